"""Finding what one block adds to its stream, and the values on each of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from explorer.discovery.attention import is_attention
from explorer.discovery.candidates import HostFindings, TensorCandidate, argument, is_norm, result
from explorer.discovery.mlp import DENSE, ROUTED, experts_call, find_dense, find_mixture
from explorer.discovery.moe_all_experts import find_spread
from explorer.discovery.moe_tables import find_apart
from explorer.discovery.recurrent import (
    gates_a_convolution,
    kernel,
)
from explorer.discovery.residual import (
    SCALES,
    CannotTrace,
    Part,
    Step,
    addend_candidate,
    contracts,
    owner_module,
    parts,
    several_mixers,
    split_addends,
    steps,
    stream,
    tail,
    weighted,
)
from explorer.discovery.trace_graph import PASSING, Call, TraceGraph, tensors
from explorer.vocabulary import HOSTS, MIXERS, resolve
from explorer.vocabulary.availability import not_in_block, not_present, not_traced


@dataclass
class Sublayer:
    """One part of a block whose result the block adds to the stream.

    role is ``"attention"``, ``"recurrent"``, ``"convolution"``, ``"mixer"``, ``"experts"``, ``"mlp"`` or ``"extra"``; ``host`` is
    the standard name of the part and ``module`` the path of its module, the block's own where it has
    none; ``norm`` is the path of the norm it reads, or None; ``behind`` that of one whose result it reads scaled. ``turn`` numbers the adds that make the
    stream, from 1, and is the one that adds this part; ``stage`` is how many steps the stream had behind
    it when the part read it, None where it read it at several points.
    """

    role: str
    host: str
    module: str
    addend: TensorCandidate
    norm: str | None
    turn: int
    stage: int | None
    behind: str | None = None

    @property
    def output(self) -> str:
        """The value that is the addend."""
        return {"mlp": "mlp_output", "extra": "extra_output"}.get(self.host, "attention_output")


@dataclass
class BlockFindings:
    """Everything found on one block, by host, and every call its forward made.

    ``steps`` is what it does to its stream; ``mid`` is how many of them ``layer_mid`` has behind it, None where there is none.
    """

    path: str
    hosts: dict[str, HostFindings] = field(default_factory=dict)
    sublayers: list[Sublayer] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    mid: int | None = None
    calls: dict[str, Call] = field(default_factory=dict)
    visited: set[tuple[str, tuple[str, ...]]] = field(default_factory=set)

    @property
    def normed(self) -> tuple[Sublayer, Sublayer | None]:
        """The first sublayer, and the second: the MLP where it is not the first, however many mixers there are."""
        return first_and_second(self.sublayers)


def first_and_second(sublayers: Sequence[Sublayer]) -> tuple[Sublayer, Sublayer | None]:
    first, *rest = sublayers
    return first, next((sub for sub in rest if sub.host == "mlp"), rest[0] if rest else None)


#: Operations that mix positions: what has them is no MLP, whatever its modules look like.
_MIXING = frozenset(
    ["convolution", "constant_pad_nd", "cumsum", "cumprod", "_softmax", "softmax", "roll", "flip"]
)
_CHOOSING = frozenset(["topk", "sort", "argmax", "max"])


def find_block(graph: TraceGraph, path: str) -> BlockFindings:
    """Find the parts of the block at ``path`` and the values on each.

    Raises CannotFollow when the block's output is not its input plus addends that can be told apart,
    or when one plays a part another plays already.
    """
    block = graph.module(path)
    if block is None:
        raise CannotTrace(f"{path} does not run exactly once in a forward")
    finds = BlockFindings(path)
    own = HostFindings(path)
    finds.hosts["layers"] = own
    own.candidates["layer_input"] = argument(block, {id(stream(block))})
    leaving = next(tensors(block.output))
    own.candidates["layer_output"] = result(block, {id(leaving)})
    own.sizes["hidden_size"] = leaving.shape[-1]
    own.note(returns=len(block.output) if isinstance(block.output, (tuple, list)) else None)
    finds.steps = steps(graph, block)
    plays, found = partial(_role, graph), []
    for turn, whole in enumerate(parts(graph, block), 1):
        pieces = split_addends(graph, block, whole)
        known = [(piece, owner_module(graph, block, piece, plays)) for piece in pieces]
        hosts = [_host(graph, block, call, piece) for piece, call in known]
        if len(set(hosts)) < len(hosts):  # two halves of one part
            known = [(whole, owner_module(graph, block, whole, plays))]
        found += [(piece, call, turn, _host(graph, block, call, piece)) for piece, call in known]
    followed = any(HOSTS[host].mixer and host != "mixer" for *_, host in found)
    for piece, call, turn, host in found:
        # Beside a mixer that is followed, what mixes positions otherwise is a part of another kind.
        _sublayer(
            finds,
            graph,
            block,
            piece,
            call,
            turn,
            "extra" if host == "mixer" and followed else host,
        )
    _between(finds, graph, block)
    finds.visited = {
        (call.module, call.labels)
        for call in graph.calls
        if block.start <= call.start and call.stop <= block.stop
    }
    return finds


def _role(graph: TraceGraph, call: Call) -> str | None:
    """What tells a module by itself: a recurrence, attention or a mixture in it."""
    if kernel(graph, call) is not None or is_attention(graph, call):
        return "mixer"
    return "experts" if experts_call(graph, call) is not None else None


def _host(graph: TraceGraph, block: Call, call: Call, part: Part) -> str:
    """The host a part plays."""
    if call.part_of is not None and several_mixers(graph, block, part, partial(_role, graph)):
        return "mixer"
    found = kernel(graph, call)
    if found is not None:
        return found.host
    if is_attention(graph, call):
        return "self_attn"
    if gates_a_convolution(graph, call, part):
        return "short_conv"
    # A convolution of what a module returns makes it no other module.
    names = {graph.ops[i].name for i in part.ops if call.part_of is not None or i < call.stop}
    mixing = (
        (names & _MIXING and not names & _CHOOSING)
        or "convolution" in names
        or contracts(graph, part)
    )
    return "mixer" if mixing else "mlp"


def _sublayer(
    finds: BlockFindings,
    graph: TraceGraph,
    block: Call,
    part: Part,
    call: Call,
    turn: int,
    host: str,
) -> None:
    taken = {HOSTS[other].attribute for other in finds.hosts}
    if host in ("mlp", "mixer") and HOSTS[host].attribute in taken:
        host = "extra"
    if HOSTS[host].attribute in taken:
        raise CannotTrace(f"{finds.path} has two parts that play {host}")
    addend = addend_candidate(graph, block, part)
    products = [i for i in weighted(graph, part) if call.part_of is not None or i < call.stop]
    if host == "extra":
        role, values = "extra", HostFindings(call.module)
    elif host in MIXERS:
        role, finder = MIXERS[host].sublayer, MIXERS[host].finder
        values = resolve(finder)(graph, call, part) if finder else HostFindings(call.module)
    elif (experts := experts_call(graph, call)) is not None:
        role, values = "experts", find_mixture(graph, call, experts)
    elif (other := find_spread(graph, call) or find_apart(graph, call)) is not None:
        role, values = "experts", other
    elif chosen := [graph.ops[i].name for i in part.ops if graph.ops[i].name in _CHOOSING]:
        role, values = "experts", HostFindings(call.module)
        values.missing = dict.fromkeys(
            (*DENSE, *ROUTED),
            not_traced(
                f"{_told(call)} chooses (by {chosen[0]}) what it runs, and is called with no expert numbers and weights"
            ),
        )
    else:
        role, values = "mlp", find_dense(graph, call, products)
    made = values.made if values.made is not None else products[-1]
    values.note(output_steps=tail(graph, block, part, made))
    if any(graph.ops[i].name == "convolution" and i > products[-1] for i in part.ops):
        values.note(convolved_output=True)
    values.sizes["hidden_size"] = addend.tensor.shape[-1]
    finds.hosts[host] = values
    if shared := values.details.shared:
        shared_call = graph.module(shared)
        inner = find_dense(graph, shared_call)
        inner.candidates["mlp_output"] = TensorCandidate(
            shared_call.output, shared_call, "output", None
        )
        inner.sizes["hidden_size"] = shared_call.output.shape[-1]
        inner.missing = {n: r for n, r in inner.missing.items() if n.startswith("mlp_")}
        finds.hosts["shared_experts"] = inner
    finds.calls[host] = call
    norm = _norm_before(graph, block, call)
    behind = _norm_before(graph, block, call, scaled=True) if norm is None else None
    sublayer = Sublayer(role, host, call.module, addend, norm, turn, part.stage, behind)
    values.candidates[sublayer.output] = addend
    finds.sublayers.append(sublayer)


def _told(call: Call) -> str:
    return f"a part of {call.module} that is no module" if call.part_of is not None else call.module


def _norm_before(graph: TraceGraph, block: Call, call: Call, scaled: bool = False) -> str | None:
    """The module whose result a part is called with, if that is a norm: a module that multiplies with no matrix.

    scaled: also where what it is called with is that result times numbers.
    """
    entering = graph.back(id(next(tensors((call.args, call.kwargs)))), call.start)
    while (
        scaled
        and (index := graph.maker(entering[-1], call.start)) is not None
        and graph.ops[index].name in SCALES
        and len(graph.ops[index].reads) == 1
    ):
        entering += graph.back(graph.ops[index].reads[0], index)
    makers = [
        c
        for c in graph.inside(block)
        if is_norm(graph, c) and result(c, entering) is not None and c.ended <= call.began
    ]
    return makers[-1].module if makers else None


def _between(finds: BlockFindings, graph: TraceGraph, block: Call) -> None:
    """The block's own values: what its norms hand on, and the stream between its parts."""
    own = finds.hosts["layers"]
    mlp = next((s for s in finds.sublayers if s.host == "mlp"), None)
    first, second = finds.normed
    for name, sublayer in (("attention_norm_output", first), ("mlp_norm_output", second)):
        if sublayer is None:
            own.missing[name] = not_present("this block has one sublayer")
        elif sublayer.norm is None and sublayer.behind:
            own.missing[name] = not_traced(
                f"what the norm in front of {sublayer.host} hands on is scaled before that reads it"
            )
        elif sublayer.norm is None:
            own.missing[name] = not_present(f"this block has no norm in front of {sublayer.host}")
        else:
            norm = graph.module(sublayer.norm)
            own.candidates[name] = TensorCandidate(norm.output, norm, "output", None)
    if mlp is None:
        own.missing["mlp_input"] = not_in_block("this block has no MLP")
    else:
        entering, neurons = (
            _entering(graph, block, finds.calls[mlp.host]),
            finds.hosts[mlp.host].candidates.get("mlp_neurons"),
        )
        # A module that does the MLP's last product alone is called with its neurons.
        if entering is None or (neurons is not None and entering.tensor is neurons.tensor):
            own.missing["mlp_input"] = not_traced(
                "what the MLP reads is handed over by no call of its own"
            )
        else:
            own.candidates["mlp_input"] = entering
    if second is None:
        own.missing["layer_mid"] = not_present("this block has one sublayer")
    elif second.stage is None or first.stage is None:
        own.missing["layer_mid"] = not_traced(
            "the second sublayer of this block does not read the stream at one point"
        )
    elif second.stage == first.stage:
        own.missing["layer_mid"] = not_present(
            "this block is parallel: its sublayers read the same stream"
        )
    else:
        _mid(finds, graph, block, second)


