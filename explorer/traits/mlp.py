"""Traits of an MLP and of the experts of a mixture: gate, activation and biases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from explorer.discovery.trace_graph import Call, tensors
from explorer.traits.evidence import Evidence, listed, name, number
from explorer.traits.probe import ModelProbe
from explorer.traits.replayable_graph import NoNumbers, ReplayableGraph

#: Activations by trait.
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "activation_silu": functional.silu,
    "activation_gelu": functional.gelu,
    "activation_gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "activation_quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "activation_relu": torch.relu,
    "activation_relu_squared": lambda x: torch.relu(x).square(),
}

_INPUTS = "inputs from -4 to 4"


@dataclass(frozen=True)
class Neurons:
    """The neurons of one MLP in a recorded run.

    module: the name of the module with the down projection. call: the call in which the neurons are
    made. down: the down projection. key, before: the tensor of neurons, as it is before an
    operation. projections: the products with weights that make the neurons.
    """

    probe: ModelProbe
    module: str
    call: Call
    down: int
    key: int
    before: int
    projections: list[int]

    @property
    def graph(self) -> ReplayableGraph:
        return self.probe.graph

    @property
    def width(self) -> int:
        return self.graph.tensors[self.key].shape[-1]

    @property
    def outputs(self) -> list[int]:
        """The tensors that the projections make."""
        return [self.graph.ops[index].makes[0] for index in self.projections]

    @property
    def gated(self) -> bool | None:
        """Whether the projections make two numbers per neuron, not one; None where neither."""
        made = sum(self.graph.tensors[key].shape[-1] for key in self.outputs)
        return {self.width: False, 2 * self.width: True}.get(made)


def mlp(probe: ModelProbe) -> Evidence:
    """Yield the traits of MLPs and experts, each from the first kind of block that shows it."""
    seen: set[str] = set()
    for neurons in _neurons(probe):
        for trait, evidence in (*_form(neurons), *_biases(neurons)):
            if trait not in seen:
                seen.add(trait)
                yield trait, evidence


def _neurons(probe: ModelProbe) -> Iterator[Neurons]:
    """Find the neurons of each kind of MLP: of the dense ones, and of the experts of mixtures."""
    graph = probe.graph
    for layer, host in probe.hosts("mlp"):
        if "mlp_neurons" in host.hook_points:
            path, call = host.hook_points["mlp_neurons"][0].module, probe.host_call(layer, host)
        elif host.details.experts:
            path = host.details.experts
            call = probe.call(layer, path)
        else:
            continue
        last = probe.call(layer, path)
        products = graph.with_weights(range(last.start, last.stop))
        if not products:
            continue
        down = products[-1]
        key, before = graph.input_of(down), down
        if host.details.normed_neurons:
            key, before = _before_norm(graph, call, key, down)
        projections = graph.projections(key, before, call.start)
        if not projections:  # they are outside the module with the neurons
            call = probe.call(layer, "")
            projections = graph.projections(key, before, call.start)
        if projections:
            yield Neurons(probe, name(path), call, down, key, before, projections)


def _before_norm(graph: ReplayableGraph, call: Call, key: int, down: int) -> tuple[int, int]:
    """Return the neurons before the norm between them and the down projection."""
    norms = [
        each
        for each in graph.calls
        if call.start <= each.start < each.stop <= down
        and key in graph.onward(id(each.output))
        and graph.is_norm(each)
    ]
    return (id(norms[-1].args[0]), norms[-1].start) if norms else (key, down)


def _form(neurons: Neurons) -> Evidence:
    if neurons.gated is None:
        return
    makers = [name(neurons.graph.owner(index).module) for index in neurons.projections]
    verb = "makes" if len(makers) == 1 else "make"
    each = "two numbers" if neurons.gated else "one number"
    trait = "gated_mlp" if neurons.gated else "plain_mlp"
    yield trait, f"{listed(makers)} {verb} {each} for each of {neurons.width} neurons"
    activation = _activation(neurons)
    if activation is not None:
        yield activation


# -- activations ---------------------------------------------------------------------------


def _activation(neurons: Neurons) -> tuple[str, str] | None:
    """Find the function between projections and neurons by running it; None where that fails."""
    grid = torch.linspace(-4, 4, neurons.width, dtype=torch.float64)
    factors = _factors(neurons)
    tested = False
    for given in _projected(neurons, grid):
        try:
            out = neurons.graph.replay(neurons.key, given, neurons.probe.numbers, neurons.before)
        except NoNumbers:
            continue
        tested = True
        found = _match(out.reshape(-1, neurons.width)[0], grid, factors)
        if found is not None:
            trait, factor = found
            scaled = "" if factor == 1 else f", of {number(factor)} times the input"
            return trait, f"{_INPUTS} give this function's values in {neurons.module}{scaled}"
    if not tested:
        return None
    return "activation_other", f"{_INPUTS} give no common function's values in {neurons.module}"


def _factors(neurons: Neurons) -> list[float]:
    """Return 1, and then the numbers by which anything between is multiplied."""
    graph = neurons.graph
    between = graph.between(neurons.projections, neurons.key, neurons.before, neurons.call.start)
    scales = [index for index in between if graph.ops[index].name in ("mul", "mul_")]
    factors = {1.0, *(n for index in scales for n in graph.ops[index].numbers)}
    return sorted(factors, key=lambda factor: factor != 1)


def _match(row: torch.Tensor, grid: torch.Tensor, factors: list[float]) -> tuple[str, float] | None:
    """Return the activation proportional to a row on a grid, and the factor of its input."""
    for factor in factors:
        for trait, function in _ACTIVATIONS.items():
            expected = function(factor * grid)
            scale = (row @ expected) / (expected @ expected)
            if scale != 0 and (row - scale * expected).abs().max() <= 1e-9 * row.abs().max():
                return trait, factor
    return None


def _projected(neurons: Neurons, grid: torch.Tensor) -> Iterator[dict[int, torch.Tensor]]:
    """Yield numbers for the projections: ``grid`` for the activation, one for what it multiplies.

    Which of the two a number is for is not known, so that every way is tried.
    """
    graph = neurons.graph
    given = {
        id(t): torch.ones(t.shape, dtype=torch.float64)
        if t.is_floating_point()
        else torch.zeros(t.shape, dtype=t.dtype)
        for t in tensors((neurons.call.args, neurons.call.kwargs))
    }
    ones = torch.ones_like(grid)
    pairs = [[grid, ones], [ones, grid]]
    if not neurons.gated:
        candidates = [[grid]]
    elif len(neurons.outputs) == 1:  # both in one tensor: in halves, or neuron by neuron
        candidates = [[torch.cat(pair)] for pair in pairs]
        candidates += [[torch.stack(pair, -1).flatten()] for pair in pairs]
    else:
        candidates = pairs
    shapes = [graph.tensors[key].shape for key in neurons.outputs]
    for rows in candidates:
        if [len(row) for row in rows] == [shape[-1] for shape in shapes]:
            made = zip(neurons.outputs, rows, shapes, strict=True)
            yield given | {key: row.expand(shape).clone() for key, row, shape in made}


# -- biases --------------------------------------------------------------------------------


def _biases(neurons: Neurons) -> Evidence:
    """Look for biases among the parameters of the modules that make the neurons and read them."""
    graph = neurons.graph
    for index in (*neurons.projections, neurons.down):
        owner, weight = graph.owner(index), graph.weight_of(index)
        biases = [
            key
            for key, parameter in owner.fn.named_parameters(recurse=False)
            if parameter.dim() == weight.dim() - 1
        ]
        if biases:
            trait = "expert_bias" if weight.dim() == 3 else "mlp_bias"
            yield trait, f"{name(owner.module)} has {listed(biases)}"
