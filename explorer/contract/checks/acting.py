"""Invariants of edits to the residual stream: the logit lens, skipping blocks and steering."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import ModelUnderTest
from explorer.contract.registry import invariant


@invariant(
    "lens",
    "On the last block's layer_output, project_on_vocab gives the model's logits and top_tokens "
    "its most likely next tokens.",
    "model",
    float32=1e-5,
    bfloat16=2e-2,
)
def lens(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    model = subject.model
    last = subject.get("layers", "layer_output", model.num_layers - 1)
    logits = subject.get("model", "logits")
    with torch.no_grad():
        compare.close("project_on_vocab", model.project_on_vocab(last), logits)
        top_tokens = model.top_tokens(last[:, -1], k=3)
    best = logits[:, -1].float().softmax(-1).topk(3)
    for row, listed in enumerate(top_tokens):
        where = f"top_tokens of row {row}"
        compare.close(where, torch.tensor([p for _, p in listed]), best.values[row])
        expected = [model.tokenizer.decode([i]) for i in best.indices[row].tolist()]
        compare.equal(where, [token for token, _ in listed], expected)


@contextmanager
def _blocks_returning(
    subject: ModelUnderTest,
    layers: range,
    change: Callable[[torch.Tensor], torch.Tensor],
    only_stream: bool = False,
) -> Iterator[None]:
    """Change the stream that blocks return, by torch's own hooks.

    only_stream: replace everything else they return by None.
    """

    def replace(module: torch.nn.Module, args: tuple, output: Any) -> Any:
        if not isinstance(output, tuple | list):
            return change(output)
        rest = [None] * (len(output) - 1) if only_stream else output[1:]
        return (change(output[0]), *rest)

    handles = [subject.module(layer, "").register_forward_hook(replace) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _left_out(
    subject: ModelUnderTest, start: int, end: int, stream: torch.Tensor | None
) -> Iterator[None]:
    """Make blocks ``start`` to ``end`` return the stream entering the first, or the one given."""
    entering: list[torch.Tensor] = []

    def note(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        entering[:] = [args[0] if args else kwargs["hidden_states"]]

    handle = subject.module(start, "").register_forward_pre_hook(note, with_kwargs=True)
    replacement = lambda _: entering[0] if stream is None else stream  # noqa: E731
    try:
        with _blocks_returning(subject, range(start, end + 1), replacement, only_stream=True):
            yield
    finally:
        handle.remove()


@invariant(
    "skip",
    "skip_layers passes the stream that enters the first skipped block, or the one given, to the "
    "block after the last, with the same result as skipping the blocks by torch's own hooks.",
    "layers",
    when=lambda subject: subject.model.anatomy.blocks_skippable,
    otherwise="the model needs what else a block returns or keeps for others",
)
def skip(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    model, last = subject.model, subject.model.num_layers - 1
    given = torch.flip(subject.get("layers", "layer_input", 0), dims=[-1])
    spans: list[tuple[int, int, torch.Tensor | None]] = [
        *((layer, layer, None) for layer in range(last + 1)),
        (0, last, None),
        (0, max(0, last - 1), given),
    ]
    for start, end, stream in spans:
        with torch.no_grad(), model.trace(subject.ids):
            model.skip_layers(start, end, skip_with=stream)
            if end < last:
                after = model.layers[end + 1].layer_input.save()
            else:
                after = model.layers[end].layer_output.save()
            logits = model.logits.save()
        with _left_out(subject, start, end, stream):
            expected = subject.native.forward(subject.ids).logits
        entering = subject.get("layers", "layer_input", start)
        compare.equal(start, after, entering if stream is None else stream)
        compare.equal(start, logits, expected)


@invariant(
    "steer",
    "steer adds factor times the vector to the stream leaving the named blocks, at the named rows "
    "and positions and nowhere else.",
    "layers",
    float32=1e-6,
)
def steer(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    model, ids = subject.model, subject.ids
    vector = torch.linspace(-1, 1, model.hidden_size, dtype=subject.dtype, device=ids.device)
    position = subject.seq // 2
    for layer in subject.one_per_kind("layers"):
        clean = subject.get("layers", "layer_output", layer)
        with torch.no_grad(), model.trace(ids):
            model.steer(layer, vector, factor=2.0, positions=position, batch_index=0)
            stream = model.layers[layer].layer_output.save()
            logits = model.logits.save()
        others = torch.ones(stream.shape[:2], dtype=torch.bool)
        others[0, position] = False
        compare.close(layer, stream[0, position], clean[0, position] + 2 * vector)
        compare.equal(layer, stream[others], clean[others])
        unchanged = torch.equal(logits[0, position:], subject.native.logits[0, position:])
        compare.holds(layer, not unchanged, "the logits did not change")
    every = range(model.num_layers)
    with torch.no_grad(), model.trace(ids):
        model.steer(every, vector, factor=-1.0)
        logits = model.logits.save()
    with _blocks_returning(subject, every, lambda stream: stream - vector):
        compare.close("all blocks", logits, subject.native.forward(ids).logits)


INVARIANTS = (lens, skip, steer)
