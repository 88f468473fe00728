"""Finding what one block adds to its stream, and the values on each of its parts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from explorer.finding.attention import find_attention, interface, interfaces
from explorer.finding.flow import PASSING, Call, Flow, tensors
from explorer.finding.mlp import experts_call, find_dense, find_mixture
from explorer.finding.recurrent import find_recurrent, kernel
from explorer.finding.spots import Finds, Spot, argument, result


@dataclass
class Sublayer:
    """One module whose result the block adds to the stream.

    role is ``"attention"``, ``"recurrent"``, ``"experts"`` or ``"mlp"``; ``host`` is
    the standard name of the module; ``norm`` is the path of the norm it reads, or None.
    """

    role: str
    host: str
    module: str
    addend: Spot
    norm: str | None


@dataclass
class BlockFinds:
    """Everything found on one block, by host."""

    path: str
    hosts: dict[str, Finds] = field(default_factory=dict)
    sublayers: list[Sublayer] = field(default_factory=list)


#: Operations that mix positions: what has them is no MLP, whatever its modules look like.
MIXING = ("convolution", "cumsum", "_softmax", "softmax")


class CannotFollow(ValueError):
    """The block's output is not its input plus a sum of things."""


def addends(flow: Flow, block: Call) -> list[tuple[int, int]]:
    """What the block adds, first to last: (tensor, the add that adds it).

    Walks back from the block's output along the adds to its input; the other
    operand of each add is an addend. Raises CannotFollow when no such path exists.
    """
    entering, leaving = id(_stream(block)), next(tensors(block.output))

    def walk(key: int, before: int | None) -> list[tuple[int, int]] | None:
        while (index := flow.maker(key, before)) is not None and index >= block.start:
            op = flow.ops[index]
            if op.name in PASSING:
                key, before = op.reads[0], index
                continue
            if op.name in ("add", "add_") and len(op.reads) == 2:
                for main, other in (op.reads, op.reads[::-1]):
                    if (rest := walk(main, index)) is not None:
                        return [*rest, (other, index)]
            return None
        # Nothing in the block made it or changed it in place: it is the stream as it came, or no part of it.
        return [] if key == entering else None

    found = walk(id(leaving), None)
    if found is None:
        raise CannotFollow(f"the output of {block.module} is not its input plus a sum of addends")
    return found


def _stream(block: Call) -> torch.Tensor:
    return next(tensors((block.args, block.kwargs)))


def find_block(flow: Flow, path: str) -> BlockFinds:
    """Find the parts of the block at ``path`` and the values on each.

    Raises CannotFollow when the block's output is not its input plus the results of modules of its
    own, or when such a module is none of those known or plays a part another plays already.
    """
    block = flow.module(path)
    finds = BlockFinds(path)
    own = Finds(path)
    finds.hosts["layers"] = own
    own.spots["layer_input"] = argument(block, {id(_stream(block))})
    leaving = next(tensors(block.output))
    own.spots["layer_output"] = result(block, {id(leaving)})
    own.sizes["hidden_size"] = leaving.shape[-1]

    modules = [c for c in flow.inside(block) if not c.labels]
    for key, add in addends(flow, block):
        chain = flow.back(key, add)
        makers = [s for c in modules if (s := result(c, chain)) is not None and _intact(flow, s, add)]
        if not makers:
            raise CannotFollow(f"an addend of {path} is the result of no module")
        addend = min(makers, key=lambda spot: spot.call.module.count("."))
        _sublayer(finds, flow, modules, addend, key)
    _between(finds, flow)
    return finds


def _intact(flow: Flow, spot: Spot, add: int) -> bool:
    """Whether what a module returned reached an add unchanged, no operation having written into it."""
    made = flow.maker(id(spot.tensor), add)
    return made is None or made < spot.call.stop


