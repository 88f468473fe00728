"""Invariants of isolation: two models, texts traced together, and the model afterwards."""

from __future__ import annotations

from typing import Any

import torch

from explorer import vocabulary
from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import ModelUnderTest, ValueKey
from explorer.contract.registry import invariant


@invariant(
    "two models are independent",
    "Two models in one process do not affect each other: one records its states and is edited "
    "while the other runs, and each gives what it gives alone.",
    "model",
    pair=True,
    form=True,
)
def two_models(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    model, other, ids = subject.model, subject.other, subject.ids
    assert other is not None  # it applies where there is a second model
    other_alone = other.record(ids)
    with torch.no_grad():
        other_logits = other.hf(ids).logits
    runs: list = []

    def run_other() -> None:
        with torch.no_grad():
            runs.append((other.record(ids), other.hf(ids).logits))

    def after_first_row(done: int, total: int) -> None:
        if done == 1:
            run_other()

    together = model.record(ids, subject.recordable, progress=after_first_row)
    for (name, layer), served in together.values.items():
        compare.about(subject.value_named(name, layer))
        where = (layer, f"{name} with the other running")
        compare.equal(where, served, subject.clean[name, layer])
    for recording, logits in runs:
        compare.about()
        compare.equal("the other's logits", logits, other_logits)
        for (name, layer), served in recording.values.items():
            compare.about(subject.value_named(name, layer))
            where = (layer, f"the other's {name}")
            compare.equal(where, served, other_alone[name, layer])

    compare.about(vocabulary.BY_HOST["layers"]["layer_input"])
    runs.clear()
    handle = subject.module(0, "").register_forward_hook(lambda *_: run_other())
    try:
        edited = _without_first_input(subject)
    finally:
        handle.remove()
    compare.equal("a trace with the other running", edited, _without_first_input(subject))
    compare.equal("the other during that trace", runs[0][1], other_logits)


def _without_first_input(subject: ModelUnderTest) -> torch.Tensor:
    """Return the logits with the first block's layer_input set to zero in a trace."""
    with torch.no_grad(), subject.model.trace(subject.ids):
        subject.model.layers[0].layer_input[:] = 0
        logits = subject.model.logits.save()
    return logits  # noqa: RET504  the trace assigns it


@invariant(
    "invokes are independent",
    "Two texts traced together each read their own rows of every value, and an edit made for one "
    "leaves the other unchanged.",
    "model",
    float32=1e-5,
    form=True,
    when=lambda subject: subject.native.rows_independent,
    otherwise="rows of a batch depend on each other in the model itself",
)
def invokes(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    model, ids = subject.model, subject.ids
    keys = subject.reading_order(derived=True)
    first: dict[ValueKey, Any] = {}
    second: dict[ValueKey, Any] = {}
    with torch.no_grad(), model.trace() as tracer:
        with tracer.invoke(ids[:1]):
            for key in keys:
                first[key] = subject.read(key)
        with tracer.invoke(ids[1:2]):
            for key in keys:
                second[key] = subject.read(key)
    for row, values in enumerate((first, second)):
        for (value, layer), served in values.items():
            if "batch" not in value.axes or not isinstance(served, torch.Tensor):
                continue
            recorded = subject.recorded((value, layer))
            expected = recorded.narrow(value.axes.index("batch"), row, 1)
            compare.about(value)
            same = compare.close if expected.is_floating_point() else compare.equal
            same((layer, f"{value.name} of text {row}"), served, expected)
    with torch.no_grad(), model.trace() as tracer:
        with tracer.invoke(ids[:1]):
            for layer in range(model.num_layers):
                model.layers[layer].layer_input[:] = 0
        with tracer.invoke(ids[1:2]):
            logits = model.logits.save()
    logits_value = vocabulary.BY_HOST["model"]["logits"]
    compare.about(vocabulary.BY_HOST["layers"]["layer_input"], logits_value)
    # Not bit by bit: the experts that the other text's tokens choose decide how a product is split.
    compare.close("logits of the text not edited", logits, second[logits_value, None])


@invariant(
    "model left unchanged",
    "After all other checks the transformers model, called directly, gives logits identical to "
    "those before, and no hook or gradient is left on it.",
    "model",
    last=True,
    bfloat16=0.0,
)
def left_unchanged(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    logits = subject.native.forward(subject.ids).logits
    compare.equal("logits", logits, subject.native.logits)
    compare.equal("hooks", subject.count_hooks(), subject.hook_count)
    no_gradients = all(parameter.grad is None for parameter in subject.hf.parameters())
    compare.holds("gradients", no_gradients, "a parameter has a gradient")


INVARIANTS = (two_models, invokes, left_unchanged)
