"""Traits of the norms, of the multipliers and caps from embedding to logits, and of the head."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from explorer.discovery.sublayer import Sublayer
from explorer.discovery.trace_graph import Call, tensors
from explorer.traits.evidence import Evidence, blocks, listed, name, number
from explorer.traits.position import computed_from_ids
from explorer.traits.probe import ModelProbe
from explorer.traits.replayable_graph import PASSING, NoNumbers

#: Where the norms around a sublayer are, by the trait that follows.
_PLACES = {"pre_norm": "before", "sandwich_norm": "before and after", "post_norm": "after"}

#: What a norm does when it is run, by the trait that follows.
_TESTS = {
    "rms_norm": "adding a constant to the input changes the output",
    "layer_norm": "adding a constant to the input does not change the output, and there is a bias",
    "layer_norm_no_bias": "adding a constant to the input does not change the output, and there is "
    "no bias",
    "norm_no_weight": "there are no parameters",
    "one_plus_gain": "with all parameters at zero the output is not zero",
}

#: Operations that multiply with a number.
_SCALING = frozenset(("mul", "mul_", "div", "div_"))


@dataclass(frozen=True)
class SublayerNorms:
    """The norms before and after one sublayer, by path from the block."""

    layer: int
    sublayer: Sublayer
    before: str | None
    after: tuple[str, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        return (*filter(None, (self.before,)), *self.after)

    @property
    def trait(self) -> str | None:
        if self.before:
            return "sandwich_norm" if self.after else "pre_norm"
        return "post_norm" if self.after else None


# -- norms -------------------------------------------------------------------------------


def norms(probe: ModelProbe) -> Evidence:
    """Yield the traits of the norms of the residual stream: where they are, what they compute."""
    count = probe.model.num_layers
    on_stream = {
        layer: path
        for layer in probe.first_layers
        if (path := _norm_on_stream(probe, layer)) is not None
    }
    around = [
        each
        for layer in probe.first_layers
        if layer not in on_stream
        for each in _sublayer_norms(probe, layer)
    ]
    if on_stream:
        layers = [i for layer in on_stream for i in probe.group(layer)]
        makers = listed(map(name, on_stream.values()))
        yield "stream_norm", f"what leaves {blocks(layers, count)} is the output of {makers}"
    for trait, place in _PLACES.items():
        if having := [each for each in around if each.trait == trait]:
            names = listed(name(path) for each in having for path in each.paths)
            hosts = listed(each.sublayer.host for each in having)
            layers = {i for each in having for i in probe.group(each.layer)}
            yield trait, f"{names} {place} {hosts}, in {blocks(layers, count)}"
    paths = [f"{probe.path}.{each.layer}.{path}" for each in around for path in each.paths]
    paths += [f"{probe.path}.{layer}.{path}" for layer, path in on_stream.items()]
    paths += [probe.anatomy.norm] if probe.anatomy.norm else []
    names_by_trait: dict[str, list[str]] = {}
    for path in dict.fromkeys(paths):
        for trait in _test_norm(probe.probed.get_submodule(path)):
            names_by_trait.setdefault(trait, []).append(name(path))
    for trait, names in names_by_trait.items():
        yield trait, f"{_TESTS[trait]}: {listed(names)}"
    yield from _embedding_norm(probe)


def _norm_on_stream(probe: ModelProbe, layer: int) -> str | None:
    """Return the norm whose output is the stream that leaves a block, or None."""
    graph, block = probe.graph, probe.call(layer, "")
    leaving = set(graph.back(id(next(tensors(block.output)))))
    prefix = f"{probe.path}.{layer}."
    for call in graph.calls:
        is_inside = call.module.startswith(prefix)
        if is_inside and graph.is_norm(call) and id(call.output) in leaving:
            return call.module.removeprefix(prefix)
    return None


def _sublayer_norms(probe: ModelProbe, layer: int) -> Iterator[SublayerNorms]:
    block = probe.anatomy.block(layer)
    prefix = f"{probe.path}.{block.layers[0]}."
    for sublayer in block.sublayers:
        host = block.hosts[sublayer.host]
        if sublayer.norm:
            before = sublayer.norm.removeprefix(prefix)
        else:
            before = _norm_without_parameters(probe, layer, host.module)
        yield SublayerNorms(layer, sublayer, before, host.details.output_steps.norms)


def _norm_without_parameters(probe: ModelProbe, layer: int, module: str) -> str | None:
    """Return the norm that makes a module's input, where discovery found none, or None."""
    if not module:
        return None
    graph, call = probe.graph, probe.call(layer, module)
    entering = set(graph.back(id(next(tensors((call.args, call.kwargs)))), call.start))
    prefix = f"{probe.path}.{layer}."
    for each in graph.calls:
        is_earlier = each.module.startswith(prefix) and each.stop <= call.start
        if is_earlier and id(each.output) in entering and graph.is_norm(each):
            return each.module.removeprefix(prefix)
    return None


def _test_norm(norm: torch.nn.Module) -> list[str]:
    """Return the traits of what a norm computes, by running a copy with numbers."""
    made: Any = copy.deepcopy(norm)
    on_meta = any(parameter.is_meta for parameter in norm.parameters())
    made = made.to_empty(device="cpu") if on_meta else made.cpu()
    parameters = dict(made.named_parameters())
    # Some norms without weights have a fixed width, the others take any.
    widths = [len(p) for p in parameters.values()] or [*getattr(made, "normalized_shape", ()), 64]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, widths[0], generator=generator)

    def run(x: torch.Tensor) -> torch.Tensor:
        return type(made).forward(made, x)  # nnsight may have wrapped the forward of the copy

    with torch.no_grad():
        for parameter in parameters.values():
            parameter.data = 0.5 + torch.rand(parameter.shape, generator=generator)
        if not torch.allclose(run(x), run(x + 1), atol=1e-3):
            traits = ["rms_norm"]
        else:
            traits = ["layer_norm" if "bias" in parameters else "layer_norm_no_bias"]
        if not parameters:
            return [*traits, "norm_no_weight"]
        for parameter in parameters.values():
            parameter.zero_()
        return [*traits, "one_plus_gain"] if run(x).any() else traits


