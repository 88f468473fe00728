"""Padded batches: what the model is given, and whether its family bears padding."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from explorer.model.errors import PromptError
from explorer.model.interface import PromptedModel

#: The largest change of a text's logits by padding beside it, as a share of their size, that is
#: rounding: in float32, and in half precision, where it may change a router's choice too.
_ROUNDING, _HALF_ROUNDING = 1e-3, 0.05


def padded_inputs(
    model: PromptedModel, ids: torch.Tensor, mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the model's inputs for token ids and their mask, both [batch seq].

    A token's position is its place among the tokens of its row: without position ids of that kind
    transformers counts the padding in front of a text too.
    """
    inputs = {"input_ids": ids, "attention_mask": mask}
    if "position_ids" in inspect.signature(model.hf.forward).parameters:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return inputs


def check_padding(model: PromptedModel, ids: torch.Tensor, mask: torch.Tensor) -> None:
    """Raise PromptError where padding changes what the model computes of the text beside it.

    ids, mask: [batch seq]. In some families' own forwards the padding of a row goes through a
    recurrence, a convolution or a choice of blocks as if it were text. The row with the most
    padding is run with it and without, once for each side of padding.
    """
    shortest = int(mask.sum(-1).argmin())
    real = mask[shortest].bool()
    side = "left" if not real[0] else "right"
    if side not in model.padding_effects:
        row = slice(shortest, shortest + 1)
        padded = padded_inputs(model, ids[row], mask[row])
        with torch.no_grad():
            with_padding: Any = model.hf(**padded)
            alone: Any = model.hf(input_ids=ids[row, real])
        wanted = alone.logits.float()
        change = (with_padding.logits[:, real].float() - wanted).abs().mean()
        model.padding_effects[side] = float(change / wanted.abs().mean())
    effect = model.padding_effects[side]
    limit = _ROUNDING if next(model.hf.parameters()).dtype == torch.float32 else _HALF_ROUNDING
    if not effect <= limit:
        name = getattr(model.hf.config, "model_type", type(model.hf).__name__)
        raise PromptError(
            f"Padding on the {side} of a text changes what {name} computes of it "
            f"(its logits by {effect:.1%}); run the texts one at a time, or texts of one length."
        )
