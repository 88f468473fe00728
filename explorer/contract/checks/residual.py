"""Laws about the residual stream: what blocks add, and who hands what to whom."""

from __future__ import annotations

import torch

from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import ModelUnderTest
from explorer.contract.registry import invariant
from explorer.contract.residual_steps import changed
from explorer.discovery.block import Sublayer

#: Rounding steps of the model's own number format that the identity may be off by.
_ULPS = 2


@invariant(
    "addends",
    "layer_input plus what the sublayers add is layer_output, within a few rounding steps, on every block, where the block scales or norms the stream itself "
    "that done too; layer_mid stands between them.",
    "layers",
    bfloat16=0.0,
)
def addends(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for layer in s.layers("layers"):
        block = s.model.anatomy.block(layer)
        allowed = (
            _ULPS * torch.finfo(s.dtype).eps * (1 + sum(step.kind != "add" for step in block.steps))
        )
        streams = _stepped(s, layer)
        if block.mid is not None:
            t.near(layer, s.get("layers", "layer_mid", layer), streams[block.mid], allowed)
        t.near(layer, streams[-1], s.get("layers", "layer_output", layer), allowed)


@invariant(
    "the stream between is the stream",
    "What is written into layer_mid is what the block goes on adding to: layer_output is what the rest of its steps makes of it.",
    "layers",
    needs=("layer_mid",),
    float32=1e-5,
)
def between(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for layer in s.first("layers", "layer_mid"):
        block = s.model.anatomy.block(layer)
        written = torch.flip(s.get("layers", "layer_mid", layer), dims=[-1])
        adds = [step.kind == "add" for step in block.steps]
        late = [sub for sub in block.sublayers if sub.turn > sum(adds[: block.mid])]
        with torch.no_grad(), s.model.trace(s.ids):
            s.model.layers[layer].layer_mid = written
            added = {
                sub.host: getattr(s.envoy(sub.host, layer), sub.output)
                for sub in sorted(late, key=lambda sub: _place(s, layer, sub))
            }.save()
            left = s.model.layers[layer].layer_output.save()
        stream, turn = written, sum(adds[: block.mid])
        for step in block.steps[block.mid :]:
            turn += step.kind == "add"
            if step.kind == "add":
                stream = stream + sum(added[sub.host] for sub in late if sub.turn == turn)
            else:
                stream = changed(s, layer, step, stream)
        t.near(layer, left, stream)


def _place(s: ModelUnderTest, layer: int, sub: Sublayer) -> int:
    """When a block's forward comes to what a sublayer adds."""
    return s.model.anatomy.block(layer).order.index((sub.host, sub.output))


def _stepped(s: ModelUnderTest, layer: int) -> list[torch.Tensor]:
    """The stream before and after each of the block's steps, made from its addends."""
    block = s.model.anatomy.block(layer)
    streams, turn = [s.get("layers", "layer_input", layer)], 0
    for step in block.steps:
        stream = streams[-1]
        if step.kind == "add":
            turn += 1
            for sub in (sub for sub in block.sublayers if sub.turn == turn):
                stream = stream + s.get(sub.host, sub.output, layer)
        else:
            stream = changed(s, layer, step, stream)
        streams.append(stream)
    return streams


@invariant(
    "the stream is handed on",
    "The stream leaving a block is the stream entering the next.",
    "layers",
    bfloat16=0.0,
    when=lambda s: s.model.num_layers > 1,
)
def handed_on(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for layer in s.layers("layers")[1:]:
        t.same(
            layer, s.get("layers", "layer_input", layer), s.get("layers", "layer_output", layer - 1)
        )


@invariant(
    "norm output is the next input",
    "A norm's output is that norm of the stream before it, and what the module after it is called with, as the engine itself sees that call.",
    "layers",
    bfloat16=0.0,
    when=lambda s: any(_asked(s, layer) for layer in s.layers("layers")),
)
def norms(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    inputs: dict[tuple[str, int], torch.Tensor] = {}
    with torch.no_grad(), s.model.trace(s.ids):
        for layer in s.layers("layers"):
            parts = {
                sub.host: name for name, sub in _normed(s, layer) if not s.part(sub.host, layer)
            }
            if layer in s.layers("layers", "mlp_input") and not s.part("mlp", layer):
                parts["mlp"] = "mlp_input"
            # In the order of the forward, which in a parallel block need not be that of the addends.
            for host in sorted(parts, key=lambda host: s.first_read(host, layer)):
                inputs[parts[host], layer] = s.envoy(host, layer).input.clone()
    for (name, layer), called in inputs.items():
        t.same(layer, s.get("layers", name, layer), called)
    for layer in s.layers("layers", "mlp_norm_output", "mlp_input"):
        if any(sub.host == "mlp" for name, sub in _normed(s, layer) if name == "mlp_norm_output"):
            t.same(
                layer,
                s.get("layers", "mlp_norm_output", layer),
                s.get("layers", "mlp_input", layer).view(s.batch, s.seq, -1),
            )
    for layer in s.layers("layers"):
        for name, sub in _normed(s, layer):
            path = _path(s, layer, sub.norm)
            with torch.no_grad():
                made = (
                    s.module(layer, path)(_stream(s, layer, sub.stage))
                    if _again(s, layer, name, sub)
                    else None
                )
            if made is not None:
                t.near(
                    layer, s.get("layers", name, layer), made, 4 * _ULPS * torch.finfo(s.dtype).eps
                )


def _asked(s: ModelUnderTest, layer: int) -> bool:
    """Whether a block has a norm that can be run again, or an MLP of its own to be seen called."""
    again = any(
        _again(s, layer, name, sub) or not s.part(sub.host, layer)
        for name, sub in _normed(s, layer)
    )
    return again or (layer in s.layers("layers", "mlp_input") and not s.part("mlp", layer))


def _again(s: ModelUnderTest, layer: int, name: str, sub: Sublayer) -> bool:
    """Whether a norm reads the stream at one point, alone, and is not one the stream itself goes through."""
    beside = name in s.details("layers", layer).own_widths
    return (
        sub.stage is not None and not beside and not _on_stream(s, layer, _path(s, layer, sub.norm))
    )


def _on_stream(s: ModelUnderTest, layer: int, path: str) -> bool:
    """Whether a norm is one the stream itself goes through."""
    return any(
        step.kind == "norm" and step.by == path for step in s.model.anatomy.block(layer).steps
    )


def _stream(s: ModelUnderTest, layer: int, stage: int) -> torch.Tensor:
    """The stream with so many of the block's steps behind it."""
    if stage == 0:
        return s.get("layers", "layer_input", layer)
    if stage == s.model.anatomy.block(layer).mid:
        return s.get("layers", "layer_mid", layer)
    return _stepped(s, layer)[stage]


def _normed(s: ModelUnderTest, layer: int) -> list[tuple[str, Sublayer]]:
    """The sublayers that read a norm's output, by the name of that output."""
    block = s.model.anatomy.block(layer)
    pairs = zip(("attention_norm_output", "mlp_norm_output"), block.normed)
    return [
        (name, sub) for name, sub in pairs if sub is not None and layer in s.layers("layers", name)
    ]


def _path(s: ModelUnderTest, layer: int, path: str) -> str:
    """A path of the block discovery looked at, named from the block."""
    return path.removeprefix(
        f"{s.model.anatomy.backbone.blocks}.{s.model.anatomy.block(layer).layers[0]}."
    )


def _last_enters(s: ModelUnderTest) -> bool:
    """Whether the final norm is called with what the last block returns, nothing coming between."""
    seen: list[torch.Tensor] = []
    hook = s.hf.get_submodule(s.model.anatomy.norm).register_forward_pre_hook(
        lambda module, args: seen.append(args[0].detach().clone())
    )
    try:
        s.forward(s.ids)
    finally:
        hook.remove()
    return torch.equal(
        seen[s.model.anatomy.norm_turn or 0],
        s.get("layers", "layer_output", s.model.num_layers - 1),
    )


@invariant(
    "head",
    "token_embeddings are the embedding's rows of the ids; final_norm_output is the final norm of the last block's stream; "
    "the head reads it (where nothing comes between), the logits are what the model returns, and next_token_probs is their "
    "softmax at the last position.",
    "model",
    float32=1e-5,
)
def head(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    model = s.model.anatomy
    if "token_embeddings" not in s.model.top.missing:
        with torch.no_grad():
            t.same(
                "token_embeddings",
                s.get("model", "token_embeddings"),
                s.hf.get_input_embeddings()(s.ids),
            )
    if model.norm is not None and _last_enters(s):
        last = s.get("layers", "layer_output", s.model.num_layers - 1)
        with torch.no_grad():
            t.near(
                "final_norm_output",
                s.hf.get_submodule(model.norm)(last),
                s.get("model", "final_norm_output"),
            )
    if s.model.anatomy.head_reads_norm and s.model.anatomy.norm is not None:
        with torch.no_grad():
            t.near(
                "lm_head_output",
                s.model.lm_head(s.get("model", "final_norm_output")),
                s.get("model", "lm_head_output"),
            )
    t.near("next_token_probs", s.get("model", "next_token_probs"), s.plain[:, -1].softmax(-1))
    t.same("logits", s.get("model", "logits"), s.plain)
