"""Requests of a page: parsing, ranges, checks against the run they are about, and error sentences.

A page is not trusted: what is no request is ignored, numbers are coerced, lists are read entry by
entry.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from explorer.app.cards import TABS
from explorer.app.messages import head_count
from explorer.app.runs import Run
from explorer.vocabulary import UnknownValue
from explorer.vocabulary.formatting import numbered
from explorer.widgets.views import attention as views_attention
from explorer.widgets.views import router as views_router
from explorer.widgets.views import state as views_state
from explorer.widgets.views import tensor as views_tensor
from explorer.widgets.views.code import Intervention
from explorer.widgets.views.selection import (
    Selection,
    describe_mixers,
    has_attention,
    recurrence_of,
)

log = logging.getLogger(__name__)

#: The most a page may ask for: characters of a model's name or path and of a prompt, switches.
_LONGEST_NAME, _LONGEST_PROMPT, _MOST_SWITCHES = 4_000, 400_000, 200

#: What a selection may be set to, where it is one of a few.
_CHOICES = {"pattern": tuple(views_attention.CHOICES), "router": tuple(views_router.CHOICES)}


@dataclass(frozen=True)
class Hello:
    """The first message of a page: its theme, and what its address asks for (empty or None:
    nothing).
    """

    theme: str
    model: str
    prompt: str
    selection: Selection
    tab: str | None


@dataclass(frozen=True)
class SetTheme:
    """Change the theme: "light" or "dark"."""

    theme: str


@dataclass(frozen=True)
class RunPrompt:
    """Load a model and run a prompt."""

    model: str
    prompt: str


@dataclass(frozen=True)
class Cancel:
    """Stop the job that is running for the page."""


@dataclass(frozen=True)
class Select:
    """Changes of the selection and of the tab.

    ``changes`` may hold ``block``, ``token``, ``head``, ``pattern``, ``router`` and ``part``.
    """

    changes: dict[str, Any] = field(default_factory=dict)
    tab: str | None = None
    seq: int | None = None


@dataclass(frozen=True)
class Intervene:
    """All switches of the page, each on or off."""

    switches: tuple[tuple[Intervention, bool], ...]


@dataclass(frozen=True)
class ShowRun:
    """Which run the panels show: with the interventions (``after``) or without."""

    after: bool
    seq: int | None = None


@dataclass(frozen=True)
class TooMuch:
    """A request above the limits; the sentence says which."""

    sentence: str


Request = Hello | SetTheme | RunPrompt | Cancel | Select | Intervene | ShowRun | TooMuch


def parse(message: object) -> Request | None:
    """Return the request in a message of the page, None where it holds none."""
    if not isinstance(message, dict):
        return None
    if (sentence := _excess(message)) is not None:
        return TooMuch(sentence)
    match message.get("do"):
        case "hello":
            return _hello(message)
        case "theme":
            return SetTheme(_theme(message))
        case "run":
            return RunPrompt(str(message.get("model") or ""), str(message.get("prompt") or ""))
        case "cancel":
            return Cancel()
        case "select":
            return _select(message)
        case "intervene":
            return _intervene(message.get("list"))
        case "shown":
            return ShowRun(message.get("shown") == "after", message.get("seq"))
    return None


def _excess(message: dict[str, Any]) -> str | None:
    """Return a sentence where a message asks for more than a page may."""
    view = message.get("view")
    source = view if isinstance(view, dict) else message
    if (count := len(str(source.get("model") or ""))) > _LONGEST_NAME:
        return f"The model's name has {count:,} characters; the most is {_LONGEST_NAME:,}."
    if (count := len(str(source.get("prompt") or ""))) > _LONGEST_PROMPT:
        return f"The prompt has {count:,} characters; the most is {_LONGEST_PROMPT:,}."
    rows = message.get("list")
    if isinstance(rows, list) and len(rows) > _MOST_SWITCHES:
        return f"There are {len(rows):,} interventions; the most is {_MOST_SWITCHES}."
    return None


def _theme(message: dict[str, Any]) -> str:
    return "dark" if message.get("theme") == "dark" else "light"


def _hello(message: dict[str, Any]) -> Hello:
    view = message.get("view")
    view = view if isinstance(view, dict) else {}
    selection = Selection(
        **{name: to_int(view.get(name), 0) for name in ("block", "token", "head")}
    )
    if "token" not in view:
        selection = selection.moved(token=-1)
    if isinstance(view.get("part"), str):
        selection = selection.moved(part=view["part"])
    tab = view.get("tab") if view.get("tab") in TABS else None
    model, prompt = str(view.get("model") or ""), str(view.get("prompt") or "")
    return Hello(_theme(message), model, prompt, selection, tab)


def _select(message: dict[str, Any]) -> Select:
    numbers = {
        name: to_int(message[name], None) for name in ("block", "token", "head") if name in message
    }
    changes: dict[str, Any] = {
        name: number for name, number in numbers.items() if number is not None
    }
    changes |= {
        name: message[name] for name, allowed in _CHOICES.items() if message.get(name) in allowed
    }
    if "part" in message:
        changes["part"] = str(message["part"] or "")
    tab = message["tab"] if message.get("tab") in TABS else None
    return Select(changes, tab, message.get("seq"))


def _intervene(rows: object) -> Intervene | None:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return None
    return Intervene(
        tuple(
            (
                Intervention(
                    str(row.get("kind")),
                    to_int(row.get("layer"), -1),
                    to_int(row.get("index"), -1),
                    str(row.get("host") or ""),
                ),
                bool(row.get("on")),
            )
            for row in rows
        )
    )


def clamp_selection(run: Run, selection: Selection) -> Selection:
    """Return the selection with everything in range; token -1 means the last."""
    tokens = len(run.tokens)
    block = min(max(selection.block, 0), run.num_layers - 1)
    token = tokens - 1 if selection.token < 0 else min(selection.token, tokens - 1)
    head = min(max(selection.head, 0), max(head_count(run, block), 1) - 1)
    return selection.moved(block=block, token=token, head=head)


def values_shown(run: Run, selection: Selection, tab: str) -> list[tuple[str, int | None]]:
    """Return the values, with their blocks, that a tab shows and a run may have left out."""
    block = selection.block
    if tab == "tensor" and selection.part:
        try:
            value = views_tensor.value_of(selection.part, run.mixers[block])
        except UnknownValue:
            return []
        return [(selection.part, None if value.host == "model" else block)]
    if tab == "attention" and has_attention(run, block):
        return [
            (name, block)
            for name in (f"attention_{selection.pattern}", "attention_queries", "attention_keys")
        ]
    host = recurrence_of(run, block) if tab == "state" else None
    return [(f"{host}.state_attention", block)] if host and views_state.by_head(host) else []


def intervention_problem(run: Run | None, one: Intervention) -> str | None:
    """Return why an intervention is impossible on a run's model, None where it is possible."""
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
            return f"Block {one.layer} has no head to zero: {describe_mixers(run, one.layer)}."
    if not 0 <= one.index < count:
        return f"Block {one.layer} has {numbered(what, count)}, not {one.index}."
    return None


def error_sentence(error: BaseException) -> str:
    """Return an error as one sentence: our own as they are, others with their type."""
    text = str(error).strip()
    if isinstance(error, (ValueError, OSError)) and text:
        return text
    log.error("a job failed", exc_info=error)
    return f"That did not work: {type(error).__name__}: {text or 'no message'}."


def to_int(value: Any, otherwise: Any) -> Any:
    """Return a whole number from the page, or ``otherwise``."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return otherwise
