"""Prompts: what may be run, as token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from explorer.model import LanguageModel


class PromptError(ValueError):
    """The prompt cannot be run; the message says what to do."""


def limit(model: "LanguageModel") -> int | None:
    """The longest sequence the model was made for, or None where its configuration names none."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def prepared(model: "LanguageModel", prompt: Any) -> dict[str, torch.Tensor]:
    """The model's inputs for a prompt: text, token ids, or a tensor [batch seq].

    Raises PromptError when it is empty, longer than the model's limit, or has ids
    outside the vocabulary.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise PromptError("The prompt is empty; write at least one word.")
        ids = model.tokenizer(prompt, return_tensors="pt")["input_ids"]
    else:
        ids = torch.as_tensor(prompt)
        if ids.numel() == 0:
            raise PromptError("The prompt is empty; give at least one token.")
        if ids.is_floating_point() or ids.dim() > 2:
            raise PromptError("A prompt of token ids is a list of integers or a tensor [batch seq].")
        ids = ids[None] if ids.dim() == 1 else ids
    longest = limit(model)
    if longest is not None and ids.shape[1] > longest:
        raise PromptError(f"The prompt has {ids.shape[1]} tokens and the model takes at most {longest}; shorten it.")
    size = model.config.get_text_config().vocab_size
    if ids.device.type != "meta" and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        raise PromptError(f"Token ids of this model run from 0 to {size - 1}.")
    device = next(model.hf.parameters()).device
    if device.type == "meta":  # transformers looks into a mask to see whether it masks anything
        return {"input_ids": ids.to(device)}
    return {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}
