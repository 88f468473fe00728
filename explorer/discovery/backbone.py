"""The backbone of a decoder: embedding, block list and head.

Here too: which blocks are equal, and running a model with other blocks in its list.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from transformers import PreTrainedConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class NotADecoder(ValueError):
    """The model has no single list of blocks between an embedding and a head."""


@dataclass(frozen=True)
class Backbone:
    """Paths, from the root of the model, of what every decoder has."""

    blocks: str
    embedding: str
    head: str
    num_layers: int


def path_of(root: PreTrainedModel, wanted: torch.nn.Module | None) -> str | None:
    """The path of a module within ``root``, or None."""
    return next((name for name, module in root.named_modules() if module is wanted), None)


def blocks_at(root: torch.nn.Module, path: str) -> torch.nn.ModuleList:
    """Return the block list at ``path``."""
    return cast(torch.nn.ModuleList, root.get_submodule(path))


def find_backbone(
    root: PreTrainedModel,
    ran: Callable[[PreTrainedModel, Sequence[str]], list[str]] = lambda root, paths: list(paths),
) -> Backbone:
    """Find the backbone of ``root``, a transformers causal language model.

    The block list is the module list with the most parameters whose entries have submodules. Of
    several side by side, as of an image encoder and a decoder, it is the largest whose blocks a
    forward over token ids runs exactly once.

    ran: returns those of some modules' paths that such a forward runs exactly once.

    Raises NotADecoder when there is no such list, or no embedding or head.
    """
    lists = [
        (sum(p.numel() for p in module.parameters()), name)
        for name, module in root.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module)
        and any(True for _ in module[0].children())
    ]
    embedding, head = (
        path_of(root, root.get_input_embeddings()),
        path_of(root, root.get_output_embeddings()),
    )
    if not lists or embedding is None or head is None:
        raise NotADecoder(
            f"{type(root).__name__} has no list of blocks between an embedding and a head, "
            "so there is nothing to give standard names to."
        )
    # The outermost of equally large lists: a list nested in a block never outweighs the block's.
    lists.sort(key=lambda entry: (-entry[0], entry[1].count(".")))
    outer = [
        name for _, name in lists if not any(name.startswith(f"{other}.") for _, other in lists)
    ]
    if len(outer) > 1:
        running = ran(root, [f"{name}.0" for name in outer])
        outer = [name for name in outer if f"{name}.0" in running] or outer
    return Backbone(outer[0], embedding, head, len(blocks_at(root, outer[0])))


#: The most kinds of blocks that fractions and words may make. Where there are more, one differs
#: from block to block, as a probability may: it shows in what blocks multiply with, or nowhere.
_MOST_KINDS = 16

_Setting = tuple[str, str]
#: What a layer index is called: ``layer_idx``, ``block_id``, ``layer_number``, ``layer``.
_INDEX = re.compile(r"(^|[._])(idx|index|id|i|layer|block|number|num|n|no)\d*$|layer_?(idx|id|n)")

_PLAIN = (bool, int, float, str, type(None))


def built_like(block: torch.nn.Module) -> tuple:
    """Return the paths and classes of a block's modules, and the shapes of its tensors."""
    modules = tuple((name, type(module).__qualname__) for name, module in block.named_modules())
    tensors = (*block.named_parameters(), *block.named_buffers())
    return modules, tuple((name, tuple(tensor.shape)) for name, tensor in tensors)


def settings(block: torch.nn.Module) -> dict[_Setting, object]:
    """Return the numbers, strings and flags on a block's modules, by module path and attribute.

    A configuration that a module has is read too, and so are lists and dictionaries of such.
    """
    found: dict[_Setting, object] = {}
    for path, module in block.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                found |= {(path, f"{name}.{key}"): one for key, one in _plain(vars(value))}
            else:
                found |= {(path, key): one for key, one in _plain({name: value})}
    return found


