"""The frame of a decoder: embedding, block list, final norm and head, found in the built model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


class NotADecoder(ValueError):
    """The model has no single list of blocks to hang standard names on."""


@dataclass(frozen=True)
class Backbone:
    """Paths, from the root of the model, of what every decoder has."""

    blocks: str
    embedding: str
    head: str
    num_layers: int


def path_of(root: torch.nn.Module, wanted: torch.nn.Module | None) -> str | None:
    """The path of a module within ``root``, or None."""
    return next((name for name, module in root.named_modules() if module is wanted), None)


def find_backbone(
    root: torch.nn.Module,
    ran: Callable[[torch.nn.Module, Sequence[str]], list[str]] = lambda root, paths: list(paths),
) -> Backbone:
    """Find the frame of ``root``, a transformers causal language model.

    The block list is the module list with the most parameters whose entries hold further modules; of several
    side by side, such as a picture's and a text's, the largest whose blocks ``ran`` says a forward over
    token ids runs once. Raises NotADecoder when there is none, or no embedding or head.
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
    return Backbone(outer[0], embedding, head, len(root.get_submodule(outer[0])))


class PassthroughBlock(torch.nn.Module):
    """Stands in for a block: hands a stream on, whatever it is called with, and is otherwise the block to whoever looks."""

    def __init__(self, block: torch.nn.Module, stream: torch.Tensor, returns: int | None) -> None:
        super().__init__()
        self.__dict__["block"] = block
        self.__dict__["handed"] = stream if returns is None else (stream, *[None] * (returns - 1))

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["block"], name)

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.__dict__["handed"]


def after_blocks(
    root: torch.nn.Module, path: str, returns: int | None, hidden: torch.Tensor, **options: object
) -> torch.Tensor:
    """The logits [… vocab_size] of a stream [… hidden_size] by the model's own forward, its blocks at ``path`` put aside.

    returns: how many things a block returns, None where it is the stream alone. options: the forward's own.
    """
    owner, _, name = path.rpartition(".")
    holder, blocks = root.get_submodule(owner), root.get_submodule(path)
    stream = hidden.reshape(1, -1, hidden.shape[-1])
    setattr(
        holder,
        name,
        torch.nn.ModuleList([PassthroughBlock(block, stream, returns) for block in blocks]),
    )
    try:
        ids = torch.ones(1, stream.shape[1], dtype=torch.long, device=hidden.device)
        return root(input_ids=ids, **options).logits.reshape(*hidden.shape[:-1], -1)
    finally:
        setattr(holder, name, blocks)


def signature(block: torch.nn.Module) -> tuple:
    """What tells one kind of block from another: its modules' classes and its parameters' shapes."""
    modules = tuple((name, type(module).__qualname__) for name, module in block.named_modules())
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
    return modules, shapes


def kinds(blocks: torch.nn.ModuleList) -> list[tuple[int, ...]]:
    """Indices of equal blocks, grouped, in order of first appearance."""
    groups: dict[tuple, list[int]] = {}
    for index, block in enumerate(blocks):
        groups.setdefault(signature(block), []).append(index)
    return [tuple(indices) for indices in groups.values()]