def _sublayer(finds: BlockFinds, flow: Flow, modules: list[Call], addend: Spot, key: int) -> None:
    call = addend.call
    if kernel(flow, call) is not None:
        role, host, values, output = "recurrent", "linear_attn", find_recurrent(flow, call), "attention_output"
    elif interface(flow, call) is not None:
        role, host, values, output = "attention", "self_attn", find_attention(flow, call, key), "attention_output"
        if len(interfaces(flow, call)) > 1:
            raise CannotFollow(f"{call.module} computes its attention in several calls, of which none is the whole")
    elif (experts := experts_call(flow, call)) is not None:
        role, host, values, output = "experts", "mlp", find_mixture(flow, call, experts), "mlp_output"
        if "num_experts" not in values.sizes:
            raise CannotFollow(f"{call.module} chooses its experts in a way that is not followed")
    else:
        role, host, values, output = "mlp", "mlp", find_dense(flow, call), "mlp_output"
        mixing = next((name for name in MIXING if flow.indices(call, name)), None)
        if mixing is not None or "mlp_neurons" not in values.spots:
            raise CannotFollow(f"{call.module} adds to the stream and is neither attention nor an MLP that can be followed")
    if host in finds.hosts:
        raise CannotFollow(f"{finds.path} has two parts that play {host}")
    values.spots[output] = addend
    values.sizes["hidden_size"] = addend.tensor.shape[-1]
    finds.hosts[host] = values
    if shared := values.traits.get("shared"):
        inner = find_dense(flow, flow.module(shared))
        shared_call = flow.module(shared)
        inner.spots["mlp_output"] = Spot(shared_call.output, shared_call, "output", None)
        inner.sizes["hidden_size"] = shared_call.output.shape[-1]
        inner.missing = {n: r for n, r in inner.missing.items() if n.startswith("mlp_")}
        finds.hosts["shared_experts"] = inner
    finds.sublayers.append(Sublayer(role, host, call.module, addend, _norm_before(flow, modules, call)))


def _norm_before(flow: Flow, modules: list[Call], call: Call) -> str | None:
    """The module whose result the sublayer is called with."""
    entering = flow.back(id(next(tensors((call.args, call.kwargs)))))
    makers = [c for c in modules if c is not call and result(c, entering) is not None and c.ended <= call.began]
    return makers[-1].module if makers else None


def _between(finds: BlockFinds, flow: Flow) -> None:
    """The block's own values: what its norms hand on, and the stream between two sublayers."""
    own = finds.hosts["layers"]
    names = ("attention_norm_output", "mlp_norm_output")
    for name, sublayer in zip(names, finds.sublayers):
        if sublayer.norm is None:
            own.missing[name] = f"this block has no norm in front of {sublayer.host}"
            continue
        norm = flow.module(sublayer.norm)
        own.spots[name] = Spot(norm.output, norm, "output", None)
    mlp = next((s for s in finds.sublayers if s.host == "mlp"), None)
    if mlp is not None:
        own.spots["mlp_input"] = argument(mlp.addend.call, {id(next(tensors((mlp.addend.call.args, mlp.addend.call.kwargs))))})
    else:
        own.missing["mlp_input"] = "this block has no MLP"
    if len(finds.sublayers) == 2 and (norm := finds.sublayers[1].norm):
        call = flow.module(norm)
        entering = Spot(call.args[0], call, "input", 0)
        first = {id(finds.sublayers[0].addend.tensor)}
        makes = flow.maker(id(entering.tensor))
        if makes is not None and flow.ops[makes].name in ("add", "add_") and _reads(flow, makes, first):
            own.spots["layer_mid"] = entering
    if "layer_mid" not in own.spots:
        own.missing["layer_mid"] = "no module reads the stream between this block's sublayers"
    for name in names[len(finds.sublayers):]:
        own.missing[name] = "this block has one sublayer"


def _reads(flow: Flow, index: int, keys: set[int]) -> bool:
    return any(keys & set(flow.back(key, index)) for key in flow.ops[index].reads)
