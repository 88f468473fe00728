"""Traits of the frame: norms, multipliers, what comes before the blocks and after them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from explorer.discovery.sublayer import Sublayer
from explorer.discovery.trace_graph import Call, tensors
from explorer.traits.evidence import blocks, listed, name, number
from explorer.traits.position import of_ids
from explorer.traits.probe import ModelProbe
from explorer.traits.replayable_graph import PASSING, NoNumbers

Found = Iterator[tuple[str, str]]


@dataclass(frozen=True)
class Around:
    """The norms around one sublayer, by path from the block; those with nothing learned included."""

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


def norms(witness: ModelProbe) -> Found:
    """Traits of the norms of the stream: where they stand, and what they do."""
    count = witness.model.num_layers
    carried = {
        layer: path for layer in witness.firsts if (path := _carrying(witness, layer)) is not None
    }
    around = [
        one for layer in witness.firsts if layer not in carried for one in _around(witness, layer)
    ]
    if carried:
        layers = [i for layer in carried for i in witness.group(layer)]
        yield (
            "stream_norm",
            f"what leaves {blocks(layers, count)} is what {listed(map(name, carried.values()))} makes",
        )
    for trait in _PLACES:
        if having := [one for one in around if one.trait == trait]:
            layers = {i for one in having for i in witness.group(one.layer)}
            names = listed(name(path) for one in having for path in one.paths)
            yield (
                trait,
                f"{names} around {listed(one.sublayer.host for one in having)} in {blocks(layers, count)}",
            )
    paths = [f"{witness.path}.{one.layer}.{path}" for one in around for path in one.paths]
    paths += [f"{witness.path}.{layer}.{path}" for layer, path in carried.items()]
    paths += [witness.anatomy.norm] if witness.anatomy.norm else []
    asked: dict[str, list[str]] = {}
    for path in dict.fromkeys(paths):
        for trait in _kind(witness.twin.get_submodule(path)):
            asked.setdefault(trait, []).append(name(path))
    for trait, names in asked.items():
        yield trait, f"{_SAID[trait]}: {listed(names)}"
    yield from _embedding_norm(witness)


_PLACES = ("pre_norm", "sandwich_norm", "post_norm")

#: What a norm was seen to do, by the trait that follows.
_SAID = {
    "rms_norm": "adding the same to all numbers of a vector changes what comes out",
    "layer_norm": "adding the same to all numbers of a vector changes nothing, and there is a bias",
    "layer_norm_no_bias": "adding the same to all numbers of a vector changes nothing, and there is no bias",
    "norm_no_weight": "they have no parameters",
    "one_plus_gain": "with all parameters at zero what comes out is not zero",
}


def _carrying(witness: ModelProbe, layer: int) -> str | None:
    """The norm whose result is the stream that leaves a block, where there is one."""
    trail, block = witness.trail, witness.call(layer, "")
    leaving = set(trail.back(id(next(tensors(block.output)))))
    within = f"{witness.path}.{layer}."
    norms = (call for call in trail.calls if call.module.startswith(within) and trail.norms(call))
    return next(
        (call.module.removeprefix(within) for call in norms if id(call.output) in leaving), None
    )


def _around(witness: ModelProbe, layer: int) -> Iterator[Around]:
    block = witness.anatomy.block(layer)
    prefix = f"{witness.path}.{block.layers[0]}."
    for sub in block.sublayers:
        host = block.hosts[sub.host]
        before = (
            sub.norm.removeprefix(prefix)
            if sub.norm
            else _bare_norm(witness, layer, sub, host.module)
        )
        tail = host.details.output_steps
        yield Around(layer, sub, before, tail.norms)


def _bare_norm(witness: ModelProbe, layer: int, sub: Sublayer, module: str) -> str | None:
    """A module without parameters that norms what a sublayer is called with."""
    if not module:
        return None
    trail, call = witness.trail, witness.call(layer, module)
    entering = set(trail.back(id(next(tensors((call.args, call.kwargs)))), call.start))
    within = f"{witness.path}.{layer}."
    for one in trail.calls:
        if (
            one.module.startswith(within)
            and one.stop <= call.start
            and id(one.output) in entering
            and trail.norms(one)
        ):
            return one.module.removeprefix(within)
    return None


def _kind(norm: torch.nn.Module) -> list[str]:
    """What a norm does, asked of a copy with numbers."""
    made = (
        copy.deepcopy(norm).to_empty(device="cpu")
        if any(p.is_meta for p in norm.parameters())
        else copy.deepcopy(norm).cpu()
    )
    parameters = dict(made.named_parameters())
    # Some without weights know how wide they are, the others take anything.
    width = next((len(p) for p in parameters.values()), None) or next(
        iter(getattr(made, "normalized_shape", ())), 64
    )
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, width, generator=drawn)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.data = 0.5 + torch.rand(parameter.shape, generator=drawn)
        run = lambda x: type(made).forward(made, x)  # noqa: E731  the engine may have wrapped the copied one
        centred = torch.allclose(run(x), run(x + 1), atol=1e-3)
        traits = (
            ["layer_norm" if "bias" in parameters else "layer_norm_no_bias"]
            if centred
            else ["rms_norm"]
        )
        if not parameters:
            return [*traits, "norm_no_weight"]
        for parameter in parameters.values():
            parameter.zero_()
        return [*traits, "one_plus_gain"] if run(x).any() else traits


def _embedding_norm(witness: ModelProbe) -> Found:
    trail, call = witness.trail, witness.call(0, "")
    stream = id(next(tensors((call.args, call.kwargs))))
    found = [i for i in trail.sources(stream, call.start) if trail.norming(i)]
    if found:
        yield (
            "embedding_norm",
            f"{name(trail.owners[found[0]].module) or 'the model'} runs before block 0",
        )


def scales(witness: ModelProbe) -> Found:
    """Traits of what is multiplied and capped on the way in, along the stream and on the way out; and the head."""
    yield from _embedding(witness)
    yield from _residual(witness)
    yield from _logits(witness)
    model = witness.model.hf
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        yield "tied_head", "one parameter is the embedding's and the head's"
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        yield "head_bias", f"{name(witness.anatomy.backbone.head)} has one"


def _embedding(witness: ModelProbe) -> Found:
    trail, call = witness.trail, witness.call(0, "")
    ids = of_ids(trail, call.start)
    stream = id(next(tensors((call.args, call.kwargs))))
    path = [i for i in trail.sources(stream, call.start) if set(trail.ops[i].reads) & ids]
    try:
        factor = trail.factor(path, witness.numbers)
    except NoNumbers:
        return
    if abs(factor - 1) > 1e-3:
        yield (
            "embedding_multiplier",
            f"the embedding is multiplied with {number(factor)} before block 0",
        )


def _residual(witness: ModelProbe) -> Found:
    """What a sublayer made is multiplied with once its work with weights is done."""
    for layer in witness.firsts:
        block = witness.anatomy.block(layer)
        for sub in block.sublayers:
            if not block.hosts[sub.host].details.output_steps.has_scale:
                continue
            factor = _tail_factor(witness, layer, sub)
            said = "" if factor is None else f" with {number(factor)}"
            if factor is None or abs(factor - 1) > 1e-3:
                yield (
                    "residual_multiplier",
                    f"what {sub.host} makes is multiplied{said} before it is added",
                )
                return


_SCALING = frozenset(("mul", "mul_", "div", "div_"))


def _tail_factor(witness: ModelProbe, layer: int, sub: Sublayer) -> float | None:
    """The number an addend is multiplied with at last, None where that is no single number."""
    trail, call = (
        witness.trail,
        witness.host_call(layer, witness.anatomy.block(layer).hosts[sub.host]),
    )
    block = witness.call(layer, "")
    products = trail.weighted(range(call.start, call.stop))
    if not products or call is block:
        return None
    key, factor = trail.ops[products[-1]].makes[0], []
    while True:
        after = (i for i in trail.readers.get(key, ()) if i < block.stop)
        follow = next((i for i in after if trail.ops[i].name in PASSING | _SCALING), None)
        if follow is None:
            break
        if trail.ops[follow].name not in PASSING:
            if any(trail.tensors[k].dim() for k in trail.ops[follow].reads[1:]):
                return None
            factor.append(follow)
        key = trail.ops[follow].makes[0]
    try:
        return trail.factor(factor, witness.numbers) if factor else None
    except NoNumbers:
        return None


def _logits(witness: ModelProbe) -> Found:
    """What is done to the head's output, and to what it reads behind the last norm."""
    trail, frame = witness.trail, witness.anatomy.backbone
    head = next(call for call in reversed(trail.calls) if call.module == frame.head)
    factor = 1.0
    norm = next(
        (call for call in reversed(trail.calls) if call.module == witness.anatomy.norm), None
    )
    if norm is not None and norm.stop <= head.start:
        try:
            factor *= trail.factor(
                trail.sources(id(head.args[0]), head.start, norm.stop), witness.numbers
            )
        except NoNumbers:
            return
    after = trail.sources(id(trail.calls[0].output.logits), None, head.stop)
    if any(trail.ops[i].name not in PASSING for i in after):
        small, large = (_after_head(witness, head, size) for size in (1e-6, 1e6))
        if small is None or large is None:
            return
        factor *= small / 1e-6
        if large < 1e6 * abs(small / 1e-6) / 2:
            yield "logit_cap", f"a logit of a million leaves as {number(large)}"
    if abs(factor - 1) > 1e-3:
        yield (
            "logits_multiplier",
            f"logits are the head's, of what the last norm makes, times {number(factor)}",
        )


def _after_head(witness: ModelProbe, head: Call, size: float) -> float | None:
    """A logit of one size as it leaves the model."""
    trail = witness.trail
    given = {
        id(head.output): torch.full((1, 1, 8), size, dtype=torch.float64)
    }  # what comes after works on each alone
    try:
        out = trail.replay(id(trail.calls[0].output.logits), given, witness.numbers)
    except (NoNumbers, RuntimeError):
        return None
    return float(out.flatten()[0]) if (out == out.flatten()[0]).all() else None


__all__ = ["norms", "scales"]
