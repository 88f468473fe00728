"""Edits: changes of values, made in the forward that is recorded."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Edit:
    """Change ``value`` of block ``layer`` (None for the model's own values) by ``change``.

    change: gets the tensor in the vocabulary's layout and returns the one to go on with, of the
    same shape and dtype; check: gets the sizes of the value's host before the run and raises where
    they rule the edit out; description: what the recording says of the edit.
    """

    value: str
    layer: int | None
    change: Callable[..., torch.Tensor]
    description: str = ""
    check: Callable[[dict[str, int]], None] = lambda sizes: None


@dataclass(frozen=True)
class JointEdit(Edit):
    """An edit whose ``change`` also gets, by name, the other values at the same location."""


def check_experts(indices: torch.Tensor, count: int) -> None:
    """Raise ValueError where expert indices [batch seq top_k] name an expert there is not."""
    if indices.device.type != "meta" and not ((indices >= 0) & (indices < count)).all():
        raise ValueError(
            f"There are experts 0 to {count - 1}; expert_indices were given "
            f"{int(indices.min())} to {int(indices.max())}."
        )


def ablate_expert(layer: int, expert: int) -> Edit:
    """Zero the weight of every routing slot of block ``layer`` that goes to ``expert``.

    The token's other weights stay as they are: they are not renormalised. Raises ValueError
    for what is no number.
    """

    expert = _number("expert", expert)

    def change(weights: torch.Tensor, others: dict[str, torch.Tensor]) -> torch.Tensor:
        return weights.masked_fill(others["expert_indices"] == expert, 0)

    def check(sizes: dict[str, int]) -> None:
        if not 0 <= expert < sizes["num_experts"]:
            raise ValueError(
                f"Block {layer} has experts 0 to {sizes['num_experts'] - 1}, not {expert}."
            )

    return JointEdit(
        "expert_weights", layer, change, f"expert {expert} of block {layer} off", check
    )


def zero_head(layer: int, head: int, host: str | None = None) -> Edit:
    """Zero the output of one head of block ``layer``, before the rest of its mixer reads it.

    host: the mixer, where the block has two.

    Works on softmax attention and on recurrent heads: ``attention_head_outputs``
    is [batch seq heads width] on both. Raises ValueError for what is no number.
    """

    head = _number("head", head)

    def change(outputs: torch.Tensor) -> torch.Tensor:
        if not 0 <= head < outputs.shape[2]:
            raise ValueError(f"Block {layer} has heads 0 to {outputs.shape[2] - 1}, not {head}.")
        outputs = outputs.clone()
        outputs[:, :, head] = 0
        return outputs

    name = "attention_head_outputs" if host is None else f"{host}.attention_head_outputs"
    return Edit(name, layer, change, f"head {head} of block {layer} zeroed")


def _number(what: str, number: int) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise ValueError(
            f"The {what} to edit is given by its number; {number!r} is not one."
        ) from None
