"""The values of a forward by their standard names, from what `oracle.observed` saw of it and from
weights. A family's `Names` say which modules are which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from tests.support.oracle import Forward, Named
from tests.support.oracle_recurrent import MIXERS


@dataclass(frozen=True)
class Names:
    """Paths in a family's model; those of parts of a block count from the block.

    addend: the module that returns what the attention (mixer, MLP) adds to the stream.
    scale: the attribute of the configuration that an addend is multiplied with, by the addend's
    value. parallel: whether attention and MLP read the same norm.
    """

    blocks: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    first_norm: str = "input_layernorm"
    second_norm: str = "post_attention_layernorm"
    attention: str = "self_attn"
    attention_addend: str = "self_attn"
    projection: str = "o_proj"
    mixer: str = ""
    mixer_host: str = ""
    mlp: str = "mlp"
    mlp_addend: str = "mlp"
    activation: str = "act_fn"
    down: str = "down_proj"
    router: str = "gate"
    shared: str = ""
    scale: tuple[tuple[str, str], ...] = ()
    parallel: bool = False


def values_of_model(forward: Forward, names: Names) -> Named:
    """Yield the model's own values."""
    yield "input_ids", forward.ids
    yield "attention_mask", torch.ones_like(forward.ids)
    embedding = forward.hf.get_input_embeddings()
    yield "token_embeddings", embedding.weight[forward.ids] * getattr(embedding, "embed_scale", 1)
    yield "final_norm_output", forward.call(names.final_norm).result
    head = forward.hf.get_output_embeddings().weight
    yield "lm_head_output", forward.call(names.final_norm).result @ head.T
    yield "logits", forward.output.logits
    yield "next_token_probs", forward.output.logits[:, -1].softmax(-1)


def values_of_block(forward: Forward, names: Names, layer: int) -> Named:
    """Yield the values of a block and of its parts."""
    path = f"{names.blocks}.{layer}"
    block, seen = forward.call(path), forward.modules
    yield "layer_input", block.input
    yield "layer_output", block.result
    addends: dict[str, torch.Tensor] = {}
    attention = f"{path}.{names.attention}"
    for host, part in (("self_attn", names.attention_addend), (names.mixer_host, names.mixer)):
        if part and f"{path}.{part}" in seen:
            addends[f"{host}.attention_output"] = forward.call(f"{path}.{part}").result
    if f"{path}.{names.mlp}" in seen:
        addends["mlp.mlp_output"] = forward.call(f"{path}.{names.mlp_addend}").result
    for name, attribute in names.scale:
        if name in addends:
            addends[name] = addends[name] * getattr(forward.hf.config, attribute)
    yield from addends.items()
    if names.first_norm and f"{path}.{names.first_norm}" in seen:
        yield "attention_norm_output", forward.call(f"{path}.{names.first_norm}").result
    if f"{path}.{names.mlp}" in seen:
        yield "mlp_input", forward.call(f"{path}.{names.mlp}").input
        if names.parallel:
            yield "mlp_norm_output", forward.call(f"{path}.{names.first_norm}").result
        else:
            if names.second_norm:
                yield "mlp_norm_output", forward.call(f"{path}.{names.second_norm}").result
            yield "layer_mid", block.result - addends["mlp.mlp_output"]
        yield from _mlp(forward, names, f"{path}.{names.mlp}")
    if attention in seen:
        yield from _attention(forward, attention, names.projection)
    mixer = f"{path}.{names.mixer}"
    if names.mixer and mixer in seen:
        for name, value in MIXERS[names.mixer_host](forward, mixer):
            yield f"{names.mixer_host}.{name}", value


# -- softmax attention ------------------------------------------------------------------


def _attention(forward: Forward, path: str, projection: str) -> Named:
    call = forward.function("eager_attention_forward", path)
    assert call is not None, path
    module = forward.hf.get_submodule(path)
    _, queries, keys, values, mask, *_ = call.args
    yield "self_attn.attention_queries", queries
    yield "self_attn.attention_keys", keys
    yield "self_attn.attention_values", values
    rotated = forward.function("apply_rotary_pos_emb", path)
    if rotated is not None and rotated.output[0].shape == queries.shape:
        yield "self_attn.attention_queries", rotated.output[0]
        yield "self_attn.attention_keys", rotated.output[1]
    groups = queries.shape[1] // keys.shape[1]
    keys, values = (one.repeat_interleave(groups, dim=1) for one in (keys, values))
    scale = call.kwargs.get("scaling") or queries.shape[-1] ** -0.5
    scores = queries @ keys.mT * scale
    cap = call.kwargs.get("softcap")
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    window = getattr(module, "sliding_window", None)
    visible = visible if window is None else visible.triu(1 - window)
    assert mask is not None and bool(((mask == 0) == visible).all())
    yield "self_attn.attention_scores", scores.masked_fill(~visible, -torch.inf)
    if hasattr(module, "sinks"):
        yield "self_attn.attention_sinks", module.sinks
        column = module.sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        with_sink = torch.cat([scores.masked_fill(~visible, -torch.inf), column], dim=-1)
        pattern = with_sink.softmax(-1)[..., :-1]
    else:
        pattern = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    yield "self_attn.attention_probabilities", pattern
    yield "self_attn.attention_probabilities", call.output[1]
    heads = (pattern @ values).transpose(1, 2)
    yield "self_attn.attention_head_outputs", heads
    yield "self_attn.attention_head_outputs", call.output[0]
    gated = forward.modules.get(f"{path}.q_proj")
    if gated and gated[0].result.shape[-1] == 2 * queries.shape[1] * queries.shape[-1]:
        gate = gated[0].result.unflatten(-1, (queries.shape[1], -1))[..., queries.shape[-1] :]
        yield "self_attn.head_gate", torch.sigmoid(gate)
    premix = forward.call(f"{path}.{projection}").input
    yield "self_attn.attention_premix", premix.unflatten(-1, heads.shape[2:])


