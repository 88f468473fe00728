"""Finding what one block adds to its stream, and the values on each of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from explorer.discovery.moe_tables import find_apart
from explorer.discovery.attention import find_attention, is_attention
from explorer.discovery.trace_graph import PASSING, Call, Flow, tensors
from explorer.discovery.mlp import DENSE, ROUTED, experts_call, find_dense, find_mixture
from explorer.discovery.recurrent import (
    find_convolution,
    find_recurrent,
    gates_a_convolution,
    kernel,
)
from explorer.discovery.candidates import Finds, Spot, argument, is_norm, result
from explorer.discovery.moe_all_experts import find_spread
from explorer.discovery.residual import (
    SCALES,
    CannotFollow,
    Part,
    Step,
    addend_spot,
    contracts,
    halves,
    home,
    parts,
    several_mixers,
    steps,
    stream,
)
from explorer.discovery.residual import tail, weighted
from explorer.vocabulary.availability import absent, elsewhere, unfollowed
from explorer.vocabulary import HOSTS


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
    addend: Spot
    norm: str | None
    turn: int
    stage: int | None
    behind: str | None = None

    @property
    def output(self) -> str:
        """The value that is the addend."""
        return {"mlp": "mlp_output", "extra": "extra_output"}.get(self.host, "attention_output")


@dataclass
class BlockFinds:
    """Everything found on one block, by host, and every call its forward made.

    ``steps`` is what it does to its stream; ``mid`` is how many of them ``layer_mid`` has behind it, None where there is none.
    """

    path: str
    hosts: dict[str, Finds] = field(default_factory=dict)
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
_MIXING = frozenset("convolution constant_pad_nd cumsum cumprod _softmax softmax roll flip".split())
_CHOOSING = frozenset("topk sort argmax max".split())


def find_block(flow: Flow, path: str) -> BlockFinds:
    """Find the parts of the block at ``path`` and the values on each.

    Raises CannotFollow when the block's output is not its input plus addends that can be told apart,
    or when one plays a part another plays already.
    """
    block = flow.module(path)
    if block is None:
        raise CannotFollow(f"{path} does not run exactly once in a forward")
    finds = BlockFinds(path)
    own = Finds(path)
    finds.hosts["layers"] = own
    own.spots["layer_input"] = argument(block, {id(stream(block))})
    leaving = next(tensors(block.output))
    own.spots["layer_output"] = result(block, {id(leaving)})
    own.sizes["hidden_size"] = leaving.shape[-1]
    own.traits["returns"] = len(block.output) if isinstance(block.output, (tuple, list)) else None
    finds.steps = steps(flow, block)
    plays, found = partial(_role, flow), []
    for turn, whole in enumerate(parts(flow, block), 1):
        pieces = halves(flow, block, whole)
        known = [(piece, home(flow, block, piece, plays)) for piece in pieces]
        hosts = [_host(flow, block, call, piece) for piece, call in known]
        if len(set(hosts)) < len(hosts):  # two halves of one part
            known = [(whole, home(flow, block, whole, plays))]
        found += [(piece, call, turn, _host(flow, block, call, piece)) for piece, call in known]
    followed = any(HOSTS[host].mixer and host != "mixer" for *_, host in found)
    for piece, call, turn, host in found:
        # Beside a mixer that is followed, what mixes positions otherwise is a part of another kind.
        _sublayer(
            finds, flow, block, piece, call, turn, "extra" if host == "mixer" and followed else host
        )
    _between(finds, flow, block)
    finds.visited = {
        (call.module, call.labels)
        for call in flow.calls
        if block.start <= call.start and call.stop <= block.stop
    }
    return finds


def _role(flow: Flow, call: Call) -> str | None:
    """What tells a module by itself: a recurrence, attention or a mixture in it."""
    if kernel(flow, call) is not None or is_attention(flow, call):
        return "mixer"
    return "experts" if experts_call(flow, call) is not None else None


def _host(flow: Flow, block: Call, call: Call, part: Part) -> str:
    """The host a part plays."""
    if call.part_of is not None and several_mixers(flow, block, part, partial(_role, flow)):
        return "mixer"
    found = kernel(flow, call)
    if found is not None:
        return found.host
    if is_attention(flow, call):
        return "self_attn"
    if gates_a_convolution(flow, call, part):
        return "short_conv"
    # A convolution of what a module returns makes it no other module.
    names = {flow.ops[i].name for i in part.ops if call.part_of is not None or i < call.stop}
    mixing = (
        names & _MIXING and not names & _CHOOSING or "convolution" in names or contracts(flow, part)
    )
    return "mixer" if mixing else "mlp"


def _sublayer(
    finds: BlockFinds, flow: Flow, block: Call, part: Part, call: Call, turn: int, host: str
) -> None:
    taken = {HOSTS[other].attribute for other in finds.hosts}
    if host in ("mlp", "mixer") and HOSTS[host].attribute in taken:
        host = "extra"
    if HOSTS[host].attribute in taken:
        raise CannotFollow(f"{finds.path} has two parts that play {host}")
    addend = addend_spot(flow, block, part)
    products = [i for i in weighted(flow, part) if call.part_of is not None or i < call.stop]
    if host == "extra":
        role, values = "extra", Finds(call.module)
    elif host == "self_attn":
        role, values = "attention", find_attention(flow, call, part)
    elif host == "short_conv":
        role, values = "convolution", find_convolution(flow, call, part)
    elif host == "mixer":
        role, values = "mixer", Finds(call.module)
    elif host != "mlp":
        role, values = "recurrent", find_recurrent(flow, call, part)
    elif (experts := experts_call(flow, call)) is not None:
        role, values = "experts", find_mixture(flow, call, experts)
    elif (other := find_spread(flow, call) or find_apart(flow, call)) is not None:
        role, values = "experts", other
    elif chosen := [flow.ops[i].name for i in part.ops if flow.ops[i].name in _CHOOSING]:
        role, values = "experts", Finds(call.module)
        values.missing = dict.fromkeys(
            (*DENSE, *ROUTED),
            unfollowed(
                f"{_told(call)} chooses (by {chosen[0]}) what it runs, and is called with no expert numbers and weights"
            ),
        )
    else:
        role, values = "mlp", find_dense(flow, call, products)
    values.traits["tail"] = tail(
        flow, block, part, values.made if values.made is not None else products[-1]
    )
    if any(flow.ops[i].name == "convolution" and i > products[-1] for i in part.ops):
        values.traits["convolved"] = True
    values.sizes["hidden_size"] = addend.tensor.shape[-1]
    finds.hosts[host] = values
    if shared := values.traits.get("shared"):
        shared_call = flow.module(shared)
        inner = find_dense(flow, shared_call)
        inner.spots["mlp_output"] = Spot(shared_call.output, shared_call, "output", None)
        inner.sizes["hidden_size"] = shared_call.output.shape[-1]
        inner.missing = {n: r for n, r in inner.missing.items() if n.startswith("mlp_")}
        finds.hosts["shared_experts"] = inner
    finds.calls[host] = call
    norm = _norm_before(flow, block, call)
    behind = _norm_before(flow, block, call, scaled=True) if norm is None else None
    sublayer = Sublayer(role, host, call.module, addend, norm, turn, part.stage, behind)
    values.spots[sublayer.output] = addend
    finds.sublayers.append(sublayer)


def _told(call: Call) -> str:
    return f"a part of {call.module} that is no module" if call.part_of is not None else call.module


def _norm_before(flow: Flow, block: Call, call: Call, scaled: bool = False) -> str | None:
    """The module whose result a part is called with, if that is a norm: a module that multiplies with no matrix.

    scaled: also where what it is called with is that result times numbers.
    """
    entering = flow.back(id(next(tensors((call.args, call.kwargs)))), call.start)
    while (
        scaled
        and (index := flow.maker(entering[-1], call.start)) is not None
        and flow.ops[index].name in SCALES
        and len(flow.ops[index].reads) == 1
    ):
        entering += flow.back(flow.ops[index].reads[0], index)
    makers = [
        c
        for c in flow.inside(block)
        if is_norm(flow, c) and result(c, entering) is not None and c.ended <= call.began
    ]
    return makers[-1].module if makers else None


def _between(finds: BlockFinds, flow: Flow, block: Call) -> None:
    """The block's own values: what its norms hand on, and the stream between its parts."""
    own = finds.hosts["layers"]
    mlp = next((s for s in finds.sublayers if s.host == "mlp"), None)
    first, second = finds.normed
    for name, sublayer in (("attention_norm_output", first), ("mlp_norm_output", second)):
        if sublayer is None:
            own.missing[name] = absent("this block has one sublayer")
        elif sublayer.norm is None and sublayer.behind:
            own.missing[name] = unfollowed(
                f"what the norm in front of {sublayer.host} hands on is scaled before that reads it"
            )
        elif sublayer.norm is None:
            own.missing[name] = absent(f"this block has no norm in front of {sublayer.host}")
        else:
            norm = flow.module(sublayer.norm)
            own.spots[name] = Spot(norm.output, norm, "output", None)
    if mlp is None:
        own.missing["mlp_input"] = elsewhere("this block has no MLP")
    else:
        entering, neurons = (
            _entering(flow, block, finds.calls[mlp.host]),
            finds.hosts[mlp.host].spots.get("mlp_neurons"),
        )
        # A module that does the MLP's last product alone is called with its neurons.
        if entering is None or neurons is not None and entering.tensor is neurons.tensor:
            own.missing["mlp_input"] = unfollowed(
                "what the MLP reads is handed over by no call of its own"
            )
        else:
            own.spots["mlp_input"] = entering
    if second is None:
        own.missing["layer_mid"] = absent("this block has one sublayer")
    elif second.stage is None or first.stage is None:
        own.missing["layer_mid"] = unfollowed(
            "the second sublayer of this block does not read the stream at one point"
        )
    elif second.stage == first.stage:
        own.missing["layer_mid"] = absent(
            "this block is parallel: its sublayers read the same stream"
        )
    else:
        _mid(finds, flow, block, second)


