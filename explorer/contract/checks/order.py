"""Laws about the order of a forward: what has been passed is refused by name, and steps are not mixed up."""

from __future__ import annotations

import torch

from explorer import vocabulary
from explorer.contract.checks.writes import STATES
from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import Key, ModelUnderTest, attempt
from explorer.contract.registry import invariant
from explorer.model.envoys import PassedBy

HOSTS = tuple(vocabulary.HOSTS)

#: Steps of a generation at which late reads are tried.
_STEPS = 2


@invariant(
    "out of order",
    "Reading what the forward has passed raises an error that names the value, in a plain trace and at every step of tracer.iter.",
    *HOSTS,
    form=True,
)
def out_of_order(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for (where, key), outcome in _late(s).items():
        if key[0].host == host:
            expression = (
                vocabulary.HOSTS[host].path.replace("[i]", f"[{key[1]}]") + f".{key[0].name}"
            )
            named = isinstance(outcome, PassedBy) and expression in str(outcome)
            t.of(key[0])
            t.holds(
                (key[1], f"{expression} in a {where}"),
                named,
                f"it gives {outcome if isinstance(outcome, str) else repr(outcome)}",
            )


def _late(s: ModelUnderTest) -> dict[tuple[str, Key], object]:
    """What each value gave, asked for once the logits were there: in a trace, and at each step of a generation."""
    if "late" not in s.memo:
        keys = [
            key
            for key in s.order(derived=True)
            if key[0].name not in ("logits", "next_token_probs")
        ]
        hook_points = ["trace", *(f"generation at step {step}" for step in range(_STEPS))]
        # A decoding step does not come to what its own code does not hold.
        held = {
            step: [key for key in keys if not step or not s.prompt_only(key)]
            for step in range(_STEPS)
        }
        asked = {
            "trace": keys,
            **{f"generation at step {step}": held[step] for step in range(_STEPS)},
        }
        found: dict[tuple[str, Key], object] = {
            (where, key): "no answer" for where in hook_points for key in asked[where]
        }
        with torch.no_grad(), s.model.trace(s.ids):
            s.model.logits
            for key in keys:
                found["trace", key] = _asked(s, key)
        for step in range(_STEPS):
            made = step + 2  # the step after it comes too: its tensors must not be handed out
            with (
                torch.no_grad(),
                s.model.generate(
                    s.ids, max_new_tokens=made, min_new_tokens=made, do_sample=False
                ) as tracer,
            ):
                for _ in tracer.iter[step : step + 1]:
                    s.model.logits
                    for key in held[step]:
                        found[f"generation at step {step}", key] = _asked(s, key)
        s.memo["late"] = found
    return s.memo["late"]


def _asked(s: ModelUnderTest, key: Key) -> object:
    return attempt(lambda: s.read(key)) or "a tensor of another step"


@invariant(
    "one step at a time",
    "Prefilling and then going on, token by token or with several at once, reads what one forward over the whole text reads: every value, state and logits.",
    *HOSTS,
    float32=1e-4,
    when=lambda s: any(
        s.goes_on(start, stop) for start, stop in ((s.seq - 2, s.seq - 1), (s.seq // 2 - 1, s.seq))
    ),
    form=True,
)
def decoding(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for start, stop, found in _continued(s):
        for key, value in found.items():
            if key[0].host == host:
                t.of(key[0])
                _compare(s, t, key, value, start, stop)


def _continued(s: ModelUnderTest) -> list[tuple[int, int, dict[Key, object]]]:
    """The values of tokens ``start`` to ``stop``, run on a cache of those before: the last two one by one, then a good half at once."""
    if "continued" not in s.memo:
        # The pattern implied by a state is that of a fresh prompt; the mask is as long as the whole text.
        # What a decoding step's own code does not hold is read on prompts alone.
        keys = [
            key
            for key in s.order(derived=True)
            if key[0].name not in ("state_attention", "attention_mask", "input_size")
            and not s.prompt_only(key)
        ]
        passed = s.order(derived=True, step=True)
        cache = s.prefilled(s.seq - 2)
        half = s.seq // 2 - 1
        runs = [
            (s.seq - 2, s.seq - 1, cache),
            (s.seq - 1, s.seq, cache),
            (half, s.seq, s.prefilled(half)),
        ]
        steps: list[tuple[int, int, dict[Key, object]]] = []
        for start, stop, before in runs:
            if not s.goes_on(start, stop) or (start == s.seq - 1 and not steps):
                continue  # a model that does not say the same itself, or a cache that has not come so far
            found: dict[Key, object] = {}
            with (
                torch.no_grad(),
                s.model.trace(s.continued(start, stop), cache=before, use_cache=True),
            ):
                for key in sorted(keys, key=passed.index) if stop - start == 1 else keys:
                    found[key] = s.read(key)
            steps.append((start, stop, found))
        s.memo["continued"] = steps
    return s.memo["continued"]


def _compare(
    s: ModelUnderTest, t: Comparisons, key: Key, found: object, start: int, stop: int
) -> None:
    value, layer = key
    where = (layer, f"{value.name} of tokens {start} to {stop - 1}")
    if value.name == "next_token_probs":
        want = s.get("model", "logits")[:, stop - 1].softmax(-1)
    elif value.layout in STATES and "states" not in vocabulary.BY_HOST[value.host]:
        whole = s.get(value.host, "attention_head_outputs", layer)
        want = whole[:, start - 1 if value.name == "state_input" else stop - 1]
    elif value.layout in STATES:
        states = s.get(value.host, "states", layer)
        want = states[:, start - 1 if value.name == "state_input" else stop - 1]
    else:
        whole = s.get(value.host, value.name, layer)
        # Keys and values handed to the attention are those of every token so far.
        first = 0 if value.layout in ("Keys", "Values") else start
        spans = {"seq": slice(first, stop), "query": slice(start, stop), "key": slice(0, stop)}
        want = whole[tuple(spans.get(axis, slice(None)) for axis in value.axes)]
        for dim, axis in enumerate(value.axes):
            # A cache that keeps a window alone hands over the last of them.
            grows = axis == "key" or (axis == "seq" and first == 0)
            if (
                grows
                and isinstance(found, torch.Tensor)
                and found.dim() == want.dim()
                and stop - start <= found.shape[dim] < want.shape[dim]
            ):
                want = want.narrow(dim, want.shape[dim] - found.shape[dim], found.shape[dim])
    if (
        value.name == "attention_scores"
    ):  # a bias by positions may count them from elsewhere: the same for a whole row
        found, want = (x - x.max(-1, keepdim=True).values for x in (found, want))
    if isinstance(want, torch.Tensor) and not want.is_floating_point():
        t.same(where, found, want)
    else:
        t.near(where, found, want)
