"""The stream through one block: what is added to it, and the part of the forward that makes each addend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from explorer.discovery.candidates import TensorCandidate, argument, innermost, is_norm, result
from explorer.discovery.details import OutputSteps, Step
from explorer.discovery.trace_graph import PASSING, Call, Op, TraceGraph, tensors

#: Operations that multiply with weights.
_PRODUCTS = frozenset(
    [
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "matmul",
        "linear",
        "_grouped_mm",
        "convolution",
        "mv",
        "addmv",
        "dot",
    ]
)
_ADDS = ("add", "add_")
_PICKS = frozenset(
    [
        "embedding",
        "index",
        "index_select",
        "gather",
        "select",
        "split",
        "split_with_sizes",
        "unbind",
        "chunk",
        "narrow",
        "mul",
        "add",
    ]
)
SCALES = ("mul", "mul_", "div", "div_")


class CannotTrace(ValueError):
    """The block's output is not its input plus a sum of things that can be told apart."""


@dataclass(frozen=True)
class Part:
    """One addend of a block and what made it.

    key: the tensor. add: the operation that adds it. ops: the operations that made it of the
    stream. stage: how many addends the stream had taken up when this part read it, None
    where it read several stages or none.
    """

    key: int
    add: int
    ops: frozenset[int]
    stage: int | None


def stream(block: Call) -> torch.Tensor:
    """The stream as it enters a block: the first tensor the block is called with."""
    return next(tensors((block.args, block.kwargs)))


def steps(graph: TraceGraph, block: Call) -> list[Step]:
    """What the block does to its stream, first to last.

    Walks back from the block's output to its input along adds, whose other operand is an addend,
    and where the stream itself is scaled, shifted or normed along that.
    Raises CannotFollow when no such path exists.
    """
    entering, leaving = id(stream(block)), next(tensors(block.output))
    constants = constants_of(block)

    def constant(key: int, before: int) -> str | None:
        return next((constants[k] for k in graph.back(key, before) if k in constants), None)

    def walk(key: int, before: int | None) -> list[Step] | None:
        while (index := graph.maker(key, before)) is not None and index >= block.start:
            op, owner = graph.ops[index], graph.owners[index]
            if (
                owner is not None
                and owner is not block
                and is_norm(graph, owner)
                and result(owner, {key}) is not None
            ):
                rest = walk(id(owner.args[0]), owner.start) if owner.args else None
                return (
                    None
                    if rest is None
                    else [
                        *rest,
                        Step(
                            "norm",
                            tuple(range(owner.start, owner.stop)),
                            key,
                            by=_within(owner.module, block),
                        ),
                    ]
                )
            if op.name in PASSING:
                key, before = op.reads[0], index
                continue
            return min(
                filter(None, taken(op, index)),
                key=lambda path: sum(step.kind != "add" for step in path),
                default=None,
            )
        # Nothing in the block made it or changed it in place: it is the stream as it came, or no part of it.
        return [] if key == entering else None

    def taken(op: Op, index: int) -> Iterator[list[Step] | None]:
        made = op.makes[0]
        if op.name in _ADDS and len(op.reads) == 2:
            for main, other in (op.reads, op.reads[::-1]):
                if (rest := walk(main, index)) is not None:
                    by = constant(other, index)
                    yield [
                        *rest,
                        Step("add", (index,), made, key=other)
                        if by is None
                        else Step("shift", (index,), made, by=by),
                    ]
        elif op.name in SCALES and len(op.reads) == 1 and len(op.numbers) == 1:
            rest = walk(op.reads[0], index)
            factor = 1 / op.numbers[0] if op.name.startswith("div") else op.numbers[0]
            yield None if rest is None else [*rest, Step("scale", (index,), made, by=factor)]
        elif op.name in ("mul", "mul_") and len(op.reads) == 2:
            for main, other in (op.reads, op.reads[::-1]):
                if (by := constant(other, index)) is not None and (
                    rest := walk(main, index)
                ) is not None:
                    yield [*rest, Step("scale", (index,), made, by=by)]

    found = walk(id(leaving), None)
    if not found:
        raise CannotTrace(
            f"the output of {block.module} is not its input plus a sum of addends, scaled or normed"
        )
    return found