def _entering(graph: TraceGraph, block: Call, call: Call) -> TensorCandidate | None:
    """What a part is called with: as an argument of its module, or, without one, where the block makes it."""
    entering = next(tensors((call.args, call.kwargs)))
    if call.part_of is None:
        return argument(call, {id(entering)})
    reading = {
        i
        for key in graph.onward(id(entering))
        for i in graph.readers.get(key, ())
        if block.start <= i < block.stop and graph.ops[i].name not in PASSING
    }
    if any(not call.start <= i < call.stop for i in reading):
        # The block goes on with it too, so that an edit where it is made would not be the part's alone.
        takes = [
            c
            for c in graph.inside(call)
            if not c.labels and argument(c, {id(entering)}) is not None
        ]
        alone = next(
            (
                c
                for c in takes
                if all(c.start <= i < c.stop for i in reading if call.start <= i < call.stop)
            ),
            None,
        )
        return argument(alone, {id(entering)}) if alone is not None else None
    made = [
        spot
        for c in graph.inside(block)
        if c.fn is not None
        and c.ended <= call.began
        and (spot := result(c, {id(entering)})) is not None
    ]
    return made[0] if made else None


def _mid(finds: BlockFindings, graph: TraceGraph, block: Call, second: Sublayer) -> None:
    """The stream as the second sublayer reads it, where the block makes it."""
    own = finds.hosts["layers"]
    step = finds.steps[second.stage - 1]
    keys = graph.onward(step.made)
    # Where it is made and not where it is first taken: what the block adds to goes past its parts.
    made = [
        spot
        for c in graph.inside(block)
        if c.start <= step.ops[-1] < c.stop
        and (spot := result(c, keys)) is not None
        and c.fn is not None
    ]
    if made:
        own.candidates["layer_mid"] = made[0]
        finds.mid = second.stage
    else:
        own.missing["layer_mid"] = not_traced(
            "no call makes the stream between this block's sublayers"
        )


__all__ = ["BlockFindings", "CannotTrace", "Sublayer", "find_block"]
