"""Laws of an MLP with neurons of its own: a dense one, and a mixture's shared expert."""

from __future__ import annotations

import torch

from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import ModelUnderTest
from explorer.contract.registry import invariant
from explorer.contract.residual_steps import added, constant, followed


def _down(s: ModelUnderTest, host: str, layer: int, neurons: torch.Tensor) -> torch.Tensor:
    """What the down projection makes of neurons: a module, or a matrix of the MLP's own."""
    if s.details(host, layer).down_parameter:
        return neurons @ _matrix(s, host, layer)
    place = s.model.anatomy.block(layer).hosts[host].hook_points["mlp_neurons"][0]
    with torch.no_grad():
        return s.module(layer, place.module)(neurons)


def _matrix(s: ModelUnderTest, host: str, layer: int) -> torch.Tensor:
    """The down projection [intermediate_size hidden_size] that is a parameter of the MLP's own, the only one of its stack."""
    weight = constant(s, layer, s.details(host, layer).down_parameter)
    weight = weight[0] if weight.dim() > 2 else weight
    return weight.mT if weight.shape[0] == s.envoy(host, layer).hidden_size else weight


def _followed(s: ModelUnderTest, host: str) -> list[int]:
    """The blocks whose neurons are followed to what the block adds."""
    return [
        layer
        for layer in s.layers(host, "mlp_neurons")
        if host != "mlp" or followed(s, host, layer)
    ]


@invariant(
    "neurons",
    "The down projection, and the norm and scale after it where the family has them, make mlp_output of mlp_neurons, and "
    "where mlp_activation is doubled mlp_neurons double with it.",
    "mlp",
    "shared_experts",
    needs=("mlp_neurons",),
    float32=1e-5,
    bfloat16=2e-2,
)
def neurons(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for layer in s.layers(host, "mlp_neurons"):
        found = s.get(host, "mlp_neurons", layer)
        made = _down(s, host, layer, found)
        if host != "mlp" or followed(s, host, layer):
            t.near(
                layer,
                made if host != "mlp" else added(s, host, layer, made),
                s.get(host, "mlp_output", layer),
            )
    for layer in s.first(host, "mlp_neurons", "mlp_activation"):
        if s.details(host, layer).normed_neurons:
            continue  # a norm between the two undoes the doubling
        part = s.envoy(host, layer)
        with torch.no_grad(), s.model.trace(s.ids):
            part.mlp_activation[:] *= 2
            doubled = part.mlp_neurons.save()
        t.same(layer, doubled, 2 * s.get(host, "mlp_neurons", layer))


@invariant(
    "silencing a neuron",
    "With one neuron at zero, mlp_output changes; where what follows the neurons is followed too, by that neuron's column of the down "
    "projection (or what a norm after it makes of that) and nothing else.",
    "mlp",
    "shared_experts",
    needs=("mlp_neurons",),
    float32=1e-5,
)
def silenced(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for layer in s.layers(host, "mlp_neurons"):
        clean = s.get(host, "mlp_neurons", layer)
        neuron = int(clean[0, -1].abs().argmax())
        with torch.no_grad(), s.model.trace(s.ids):
            s.envoy(host, layer).mlp_neurons[0, -1, neuron] = 0
            edited = s.envoy(host, layer).mlp_output.save()
        t.holds(
            layer,
            not torch.equal(edited[0, -1], s.get(host, "mlp_output", layer).view_as(edited)[0, -1]),
            "the edit did not arrive",
        )
        if layer not in _followed(s, host):
            continue
        made = _down(s, host, layer, clean)
        place = s.model.anatomy.block(layer).hosts[host].hook_points["mlp_neurons"][0]
        weight = (
            _matrix(s, host, layer)
            if s.details(host, layer).down_parameter
            else s.module(layer, place.module).weight.detach()
        )
        changed = made.clone()
        changed[0, -1] -= clean[0, -1, neuron] * (
            weight[:, neuron] if weight.shape[0] == made.shape[-1] else weight[neuron]
        )
        want = changed if host != "mlp" else added(s, host, layer, changed)
        t.near(layer, edited, want)
        t.same(
            layer,
            edited.flatten(0, 1)[: s.seq - 1],
            s.get(host, "mlp_output", layer).flatten(0, 1)[: s.seq - 1],
        )


def _per_token(s: ModelUnderTest) -> list[int]:
    """One block of each kind whose MLP is followed: one whose choice of what it runs is not may choose for all tokens at once."""
    known = {*s.layers("mlp", "mlp_neurons"), *s.layers("mlp", "expert_indices")}
    return [
        layer
        for layer in s.first("layers", "mlp_input")
        if layer in known and not s.details("mlp", layer).convolved_output
    ]


@invariant(
    "one token at a time",
    "mlp_output of one token depends on mlp_input of that token alone, where the MLP's inside is followed, no convolution is "
    "behind it, and the model itself reads no later token.",
    "mlp",
    float32=1e-5,
    when=lambda s: s.causal and bool(_per_token(s)),
)
def per_token(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    s.looks("mlp", "mlp_output")
    for layer in _per_token(s):
        position = s.seq // 2
        with torch.no_grad(), s.model.trace(s.ids):
            s.model.layers[layer].mlp_input.view(s.batch, s.seq, -1)[:, position] *= -0.5
            edited = s.envoy("mlp", layer).mlp_output.save()
        clean = s.get("mlp", "mlp_output", layer)
        others = torch.arange(s.seq) != position
        t.near(layer, edited[:, others], clean[:, others])
        t.holds(
            layer,
            not torch.equal(edited[:, position], clean[:, position]),
            "the edit did not arrive",
        )