def _within(path: str, block: Call) -> str:
    return path.removeprefix(f"{block.module}.")


def _stages(found: list[Step]) -> dict[int, int]:
    """For each operation on the stream itself, how many steps are done with it."""
    return {index: number for number, step in enumerate(found, 1) for index in step.ops}


def parts(graph: TraceGraph, block: Call) -> list[Part]:
    """The block's addends, first to last. A sum of two that the block itself adds up is left whole; see `split_addends`."""
    found = steps(graph, block)
    stages = _stages(found)
    return [
        _part(graph, block, step.key, step.ops[0], stages) for step in found if step.kind == "add"
    ]


def split_addends(graph: TraceGraph, block: Call, part: Part) -> list[Part]:
    """The two addends that the block itself added up before it added the sum, or the part alone where it did not."""
    *_, last = graph.back(part.key, part.add)
    index = graph.maker(last, part.add)
    if (
        index is None
        or index < block.start
        or graph.ops[index].name not in _ADDS
        or len(graph.ops[index].reads) != 2
    ):
        return [part]
    if graph.owners[index] is not block:
        return [part]
    shape = graph.tensors[last].shape
    if any(graph.tensors[key].shape != shape for key in graph.ops[index].reads):
        return [part]
    stages = _stages(steps(graph, block))
    pair = [_part(graph, block, key, index, stages) for key in graph.ops[index].reads]
    pair.sort(key=lambda one: max(one.ops, default=0))
    weights = [set(weighted(graph, one)) for one in pair]
    return (
        [piece for one in pair for piece in split_addends(graph, block, one)]
        if all(weights) and not weights[0] & weights[1]
        else [part]
    )


def _part(graph: TraceGraph, block: Call, key: int, add: int, stages: dict[int, int]) -> Part:
    """Walks back from an addend to the stream; ``stages`` numbers the operations that make the stream."""
    entering = id(stream(block))
    ops: set[int] = set()
    read: set[int] = set()
    todo = [(key, add)]
    while todo:
        tensor, before = todo.pop()
        index = graph.maker(tensor, before)
        if index is None or index < block.start:
            if tensor == entering:
                read.add(0)
        elif index in stages:
            read.add(stages[index])
        elif index not in ops:
            ops.add(index)
            todo += [(source, index) for source in graph.ops[index].reads]
    return Part(key, add, frozenset(ops), read.pop() if len(read) == 1 else None)


def weighted(graph: TraceGraph, part: Part) -> list[int]:
    """The operations of a part that multiply with a parameter, in order."""
    return [
        i for i in sorted(part.ops) if graph.ops[i].name in _PRODUCTS and _with_weights(graph, i)
    ]


def _with_weights(graph: TraceGraph, index: int) -> bool:
    """Whether an operation reads a parameter, or what was picked from one."""
    return any(
        isinstance(graph.tensors[k], torch.nn.Parameter)
        for read in graph.ops[index].reads
        for k in origins(graph, read, index)
    )


def contracts(graph: TraceGraph, part: Part) -> bool:
    """Whether a part multiplies matrices that are both made of the stream, as what mixes positions does and an MLP does not."""
    return any(
        graph.ops[i].name in ("bmm", "baddbmm", "mm", "matmul") and not _with_weights(graph, i)
        for i in part.ops
    )


def origins(graph: TraceGraph, key: int, before: int) -> list[int]:
    """A tensor and what it was picked from: copies and views, and choices of rows, as an expert's matrix is chosen."""
    chain = graph.back(key, before)
    while (index := graph.maker(chain[-1], before)) is not None and graph.ops[index].name in _PICKS:
        before = index
        chain += graph.back(graph.ops[index].reads[0], index)
    return chain


