"""Invariants of an MLP with neurons: a dense one, also beside a mixture, and a shared expert."""

from __future__ import annotations

from typing import Any

import torch

from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import ModelUnderTest
from explorer.contract.module_calls import module_calls
from explorer.contract.registry import invariant
from explorer.contract.residual_steps import addend_of, constant, tail_known


def _down_module(subject: ModelUnderTest, host: str, layer: int) -> Any:
    """Return the module that is the down projection."""
    point = subject.host(host, layer).hook_points["mlp_neurons"][0]
    return subject.module(layer, point.module)


def _down_matrix(subject: ModelUnderTest, host: str, layer: int) -> torch.Tensor:
    """Return a down projection [intermediate_size hidden_size] that is the MLP's own parameter."""
    weight = constant(subject, layer, subject.details(host, layer).down_parameter)
    weight = weight[0] if weight.dim() > 2 else weight  # a stack of one
    return weight.mT if weight.shape[0] == subject.envoy(host, layer).hidden_size else weight


def _project_down(
    subject: ModelUnderTest, host: str, layer: int, neurons: torch.Tensor
) -> torch.Tensor:
    """Apply the down projection to neurons."""
    if subject.details(host, layer).down_parameter:
        return neurons @ _down_matrix(subject, host, layer)
    with torch.no_grad():
        return _down_module(subject, host, layer)(neurons)


def _column(
    subject: ModelUnderTest, host: str, layer: int, neuron: int, width: int
) -> torch.Tensor:
    """Return what the down projection adds per unit of one neuron [hidden_size]."""
    if subject.details(host, layer).down_parameter:
        weight = _down_matrix(subject, host, layer)
    else:
        weight = _down_module(subject, host, layer).weight.detach()
    return weight[:, neuron] if weight.shape[0] == width else weight[neuron]


def _output_known(subject: ModelUnderTest, host: str, layer: int) -> bool:
    """Return whether mlp_output can be computed from what the down projection makes."""
    return host == "shared_experts" or tail_known(subject, host, layer)


def _output(subject: ModelUnderTest, host: str, layer: int, made: torch.Tensor) -> torch.Tensor:
    """Return mlp_output where the down projection makes ``made``."""
    return made if host == "shared_experts" else addend_of(subject, host, layer, made)


