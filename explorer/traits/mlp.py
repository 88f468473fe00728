"""Traits of the MLP: its gate and activation, and what there is to a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from explorer.discovery.anatomy import HostAnatomy
from explorer.discovery.trace_graph import Call, tensors
from explorer.traits.evidence import blocks, listed, name, number
from explorer.traits.probe import ModelProbe
from explorer.traits.replayable_graph import NoNumbers, ReplayableGraph

Found = Iterator[tuple[str, str]]

#: Activations by trait.
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "activation_silu": functional.silu,
    "activation_gelu": functional.gelu,
    "activation_gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "activation_quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "activation_relu": torch.relu,
    "activation_relu_squared": lambda x: torch.relu(x).square(),
}


@dataclass(frozen=True)
class Neurons:
    """One MLP's inside in a run: the product back to the stream, what it takes, and the products that made that."""

    witness: ModelProbe
    where: str
    call: Call
    down: int
    key: int
    before: int
    cuts: list[int]

    @property
    def trail(self) -> ReplayableGraph:
        return self.witness.trail

    @property
    def width(self) -> int:
        return self.trail.tensors[self.key].shape[-1]

    @property
    def gated(self) -> bool | None:
        """Whether two numbers make each neuron; None where it is neither two nor one."""
        made = sum(self.trail.tensors[self.trail.ops[cut].makes[0]].shape[-1] for cut in self.cuts)
        return {self.width: False, 2 * self.width: True}.get(made)


def mlp(witness: ModelProbe) -> Found:
    """Traits of the MLPs, dense or in a mixture."""
    once: set[str] = set()
    for neurons in _neurons(witness):
        for trait, evidence in (*_shape(neurons), *_biases(neurons)):
            if trait not in once:
                once.add(trait)
                yield trait, evidence


def _neurons(witness: ModelProbe) -> Iterator[Neurons]:
    """The inside of each kind of MLP: the dense ones, and the experts of mixtures."""
    for layer, host in witness.hosts("mlp"):
        if "mlp_neurons" in host.hook_points:
            path, call = host.hook_points["mlp_neurons"][0].module, witness.host_call(layer, host)
        elif path := host.details.experts:
            call = witness.call(layer, path)
        else:
            continue
        trail, last = witness.trail, witness.call(layer, path)
        products = trail.weighted(range(last.start, last.stop))
        if not products:
            continue
        key, before = trail.taken(products[-1]), products[-1]
        if host.details.normed_neurons:
            norms = [
                one
                for one in trail.calls
                if call.start <= one.start < one.stop <= products[-1]
                and key in trail.onward(id(one.output))
                and trail.norms(one)
            ]
            key, before = (id(norms[-1].args[0]), norms[-1].start) if norms else (key, before)
        cuts = trail.cuts(key, before, call.start)
        if not cuts:  # the projections before it stand outside the module it is in
            call = witness.call(layer, "")
            cuts = trail.cuts(key, before, call.start)
        if cuts:
            yield Neurons(witness, name(path), call, products[-1], key, before, cuts)


def _shape(neurons: Neurons) -> Found:
    makers = listed(neurons.trail.owners[cut].module.rpartition(".")[2] for cut in neurons.cuts)
    if neurons.gated is None:
        return
    count = len(neurons.cuts)
    if neurons.gated:
        yield (
            "gated_mlp",
            f"{makers} make{'s' * (count == 1)} two numbers for each of {neurons.width} neurons",
        )
    else:
        yield "plain_mlp", f"{makers} makes one number for each of {neurons.width} neurons"
    activation = _activation(neurons)
    if activation is not None:
        yield activation


