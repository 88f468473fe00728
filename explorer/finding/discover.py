"""Discovery: run a shape-only twin of a model once and say where each of its standard values is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from explorer import vocabulary
from explorer.finding.block import BlockFinds, CannotFollow, Sublayer, find_block, first_and_second
from explorer.finding.flow import recorded
from explorer.finding.spots import Finds
from explorer.finding.stream import Tail
from explorer.finding.structure import Frame, frame, kinds
from explorer.places import Place

#: Lengths tried for the probe's batch and sequence, so that no size of the model equals one of them.
_LENGTHS = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)

ABSENT = {
    "self_attn": "this block is a recurrent mixer (linear_attn): it has no softmax attention",
    "linear_attn": "this block is softmax attention (self_attn): it has no recurrent state",
    "shared_experts": "this block's MLP has no shared expert",
    "mlp": "this block has no MLP",
    "mixer": "this block has neither softmax attention nor a recurrent mixer",
}


@dataclass(frozen=True)
class Host:
    """One host of one kind of block: its module (relative to the block), sizes, and its values.

    ``places`` holds one place per way the forward can reach the value (a prompt,
    a decoding step); ``missing`` one sentence for each value that is not there.
    """

    name: str
    module: str
    sizes: dict[str, int]
    places: dict[str, tuple[Place, ...]]
    missing: dict[str, str]
    traits: dict

    @property
    def part(self) -> bool:
        """Whether it is a part of the block's own forward, without a module."""
        return bool(self.places) and not self.module and self.name != "layers"


@dataclass(frozen=True)
class Block:
    """One kind of block: the blocks that are so, their hosts, what they add, and the order of reading.

    ``mid`` is how many addends ``layer_mid`` holds, None where it is not there.
    """

    layers: tuple[int, ...]
    hosts: dict[str, Host]
    sublayers: tuple[Sublayer, ...]
    order: tuple[tuple[str, str], ...]
    mid: int | None = None

    @property
    def normed(self) -> tuple[Sublayer, Sublayer | None]:
        """The sublayers whose norms attention_norm_output and mlp_norm_output are of."""
        return first_and_second(self.sublayers)


@dataclass
class Anatomy:
    """What discovery found out about a model.

    ``norm`` is the last module before the head, if any; ``head_is_last`` whether the head's output is the logits.
    """

    frame: Frame
    norm: str | None
    blocks: list[Block]
    head_is_last: bool

    def block(self, layer: int) -> Block:
        return next(block for block in self.blocks if layer in block.layers)


def discover(twin: torch.nn.Module) -> Anatomy:
    """Find the standard values of ``twin``, a model on the meta device in bfloat16 that no engine has wrapped yet.

    It runs shortened to the blocks that differ and is left as it was found, unless its experts
    run in a loop: such a twin must not be used for anything else.

    Raises NotADecoder when the model has no list of blocks between an embedding and a head, CannotFollow
    when a block is not its input plus what mixers and MLPs return, and whatever the model's own forward raises.
    """
    base = frame(twin)
    blocks = twin.get_submodule(base.blocks)
    groups = kinds(blocks)
    depth = max(group[0] for group in groups) + 1
    if getattr(twin.config.get_text_config(), "_experts_implementation", None) == "eager":
        _choose_no_expert(twin)
    paths = [f"{base.blocks}.{group[0]}" for group in groups]
    batch, seq = probe_lengths(twin)
    ids = torch.zeros(batch, seq, dtype=torch.long, device="meta")
    with torch.no_grad(), unpadded(twin), _shortened(twin, base.blocks, depth):
        with recorded(twin, paths) as prompt, _tail(twin, base) as tail:
            out = twin(ids, use_cache=True)
        norm = tail.norm()
        first = [find_block(prompt, path) for path in paths]
        second: list[BlockFinds | None] = [None] * len(paths)
        if any("linear_attn" in finds.hosts for finds in first):
            with recorded(twin, paths) as step:
                twin(ids[:, :1], cache=out.cache, use_cache=True)
            second = [find_block(step, path) for path in paths]
    sizes = {"batch": batch, "seq": seq}
    found = [_block(group, path, a, b, sizes) for group, path, a, b in zip(groups, paths, first, second)]
    return Anatomy(base, norm, found, tail.head is out.logits)


@contextmanager
def unpadded(model: torch.nn.Module) -> Iterator[None]:
    """A model of shapes alone, told of no padding: some look for it among the ids to warn of it, and here there are none to look at."""
    configs = {id(config): config for config in (model.config, model.config.get_text_config())}.values()
    before = [(config, config.pad_token_id) for config in configs]
    for config, _ in before:
        config.pad_token_id = None
    try:
        yield
    finally:
        for config, token in before:
            config.pad_token_id = token


@contextmanager
def _shortened(twin: torch.nn.Module, path: str, depth: int) -> Iterator[None]:
    """The twin with its first ``depth`` blocks alone."""
    owner, _, name = path.rpartition(".")
    holder, whole = twin.get_submodule(owner), twin.get_submodule(path)
    setattr(holder, name, whole[:depth])
    try:
        yield
    finally:
        setattr(holder, name, whole)


