"""Prompts given as the messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from explorer.errors import first_sentence
from explorer.model.errors import PromptError
from explorer.model.interface import PromptedModel


def is_messages(prompt: Any) -> bool:
    """Whether a prompt is a list of messages: mappings with a role and content."""
    given: Any = prompt
    return (
        isinstance(prompt, list | tuple)
        and bool(given)
        and all(isinstance(one, Mapping) and "role" in one for one in given)
    )


def chat_text(model: PromptedModel, messages: Any) -> str:
    """Return messages as the text that the tokenizer's chat template makes of them.

    It ends where the answer begins. Raises PromptError where there is no template, and where it
    does not take these messages.
    """
    tokenizer = model.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError("This model's tokenizer has no chat template; give the prompt as a text.")
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
    except Exception as error:
        raise PromptError(
            f"The model's chat template cannot take these messages ({first_sentence(error)})."
        ) from error