def _activation(neurons: Neurons) -> tuple[str, str] | None:
    """Which function turns what a projection made into the neurons, by trying: None where it cannot be tried."""
    trail = neurons.trail
    factors = {
        1.0,
        *(
            n
            for i in trail.between(neurons.key, neurons.before, neurons.cuts, neurons.call.start)
            if trail.ops[i].name in ("mul", "mul_")
            for n in trail.ops[i].numbers
        ),
    }
    grid = torch.linspace(-4, 4, neurons.width, dtype=torch.float64)
    asked = False
    for made in _inputs(neurons, grid):
        try:
            out = trail.replay(neurons.key, made, neurons.witness.numbers, neurons.before)
        except NoNumbers:
            continue
        asked = True
        row = out.reshape(-1, neurons.width)[0]
        for factor in sorted(factors, key=lambda f: f != 1):
            for trait, function in _ACTIVATIONS.items():
                wanted = function(factor * grid)
                scale = (row @ wanted) / (wanted @ wanted)
                if scale != 0 and (row - scale * wanted).abs().max() <= 1e-9 * row.abs().max():
                    of = (
                        ""
                        if factor == 1
                        else f", of {number(factor)} times what the projection makes"
                    )
                    return (
                        trait,
                        f"numbers from -4 to 4 come out as this function has them in {neurons.where}{of}",
                    )
    if not asked:
        return None
    return (
        "activation_other",
        f"numbers from -4 to 4 come out as no usual function has them in {neurons.where}",
    )


def _inputs(neurons: Neurons, grid: torch.Tensor) -> Iterator[dict[int, torch.Tensor]]:
    """What the projections may have made, with ``grid`` in what passes the activation and one in what is multiplied with it."""
    trail = neurons.trail
    entering = {
        id(t): torch.ones(t.shape, dtype=torch.float64)
        if t.is_floating_point()
        else torch.zeros(t.shape, dtype=t.dtype)
        for t in tensors((neurons.call.args, neurons.call.kwargs))
    }
    keys = [trail.ops[cut].makes[0] for cut in neurons.cuts]
    ones = torch.ones_like(grid)
    if not neurons.gated:
        rows = [[grid]]
    elif len(keys) == 1:
        pairs = ((grid, ones), (ones, grid))
        rows = [[torch.cat(pair)] for pair in pairs] + [
            [torch.stack(pair, -1).flatten()] for pair in pairs
        ]
    else:
        rows = [[grid, ones], [ones, grid]]
    for row in rows:
        if len(row) == len(keys) and all(
            len(one) == trail.tensors[key].shape[-1] for key, one in zip(keys, row)
        ):
            yield entering | {
                key: one.expand(trail.tensors[key].shape).clone() for key, one in zip(keys, row)
            }


def _biases(neurons: Neurons) -> Found:
    """Vectors among the parameters of the modules that make the neurons and take them."""
    trail = neurons.trail
    for index in (*neurons.cuts, neurons.down):
        owner = trail.owners[index]
        matrix = trail.matrix(index)
        own = [
            key
            for key, parameter in owner.fn.named_parameters(recurse=False)
            if parameter.dim() == matrix.dim() - 1
        ]
        if own:
            yield (
                ("expert_bias" if matrix.dim() == 3 else "mlp_bias"),
                f"{name(owner.module)} has {listed(own)}",
            )


def mixture(witness: ModelProbe) -> Found:
    """Traits of mixtures of experts."""
    kinds = [(kind.layers, {sub.role for sub in kind.sublayers}) for kind in witness.anatomy.blocks]
    mixed, dense = (
        [layer for layers, roles in kinds if role in roles for layer in layers]
        for role in ("experts", "mlp")
    )
    if not mixed:
        return
    count = witness.model.num_layers
    for layer, host in witness.hosts("mlp"):
        if host.details.scoring is not None:
            yield from _routing(witness, layer, host, blocks(mixed, count))
            break
    else:
        yield "mixture", f"{blocks(mixed, count)} choose what they run"
    if dense:
        trait = "dense_first" if max(dense) < min(mixed) else "some_mixtures"
        yield trait, f"a dense MLP in {blocks(dense, count)}, a mixture in {blocks(mixed, count)}"