def _embedding_norm(probe: ModelProbe) -> Evidence:
    graph, first_block = probe.graph, probe.call(0, "")
    stream = id(next(tensors((first_block.args, first_block.kwargs))))
    sources = graph.sources(stream, first_block.start)
    norms = [index for index in sources if graph.is_norm_operation(index)]
    if norms:
        yield (
            "embedding_norm",
            f"{name(graph.owner(norms[0]).module) or 'a norm'} runs before block 0",
        )


# -- multipliers and caps ------------------------------------------------------------------


def scales(probe: ModelProbe) -> Evidence:
    """Yield the traits of multipliers and caps from embedding to logits, and of the head."""
    yield from _embedding_multiplier(probe)
    yield from _residual_multiplier(probe)
    yield from _logits(probe)
    model: Any = probe.model.hf
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:
        yield "tied_head", "the head and the embedding are one parameter"
    if getattr(head, "bias", None) is not None:
        yield "head_bias", f"{name(probe.anatomy.backbone.head)} has a bias"


def _embedding_multiplier(probe: ModelProbe) -> Evidence:
    graph, first_block = probe.graph, probe.call(0, "")
    from_ids = computed_from_ids(graph, first_block.start)
    stream = id(next(tensors((first_block.args, first_block.kwargs))))
    sources = graph.sources(stream, first_block.start)
    try:
        factor = graph.factor(
            [index for index in sources if set(graph.ops[index].reads) & from_ids], probe.numbers
        )
    except NoNumbers:
        return
    if abs(factor - 1) > 1e-3:
        yield "embedding_multiplier", f"the embedding is multiplied by {number(factor)}"


def _residual_multiplier(probe: ModelProbe) -> Evidence:
    """Look for a factor between a sublayer's last product with weights and its addend."""
    for layer in probe.first_layers:
        block = probe.anatomy.block(layer)
        for sublayer in block.sublayers:
            if not block.hosts[sublayer.host].details.output_steps.has_scale:
                continue
            factor = _addend_factor(probe, layer, sublayer)
            if factor is None or abs(factor - 1) > 1e-3:
                by = "" if factor is None else f" by {number(factor)}"
                yield (
                    "residual_multiplier",
                    f"the output of {sublayer.host} is multiplied{by} before it is added",
                )
                return


def _addend_factor(probe: ModelProbe, layer: int, sublayer: Sublayer) -> float | None:
    """Return the single number that an addend is multiplied with last, or None."""
    graph, block = probe.graph, probe.call(layer, "")
    call = probe.host_call(layer, probe.anatomy.block(layer).hosts[sublayer.host])
    products = graph.with_weights(range(call.start, call.stop))
    if not products or call is block:
        return None
    key, scaling = graph.ops[products[-1]].makes[0], []
    while True:
        readers = (index for index in graph.readers.get(key, ()) if index < block.stop)
        index = next((i for i in readers if graph.ops[i].name in PASSING | _SCALING), None)
        if index is None:
            break
        if graph.ops[index].name not in PASSING:
            if any(graph.tensors[k].dim() for k in graph.ops[index].reads[1:]):
                return None
            scaling.append(index)
        key = graph.ops[index].makes[0]
    try:
        return graph.factor(scaling, probe.numbers) if scaling else None
    except NoNumbers:
        return None


def _logits(probe: ModelProbe) -> Evidence:
    """Look for factors and a cap between the final norm and the logits, beside the head."""
    graph = probe.graph
    calls = {call.module: call for call in graph.calls}  # the last call of each module
    head, norm = calls[probe.anatomy.backbone.head], calls.get(probe.anatomy.norm or "no norm")
    factor = 1.0
    if norm is not None and norm.stop <= head.start:
        between = graph.sources(id(head.args[0]), head.start, norm.stop)
        try:
            factor = graph.factor(between, probe.numbers)
        except NoNumbers:
            return
    after_head = graph.sources(id(graph.calls[0].output.logits), None, head.stop)
    if any(graph.ops[index].name not in PASSING for index in after_head):
        small, large = (_logit_after_head(probe, head, size) for size in (1e-6, 1e6))
        if small is None or large is None:
            return
        slope = small / 1e-6
        factor *= slope
        if large < 1e6 * abs(slope) / 2:
            yield "logit_cap", f"a logit of a million comes out as {number(large)}"
    if abs(factor - 1) > 1e-3:
        yield (
            "logits_multiplier",
            f"the logits are the head's, of the final norm's output, times {number(factor)}",
        )


def _logit_after_head(probe: ModelProbe, head: Call, size: float) -> float | None:
    """Return what becomes of a logit of one size behind the head; None where it is unknown."""
    graph = probe.graph
    # What comes after the head works on each logit separately, so a few will do.
    given = {id(head.output): torch.full((1, 1, 8), size, dtype=torch.float64)}
    try:
        out = graph.replay(id(graph.calls[0].output.logits), given, probe.numbers)
    except (NoNumbers, RuntimeError):
        return None
    return float(out.flatten()[0]) if (out == out.flatten()[0]).all() else None


__all__ = ["norms", "scales"]
