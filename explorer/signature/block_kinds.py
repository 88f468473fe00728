"""Which blocks of a model differ, and a configuration with one of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from explorer.discovery.backbone import built_like, find_backbone
from explorer.meta_device import build_meta
from explorer.signature.sizes import Key, at, changed, figures, per_block, with_blocks

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


#: Figures that say after how many blocks the others begin, of which one is enough.
_LEADING = ("first_k_dense_replace", "num_dense_layers")


def few_blocks(
    model: PreTrainedModel, path: str
) -> tuple[PreTrainedConfig, list[list[int]], int | None]:
    """A configuration with few blocks and, for each of them, the blocks of ``model`` that are so.

    ``path`` is the block list's. One block of each kind, where the class builds the same ones of
    such a configuration; else the first blocks up to the first of the last kind, by a configuration
    of so many or, where there is none, by the number of blocks to keep of all, which comes last.
    """
    lists = list(per_block(model.config))
    kinds = _kinds(model.config, model.get_submodule(path), lists)
    firsts = sorted({kind: i for i, kind in reversed(list(enumerate(kinds)))}.values())
    alike = {kind: [i for i, one in enumerate(kinds) if one == kind] for kind in kinds}
    leading = {
        key: 1
        for key, value in figures(model.config, everything=True).items()
        if key[-1] in _LEADING and value > 1
    }
    for chosen, also in ((firsts, {}), (firsts, leading), (list(range(firsts[-1] + 1)), {})):
        if len(chosen) == len(kinds):
            break
        try:
            config = changed(with_blocks(model.config, chosen), also)
            few = build_meta(config, model_class=type(model))
            found = _kinds(config, few.get_submodule(path), lists)
        except Exception:
            continue
        if found == [kinds[i] for i in chosen]:
            return config, [alike[kind] for kind in found], None
    count = firsts[-1] + 1
    return (
        model.config,
        [alike[kind] for kind in kinds[:count]],
        count if count < len(kinds) else None,
    )


def counterparts(small: PreTrainedModel, model: PreTrainedModel, path: str) -> list[list[int]]:
    """For each block of a small model of the same class, the blocks of ``model`` that have the same
    modules and parameters."""

    def built(block: nn.Module) -> tuple:
        modules = tuple((name, type(one).__name__) for name, one in block.named_modules())
        return modules, tuple(name for name, _ in block.named_parameters())

    blocks: Any = model.get_submodule(path)
    small_blocks: Any = small.get_submodule(path)
    whole = [built(block) for block in blocks]
    return [[i for i, one in enumerate(whole) if one == built(block)] for block in small_blocks]


def block_list(model: PreTrainedModel) -> str:
    """The path of the block list; raises NotADecoder where there is none."""
    return find_backbone(model).blocks


def _kinds(config: PreTrainedConfig, blocks: Any, lists: Sequence[Key]) -> list[tuple]:
    """What tells each block from others: how it is built, what the configuration's lists say of it,
    how far it looks back."""
    said = [values for key in lists if len(values := at(config, key)) == len(blocks)]
    said = [values for values in said if all(isinstance(one, str | int) for one in values)]
    return [
        (built_like(block), tuple(values[i] for values in said), _looks_back(block))
        for i, block in enumerate(blocks)
    ]


def _looks_back(block: nn.Module) -> tuple[Any, ...]:
    return tuple(
        (path, name, value)
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if any(word in name for word in ("window", "sliding", "shared"))
        and isinstance(value, int | str | None)
    )