def _routing(witness: ModelProbe, layer: int, host: HostAnatomy, where: str) -> Found:
    scoring, sizes = host.details.scoring, host.sizes
    yield "mixture", f"{sizes['top_k']} of {sizes['num_experts']} in {where}"
    router = name(host.details.router) or "the router"
    for function, trait in (("softmax", "router_softmax"), ("sigmoid", "router_sigmoid")):
        if scoring.function == function:
            yield (
                trait,
                f"{router} takes a {function} of all {sizes['num_experts']} logits before its top-k",
            )
        if scoring.after == function:
            yield (
                f"{trait}_chosen",
                f"{router} takes a {function} of {sizes['top_k']} logits after its top-k",
            )
    choice = _choice(witness, layer, host)
    if choice is not None and (bias := _selection_bias(witness, choice, sizes["num_experts"])):
        yield (
            "selection_bias",
            f"{bias} is added to the {sizes['num_experts']} scores that the top-k chooses by",
        )
    if (
        choice is not None
        and scoring.masked
        and (struck := _struck(witness, choice, sizes["num_experts"]))
    ):
        yield (
            "expert_groups",
            f"of {sizes['num_experts']} experts {struck} are struck out before the top-k",
        )
    if scoring.renormalised:
        yield "renormalised", "a sum and a division follow the top-k"
    for what, factor in (
        ("each weight", scoring.factor),
        ("the experts' sum", host.details.routed_factor),
    ):
        if factor is not None and factor != 1:
            yield (
                "routed_factor",
                f"{what} is multiplied with {name(factor) if isinstance(factor, str) else number(factor)}",
            )
            break
    if host.details.shared:
        shared = name(host.details.shared)
        yield "shared_expert", f"what {shared} makes is added to the routed experts' sum"
        if (gate := _gate(witness, layer, host.details.shared)) is not None:
            yield (
                "shared_expert_gated",
                f"what {shared} makes is multiplied with {gate} before it is added",
            )


def _gate(witness: ModelProbe, layer: int, shared: str) -> str | None:
    """What multiplies the shared expert's output, where that is a number for each token."""
    trail, call = witness.trail, witness.call(layer, shared)
    onward = trail.onward(id(call.output))
    for index in sorted(index for key in onward for index in trail.readers.get(key, ())):
        op = trail.ops[index]
        if index >= call.stop and op.name in ("mul", "mul_") and len(op.reads) == 2:
            others = [trail.tensors[key] for key in op.reads if key not in onward]
            if others and others[0].dim() > 0:
                return (
                    "one number for each token"
                    if others[0].shape[-1] == 1
                    else "a vector for each token"
                )
    return None


@dataclass(frozen=True)
class Choice:
    """The top-k of one router: the operation, the scores it takes, and the projections those were made by."""

    topk: int
    scores: int
    logits: list[int]


def _choice(witness: ModelProbe, layer: int, host: HostAnatomy) -> Choice | None:
    """The last top-k over all experts."""
    trail, call, experts = witness.trail, witness.host_call(layer, host), host.sizes["num_experts"]
    for topk in reversed(trail.indices(call, "topk")):
        scores = trail.ops[topk].reads[0]
        if trail.tensors[scores].shape[-1] == experts:
            made = trail.cuts(scores, topk, call.start)
            return Choice(
                topk,
                scores,
                [i for i in made if trail.tensors[trail.ops[i].makes[0]].shape[-1] == experts],
            )
    return None


def _selection_bias(witness: ModelProbe, choice: Choice, experts: int) -> str | None:
    """The name of a parameter or buffer with a number for each expert that is added to the scores the choice is made by."""
    trail = witness.trail
    for index in trail.between(choice.scores, choice.topk, choice.logits, 0):
        for key in trail.ops[index].reads if trail.ops[index].name in ("add", "add_") else ():
            source = trail.back(key, index)[-1]
            if (
                trail.tensors[source].numel() == experts
                and trail.maker(source, index) is None
                and (path := witness.name(source))
            ):
                return name(path)
    return None


def _struck(witness: ModelProbe, choice: Choice, experts: int) -> int:
    """How many experts a token cannot choose, asked with logits of which no two are equal."""
    trail = witness.trail
    drawn = {
        made: torch.randn(
            trail.tensors[made].shape,
            generator=torch.Generator().manual_seed(0),
            dtype=torch.float64,
        )
        for index in choice.logits
        for made in trail.ops[index].makes
    }
    try:
        scores = trail.replay(choice.scores, drawn, witness.numbers, choice.topk).reshape(
            -1, experts
        )[0]
    except NoNumbers:
        return 0
    struck = int((scores == scores.min()).sum())
    return struck if struck > 1 else 0