@invariant(
    "neurons",
    "The down projection, and the norm and scale after it where there are any, turn mlp_neurons "
    "into mlp_output, and doubling mlp_activation doubles mlp_neurons.",
    "mlp",
    "shared_experts",
    "dense_mlp",
    needs=("mlp_neurons",),
    float32=1e-5,
    bfloat16=2e-2,
)
def neurons(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for layer in subject.layers(host, "mlp_neurons"):
        found = subject.get(host, "mlp_neurons", layer)
        if _output_known(subject, host, layer):
            made = _project_down(subject, host, layer, found)
            expected = _output(subject, host, layer, made)
            compare.close(layer, expected, subject.get(host, "mlp_output", layer))
    for layer in subject.one_per_kind(host, "mlp_neurons", "mlp_activation"):
        if subject.details(host, layer).normed_neurons:
            continue  # a norm between the two undoes the doubling
        mlp = subject.envoy(host, layer)
        with torch.no_grad(), subject.model.trace(subject.ids):
            mlp.mlp_activation[:] *= 2
            doubled = mlp.mlp_neurons.save()
        compare.equal(layer, doubled, 2 * subject.get(host, "mlp_neurons", layer))


@invariant(
    "silencing a neuron",
    "Setting one neuron to zero changes mlp_output; where what follows the neurons is known, by "
    "that neuron's column of the down projection (through the norm after it, if any) and nothing "
    "else.",
    "mlp",
    "shared_experts",
    "dense_mlp",
    needs=("mlp_neurons",),
    float32=1e-5,
)
def silenced(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for layer in subject.layers(host, "mlp_neurons"):
        clean = subject.get(host, "mlp_neurons", layer)
        neuron = int(clean[0, -1].abs().argmax())
        with torch.no_grad(), subject.model.trace(subject.ids):
            subject.envoy(host, layer).mlp_neurons[0, -1, neuron] = 0
            edited = subject.envoy(host, layer).mlp_output.save()
        output = subject.get(host, "mlp_output", layer).view_as(edited)
        unchanged = torch.equal(edited[0, -1], output[0, -1])
        compare.holds(layer, not unchanged, "the edit did not arrive")
        if not _output_known(subject, host, layer):
            continue
        made = _project_down(subject, host, layer, clean).clone()
        column = _column(subject, host, layer, neuron, made.shape[-1])
        made[0, -1] -= clean[0, -1, neuron] * column
        compare.close(layer, edited, _output(subject, host, layer, made))
        earlier = slice(0, subject.seq - 1)
        compare.equal(layer, edited.flatten(0, 1)[earlier], output.flatten(0, 1)[earlier])


def _tokenwise(subject: ModelUnderTest) -> list[int]:
    """Return one block of each kind whose MLP is known inside and has no convolution after it.

    An MLP whose choice of what to run is not known may choose for all tokens together.
    """
    known = {*subject.layers("mlp", "mlp_neurons"), *subject.layers("mlp", "expert_indices")}
    return [
        layer
        for layer in subject.one_per_kind("layers", "mlp_input")
        if layer in known and not subject.details("mlp", layer).convolved_output
    ]


@invariant(
    "one token at a time",
    "mlp_output of a token depends on mlp_input of that token only, where the inside of the MLP is "
    "known, no convolution follows it, and the model is causal.",
    "mlp",
    float32=1e-5,
    when=lambda subject: subject.native.causal and bool(_tokenwise(subject)),
    otherwise="its MLPs are not known inside, a convolution follows, or it is not causal",
)
def tokenwise(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    subject.note_read("mlp", "mlp_output")
    position = subject.seq // 2
    others = torch.arange(subject.seq) != position
    for layer in _tokenwise(subject):
        with torch.no_grad(), subject.model.trace(subject.ids):
            block = subject.model.layers[layer]
            block.mlp_input.view(subject.batch, subject.seq, -1)[:, position] *= -0.5
            edited = subject.envoy("mlp", layer).mlp_output.save()
        clean = subject.get("mlp", "mlp_output", layer)
        compare.close(layer, edited[:, others], clean[:, others])
        unchanged = torch.equal(edited[:, position], clean[:, position])
        compare.holds(layer, not unchanged, "the edit did not arrive")


#: The files that activation functions are defined in when they are modules.
_ACTIVATION_FILES = ("transformers.activations", "torch.nn.modules.activation")


def _activations(subject: ModelUnderTest, host: str) -> dict[int, torch.Tensor]:
    """Return by block what an MLP's one activation module returns, where it is called once."""
    return subject.once(f"activations of {host}", lambda: _returned(subject, host))


def _returned(subject: ModelUnderTest, host: str) -> dict[int, torch.Tensor]:
    modules: dict[int, torch.nn.Module] = {}
    for layer in subject.layers(host, "mlp_activation"):
        path = subject.host(host, layer).module
        parts = subject.module(layer, path).modules() if path else ()
        named = [one for one in parts if type(one).__module__ in _ACTIVATION_FILES]
        if len(named) == 1:
            modules[layer] = named[0]
    with module_calls(modules.values(), copied=True) as calls:
        subject.native.forward(subject.ids)
    return {layer: calls[one][1][0] for layer, one in modules.items() if one in calls}


@invariant(
    "activation",
    "By torch's own hooks, mlp_activation is what the MLP's activation module returns.",
    "mlp",
    "shared_experts",
    needs=("mlp_activation",),
    when=lambda subject: all(
        _activations(subject, host)
        for host in ("mlp", "shared_experts")
        if subject.layers(host, "mlp_activation")
    ),
    otherwise="its activation functions are no modules that are called once",
)
def activation(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for layer, returned in _activations(subject, host).items():
        found = subject.get(host, "mlp_activation", layer)
        compare.equal(layer, found, returned.view_as(found))


INVARIANTS = (activation, neurons, silenced, tokenwise)