# -- MLPs -------------------------------------------------------------------------------


def _mlp(forward: Forward, names: Names, path: str) -> Named:
    module = forward.hf.get_submodule(path)
    if not hasattr(module, names.router) or not hasattr(module, "experts"):
        yield from _dense(forward, names, path, "mlp")
        return
    taken = forward.call(path).input
    tokens = taken.flatten(0, 1)
    logits, scores, weights, indices = ROUTERS[type(module).__name__](
        getattr(module, names.router), tokens
    )
    # The order of the slots is the router's own.
    in_order = forward.call(f"{path}.{names.router}").output[-1]
    assert torch.equal(in_order.sort(-1).values, indices.sort(-1).values)
    weights = torch.zeros_like(logits).scatter(1, indices, weights).gather(1, in_order)
    indices, shape = in_order, taken.shape[:2]
    yield "mlp.router_logits", logits.unflatten(0, shape)
    yield "mlp.router_scores", scores.unflatten(0, shape)
    best = scores.topk(indices.shape[-1] + 1, dim=-1).values
    yield "mlp.router_margin", (best[..., -2] - best[..., -1]).unflatten(0, shape)
    yield "mlp.expert_indices", indices.unflatten(0, shape)
    yield "mlp.expert_weights", weights.unflatten(0, shape)
    each = torch.stack(
        [_expert(module.experts, expert, tokens) for expert in range(logits.shape[-1])], dim=1
    )
    chosen = each.gather(1, indices[..., None].expand(*indices.shape, each.shape[-1]))
    outputs = chosen * weights[..., None]
    yield "mlp.expert_outputs", outputs.unflatten(0, shape)
    yield "mlp.routed_output", outputs.sum(1).unflatten(0, shape)
    yield "mlp.routed_output", forward.call(f"{path}.experts").result.view_as(taken)
    if names.shared and hasattr(module, names.shared):
        shared = forward.call(f"{path}.{names.shared}").result.view_as(taken)
        yield "shared_experts.mlp_output", shared
        if hasattr(module, "shared_expert_gate"):
            shared = shared * torch.sigmoid(taken @ module.shared_expert_gate.weight.T)
        yield "mlp.shared_expert_output", shared
        yield from _dense(forward, names, f"{path}.{names.shared}", "shared_experts", shape)


def _dense(
    forward: Forward, names: Names, path: str, host: str, shape: torch.Size | None = None
) -> Named:
    neurons = forward.call(f"{path}.{names.down}").input
    activation = forward.modules.get(f"{path}.{names.activation}")
    if activation:
        found = activation[0].result
        yield f"{host}.mlp_activation", found if shape is None else found.view(*shape, -1)
    elif hasattr(forward.hf.get_submodule(path), "w1"):
        yield f"{host}.mlp_activation", functional.silu(forward.call(f"{path}.w1").result)
    yield f"{host}.mlp_neurons", neurons if shape is None else neurons.view(*shape, -1)


def _expert(experts: Any, expert: int, x: torch.Tensor) -> torch.Tensor:
    """Run one expert on x [tokens hidden_size], from its weights."""
    first, second = experts.gate_up_proj[expert], experts.down_proj[expert]
    if hasattr(experts, "gate_up_proj_bias"):  # gate and up alternate, and are clamped
        inner = x @ first + experts.gate_up_proj_bias[expert]
        gate, up = inner[..., ::2].clamp(max=7.0), inner[..., 1::2].clamp(-7.0, 7.0)
        neurons = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        return neurons @ second + experts.down_proj_bias[expert]
    gate, up = (x @ first.T).chunk(2, dim=-1)
    return (functional.silu(gate) * up) @ second.T


Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _softmax_router(router: Any, x: torch.Tensor) -> Routed:
    logits = x @ router.weight.T
    scores = logits.softmax(-1)
    weights, indices = scores.topk(router.top_k, dim=-1)
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, scores, weights, indices


def _topk_first_router(router: Any, x: torch.Tensor) -> Routed:
    logits = x @ router.weight.T + router.bias
    best, indices = logits.topk(router.top_k, dim=-1)
    return logits, logits, best.softmax(-1), indices


def _grouped_router(router: Any, x: torch.Tensor) -> Routed:
    logits = x @ router.weight.T
    biased = torch.sigmoid(logits) + router.e_score_correction_bias
    groups = biased.unflatten(-1, (router.num_group, -1))
    best = groups.topk(2, dim=-1).values.sum(-1).topk(router.topk_group, dim=-1).indices
    allowed = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter(1, best, True)
    scores = groups.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
    indices = scores.topk(router.top_k, dim=-1).indices
    weights = torch.sigmoid(logits).gather(-1, indices)
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, scores, weights * router.routed_scaling_factor, indices


#: By the class of the mixture.
ROUTERS: dict[str, Callable[[Any, torch.Tensor], Routed]] = {
    "Qwen3MoeSparseMoeBlock": _softmax_router,
    "Qwen3NextSparseMoeBlock": _softmax_router,
    "GptOssMLP": _topk_first_router,
    "DeepseekV3MoE": _grouped_router,
}
