"""Traits of the mixers, and of how blocks are put together."""

from __future__ import annotations

from collections import Counter

from explorer import vocabulary
from explorer.discovery.trace_graph import tensors
from explorer.traits.attention_core import untraced_attention
from explorer.traits.evidence import Evidence, blocks, listed
from explorer.traits.probe import ModelProbe

#: How evidence names an attention inside another part of a block.
_UNTRACED = "an untraced attention"


def mixers(probe: ModelProbe) -> Evidence:
    """Yield the traits of the mixers."""
    count = probe.model.num_layers
    layers_by_kind: dict[str, list[int]] = {}
    for layer in probe.first_layers:
        for kind in probe.model.mixers[layer]:
            if kind != "mixer" or _reads_other_tokens(probe, layer):
                layers_by_kind.setdefault(kind, []).extend(probe.group(layer))
    for layer in untraced_attention(probe):
        layers_by_kind.setdefault(_UNTRACED, []).extend(probe.group(layer))
    if len(layers_by_kind) > 1:
        parts = (f"{kind} in {blocks(layers, count)}" for kind, layers in layers_by_kind.items())
        yield "hybrid", ", ".join(parts)
    yield from _side_by_side(probe)
    for kind, layers in layers_by_kind.items():
        trait = vocabulary.MIXERS[kind].trait if kind in vocabulary.MIXERS else None
        beside_another = any(len(probe.model.mixers[layer]) > 1 for layer in layers)
        if trait is None or (kind == "short_conv" and beside_another):
            continue
        kernel = probe.anatomy.block(layers[0]).hosts[kind].details.kernel
        what = f"the mixer calls {kernel}" if kernel else vocabulary.HOSTS[kind].meaning
        yield trait, f"{what}, in {blocks(sorted(layers), count)}"
    yield from _recurrent_parts(probe)


def _side_by_side(probe: ModelProbe) -> Evidence:
    for block in probe.anatomy.blocks:
        pair = [sub for sub in block.sublayers if vocabulary.HOSTS[sub.host].mixer]
        if len(pair) > 1 and pair[0].stage == pair[1].stage is not None:
            names = listed(sub.host for sub in pair)
            where = blocks(block.layers, probe.model.num_layers)
            yield "side_by_side", f"{names} read the same stream in {where}"
            return


def _reads_other_tokens(probe: ModelProbe, layer: int) -> bool:
    """Return whether a mixer that is not traced has an operation along the axis of tokens.

    That axis is recognised by its length, which no other axis has.
    """
    graph, seq = probe.graph, probe.lengths[1]
    call = probe.host_call(layer, probe.anatomy.block(layer).hosts["mixer"])
    for index in range(call.start, call.stop):
        op = graph.ops[index]
        reads, makes = ([graph.tensors[key].shape for key in keys] for keys in (op.reads, op.makes))
        if op.name in ("convolution", "cumsum", "cumprod", "roll", "flip"):
            return True
        if op.name in ("bmm", "mm", "matmul"):
            reads_tokens = bool(reads) and len(reads[0]) > 1 and reads[0][-1] == seq
        else:
            cuts = op.name in ("slice", "select", "constant_pad_nd", "split", "unbind")
            reads_tokens = cuts and seq in reads[0] and seq not in makes[0]
        if reads_tokens:
            return True
    return False


def _recurrent_parts(probe: ModelProbe) -> Evidence:
    all_sizes = [host.sizes for kind in vocabulary.RECURRENT for _, host in probe.hosts(kind)]
    for sizes in all_sizes:
        if "conv_width" in sizes:
            yield (
                "short_convolution",
                f"{sizes['conv_width']} tokens wide, over {sizes['channels']} channels",
            )
            break
    for sizes in all_sizes:
        if sizes.get("key_heads", 0) < sizes.get("heads", 0):
            yield (
                "grouped_value",
                f"{sizes['heads']} heads share {sizes['key_heads']} heads of queries and keys",
            )
            break


# -- blocks ------------------------------------------------------------------------------


def block(probe: ModelProbe) -> Evidence:
    """Yield the traits of how blocks are put together."""
    count = probe.model.num_layers
    parallel: list[int] = []
    single: list[int] = []
    for kind in probe.anatomy.blocks:
        mlp = next((sub for sub in kind.sublayers if sub.host == "mlp"), None)
        others = [sub for sub in kind.sublayers if sub is not mlp]
        if mlp is not None and any(sub.stage == mlp.stage is not None for sub in others):
            parallel += kind.layers
        if len(kind.sublayers) == 1 and _has_all_weights(probe, kind.layers[0]):
            single += kind.layers
    if parallel:
        norms = {sub.norm for sub in probe.anatomy.block(parallel[0]).sublayers}
        through = "the same norm" if len(norms) == 1 else "different norms"
        yield "parallel", f"{blocks(parallel, count)}, through {through}"
    if len(single) == count:
        yield "one_sublayer", f"{blocks(single, count)} add one result to the stream"
    yield from _shared_parameters(probe)
    yield from _repeated_modules(probe)


def _has_all_weights(probe: ModelProbe, layer: int) -> bool:
    """Return whether a block's only sublayer is traced and has all products with weights."""
    block = probe.anatomy.block(layer)
    only = block.sublayers[0]
    if only.host == "mixer":
        return False
    call, outer = probe.host_call(layer, block.hosts[only.host]), probe.call(layer, "")
    products = probe.graph.with_weights(range(outer.start, outer.stop))
    return all(call.start <= index < call.stop for index in products)


def _repeated_modules(probe: ModelProbe) -> Evidence:
    """Look for modules with parameters of their own that run on every token more than once."""
    batch, seq = probe.lengths
    prefix = f"{probe.path}."
    experts = tuple(
        f"{prefix}{layer}.{host.details.experts}"
        for layer, host in probe.hosts("mlp")
        if host.details.experts
    )
    runs: Counter[str] = Counter()
    for call in probe.graph.calls:
        entering = next(tensors((call.args, call.kwargs)), None)
        in_block = call.module.startswith(prefix) and not call.module.startswith(experts)
        if entering is None or not in_block:
            continue
        if entering.shape[:-1] in ((batch, seq), (batch * seq,)):
            runs[call.module] += any(True for _ in call.fn.parameters(recurse=False))
    path, times = max(runs.items(), key=lambda run: run[1])
    if times > 1:
        module = path.removeprefix(prefix).partition(".")[2]
        yield "called_again", f"{module} runs {times} times on every token"


def _shared_parameters(probe: ModelProbe) -> Evidence:
    """Look for parameters that several blocks hold."""
    holders: dict[int, list[tuple[int, str]]] = {}
    for layer, module in enumerate(probe.blocks):
        for path, parameter in module.named_parameters():
            holders.setdefault(id(parameter), []).append((layer, path))
    shared = [where for where in holders.values() if len(where) > 1]
    if shared:
        layers = {layer for where in shared for layer, _ in where}
        modules = list(dict.fromkeys(where[0][1].rpartition(".")[0] for where in shared))
        more = f" and {len(modules) - 1} more modules" if len(modules) > 1 else ""
        where = blocks(layers, probe.model.num_layers)
        yield "shared_block", f"{where} share the parameters of {modules[0]}{more}"