def owner_module(
    graph: TraceGraph,
    block: Call,
    part: Part,
    plays: Callable[[Call], str | None] = lambda call: None,
) -> Call:
    """The smallest module that does all of a part's work with weights; the part as a call of the block's own where none does.

    Work on the way into that module (a norm with weights of its own) does not count, nor work beside the one module
    that ``plays`` says is attention, a recurrence or a mixture. Raises CannotFollow for a part that has no weights.
    """
    products = weighted(graph, part)
    if not products:
        raise CannotTrace(f"an addend of {block.module} is made without weights")
    path = block.module
    owners = [graph.owners[i].module.split(".") for i in products]
    shared = [names[0] for names in zip(*owners) if len(set(names)) == 1]
    if len({tuple(names) for names in owners}) == 1 and len(shared) > path.count(".") + 2:
        shared.pop()  # one matrix is a layer of something
    while len(shared) > path.count(".") + 1:
        call = graph.module(".".join(shared))
        if call is not None and all(call.start <= i < call.stop for i in products):
            return call
        shared.pop()
    return _core(graph, block, products, plays) or _piece(graph, block, part)


def several_mixers(
    graph: TraceGraph, block: Call, part: Part, plays: Callable[[Call], str | None]
) -> bool:
    """Whether several of the block's children that mix positions make one addend together."""
    depth = block.module.count(".") + 2
    names = {
        ".".join(graph.owners[index].module.split(".")[:depth]) for index in weighted(graph, part)
    }
    return (
        sum(
            (call := graph.module(name)) is not None
            and call is not block
            and plays(call) == "mixer"
            for name in names
        )
        > 1
    )


def _core(
    graph: TraceGraph, block: Call, products: list[int], plays: Callable[[Call], str | None]
) -> Call | None:
    """Of the block's children that share a part's products, the one that the others lead into or stand beside."""
    depth = block.module.count(".") + 2
    groups: dict[str, list[int]] = {}
    for index in products:
        groups.setdefault(".".join(graph.owners[index].module.split(".")[:depth]), []).append(index)
    while (behind := _convolving(graph, groups)) is not None:
        del groups[behind]
    last = max(groups, key=lambda name: max(groups[name]))
    calls = {
        name: call
        for name in groups
        if (call := graph.module(name)) is not None and any(True for _ in call.fn.children())
    }
    roles = {name: role for name, call in calls.items() if (role := plays(call)) is not None}
    if list(roles.values()).count("mixer") > 1:
        return None  # several mixers make one addend
    if (
        len(roles) == 1
        and (name := next(iter(roles)))
        and (roles[name] != "experts" or name == last)
    ):
        return calls[name]
    if last not in calls or all(graph.ops[i].name == "convolution" for i in groups[last]):
        return None
    entered = next(tensors((calls[last].args, calls[last].kwargs)), None)
    if entered is not None and entered.shape[-1] != stream(block).shape[-1]:
        return None  # half of a part: what leads into it has left the stream's width
    leading = all(
        max(own) < calls[last].start and leads(graph, max(own), calls[last])
        for name, own in groups.items()
        if name != last
    )
    return calls[last] if leading else None


def _convolving(graph: TraceGraph, groups: dict[str, list[int]]) -> str | None:
    """Of the block's children one that comes behind all others and does nothing but convolve what they made."""
    last = max(groups, key=lambda name: max(groups[name]))
    rest = [index for name, own in groups.items() if name != last for index in own]
    call = graph.module(last)
    if (
        not rest
        or call is None
        or any(graph.ops[i].name != "convolution" for i in groups[last])
        or min(groups[last]) < max(rest)
    ):
        return None
    return last if leads(graph, max(rest), call) else None


def leads(graph: TraceGraph, product: int, call: Call) -> bool:
    """Whether what an operation makes goes into what a module is called with."""
    found, todo = set(), [(id(tensor), call.start) for tensor in tensors((call.args, call.kwargs))]
    while todo:
        key, before = todo.pop()
        index = graph.maker(key, before)
        if index is None or index in found or index < product:
            continue
        found.add(index)
        todo += [(source, index) for source in graph.ops[index].reads]
    return product in found