def _entering(flow: Flow, block: Call, call: Call) -> Spot | None:
    """What a part is called with: as an argument of its module, or, without one, where the block makes it."""
    entering = next(tensors((call.args, call.kwargs)))
    if call.part_of is None:
        return argument(call, {id(entering)})
    reading = {
        i
        for key in flow.onward(id(entering))
        for i in flow.readers.get(key, ())
        if block.start <= i < block.stop and flow.ops[i].name not in PASSING
    }
    if any(not call.start <= i < call.stop for i in reading):
        # The block goes on with it too, so that an edit where it is made would not be the part's alone.
        takes = [
            c for c in flow.inside(call) if not c.labels and argument(c, {id(entering)}) is not None
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
        for c in flow.inside(block)
        if c.fn is not None
        and c.ended <= call.began
        and (spot := result(c, {id(entering)})) is not None
    ]
    return made[0] if made else None


def _mid(finds: BlockFinds, flow: Flow, block: Call, second: Sublayer) -> None:
    """The stream as the second sublayer reads it, where the block makes it."""
    own = finds.hosts["layers"]
    step = finds.steps[second.stage - 1]
    keys = flow.onward(step.made)
    # Where it is made and not where it is first taken: what the block adds to goes past its parts.
    made = [
        spot
        for c in flow.inside(block)
        if c.start <= step.ops[-1] < c.stop
        and (spot := result(c, keys)) is not None
        and c.fn is not None
    ]
    if made:
        own.spots["layer_mid"] = made[0]
        finds.mid = second.stage
    else:
        own.missing["layer_mid"] = unfollowed(
            "no call makes the stream between this block's sublayers"
        )


__all__ = ["BlockFinds", "CannotFollow", "Sublayer", "find_block"]
