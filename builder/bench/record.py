"""Recording values of a real model, against transformers' own forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from builder.bench.figures import MEGABYTE, Figure, Settings, milliseconds
from builder.bench.timing import against, once, peak_above_start
from builder.bench.weights import native_copy, small_model

#: The residual stream at every step, and every attention pattern.
PATTERNS_AND_STREAM = ("layer_input", "layer_mid", "layer_output", "attention_probabilities")


def measure(settings: Settings) -> Iterator[Figure]:
    """Yield ratios for three sets of values, and the peak memory of recording the first."""
    import torch

    model, label = small_model()
    native: Any = native_copy(model._module)
    ids = torch.randint(
        0, model.config.vocab_size, (1, settings.tokens), generator=torch.Generator().manual_seed(0)
    )

    def forward() -> object:
        with torch.no_grad():
            return native(input_ids=ids, output_attentions=True)

    def forward_with_stream() -> object:
        with torch.no_grad():
            return native(input_ids=ids, output_attentions=True, output_hidden_states=True)

    once(forward)
    inner, every = inner_values(model), every_value(model)
    cases = (
        ("record the sublayers' values", inner, forward, 1.15),
        ("record patterns and stream", list(PATTERNS_AND_STREAM), forward_with_stream, None),
        ("record every value", every, forward_with_stream, None),
    )
    for name, values, theirs, aim in cases:
        ratio = against(
            lambda values=values: model.record(ids, values=values), theirs, settings.repeats
        )
        times = (
            f"{milliseconds(ratio.ours)} against {milliseconds(ratio.theirs)} of the native forward"
        )
        shown = ", ".join(values) if len(values) < 20 else f"{len(values)} values"
        detail = f"{label}, {settings.tokens} tokens: {times}; {shown}"
        yield Figure(f"{name} / native forward", ratio.value, "x", aim, detail)
    ours, theirs = (
        peak_above_start(call) / MEGABYTE
        for call in (lambda: model.record(ids, values=inner), forward)
    )
    size = model.record(ids, values=inner).bytes / MEGABYTE
    yield Figure(
        "record, peak memory",
        ours,
        "MB",
        None,
        f"above the loaded model, the recording's own {size:.0f} MB included; "
        f"the native forward peaks at {theirs:.0f} MB",
    )


def inner_values(model: Any) -> list[str]:
    """Return, with their hosts, the names of every router, attention and state value the model
    serves in one forward.

    Values that are computed afterwards from others (a state for every token, the implied attention)
    are left out.
    """
    routing = {"router_logits", "router_scores", "expert_weights", "expert_indices"}
    mixers = {"self_attn", "linear_attn"}
    return _served(model, lambda row: row.host in mixers or row.name in routing)


def every_value(model: Any) -> list[str]:
    """Return, with their hosts, the names of every value of the blocks that the model serves in
    one forward.
    """
    return _served(model, lambda row: True)


def _served(model: Any, wanted: Any) -> list[str]:
    rows = (row for row in model.support() if row.layers and not row.value.derived)
    return list(dict.fromkeys(f"{row.host}.{row.name}" for row in rows if wanted(row)))
