"""Laws about the order of a forward: what has been passed is refused by name, and steps are not mixed up."""

from __future__ import annotations

import torch

from explorer import vocabulary
from explorer.contract.laws import law
from explorer.contract.subject import Key, Subject, attempt
from explorer.contract.tally import Tally
from explorer.hosts import PassedBy

HOSTS = tuple(vocabulary.HOSTS)

#: Steps of a generation at which late reads are tried.
_STEPS = 2


@law(
    "out of order",
    "Reading what the forward has passed raises an error that names the value, in a plain trace and at every step of tracer.iter.",
    *HOSTS,
)
def out_of_order(s: Subject, host: str, t: Tally) -> None:
    for (where, key), outcome in _late(s).items():
        if key[0].host == host:
            expression = vocabulary.HOSTS[host].path.replace("[i]", f"[{key[1]}]") + f".{key[0].name}"
            named = isinstance(outcome, PassedBy) and expression in str(outcome)
            t.holds((key[1], f"{expression} in a {where}"), named, f"it gives {outcome if isinstance(outcome, str) else repr(outcome)}")


def _late(s: Subject) -> dict[tuple[str, Key], object]:
    """What each value gave, asked for once the logits were there: in a trace, and at each step of a generation."""
    if "late" not in s.memo:
        keys = [key for key in s.order(derived=True) if key[0].name not in ("logits", "next_token_probs")]
        places = ["trace", *(f"generation at step {step}" for step in range(_STEPS))]
        found: dict[tuple[str, Key], object] = {(where, key): "no answer" for where in places for key in keys}
        with torch.no_grad(), s.model.trace(s.ids):
            s.model.logits
            for key in keys:
                found["trace", key] = _asked(s, key)
        for step in range(_STEPS):
            made = step + 2  # the step after it comes too: its tensors must not be handed out
            with torch.no_grad(), s.model.generate(s.ids, max_new_tokens=made, min_new_tokens=made, do_sample=False) as tracer:
                for _ in tracer.iter[step : step + 1]:
                    s.model.logits
                    for key in keys:
                        found[f"generation at step {step}", key] = _asked(s, key)
        s.memo["late"] = found
    return s.memo["late"]


def _asked(s: Subject, key: Key) -> object:
    return attempt(lambda: s.read(key)) or "a tensor of another step"


@law(
    "one step at a time",
    "Prefilling and then decoding token by token reads what one forward over the whole text reads: every value, state and logits.",
    *HOSTS, float32=1e-4,
)
def decoding(s: Subject, host: str, t: Tally) -> None:
    for position, found in _decoded(s):
        for key, value in found.items():
            if key[0].host == host:
                _compare(s, t, key, value, position)


def _decoded(s: Subject) -> list[tuple[int, dict[Key, object]]]:
    """The values of the last two tokens, each decoded on a cache of those before."""
    if "decoded" not in s.memo:
        # The pattern implied by a state is that of a fresh prompt; the mask is as long as the whole text.
        keys = [key for key in s.order(derived=True) if key[0].name not in ("state_attention", "attention_mask", "input_size")]
        cache = s.prefilled(s.seq - 2)
        steps = []
        for position in (s.seq - 2, s.seq - 1):
            found: dict[Key, object] = {}
            with torch.no_grad(), s.model.trace(s.continued(position), cache=cache, use_cache=True):
                for key in keys:
                    found[key] = s.read(key)
            steps.append((position, found))
        s.memo["decoded"] = steps
    return s.memo["decoded"]


def _compare(s: Subject, t: Tally, key: Key, found: object, position: int) -> None:
    value, layer = key
    where = (layer, f"{value.name} at token {position}")
    if value.name == "next_token_probs":
        want = s.get("model", "logits")[:, position].softmax(-1)
    elif value.layout == "State":
        states = s.get(value.host, "states", layer)
        want = states[:, position - (value.name == "state_input")]
    else:
        whole = s.get(value.host, value.name, layer)
        # Keys and values handed to the attention are those of every token so far.
        start = 0 if value.layout in ("Keys", "Values") else position
        spans = {"seq": slice(start, position + 1), "query": slice(position, position + 1), "key": slice(0, position + 1)}
        want = whole[tuple(spans.get(axis, slice(None)) for axis in value.axes)]
    if isinstance(want, torch.Tensor) and not want.is_floating_point():
        t.same(where, found, want)
    else:
        t.near(where, found, want)
