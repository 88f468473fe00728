"""Prompts: what may be run, as token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses import FakeTensor

if TYPE_CHECKING:
    from explorer.model.language_model import LanguageModel


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class PromptError(ValueError):
    """The prompt cannot be run; the message says what to do."""


def limit(model: LanguageModel) -> int | None:
    """The longest sequence the model was made for, or None where its configuration names none."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def token_ids(model: LanguageModel, prompt: Any) -> torch.Tensor:
    """The token ids [batch seq] of a prompt: text, token ids, or a tensor [batch seq].

    Raises PromptError when it is empty, longer than the model's limit, or has ids
    outside the vocabulary.
    """
    if isinstance(prompt, str):
        checked_text(prompt)
        ids = model.tokenizer(prompt, return_tensors="pt")["input_ids"]
    else:
        ids = _matrix(prompt)
        if ids.device.type == "meta" and model.hf.device.type != "meta":
            raise PromptError(
                "The prompt's token ids are on the meta device, which keeps no numbers; give them on another."
            )
    return checked(model, ids)


def checked_text(text: str) -> str:
    """A prompt that says something and is text, or PromptError."""
    if not text.strip():
        raise PromptError("The prompt is empty; write at least one word.")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise PromptError("The prompt holds bytes that are no text; write it in UTF-8.")
    return text


def checked(model: LanguageModel, ids: torch.Tensor) -> torch.Tensor:
    """Token ids [batch seq] that the model can run on, or PromptError as for `token_ids`."""
    if ids.numel() == 0:
        raise PromptError("The prompt is empty; give at least one token.")
    longest = limit(model)
    if longest is not None and ids.shape[1] > longest:
        raise PromptError(
            f"The prompt has {ids.shape[1]} tokens and the model takes at most {longest}; shorten it."
        )
    size = model.config.get_text_config().vocab_size
    numbers = ids.device.type != "meta" and not isinstance(
        ids, FakeTensor
    )  # a scan's ids are shapes alone
    if numbers and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        raise PromptError(f"Token ids of this model run from 0 to {size - 1}.")
    return ids


def _matrix(prompt: Any) -> torch.Tensor:
    """Token ids given as numbers, as one matrix."""
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        raise PromptError(
            'A prompt is a text or token ids: of what a tokenizer returns, give its ["input_ids"].'
        )
    try:
        ids = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError):
        ids = None
    if ids is not None and ids.layout != torch.strided:
        raise PromptError("The token ids of a prompt are a dense tensor; give ids.to_dense().")
    if ids is not None and ids.dim() in (1, 2) and not ids.numel():
        return ids.long().reshape(1, 0)
    if ids is None or ids.dim() not in (1, 2) or ids.dtype not in _INTEGERS:
        raise PromptError(
            "A prompt is a text, a list of token ids, or a tensor of them [batch seq]; for several texts use tracer.invoke()."
        )
    return ids.long().reshape(-1, ids.shape[-1])


def prepared(model: LanguageModel, prompt: Any) -> dict[str, torch.Tensor]:
    """The model's inputs for a prompt, on its device; raises what `token_ids` raises."""
    ids = token_ids(model, prompt)
    device = next(model.hf.parameters()).device
    if (
        device.type == "meta" and not model.anatomy.masked
    ):  # transformers looks into a mask to see whether it masks anything
        return {"input_ids": ids.to(device)}
    return {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}


def pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """Each token as text. Where a character is spread over several tokens, each shows it and which part it is: ``א 1/2``."""
    shown: list[str] = []
    start = 0
    while start < len(ids):
        end = start + 1
        # At most four bytes make a character.
        while "\ufffd" in tokenizer.decode(ids[start:end]) and end < min(start + 4, len(ids)):
            end += 1
        text = tokenizer.decode(ids[start:end])
        if end == start + 1 or "\ufffd" in text:
            shown.append(tokenizer.decode(ids[start : start + 1]))
            start += 1
        else:
            parts = end - start
            shown += [f"{text} {part}/{parts}" for part in range(1, parts + 1)]
            start = end
    return shown
