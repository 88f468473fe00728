"""Laws about the residual stream: what blocks add, and who hands what to whom."""

from __future__ import annotations

import torch

from explorer.contract.laws import law
from explorer.contract.subject import Subject
from explorer.contract.tally import Tally

#: Rounding steps of the model's own number format that the identity may be off by.
_ULPS = 2


def _addends(s: Subject, layer: int) -> list[torch.Tensor]:
    """What the block adds, in the order it adds it."""
    names = {"mlp": "mlp_output"}
    return [s.get(sub.host, names.get(sub.host, "attention_output"), layer) for sub in s.model.anatomy.block(layer).sublayers]


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
            if index == 0 and layer in s.layers("layers", "layer_mid"):
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
    "layers", bfloat16=0.0,
)
def norms(s: Subject, host: str, t: Tally) -> None:
    inputs: dict[tuple[str, int], torch.Tensor] = {}
    mixers = {layer: name for layer, name in enumerate(s.model.kinds) if name != "none"}
    normed = s.layers("layers", "attention_norm_output")
    with torch.no_grad(), s.model.trace(s.ids):
        for layer in s.layers("layers"):
            if layer in mixers:
                inputs["attention_norm_output", layer] = s.envoy(mixers[layer], layer).input.clone()
            if layer in s.layers("mlp"):
                inputs["mlp_input", layer] = s.envoy("mlp", layer).input.clone()
    for (name, layer), called in inputs.items():
        if name == "mlp_input" or layer in normed:
            t.same(layer, s.get("layers", name, layer), called)
    for layer in s.layers("layers", "mlp_norm_output", "mlp_input"):
        t.same(layer, s.get("layers", "mlp_norm_output", layer), s.get("layers", "mlp_input", layer))
    for stream, name, index in (("layer_input", "attention_norm_output", 0), ("layer_mid", "mlp_norm_output", 1)):
        for layer in s.layers("layers", stream, name):
            with torch.no_grad():
                made = _norm(s, layer, index)(s.get("layers", stream, layer))
            t.near(layer, s.get("layers", name, layer), made, _ULPS * torch.finfo(s.dtype).eps)


def _norm(s: Subject, layer: int, index: int) -> torch.nn.Module:
    """The norm in front of one of a block's sublayers."""
    block = s.model.anatomy.block(layer)
    path = block.sublayers[index].norm
    return s.module(layer, path.removeprefix(f"{s.model.anatomy.frame.blocks}.{block.layers[0]}."))


@law(
    "head",
    "The head reads final_norm_output, the logits are what the model returns, and next_token_probs is their softmax at the last position.",
    "model", float32=1e-5,
)
def head(s: Subject, host: str, t: Tally) -> None:
    with torch.no_grad():
        t.near("lm_head_output", s.model.lm_head(s.get("model", "final_norm_output")), s.get("model", "lm_head_output"))
    t.near("next_token_probs", s.get("model", "next_token_probs"), s.plain[:, -1].softmax(-1))
    t.same("logits", s.get("model", "logits"), s.plain)
