"""Laws about the residual stream: what blocks add, and who hands what to whom."""

from __future__ import annotations

import torch

from explorer.contract.laws import law
from explorer.contract.subject import Subject
from explorer.contract.tally import Tally
from explorer.finding.block import Sublayer

#: Rounding steps of the model's own number format that the identity may be off by.
_ULPS = 2


def _addends(s: Subject, layer: int) -> list[torch.Tensor]:
    """What the block adds, in the order it adds it."""
    return [s.get(sub.host, sub.output, layer) for sub in s.model.anatomy.block(layer).sublayers]


@law(
    "addends",
    "layer_input plus what the sublayers add is layer_output, within a few rounding steps, on every block; layer_mid stands between them.",
    "layers", bfloat16=0.0,
)
def addends(s: Subject, host: str, t: Tally) -> None:
    allowed = _ULPS * torch.finfo(s.dtype).eps
    for layer in s.layers("layers"):
        stream = s.get("layers", "layer_input", layer)
        added = _addends(s, layer)
        t.holds(layer, added, "an addend of the block has no value")
        for index, addend in enumerate(added):
            stream = stream + addend
            if index + 1 == s.model.anatomy.block(layer).mid:
                t.near(layer, s.get("layers", "layer_mid", layer), stream, allowed)
        t.near(layer, stream, s.get("layers", "layer_output", layer), allowed)


@law(
    "the stream is handed on",
    "The stream leaving a block is the stream entering the next.",
    "layers", bfloat16=0.0, when=lambda s: s.model.num_layers > 1,
)
def handed_on(s: Subject, host: str, t: Tally) -> None:
    for layer in s.layers("layers")[1:]:
        t.same(layer, s.get("layers", "layer_input", layer), s.get("layers", "layer_output", layer - 1))


@law(
    "norm output is the next input",
    "A norm's output is that norm of the stream before it, and what the module after it is called with, as the engine itself sees that call.",
    "layers", bfloat16=0.0, when=lambda s: any(_normed(s, layer) for layer in s.layers("layers")) or bool(s.layers("layers", "mlp_input")),
)
def norms(s: Subject, host: str, t: Tally) -> None:
    inputs: dict[tuple[str, int], torch.Tensor] = {}
    with torch.no_grad(), s.model.trace(s.ids):
        for layer in s.layers("layers"):
            parts = {sub.host: name for name, sub in _normed(s, layer) if not s.part(sub.host, layer)}
            if layer in s.layers("layers", "mlp_input") and not s.part("mlp", layer):
                parts["mlp"] = "mlp_input"
            # In the order of the forward, which in a parallel block need not be that of the addends.
            for host in sorted(parts, key=lambda host: s.first_read(host, layer)):
                inputs[parts[host], layer] = s.envoy(host, layer).input.clone()
    for (name, layer), called in inputs.items():
        t.same(layer, s.get("layers", name, layer), called)
    for layer in s.layers("layers", "mlp_norm_output", "mlp_input"):
        if any(sub.host == "mlp" for name, sub in _normed(s, layer) if name == "mlp_norm_output"):
            t.same(layer, s.get("layers", "mlp_norm_output", layer), s.get("layers", "mlp_input", layer).view(s.batch, s.seq, -1))
    for layer in s.layers("layers"):
        for name, sub in _normed(s, layer):
            stream = "layer_input" if sub.stage == 0 else "layer_mid"
            if layer in s.layers("layers", stream):
                with torch.no_grad():
                    made = s.module(layer, _path(s, layer, sub.norm))(s.get("layers", stream, layer))
                t.near(layer, s.get("layers", name, layer), made, _ULPS * torch.finfo(s.dtype).eps)


def _normed(s: Subject, layer: int) -> list[tuple[str, Sublayer]]:
    """The sublayers that read a norm's output, by the name of that output."""
    block = s.model.anatomy.block(layer)
    pairs = zip(("attention_norm_output", "mlp_norm_output"), block.normed)
    return [(name, sub) for name, sub in pairs if sub is not None and layer in s.layers("layers", name)]


def _path(s: Subject, layer: int, path: str) -> str:
    """A path of the block discovery looked at, named from the block."""
    return path.removeprefix(f"{s.model.anatomy.frame.blocks}.{s.model.anatomy.block(layer).layers[0]}.")


@law(
    "head",
    "The head reads final_norm_output (where nothing comes between), the logits are what the model returns, and next_token_probs is their softmax at the last position.",
    "model", float32=1e-5,
)
def head(s: Subject, host: str, t: Tally) -> None:
    if s.model.anatomy.head_reads_norm and s.model.anatomy.norm is not None:
        with torch.no_grad():
            t.near("lm_head_output", s.model.lm_head(s.get("model", "final_norm_output")), s.get("model", "lm_head_output"))
    t.near("next_token_probs", s.get("model", "next_token_probs"), s.plain[:, -1].softmax(-1))
    t.same("logits", s.get("model", "logits"), s.plain)