def _plain(attributes: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the attributes that are plain, or plain all through, in a form that can be compared."""
    for name, value in attributes.items():
        if name.startswith("_"):
            continue
        if isinstance(value, _PLAIN):
            yield name, value
        elif isinstance(value, tuple | list) and all(isinstance(one, _PLAIN) for one in value):
            yield name, tuple(value)
        elif isinstance(value, dict) and all(isinstance(one, _PLAIN) for one in value.values()):
            yield name, tuple(sorted((str(key), repr(one)) for key, one in value.items()))


def _entries(config: PreTrainedConfig | None, count: int) -> list[dict[_Setting, object]]:
    """Return the entries of each of ``count`` blocks in a configuration's lists of that length."""
    if config is None:
        return [{}] * count
    lists = {
        ("config", name): value
        for name, value in _plain(vars(config.get_text_config()))
        if isinstance(value, tuple)
        and len(value) == count
        and any(word in name for word in ("layer", "block"))
    }
    return [{key: value[at] for key, value in lists.items()} for at in range(count)]


def equal_blocks(
    blocks: Iterable[torch.nn.Module], config: PreTrainedConfig | None = None
) -> list[tuple[int, ...]]:
    """Return the indices of equal blocks, grouped, in order of first appearance.

    Blocks are equal if they have the same structure (see `built_like`), equal settings (see
    `settings`) and equal entries in the lists of ``config``, apart from layer indices: numbers that
    are the block's index plus a constant in every block, and are called an index.
    """
    blocks = list(blocks)
    built = [built_like(block) for block in blocks]
    entries = _entries(config, len(blocks))
    own = [settings(block) | entry for block, entry in zip(blocks, entries, strict=True)]
    counting = _counting(own)

    def groups(kept: Callable[[object], bool]) -> list[tuple[int, ...]]:
        distinguishing = [
            tuple(
                (key, type(value), value)
                for key, value in each.items()
                if key not in counting and kept(value)
            )
            for each in own
        ]
        return _grouped(list(zip(built, distinguishing, strict=True)))

    found = groups(lambda _: True)
    if len(found) <= _MOST_KINDS:
        return found
    return groups(lambda value: not isinstance(value, float | str))


def _counting(own: Sequence[dict[_Setting, object]]) -> set[_Setting]:
    """Return the settings that are layer indices."""
    offsets: dict[_Setting, list[int | None]] = {}
    for index, each in enumerate(own):
        for key, value in each.items():
            number = value if isinstance(value, int) and not isinstance(value, bool) else None
            offsets.setdefault(key, []).append(None if number is None else number - index)
    return {
        key
        for key, found in offsets.items()
        if _INDEX.search(key[1]) and len(set(found)) == 1 and None not in found
    }


def _grouped(descriptions: Sequence[tuple]) -> list[tuple[int, ...]]:
    groups: dict[tuple, list[int]] = {}
    for index, description in enumerate(descriptions):
        groups.setdefault(description, []).append(index)
    return [tuple(indices) for indices in groups.values()]


class PassthroughBlock(torch.nn.Module):
    """Replaces a block and returns ``result(args, kwargs)``; its attributes are the block's."""

    def __init__(
        self, block: torch.nn.Module, result: Callable[[tuple, dict[str, object]], object]
    ) -> None:
        super().__init__()
        self.__dict__.update(block=block, result=result)

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["block"], name)

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.__dict__["result"](args, kwargs)


def stream_alone(stream: object, returns: int | None) -> object:
    """Return a block's output that holds the residual stream alone.

    returns: the length of the tuple that the block returns, filled up with None; None where the
        block returns the stream itself.
    """
    return stream if returns is None else (stream, *[None] * (returns - 1))


@contextmanager
def swapped_blocks(
    root: PreTrainedModel, path: str, blocks: Iterable[torch.nn.Module]
) -> Iterator[None]:
    """Put other blocks into the list at ``path`` of ``root`` for the duration."""
    owner, _, name = path.rpartition(".")
    holder, own = root.get_submodule(owner), root.get_submodule(path)
    setattr(holder, name, torch.nn.ModuleList(blocks))
    try:
        yield
    finally:
        setattr(holder, name, own)


def after_blocks(
    root: PreTrainedModel, path: str, returns: int | None, hidden: torch.Tensor, **options: object
) -> torch.Tensor:
    """Return the logits [… vocab_size] of a residual stream [… hidden_size].

    The model's own forward computes them, its blocks at ``path`` replaced.

    returns: as for `stream_alone`. options: keyword arguments of the forward.
    """
    stream = hidden.reshape(1, -1, hidden.shape[-1])
    left = stream_alone(stream, returns)
    passing = [PassthroughBlock(block, lambda *_: left) for block in blocks_at(root, path)]
    if "output_router_logits" in inspect.signature(type(root).forward).parameters:
        options = {"output_router_logits": False, **options}  # no block runs a router
    with swapped_blocks(root, path, passing):
        ids = torch.ones(1, stream.shape[1], dtype=torch.long, device=hidden.device)
        return root(input_ids=ids, **options).logits.reshape(*hidden.shape[:-1], -1)
