"""What a page wishes, made sense of: selections in range, what they need recorded, errors as sentences."""

from __future__ import annotations

import logging
from typing import Any

from explorer.app_runs import Run
from explorer.app_texts import head_count
from explorer.vocabulary import UnknownValue
from explorer.widgets import views_part
from explorer.widgets.selection import Selection, is_recurrent

log = logging.getLogger(__name__)


def clamped(run: Run, chosen: Selection) -> Selection:
    """``chosen`` with everything in range; token -1 is the last."""
    tokens = len(run.tokens)
    block = min(max(chosen.block, 0), run.num_layers - 1)
    token = tokens - 1 if chosen.token < 0 else min(chosen.token, tokens - 1)
    head = min(max(chosen.head, 0), head_count(run, block) - 1)
    return chosen.moved(block=block, token=token, head=head)


def looked_at(run: Run, chosen: Selection, tab: str) -> list[tuple[str, int | None]]:
    """The values, with their blocks, that a tab shows of a selection and a run may have left out."""
    block = chosen.block
    if tab == "tensor" and chosen.part:
        try:
            value = views_part.value_of(chosen.part, run.kinds[block])
        except UnknownValue:
            return []
        return [(chosen.part, None if value.host == "model" else block)]
    if tab == "attention" and not is_recurrent(run, block):
        return [(name, block) for name in (f"attention_{chosen.pattern}", "attention_queries", "attention_keys")]
    return [("state_attention", block)] if tab == "state" and is_recurrent(run, block) else []


def sentence(error: BaseException) -> str:
    """What went wrong, for people: our own errors speak for themselves."""
    text = str(error).strip()
    if isinstance(error, (ValueError, OSError)) and text:
        return text
    log.error("a job failed", exc_info=error)
    return f"That did not work: {type(error).__name__}: {text or 'no message'}."


def whole(value: Any, otherwise: int) -> int:
    """A whole number from the page, or ``otherwise``."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return otherwise
