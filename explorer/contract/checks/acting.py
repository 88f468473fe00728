"""Laws about acting on the stream: the lens, skipping and steering."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import ModelUnderTest
from explorer.contract.registry import invariant


@invariant(
    "lens",
    "On the last block's layer_output, project_on_vocab gives the model's logits and top_tokens its likeliest next tokens.",
    "model",
    float32=1e-5,
    bfloat16=2e-2,
)
def lens(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    last = s.get("layers", "layer_output", s.model.num_layers - 1)
    with torch.no_grad():
        t.near("project_on_vocab", s.model.project_on_vocab(last), s.get("model", "logits"))
        told = s.model.top_tokens(last[:, -1], k=3)
    best = s.get("model", "logits")[:, -1].float().softmax(-1).topk(3)
    for row, listed in enumerate(told):
        t.near(f"top_tokens of row {row}", torch.tensor([p for _, p in listed]), best.values[row])
        t.same(
            f"top_tokens of row {row}",
            [token for token, _ in listed],
            [s.model.tokenizer.decode([i]) for i in best.indices[row].tolist()],
        )


@contextmanager
def _passed_over(
    s: ModelUnderTest, start: int, end: int, stream: torch.Tensor | None
) -> Iterator[None]:
    """The model with the output of blocks ``start`` to ``end`` put aside by hooks of torch's own."""
    entering: list[torch.Tensor] = []

    def enters(module, args, kwargs):
        entering[:] = [args[0] if args else kwargs["hidden_states"]]

    def leaves(module, args, output):
        kept = entering[0] if stream is None else stream
        return (
            (kept, *[None] * (len(output) - 1)) if isinstance(output, tuple | list) else kept
        )  # a block left out returns nothing else

    blocks = [s.module(layer, "") for layer in range(start, end + 1)]
    handles = [blocks[0].register_forward_pre_hook(enters, with_kwargs=True)]
    handles += [block.register_forward_hook(leaves) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@invariant(
    "skip",
    "skip_layers hands the stream entering the first block left out, or the one given, to the block after the last, as leaving them out by hand does.",
    "layers",
    when=lambda s: s.model.anatomy.passable,
)
def skip(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    last = s.model.num_layers - 1
    given = torch.flip(s.get("layers", "layer_input", 0), dims=[-1])
    ranges = [(layer, layer, None) for layer in range(last + 1)] + [
        (0, last, None),
        (0, max(0, last - 1), given),
    ]
    for start, end, stream in ranges:
        with torch.no_grad(), s.model.trace(s.ids):
            s.model.skip_layers(start, end, skip_with=stream)
            after = (
                s.model.layers[end + 1].layer_input
                if end < last
                else s.model.layers[end].layer_output
            ).save()
            logits = s.model.logits.save()
        with _passed_over(s, start, end, stream):
            want = s.forward(s.ids).logits
        t.same(start, after, s.get("layers", "layer_input", start) if stream is None else stream)
        t.same(start, logits, want)


@invariant(
    "steer",
    "steer adds factor times the vector to the stream leaving the blocks named, at the rows and positions named and nowhere else.",
    "layers",
    float32=1e-6,
)
def steer(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    vector = torch.linspace(-1, 1, s.model.hidden_size, dtype=s.dtype, device=s.ids.device)
    position = s.seq // 2
    for layer in s.first("layers"):
        clean = s.get("layers", "layer_output", layer)
        with torch.no_grad(), s.model.trace(s.ids):
            s.model.steer(layer, vector, factor=2.0, positions=position, batch_index=0)
            stream = s.model.layers[layer].layer_output.save()
            logits = s.model.logits.save()
        elsewhere = torch.ones(stream.shape[:2], dtype=torch.bool)
        elsewhere[0, position] = False
        t.near(layer, stream[0, position], clean[0, position] + 2 * vector)
        t.same(layer, stream[elsewhere], clean[elsewhere])
        t.holds(
            layer,
            not torch.equal(logits[0, position:], s.plain[0, position:]),
            "the logits did not move",
        )
    every = range(s.model.num_layers)
    with torch.no_grad(), s.model.trace(s.ids):
        s.model.steer(every, vector, factor=-1.0)
        logits = s.model.logits.save()
    with _added(s, -vector):
        t.near("all blocks", logits, s.forward(s.ids).logits)


@contextmanager
def _added(s: ModelUnderTest, vector: torch.Tensor) -> Iterator[None]:
    """The model with ``vector`` added to what each block returns, by hooks of torch's own."""

    def leaves(module, args, output):
        return (
            (output[0] + vector, *output[1:])
            if isinstance(output, tuple | list)
            else output + vector
        )

    handles = [
        s.module(layer, "").register_forward_hook(leaves) for layer in range(s.model.num_layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