def _choose_no_expert(twin: torch.nn.Module) -> None:
    """Let the loop over the chosen experts run on shapes alone.

    Which experts are chosen is data, and the meta device has none. The loop starts from zeros in the
    shape of its input and adds each chosen expert's tokens; with none chosen it returns the zeros.
    They are made of the routing's tensors too, as what the loop returns is.
    """
    def forward(self: torch.nn.Module, hidden_states: torch.Tensor, *routing: torch.Tensor, **options: object) -> torch.Tensor:
        chosen = sum(tensor.sum() for tensor in (*routing, *options.values()) if isinstance(tensor, torch.Tensor))
        return torch.zeros_like(hidden_states) + (chosen * 0).to(hidden_states)

    for module in twin.modules():
        if hasattr(module, "_is_expert_parallel"):  # what transformers' own experts classes set
            kind = type(module)
            module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def probe_lengths(model: torch.nn.Module) -> tuple[int, int]:
    """A batch and a sequence length that no dimension of the model's parameters equals, alone or multiplied."""
    taken = {extent for parameter in model.parameters() for extent in parameter.shape}
    config = model.config.get_text_config()
    taken |= {value for value in config.to_dict().values() if isinstance(value, int)}
    free = [n for n in _LENGTHS if n not in taken]
    return next((b, s) for b in free for s in free if s > b and b * s not in taken)


@dataclass
class _Tail:
    """What ran around the blocks: modules before and after the last block, in order, and what the head returned."""

    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    head: torch.Tensor | None = None

    def block_done(self) -> None:
        self.before, self.after = [*self.before, *self.after], []

    def norm(self) -> str | None:
        """The last module before the head, None where there is none; raises CannotFollow where it runs elsewhere too."""
        if not self.after:
            return None
        if [*self.before, *self.after].count(self.after[-1]) > 1:
            raise CannotFollow(f"{self.after[-1]} runs before the head and elsewhere too")
        return self.after[-1]


@contextmanager
def _tail(twin: torch.nn.Module, base: Frame) -> Iterator[_Tail]:
    """Watch the modules outside the blocks as the run goes on."""
    tail = _Tail()
    inside = f"{base.blocks}."
    last = twin.get_submodule(base.blocks)[-1]
    hooks = [last.register_forward_hook(lambda *_: tail.block_done())]
    hooks.append(twin.get_submodule(base.head).register_forward_hook(lambda _, args, out: setattr(tail, "head", out)))
    for path, module in twin.named_modules():
        if path and not path.startswith(inside) and path != base.head and not any(True for _ in module.children()):
            hooks.append(module.register_forward_hook(lambda *_, path=path: tail.after.append(path)))
    try:
        yield tail
    finally:
        for hook in hooks:
            hook.remove()


def _block(layers: tuple[int, ...], path: str, prompt: BlockFinds, step: BlockFinds | None, call: dict[str, int]) -> Block:
    hosts = {}
    order: list[tuple[int, int, str, str]] = []
    for name, finds in prompt.hosts.items():
        again = step.hosts.get(name) if step is not None else None
        hosts[name] = _host(name, path, finds, again, call)
        ranks = list(vocabulary.BY_HOST[name])
        order += [(spot.when, ranks.index(value), name, value) for value, spot in finds.spots.items()
                  if value in hosts[name].places]
    mixers = {"self_attn", "linear_attn"}
    for name in vocabulary.HOSTS:
        if name != "model" and name not in hosts:
            reason = ABSENT["mixer"] if name in mixers and not mixers & set(prompt.hosts) else ABSENT[name]
            missing = dict.fromkeys(vocabulary.BY_HOST[name], reason)
            hosts[name] = Host(name, "", {}, {}, missing, {})
    return Block(layers, hosts, tuple(prompt.sublayers), tuple((h, v) for _, _, h, v in sorted(order)), prompt.mid)


def _host(name: str, path: str, finds: Finds, again: Finds | None, call: dict[str, int]) -> Host:
    sizes = {**call, **finds.sizes}
    places: dict[str, tuple[Place, ...]] = {}
    missing = dict(finds.missing)
    for value in vocabulary.BY_HOST[name].values():
        if value.derived:
            continue
        spot = finds.spots.get(value.name)
        place = spot.place(value.axes, sizes) if spot is not None else None
        if place is None:
            missing.setdefault(value.name, "it was found, but its axes are not the layout's" if spot else "nothing was found that plays this part")
            continue
        found = [place]
        if again is not None and (other := again.spots.get(value.name)) is not None:
            found.append(Place(other.call.module, other.side, other.element, place.arrangement, other.says, other.call.labels, place.repeat))
        unique = {(p.point, p.element): _relative(p, path) for p in found}
        places[value.name] = tuple(unique.values())
    for value in vocabulary.BY_HOST[name].values():
        if value.derived and value.source not in places:
            missing[value.name] = missing.get(value.source, ABSENT.get(name, ""))
    lengths = ("query", "key")
    own = {axis: extent for axis, extent in finds.sizes.items() if axis not in lengths}
    return Host(name, finds.module.removeprefix(path).lstrip("."), own, places, missing, _relative_traits(finds.traits, path))


def _relative(place: Place, path: str) -> Place:
    """The place with its module named from the block, so that one finding serves every equal block."""
    return replace(place, module=place.module.removeprefix(path).lstrip("."))


def _relative_traits(traits: dict, path: str) -> dict:
    """The traits with paths named from the block."""
    def named(value: object) -> object:
        if isinstance(value, Tail):
            return replace(value, modules=tuple(map(named, value.modules)))
        return value.removeprefix(path).lstrip(".") if isinstance(value, str) else value

    return {name: named(value) for name, value in traits.items()}
