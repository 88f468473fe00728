"""Which blocks of a model differ, and a configuration with one of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from explorer.accounting import build_meta
from explorer.finding.structure import frame, signature
from explorer.signature.sizes import per_block, with_blocks

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


def few_blocks(model: PreTrainedModel, path: str) -> tuple[PreTrainedConfig, list[list[int]]]:
    """A configuration with few blocks and, for each of them, the blocks of ``model`` that are so.

    ``path`` is the block list's. One block of each kind, where the class builds the same ones of such a configuration; else the
    first blocks up to the first of the last kind; else all of them.
    """
    kinds = _kinds(model.config, model.get_submodule(path))
    firsts = sorted({kind: at for at, kind in reversed(list(enumerate(kinds)))}.values())
    alike = {kind: [at for at, one in enumerate(kinds) if one == kind] for kind in kinds}
    for chosen in (firsts, list(range(firsts[-1] + 1))):
        if len(chosen) == len(kinds):
            break
        try:
            config = with_blocks(model.config, chosen)
            few = build_meta(config, model_class=type(model))
            found = _kinds(config, few.get_submodule(path))
        except Exception:  # noqa: BLE001  a class may want more of them
            continue
        if found == [kinds[at] for at in chosen]:
            return config, [alike[kind] for kind in found]
    return model.config, [alike[kind] for kind in kinds]


def block_list(model: PreTrainedModel) -> str:
    """The path of the block list; raises NotADecoder where there is none."""
    return frame(model).blocks


def _kinds(config: PreTrainedConfig, blocks: Sequence[nn.Module]) -> list[tuple]:
    """What tells each block from others: how it is built, what the configuration's lists say of it, how far it looks back."""
    lists = [values for values in per_block(config).values() if len(values) == len(blocks) and all(isinstance(one, str | int) for one in values)]
    return [(signature(block), tuple(values[at] for values in lists), _looks_back(block)) for at, block in enumerate(blocks)]


def _looks_back(block: nn.Module) -> tuple[Any, ...]:
    return tuple(
        (path, name, value) for path, module in block.named_modules() for name, value in vars(module).items()
        if ("window" in name or "sliding" in name) and isinstance(value, int | str | None)
    )
