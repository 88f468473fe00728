"""Checkpoints on the hub: read from the download cache, else downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from explorer.checkpoints import cards
from explorer.errors import (
    LoadError,
    abbreviated,
    first_sentence,
    is_internal_error,
    panics_as_errors,
)

T = TypeVar("T")

#: Seconds to wait for the hub to say whether it has a checkpoint.
PATIENCE = 10


def read(source: str, fetch: Callable[[bool], T]) -> T:
    """Return ``fetch(True)``, which reads downloaded files only, or else ``fetch(False)``.

    Before the second, the hub is asked whether it has ``source``, with a short timeout: being
    offline and misspelled ids are reported at once. Raises UnknownCheckpoint for what is no
    hub id, and LoadError with one sentence otherwise.
    """
    if source.count("/") > 1:
        cards.card(source)  # raises, naming the nearest
    try:
        with panics_as_errors():
            return fetch(True)
    except LoadError:
        raise
    except Exception as error:  # missing or incomplete
        if is_internal_error(error):
            raise
        _ask(source)
    try:
        with panics_as_errors():
            return fetch(False)
    except LoadError:
        raise
    except Exception as error:
        if is_internal_error(error):
            raise
        if "trust_remote_code" in str(error):
            raise LoadError(
                f"{source} brings modeling code of its own; read it, then load with "
                "trust_remote_code=True."
            ) from error
        raise LoadError(f"{source} cannot be loaded ({first_sentence(error)}).") from error


def _ask(source: str) -> None:
    """Raise LoadError unless the hub says that it has ``source``."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        HfApi().model_info(source, timeout=PATIENCE)
    except GatedRepoError as error:
        raise LoadError(
            f"{source} is given out by its owners on request: ask for it there and log in to the "
            "hub."
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise LoadError(
            f"The hub has no checkpoint {abbreviated(source)!r}{_near(source)}"
        ) from error
    except Exception as error:  # offline, refused, too slow
        raise LoadError(_unreachable(source)) from error


def _unreachable(source: str) -> str:
    if source in cards.IDS:
        return (
            f"The weights of {source} are not here and the hub cannot be reached; "
            "load it with weights=False for its shapes, or give the folder they are in."
        )
    return (
        f"There is no checkpoint {abbreviated(source)!r} here and the hub cannot be reached"
        f"{_near(source)}"
    )


def _near(source: str) -> str:
    """The most similar ids with a card, as the end of a sentence."""
    try:
        cards.card(source)
    except cards.UnknownCheckpoint as error:
        if error.nearest:
            return f"; did you mean {' or '.join(error.nearest)}?"
    return "."
