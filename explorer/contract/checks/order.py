"""Invariants of order: late reads are refused, and steps of a generation are not mixed up."""

from __future__ import annotations

import torch

from explorer import vocabulary
from explorer.contract.checks.writes import STATE_LAYOUTS
from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import ModelUnderTest, ValueKey, attempt
from explorer.contract.registry import invariant
from explorer.model.errors import AlreadyPassed

#: Steps of a generation at which late reads are tried.
_STEPS = 2

#: What a late read gave where it raised nothing.
WRONG_STEP = "a tensor of another step"


@invariant(
    "late reads are refused",
    "Reading a value that the forward has passed raises an error that names the value, in a plain "
    "trace and at every step of tracer.iter.",
    *vocabulary.HOSTS,
    form=True,
)
def out_of_order(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for (when, key), outcome in late_reads(subject).items():
        value, layer = key
        if value.host != host:
            continue
        path = vocabulary.HOSTS[host].path.replace("[i]", f"[{layer}]")
        expression = f"{path}.{value.name}"
        compare.about(value)
        compare.holds(
            (layer, f"{expression} in a {when}"),
            isinstance(outcome, AlreadyPassed) and expression in str(outcome),
            f"it gives {outcome if isinstance(outcome, str) else repr(outcome)}",
        )


def late_reads(subject: ModelUnderTest) -> dict[tuple[str, ValueKey], Exception | str]:
    """Return what reading each value after the logits gave, in a trace and in a generation."""
    return subject.once("late reads", lambda: _late_reads(subject))


def _late_reads(subject: ModelUnderTest) -> dict[tuple[str, ValueKey], Exception | str]:
    model, ids = subject.model, subject.ids
    keys = [
        key
        for key in subject.reading_order(derived=True)
        if key[0].name not in ("logits", "next_token_probs")
    ]
    # A decoding step does not reach what only the code for prompts holds.
    later = [key for key in keys if not subject.prompt_only(key)]
    tried = {"trace": keys}
    tried |= {f"generation at step {step}": later if step else keys for step in range(_STEPS)}
    outcomes: dict[tuple[str, ValueKey], Exception | str] = {
        (when, key): "no answer" for when, listed in tried.items() for key in listed
    }
    with torch.no_grad(), model.trace(ids):
        model.logits  # noqa: B018  the forward passes every other value to get here
        for key in keys:
            outcomes["trace", key] = _late_read(subject, key)
    for step in range(_STEPS):
        when = f"generation at step {step}"
        # The step after it runs too: none of its tensors may be returned.
        count = step + 2
        with (
            torch.no_grad(),
            model.generate(
                ids, max_new_tokens=count, min_new_tokens=count, do_sample=False
            ) as tracer,
        ):
            for _ in tracer.iter[step : step + 1]:
                model.logits  # noqa: B018
                for key in tried[when]:
                    outcomes[when, key] = _late_read(subject, key)
    return outcomes


def _late_read(subject: ModelUnderTest, key: ValueKey) -> Exception | str:
    return attempt(lambda: subject.read(key)) or WRONG_STEP


@invariant(
    "decoding equals one forward",
    "Prefilling and then continuing, token by token or with several tokens at once, reads what one "
    "forward over the whole text reads: every value, state and logits.",
    *vocabulary.HOSTS,
    float32=1e-4,
    form=True,
    when=lambda subject: any(
        subject.native.continues(start, stop)
        for start, stop in ((subject.seq - 2, subject.seq - 1), (subject.seq // 2 - 1, subject.seq))
    ),
    otherwise="transformers itself does not decode this model as it runs a whole text",
)
def decoding(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for start, stop, values in subject.once("continuations", lambda: _continuations(subject)):
        for key, served in values.items():
            if key[0].host == host:
                compare.about(key[0])
                _compare_continued(subject, compare, key, served, start, stop)


def _continuations(subject: ModelUnderTest) -> list[tuple[int, int, dict[ValueKey, object]]]:
    """Return the values of tokens ``start`` to ``stop``, run on a cache of those before.

    The runs are the last two tokens one after the other, then the second half at once.
    """
    native, seq = subject.native, subject.seq
    # state_attention is that of a fresh prompt only, and the mask is as long as the whole text.
    left_out = ("state_attention", "attention_mask", "input_size")
    keys = [
        key
        for key in subject.reading_order(derived=True)
        if key[0].name not in left_out and not subject.prompt_only(key)
    ]
    decoding_order = subject.reading_order(derived=True, decoding=True)
    cache, half = native.cache_after(seq - 2), seq // 2 - 1
    runs = [(seq - 2, seq - 1, cache), (seq - 1, seq, cache), (half, seq, native.cache_after(half))]
    continued: list[tuple[int, int, dict[ValueKey, object]]] = []
    for start, stop, before in runs:
        if not native.continues(start, stop) or (start == seq - 1 and not continued):
            continue  # the model itself gives something else, or the cache is not this far
        values: dict[ValueKey, object] = {}
        inputs = native.continuation(start, stop)
        in_order = sorted(keys, key=decoding_order.index) if stop - start == 1 else keys
        with torch.no_grad(), subject.model.trace(inputs, **before, use_cache=True):
            for key in in_order:
                values[key] = subject.read(key)
        continued.append((start, stop, values))
    return continued


def _compare_continued(
    subject: ModelUnderTest,
    compare: Comparisons,
    key: ValueKey,
    served: object,
    start: int,
    stop: int,
) -> None:
    value, layer = key
    where = (layer, f"{value.name} of tokens {start} to {stop - 1}")
    expected = _expected(subject, key, start, stop)
    if isinstance(expected, torch.Tensor) and isinstance(served, torch.Tensor):
        expected = _as_cached(value, served, expected, stop - start)
        if value.name == "attention_scores":
            # A bias by position may count from another token, which shifts a whole row.
            served, expected = (x - x.amax(-1, keepdim=True) for x in (served, expected))
    if isinstance(expected, torch.Tensor) and not expected.is_floating_point():
        compare.equal(where, served, expected)
    else:
        compare.close(where, served, expected)


def _expected(subject: ModelUnderTest, key: ValueKey, start: int, stop: int) -> torch.Tensor:
    """Return a value of one forward over the whole text, at tokens ``start`` to ``stop``."""
    value, layer = key
    if value.name == "next_token_probs":
        return subject.get("model", "logits")[:, stop - 1].softmax(-1)
    if value.layout in STATE_LAYOUTS:
        has_states = "states" in vocabulary.BY_HOST[value.host]
        states = subject.get(
            value.host, "states" if has_states else "attention_head_outputs", layer
        )
        return states[:, start - 1 if value.name == "state_input" else stop - 1]
    full = subject.get(value.host, value.name, layer)
    # An attention is passed the keys and values of every token so far.
    first = 0 if value.layout in ("Keys", "Values") else start
    spans = {"seq": slice(first, stop), "query": slice(start, stop), "key": slice(0, stop)}
    return full[tuple(spans.get(axis, slice(None)) for axis in value.axes)]


def _as_cached(
    value: vocabulary.Value, served: torch.Tensor, expected: torch.Tensor, new_tokens: int
) -> torch.Tensor:
    """Keep the last keys of ``expected``, as many as a cache that holds a window has served."""
    if served.dim() != expected.dim():
        return expected
    for dim, axis in enumerate(value.axes):
        grows = axis == "key" or (axis == "seq" and value.layout in ("Keys", "Values"))
        length = served.shape[dim]
        if grows and new_tokens <= length < expected.shape[dim]:
            expected = expected.narrow(dim, expected.shape[dim] - length, length)
    return expected


INVARIANTS = (out_of_order, decoding)