def _piece(graph: TraceGraph, block: Call, part: Part) -> Call:
    """A part without a module, as a call of the block's module that spans its operations."""
    first = weighted(graph, part)[0]
    owner = graph.owners[first]
    start, stop = first if owner is block else owner.start, max(part.ops) + 1
    inner = [
        c for c in graph.inside(block) if c.start < c.stop and start <= c.start and c.stop <= stop
    ]
    began, ended = min(c.began for c in inner), max(c.ended for c in inner)
    reads = [
        k for k in graph.ops[first].reads if not isinstance(graph.tensors[k], torch.nn.Parameter)
    ]
    entering = next(
        (graph.tensors[k] for k in reads if not _of_weights(graph, k, first)),
        graph.tensors[reads[0]],
    )
    if owner is not block and isinstance(next(iter(owner.args), None), torch.Tensor):
        entering = owner.args[0]  # as its module was called with it, before that flattened it
    return Call(
        block.module,
        (),
        block.fn,
        (entering,),
        {},
        start,
        graph.tensors[part.key],
        stop,
        block.parent,
        began,
        ended,
        part_of=block,
    )


def _of_weights(graph: TraceGraph, key: int, before: int) -> bool:
    return any(isinstance(graph.tensors[k], torch.nn.Parameter) for k in graph.back(key, before))


def tail(graph: TraceGraph, block: Call, part: Part, made: int) -> OutputSteps:
    """What a part does after operation ``made``, which finished its work with weights."""
    maker = graph.owners[made]
    done: list[Step] = []
    strange = False
    for index in sorted(i for i in part.ops if i > made):
        owner, op = graph.owners[index], graph.ops[index]
        if owner is maker and not any(True for _ in maker.fn.children()):
            continue  # a bias, or what else its own module does to a product
        if owner is not block and is_norm(graph, owner):
            step = Step("norm", (), 0, by=_within(owner.module, block))
            done += [step] if step not in done else []
        elif op.name in SCALES and (by := _factor(graph, block, index)) is not None:
            done.append(Step("scale", (), 0, by=by))
        elif op.name in _ADDS and (by := _factor(graph, block, index, op.name)) is not None:
            done.append(Step("shift", (), 0, by=by))
        elif op.name not in PASSING:
            strange = True
    return OutputSteps(tuple(done), not strange)


def _factor(graph: TraceGraph, block: Call, index: int, *adds: str) -> float | str | None:
    """What an operation multiplies with (or, one of ``adds``, adds): a number, or the path of a parameter or buffer from the block; None for anything else."""
    op = graph.ops[index]
    if len(op.reads) == 1 and len(op.numbers) == 1:
        return 1 / op.numbers[0] if op.name.startswith("div") else op.numbers[0]
    constants = constants_of(block)
    found = [constants[k] for key in op.reads for k in graph.back(key, index) if k in constants]
    return (
        found[0]
        if len(op.reads) == 2 and len(found) == 1 and op.name in ("mul", "mul_", *adds)
        else None
    )


def constants_of(call: Call) -> dict[int, str]:
    """Parameters and buffers of a module, by identity, with their paths from it."""
    return {
        id(tensor): name for name, tensor in (*call.fn.named_parameters(), *call.fn.named_buffers())
    }


def addend_candidate(graph: TraceGraph, block: Call, part: Part) -> TensorCandidate:
    """Where an addend is handed over: the outermost module that returns it, else the call or operator that makes it.

    Raises CannotFollow where it is the result of no call.
    """
    chain = graph.back(part.key, part.add)
    made = [
        spot
        for call in graph.inside(block)
        if (spot := result(call, chain)) is not None and _intact(graph, spot, part.add)
    ]
    modules = [spot for spot in made if not spot.call.labels]
    if modules:
        return min(modules, key=lambda spot: spot.call.module.count("."))
    own = [spot for spot in made if spot.call.fn is not None]
    if own:
        return min(own, key=lambda spot: (chain.index(id(spot.tensor)), len(spot.call.labels)))
    for call in innermost(graph.inside(block), part.add):
        if (spot := argument(call, chain)) is not None:
            return spot
    raise CannotTrace(f"an addend of {block.module} is the result of no call")


def _intact(graph: TraceGraph, spot: TensorCandidate, add: int) -> bool:
    """Whether what a call returned reached an add unchanged, no operation having written into it."""
    made = graph.maker(id(spot.tensor), add)
    return made is None or made < spot.call.stop
