"""Prompts: checked, and turned into token ids and model inputs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses import FakeTensor
from transformers import PreTrainedModel

from explorer.errors import first_sentence, panics_as_errors
from explorer.meta_device import CACHE_NAMES
from explorer.model.chat import chat_text, is_messages
from explorer.model.errors import PromptError
from explorer.model.interface import PromptedModel
from explorer.model.length import check_length
from explorer.model.masks import as_mask, is_padded, pad
from explorer.model.padding import check_padding, padded_inputs

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

_BYTES = (bytes, bytearray, memoryview)

_NO_PROMPT = (
    "A prompt is a text, a list of texts or of token ids, a tensor of ids [batch seq], "
    "or what the tokenizer returns."
)


def text_config(model: PreTrainedModel) -> Any:
    """Return the configuration of a model's text side."""
    config: Any = model.config
    return config.get_text_config()


def encode(model: PromptedModel, prompt: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the token ids [batch seq] of a prompt and, where it is padded, its mask [batch seq].

    prompt: a text, a list of texts, token ids, a tensor of them [batch seq], or what a tokenizer
    returns (``input_ids`` with ``attention_mask``, 0 at padding), or the messages of a
    conversation (``role`` and ``content``), which the tokenizer's chat template makes a text. Texts
    of different length are padded on the tokenizer's side.

    Raises PromptError where it is empty, longer than the model takes, or has ids outside the
    vocabulary, and for a mask that does not fit.
    """
    mask = None
    if isinstance(prompt, str):
        ids = torch.tensor([_text_ids(model, prompt)], dtype=torch.long)
    elif is_messages(prompt):
        # A template writes the special tokens itself.
        text = chat_text(model, prompt)
        ids = torch.tensor([_text_ids(model, text, add_special_tokens=False)], dtype=torch.long)
    elif _is_texts(prompt):
        rows = [_text_ids(model, text) for text in prompt]
        tokenizer = model.tokenizer
        fill = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        ids, mask = pad(rows, fill or 0, tokenizer.padding_side)
    else:
        given: Any = prompt
        if isinstance(prompt, Mapping) and "input_ids" in prompt:
            given, mask = given["input_ids"], given.get("attention_mask")
        ids = _as_matrix(given)
        if ids.device.type == "meta" and model.hf.device.type != "meta":
            raise PromptError(
                "The prompt's token ids are on the meta device, which keeps no numbers; "
                "give them on another."
            )
        mask = None if mask is None else as_mask(mask, ids)
    return check_ids(model, ids), mask


def _is_texts(prompt: Any) -> bool:
    """Whether a prompt is a list of texts."""
    given: Any = prompt
    return (
        isinstance(prompt, list | tuple)
        and bool(given)
        and all(isinstance(text, str) for text in given)
    )


def _text_ids(model: PromptedModel, text: str, **options: Any) -> list[int]:
    """Return the token ids of one text; warn where it writes the first token a second time."""
    check_text(text)
    try:
        with panics_as_errors():
            ids = list(model.tokenizer(text, **options)["input_ids"])
    except Exception as error:
        raise PromptError(
            f"The model's tokenizer cannot read this prompt ({first_sentence(error)})."
        ) from error
    first = model.tokenizer.bos_token
    if first and text.startswith(first) and ids[:2] == [model.tokenizer.bos_token_id] * 2:
        warnings.warn(
            f"The prompt begins with {first}, which the tokenizer adds too, so the model reads it "
            "twice; leave it out of the text.",
            stacklevel=2,
        )
    return ids


def check_text(text: str) -> str:
    """Return ``text``; raise PromptError where it is empty or holds bytes that are no text."""
    if not text.strip():
        raise PromptError("The prompt is empty; write at least one word.")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise PromptError("The prompt holds bytes that are no text; write it in UTF-8.")
    return text


def check_given(model: PromptedModel, prompt: Any) -> None:
    """Raise PromptError for a text or a matrix of ids in what a trace was given that cannot be run.

    The engine takes further kinds of input; these are left to it.
    """
    if isinstance(prompt, torch.Tensor):
        if prompt.dim() == 2:
            check_ids(model, prompt)
        return
    given: Any = prompt
    texts: list[Any] = list(given) if isinstance(prompt, list) else [given]
    if isinstance(prompt, int | float) or any(isinstance(text, _BYTES) for text in texts):
        raise PromptError(_NO_PROMPT)
    for text in texts:
        if isinstance(text, str) and not model.tokenizer(check_text(text))["input_ids"]:
            raise PromptError("The prompt is empty; write at least one word.")


def check_ids(model: PromptedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return ``ids`` [batch seq].

    Raise PromptError, as `encode` does, where the model cannot run on them.
    """
    if ids.numel() == 0:
        raise PromptError("The prompt is empty; give at least one token.")
    check_length(model, ids.shape[1])
    size = text_config(model.hf).vocab_size
    # On the meta device and in the engine's scan, ids are shapes alone.
    has_data = ids.device.type != "meta" and not isinstance(ids, FakeTensor)
    if has_data and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        raise PromptError(f"Token ids of this model run from 0 to {size - 1}.")
    return ids


def _as_matrix(prompt: Any) -> torch.Tensor:
    """Return token ids that were given as numbers as a matrix [batch seq]."""
    try:
        ids = None if isinstance(prompt, _BYTES) else torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError):
        ids = None
    if ids is not None and ids.layout != torch.strided:
        raise PromptError("The token ids of a prompt are a dense tensor; give ids.to_dense().")
    if ids is not None and ids.dim() in (1, 2) and not ids.numel():
        return ids.long().reshape(1, 0)
    if ids is None or ids.dim() not in (1, 2) or ids.dtype not in _INTEGERS:
        raise PromptError(_NO_PROMPT)
    return ids.long().reshape(-1, ids.shape[-1])


