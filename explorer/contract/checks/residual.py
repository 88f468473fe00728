"""Invariants of the residual stream: what blocks add to it, and what they pass to each other."""

from __future__ import annotations

import torch

from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import ModelUnderTest
from explorer.contract.registry import invariant
from explorer.contract.residual_steps import apply_step
from explorer.discovery.sublayer import Sublayer

#: Rounding errors, in units of the dtype's epsilon, that an addition may make.
_ULPS = 2


@invariant(
    "addends",
    "layer_input plus the sublayers' addends is layer_output up to rounding, on every block; where "
    "the block scales or norms the stream itself, with that done too. layer_mid is the stream "
    "between the sublayers.",
    "layers",
    bfloat16=0.0,
)
def addends(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for layer in subject.layers("layers"):
        block = subject.block(layer)
        other_steps = sum(step.kind != "add" for step in block.steps)
        tolerance = _ULPS * torch.finfo(subject.dtype).eps * (1 + other_steps)
        streams = _streams(subject, layer)
        if block.mid_step is not None:
            mid = subject.get("layers", "layer_mid", layer)
            compare.close(layer, mid, streams[block.mid_step], tolerance)
        output = subject.get("layers", "layer_output", layer)
        compare.close(layer, streams[-1], output, tolerance)


def _streams(subject: ModelUnderTest, layer: int) -> list[torch.Tensor]:
    """Return the stream before and after each of a block's steps, computed from its addends."""
    block = subject.block(layer)
    streams, adds = [subject.get("layers", "layer_input", layer)], 0
    for step in block.steps:
        stream = streams[-1]
        if step.kind == "add":
            adds += 1
            for sublayer in block.sublayers:
                if sublayer.add_number == adds:
                    stream = stream + subject.get(sublayer.host, sublayer.output, layer)
        else:
            stream = apply_step(subject, layer, step, stream)
        streams.append(stream)
    return streams


@invariant(
    "layer_mid is the stream",
    "What is written to layer_mid is what the block continues with: layer_output is the result of "
    "its remaining steps.",
    "layers",
    needs=("layer_mid",),
    float32=1e-5,
)
def mid_stream(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for layer in subject.one_per_kind("layers", "layer_mid"):
        block = subject.block(layer)
        written = torch.flip(subject.get("layers", "layer_mid", layer), dims=[-1])
        adds = sum(step.kind == "add" for step in block.steps[: block.mid_step])
        remaining = sorted(
            (sublayer for sublayer in block.sublayers if sublayer.add_number > adds),
            key=lambda sublayer, block=block: block.order.index((sublayer.host, sublayer.output)),
        )
        with torch.no_grad(), subject.model.trace(subject.ids):
            subject.model.layers[layer].layer_mid = written
            added = {
                sublayer.host: getattr(subject.envoy(sublayer.host, layer), sublayer.output)
                for sublayer in remaining
            }.save()  # pyright: ignore[reportAttributeAccessIssue]  # nnsight adds it
            output = subject.model.layers[layer].layer_output.save()
        stream = written
        for step in block.steps[block.mid_step :]:
            if step.kind == "add":
                adds += 1
                stream = stream + sum(added[s.host] for s in remaining if s.add_number == adds)
            else:
                stream = apply_step(subject, layer, step, stream)
        compare.close(layer, output, stream)


@invariant(
    "stream passes between blocks",
    "The stream leaving a block is the stream entering the next.",
    "layers",
    bfloat16=0.0,
    when=lambda subject: subject.model.num_layers > 1,
    otherwise="the model has one block",
)
def stream_continues(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for layer in subject.layers("layers")[1:]:
        entering = subject.get("layers", "layer_input", layer)
        compare.equal(layer, entering, subject.get("layers", "layer_output", layer - 1))


# -- norms ---------------------------------------------------------------------------


@invariant(
    "norm output is the next input",
    "A norm's output is that norm of the stream before it, and what the next module is called "
    "with, as nnsight sees that call.",
    "layers",
    bfloat16=0.0,
    when=lambda subject: any(
        _norm_comparable(subject, layer) for layer in subject.layers("layers")
    ),
    otherwise="no norm of a block is a module that reads the stream",
)
def norms(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for (name, layer), called_with in sublayer_inputs(subject).items():
        compare.equal(layer, subject.get("layers", name, layer), called_with)
    for layer in subject.layers("layers", "mlp_norm_output", "mlp_input"):
        if "mlp" in {s.host for name, s in _norms(subject, layer) if name == "mlp_norm_output"}:
            compare.equal(
                layer,
                subject.get("layers", "mlp_norm_output", layer),
                subject.get("layers", "mlp_input", layer).view(subject.batch, subject.seq, -1),
            )
    tolerance = 4 * _ULPS * torch.finfo(subject.dtype).eps
    for layer in subject.layers("layers"):
        for name, sublayer in _norms(subject, layer):
            if _recomputable(subject, layer, name, sublayer):
                norm = subject.module(layer, _norm_path(subject, layer, sublayer))
                with torch.no_grad():
                    normed = norm(_stream_after(subject, layer, sublayer.stage or 0))
                compare.close(layer, subject.get("layers", name, layer), normed, tolerance)


def sublayer_inputs(subject: ModelUnderTest) -> dict[tuple[str, int], torch.Tensor]:
    """Return nnsight's own ``input`` of sublayers, keyed by the value it should be."""
    return subject.once("sublayer inputs", lambda: _sublayer_inputs(subject))


def _sublayer_inputs(subject: ModelUnderTest) -> dict[tuple[str, int], torch.Tensor]:
    inputs: dict[tuple[str, int], torch.Tensor] = {}
    with torch.no_grad(), subject.model.trace(subject.ids):
        for layer in subject.layers("layers"):
            names = {
                sublayer.host: name
                for name, sublayer in _norms(subject, layer)
                if not subject.is_part(sublayer.host, layer)
            }
            if _mlp_called(subject, layer):
                names["mlp"] = "mlp_input"
            # In the order of the forward; that of a parallel block's addends may be another.
            reached = [host for host, _ in subject.block(layer).order]
            for host in sorted(names, key=reached.index):
                inputs[names[host], layer] = subject.envoy(host, layer).input.clone()
    return inputs


def _norms(subject: ModelUnderTest, layer: int) -> list[tuple[str, Sublayer]]:
    """Return the sublayers that read a norm's output, with the name of that value."""
    pairs = zip(
        ("attention_norm_output", "mlp_norm_output"),
        subject.block(layer).main_sublayers,
        strict=True,
    )
    return [
        (name, sublayer)
        for name, sublayer in pairs
        if sublayer is not None and layer in subject.layers("layers", name)
    ]


def _mlp_called(subject: ModelUnderTest, layer: int) -> bool:
    """Return whether a block has an MLP module with an mlp_input."""
    return layer in subject.layers("layers", "mlp_input") and not subject.is_part("mlp", layer)


def _norm_comparable(subject: ModelUnderTest, layer: int) -> bool:
    """Return whether a block has a norm that can be computed again, or a module that reads one."""
    return _mlp_called(subject, layer) or any(
        _recomputable(subject, layer, name, sublayer) or not subject.is_part(sublayer.host, layer)
        for name, sublayer in _norms(subject, layer)
    )


def _recomputable(subject: ModelUnderTest, layer: int, name: str, sublayer: Sublayer) -> bool:
    """Return whether a sublayer's norm reads the stream at one point and nothing else.

    The stream itself must not pass through that norm, and its width must be the stream's.
    """
    path = _norm_path(subject, layer, sublayer)
    on_stream = any(step.kind == "norm" and step.by == path for step in subject.block(layer).steps)
    other_width = name in subject.details("layers", layer).own_widths
    alone = sublayer.stage is not None and not sublayer.fed_by
    return alone and not other_width and not on_stream


def _norm_path(subject: ModelUnderTest, layer: int, sublayer: Sublayer) -> str:
    """Return the path of a sublayer's norm from its block."""
    # Discovery names it from the root of the model, on the first block of the kind.
    first = subject.block(layer).layers[0]
    return (sublayer.norm or "").removeprefix(f"{subject.model.anatomy.backbone.blocks}.{first}.")


def _stream_after(subject: ModelUnderTest, layer: int, steps: int) -> torch.Tensor:
    """Return the stream after so many of the block's steps."""
    if steps == 0:
        return subject.get("layers", "layer_input", layer)
    if steps == subject.block(layer).mid_step:
        return subject.get("layers", "layer_mid", layer)
    return _streams(subject, layer)[steps]


# -- after the last block --------------------------------------------------------------


@invariant(
    "head",
    "token_embeddings are the embedding's rows of the ids; final_norm_output is the final norm of "
    "the last block's output, and the head reads it, where nothing is between them; the logits "
    "are what the model returns, and next_token_probs is their softmax at the last position.",
    "model",
    float32=1e-5,
)
def head(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    model, anatomy = subject.model, subject.model.anatomy
    with torch.no_grad():
        if "token_embeddings" not in model.top.missing:
            embeddings = subject.get("model", "token_embeddings")
            compare.equal(
                "token_embeddings", embeddings, subject.hf.get_input_embeddings()(subject.ids)
            )
        if anatomy.norm is not None and _norm_reads_last_block(subject, anatomy.norm):
            last = subject.get("layers", "layer_output", model.num_layers - 1)
            normed = subject.hf.get_submodule(anatomy.norm)(last)
            compare.close("final_norm_output", normed, subject.get("model", "final_norm_output"))
        if anatomy.norm is not None and anatomy.head_reads_norm:
            projected = model.lm_head(subject.get("model", "final_norm_output"))
            compare.close("lm_head_output", projected, subject.get("model", "lm_head_output"))
    probabilities = subject.native.logits[:, -1].softmax(-1)
    compare.close("next_token_probs", subject.get("model", "next_token_probs"), probabilities)
    compare.equal("logits", subject.get("model", "logits"), subject.native.logits)


def _norm_reads_last_block(subject: ModelUnderTest, norm: str) -> bool:
    """Return whether the final norm is called with exactly what the last block returns."""
    inputs: list[torch.Tensor] = []
    hook = subject.hf.get_submodule(norm).register_forward_pre_hook(
        lambda module, args: inputs.append(args[0].detach().clone())
    )
    try:
        subject.native.forward(subject.ids)
    finally:
        hook.remove()
    last = subject.get("layers", "layer_output", subject.model.num_layers - 1)
    return torch.equal(inputs[subject.model.anatomy.norm_call or 0], last)


INVARIANTS = (addends, mid_stream, stream_continues, norms, head)
