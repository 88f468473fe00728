"""What a page wishes, made sense of: selections in range, what they need recorded, errors as sentences."""

from __future__ import annotations

import logging
from typing import Any

from explorer.app.messages import head_count
from explorer.app.runs import Run
from explorer.vocabulary import UnknownValue
from explorer.vocabulary.formatting import numbered
from explorer.widgets.views import router as views_router
from explorer.widgets.views import state as views_state
from explorer.widgets.views import tensor as views_part
from explorer.widgets.views.code import Intervention
from explorer.widgets.views.selection import Selection, attends, mixer_words, recurrence_of

log = logging.getLogger(__name__)


def clamped(run: Run, chosen: Selection) -> Selection:
    """``chosen`` with everything in range; token -1 is the last."""
    tokens = len(run.tokens)
    block = min(max(chosen.block, 0), run.num_layers - 1)
    token = tokens - 1 if chosen.token < 0 else min(chosen.token, tokens - 1)
    head = min(max(chosen.head, 0), max(head_count(run, block), 1) - 1)
    return chosen.moved(block=block, token=token, head=head)


def looked_at(run: Run, chosen: Selection, tab: str) -> list[tuple[str, int | None]]:
    """The values, with their blocks, that a tab shows of a selection and a run may have left out."""
    block = chosen.block
    if tab == "tensor" and chosen.part:
        try:
            value = views_part.value_of(chosen.part, run.mixers[block])
        except UnknownValue:
            return []
        return [(chosen.part, None if value.host == "model" else block)]
    if tab == "attention" and attends(run, block):
        return [
            (name, block)
            for name in (f"attention_{chosen.pattern}", "attention_queries", "attention_keys")
        ]
    host = recurrence_of(run, block) if tab == "state" else None
    return [(f"{host}.state_attention", block)] if host and views_state.by_head(host) else []


def impossible(run: Run | None, one: Intervention) -> str | None:
    """Why an intervention cannot be made on the model of a run, in one sentence; None where it can."""
    if run is None:
        return "Run a prompt first: an intervention changes a run."
    if one.kind not in ("expert", "head") or not 0 <= one.layer < run.num_layers:
        return f"There is no block {one.layer}: this model has {numbered('block', run.num_layers)}."
    if one.kind == "expert":
        if (reason := views_router.refusal(run, one.layer)) is not None:
            return f"Block {one.layer} has no expert to ablate: {reason.reason}"
        count, what = views_router.num_experts(run, one.layer), "expert"
    else:
        first, *others = run.heads[one.layer] or [""]
        if one.host not in ("", *others):
            return f"Block {one.layer} has no second mixer called {one.host}."
        count, what = run.heads[one.layer].get(one.host or first, 0), "head"
        if not count:
            return f"Block {one.layer} has no head to zero: {mixer_words(run, one.layer)}."
    if not 0 <= one.index < count:
        return f"Block {one.layer} has {numbered(what, count)}, not {one.index}."
    return None


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
