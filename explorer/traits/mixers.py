"""Traits of the mixers: which kinds there are, and how they are put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from explorer import vocabulary
from explorer.discovery.trace_graph import tensors
from explorer.traits.attention_core import hidden
from explorer.traits.evidence import blocks, listed
from explorer.traits.probe import ModelProbe

Found = Iterator[tuple[str, str]]

#: What evidence calls an attention that lies inside another part of a block.
_INSIDE = "an attention that is not followed"


def mixers(witness: ModelProbe) -> Found:
    """Traits of the mixers, as finding told them apart by what they are called with and hand on."""
    count = witness.model.num_layers
    having: dict[str, list[int]] = {}
    for layer in witness.firsts:
        for kind in witness.model.mixers[layer]:
            if kind != "mixer" or _mixes(witness, layer):
                having.setdefault(kind, []).extend(witness.group(layer))
    for layer in hidden(witness):
        having.setdefault(_INSIDE, []).extend(witness.group(layer))
    if len(having) > 1:
        yield (
            "hybrid",
            ", ".join(f"{kind} in {blocks(layers, count)}" for kind, layers in having.items()),
        )
    for kind in witness.anatomy.blocks:
        pair = [sub for sub in kind.sublayers if vocabulary.HOSTS[sub.host].mixer]
        if len(pair) > 1 and pair[0].stage == pair[1].stage is not None:
            yield (
                "side_by_side",
                f"{listed(sub.host for sub in pair)} read the same stream in {blocks(kind.layers, count)}",
            )
            break
    for kind, layers in having.items():
        trait = vocabulary.MIXERS[kind].trait if kind in vocabulary.MIXERS else None
        if trait is None or (
            kind == "short_conv" and any(len(witness.model.mixers[layer]) > 1 for layer in layers)
        ):
            continue
        host = witness.anatomy.block(layers[0]).hosts[kind]
        called = (
            f"the mixer calls {host.details.kernel}"
            if host.details.kernel
            else vocabulary.HOSTS[kind].meaning
        )
        yield trait, f"{called}, in {blocks(sorted(layers), count)}"
    yield from _parts(witness)


def _mixes(witness: ModelProbe, layer: int) -> bool:
    """Whether a part that nobody followed reads other tokens: an operation works along their axis, as long as no other."""
    trail, seq = witness.trail, witness.lengths[1]
    call = witness.host_call(layer, witness.anatomy.block(layer).hosts["mixer"])
    for index in range(call.start, call.stop):
        op = trail.ops[index]
        reads, makes = ([trail.tensors[key].shape for key in keys] for keys in (op.reads, op.makes))
        if op.name in ("convolution", "cumsum", "cumprod", "roll", "flip"):
            return True
        if (
            op.name in ("bmm", "mm", "matmul")
            and reads
            and len(reads[0]) > 1
            and reads[0][-1] == seq
        ):
            return True
        if (
            op.name in ("slice", "select", "constant_pad_nd", "split", "unbind")
            and seq in reads[0]
            and seq not in makes[0]
        ):
            return True
    return False


def _parts(witness: ModelProbe) -> Found:
    hosts = [host for kind in vocabulary.RECURRENT for _, host in witness.hosts(kind)]
    for sizes in (host.sizes for host in hosts if "conv_width" in host.sizes):
        yield "short_convolution", f"width {sizes['conv_width']} over {sizes['channels']} channels"
        break
    for sizes in (
        host.sizes for host in hosts if host.sizes.get("key_heads", 0) < host.sizes.get("heads", 0)
    ):
        yield (
            "grouped_value",
            f"{sizes['heads']} heads share the queries and keys of {sizes['key_heads']}",
        )
        break


def block(witness: ModelProbe) -> Found:
    """Traits of how a block is put together."""
    count = witness.model.num_layers
    parallel: list[int] = []
    single: list[int] = []
    for kind in witness.anatomy.blocks:
        mlp = next((sub for sub in kind.sublayers if sub.host == "mlp"), None)
        if mlp is not None and any(
            sub.stage == mlp.stage is not None for sub in kind.sublayers if sub is not mlp
        ):
            parallel += kind.layers
        if len(kind.sublayers) == 1 and _alone(witness, kind.layers[0]):
            single += kind.layers
    if parallel:
        shared = witness.anatomy.block(parallel[0])
        norms = {sub.norm for sub in shared.sublayers}
        yield (
            "parallel",
            f"{blocks(parallel, count)}, through {'one norm' if len(norms) == 1 else 'norms of their own'}",
        )
    if len(single) == count:
        yield "one_sublayer", f"{blocks(single, count)} add one thing to the stream"
    yield from _shared(witness)
    yield from _again(witness)


def _alone(witness: ModelProbe, layer: int) -> bool:
    """Whether the one sublayer of a block, where it was followed, does all the block's work with weights."""
    trail, block = witness.trail, witness.anatomy.block(layer)
    if block.sublayers[0].host == "mixer":
        return False
    call, whole = (
        witness.host_call(layer, block.hosts[block.sublayers[0].host]),
        witness.call(layer, ""),
    )
    return all(
        call.start <= index < call.stop for index in trail.weighted(range(whole.start, whole.stop))
    )


def _again(witness: ModelProbe) -> Found:
    """Modules with parameters of their own that run on every token more than once."""
    batch, seq = witness.lengths
    within = f"{witness.path}."
    experts = tuple(
        f"{within}{layer}.{path}"
        for layer, host in witness.hosts("mlp")
        if (path := host.details.experts)
    )
    runs: Counter[str] = Counter()
    for call in witness.trail.calls:
        given = next(tensors((call.args, call.kwargs)), None)
        whole = given is not None and given.shape[:-1] in ((batch, seq), (batch * seq,))
        if whole and call.module.startswith(within) and not call.module.startswith(experts):
            runs[call.module] += any(True for _ in call.fn.parameters(recurse=False))
    path, times = max(runs.items(), key=lambda run: run[1])
    if times > 1:
        yield (
            "called_again",
            f"{path.removeprefix(within).partition('.')[2]} runs {times} times on every token",
        )


def _shared(witness: ModelProbe) -> Found:
    """Parameters that several blocks hold."""
    holders: dict[int, list[tuple[int, str]]] = {}
    for layer, module in enumerate(witness.blocks):
        for path, parameter in module.named_parameters():
            holders.setdefault(id(parameter), []).append((layer, path))
    several = [where for where in holders.values() if len(where) > 1]
    if several:
        layers = {layer for where in several for layer, _ in where}
        modules = list(dict.fromkeys(path.rpartition(".")[0] for (_, path), *_ in several))
        more = f" and {len(modules) - 1} more modules" if len(modules) > 1 else ""
        yield (
            "shared_block",
            f"{blocks(layers, witness.model.num_layers)} hold the same {modules[0]}{more}",
        )
