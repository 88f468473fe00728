"""One expert of a mixture run alone, however the block stores its experts."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from explorer.contract.model_under_test import ModelUnderTest
from explorer.discovery.trace_graph import tensors

HOST = "mlp"


def computable(subject: ModelUnderTest) -> list[int]:
    """Return the blocks whose experts' weights have transformers' usual names."""

    def has_weights(layer: int) -> bool:
        path = subject.details(HOST, layer).experts
        return not path or hasattr(subject.module(layer, path), "down_proj")

    layers = subject.layers(HOST, "routed_output", "expert_indices", "expert_weights")
    return [layer for layer in layers if has_weights(layer)]


def expert_inputs(subject: ModelUnderTest, layer: int) -> torch.Tensor:
    """Return what every expert is run on [tokens hidden_size], or of the width they work on.

    It is what the experts' module is called with, or the MLP where that calls its experts with
    one copy of every token per expert.
    """
    inputs: list[torch.Tensor] = []
    details = subject.details(HOST, layer)
    if details.experts and not details.runs_all_experts:
        module = subject.module(layer, details.experts)
    else:
        module = subject.envoy(HOST, layer)._module

    def note(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        inputs.append(next(tensors((args, kwargs))).detach().clone())

    hook = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        subject.native.forward(subject.ids)
    finally:
        hook.remove()
    return inputs[0].flatten(0, -2)


def routed_from(subject: ModelUnderTest, layer: int, total: torch.Tensor) -> torch.Tensor:
    """Return routed_output where the slots' outputs sum to ``total``."""
    path = subject.details(HOST, layer).routed_projection
    if not path:
        return total
    with torch.no_grad():
        return subject.module(layer, path)(total)


def slot_outputs(
    subject: ModelUnderTest,
    layer: int,
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return each slot's weighted output [tokens top_k hidden_size].

    x: [tokens hidden_size]. indices, weights: [tokens top_k]. Where a block calls its experts with
    a copy of every token for each of them, the copies are weighted, not the outputs.
    """
    weights_inputs = subject.details(HOST, layer).runs_all_experts
    out = torch.empty(*indices.shape, x.shape[-1], dtype=x.dtype)
    with torch.no_grad():
        for expert in indices.unique().tolist():
            tokens, slot = torch.where(indices == expert)
            weight = weights[tokens, slot, None].to(x.dtype)
            if weights_inputs:
                out[tokens, slot] = _expert_of_block(subject, layer, expert, x[tokens] * weight)
            else:
                out[tokens, slot] = _expert_of_block(subject, layer, expert, x[tokens]) * weight
    return out


def _expert_of_block(
    subject: ModelUnderTest, layer: int, expert: int, x: torch.Tensor
) -> torch.Tensor:
    """Run one expert of a block on x [tokens hidden_size]."""
    details = subject.details(HOST, layer)
    if details.experts:
        return run_expert(subject.module(layer, details.experts), expert, x)
    paths = details.expert_tables or details.expert_stacks
    first, second, activation = (subject.module(layer, path) for path in paths)
    if details.expert_tables:  # one neuron per expert: a row of each table
        return activation(x @ first.weight[expert, :, None]) * second.weight[expert]
    inner = functional.linear(x, first.weight[expert])
    if inner.shape[-1] != second.weight.shape[-1]:
        gate, up = inner.chunk(2, dim=-1)
        return functional.linear(activation(gate) * up, second.weight[expert])
    return functional.linear(activation(inner), second.weight[expert])


def run_expert(experts: Any, expert: int, x: torch.Tensor) -> torch.Tensor:
    """Run one expert of a transformers module on x [tokens hidden_size]."""
    if expert >= len(experts.down_proj):  # an index of no expert
        return torch.zeros_like(x)
    if not hasattr(experts, "has_gate"):  # a class of the family's own, without these attributes
        gate, up = (x @ experts.gate_up_proj[expert]).chunk(2, dim=-1)
        return (up * experts.act_fn(gate)) @ experts.down_proj[expert]
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = _linear(experts, name, expert, x)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    return _linear(experts, "down_proj", expert, inner)


def _linear(experts: Any, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    weight = getattr(experts, name)[expert]
    weight = weight.T if experts.is_transposed else weight
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    return functional.linear(x, weight, bias)