def model_inputs(model: PromptedModel, prompt: Any) -> dict[str, torch.Tensor]:
    """Return the model's inputs for a prompt, on its device; raise what `encode` raises."""
    device = next(model.hf.parameters()).device
    ids, mask = encode(model, prompt)
    ids = ids.to(device)
    # transformers looks into a mask to see whether it masks anything: not on the meta device.
    if ids.device.type == "meta" and not model.anatomy.masked:
        return {"input_ids": ids}
    if mask is None or ids.device.type == "meta":
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    mask = mask.to(device)
    check_padding(model, ids, mask)
    return padded_inputs(model, ids, mask)


def check_call(model: PromptedModel, kwargs: dict[str, Any]) -> None:
    """Check the prompts of a call that the engine assembled, and drop a harmful mask from it.

    A model without weights cannot look into a mask. Beside a cache, one as long as the new tokens
    alone would hide what the cache holds.
    """
    ids: Any = kwargs.get("input_ids")
    mask: Any = kwargs.get("attention_mask")
    if isinstance(ids, torch.Tensor):
        check_ids(model, ids)
    cache = next(filter(None, (kwargs.get(name) for name in CACHE_NAMES)), None)
    if cache is None and isinstance(ids, torch.Tensor) and is_padded(mask, ids):
        check_padding(model, ids.to(model.hf.device), mask.to(model.hf.device))
    if model.hf.device.type == "meta":
        kwargs.pop("attention_mask", None)
        if model.anatomy.masked and isinstance(ids, torch.Tensor):
            kwargs["attention_mask"] = torch.ones_like(ids)
    elif mask is not None and cache is not None and mask.shape == ids.shape and bool(mask.all()):
        del kwargs["attention_mask"]


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """Return each token as text, with the spaces that stand in front of it.

    Where a character is spread over several tokens, each shows it and which part it is: ``א 1/2``.
    """
    texts: list[str] = []
    start = 0
    while start < len(ids):
        end = start + 1
        # At most four bytes make a character.
        while "\ufffd" in tokenizer.decode(ids[start:end]) and end < min(start + 4, len(ids)):
            end += 1
        text = tokenizer.decode(ids[start:end])
        if end == start + 1 or "\ufffd" in text:
            texts.append(_spaced(tokenizer, ids[start]))
            start += 1
        else:
            parts = end - start
            texts += [f"{text} {part}/{parts}" for part in range(1, parts + 1)]
            start = end
    return texts


def _spaced(tokenizer: Any, token: int) -> str:
    """Return one token as text; decoding one alone leaves out the spaces of SentencePiece's."""
    text, piece = tokenizer.decode([token]), tokenizer.convert_ids_to_tokens(token)
    if not isinstance(piece, str):  # an id beyond the vocabulary
        return text
    lost = len(piece) - len(piece.lstrip("\u2581")) - (len(text) - len(text.lstrip(" ")))
    return " " * lost + text
