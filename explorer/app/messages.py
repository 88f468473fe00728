"""Texts and numbers for the page, as plain data; the page inserts them as text, never as markup."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from explorer import vocabulary
from explorer.app.runs import Run
from explorer.vocabulary import HOSTS
from explorer.vocabulary.formatting import ranges, size_in_bytes
from explorer.widgets.views import attention as views_attention
from explorer.widgets.views import code as code
from explorer.widgets.views import next_token as views_next
from explorer.widgets.views import residual as views_residual
from explorer.widgets.views import router as views_router
from explorer.widgets.views import tensor as views_tensor
from explorer.widgets.views.labels import number, shown_token
from explorer.widgets.views.picture import Refusal
from explorer.widgets.views.selection import Selection


def run_summary(model: Any, run: Run) -> dict[str, Any]:
    """Summarise a finished run: the model, its tokens, its blocks, its cost."""
    return {
        "source": run.origin.source,
        "prompt": run.origin.prompt,
        "label": model.label,
        "family": model.family,
        "weights": run.recording.weights,
        "tokens": [shown_token(token, 40) for token in run.tokens],
        "mixers": [[HOSTS[mixer].attribute for mixer in mixers] for mixers in run.mixers],
        "experts": [expert_count(run, layer) for layer in range(run.num_layers)],
        "heads": [dict(heads) for heads in run.heads],
        "status": status_line(run),
    }


def status_line(run: Run) -> list[str]:
    """Return the status line: tokens, seconds, bytes of the recording and of the process."""
    return [
        f"{len(run.tokens)} tokens",
        f"{run.recording.seconds:.2g} s for the forward",
        f"recording {size_in_bytes(run.bytes)}",
        f"process {size_in_bytes(process_bytes())}",
    ]


def process_bytes() -> int:
    """Return the memory of this process in bytes, its peak where the system gives no current
    figure.
    """
    statm = Path("/proc/self/statm")
    if statm.exists():
        import resource

        return int(statm.read_text().split()[1]) * resource.getpagesize()
    try:
        import resource
    except ImportError:  # no such figure on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def first_tab(run: Run) -> str:
    """Return the tab a page opens on: the first of router, state and attention the model has."""
    if any(expert_count(run, layer) for layer in range(run.num_layers)):
        return "router"
    return (
        "state"
        if any(mixer in vocabulary.RECURRENT for mixers in run.mixers for mixer in mixers)
        else "attention"
    )


def expert_count(run: Run, layer: int) -> int:
    """Return how many experts a block routes to, 0 where it has no router."""
    return 0 if views_router.refusal(run, layer) else views_router.num_experts(run, layer)


def head_count(run: Run, layer: int) -> int:
    """Return the largest number of heads (or channels with a state) of a block's mixers."""
    return max(run.heads[layer].values(), default=0)


def router_summary(run: Run, selection: Selection) -> dict[str, Any] | None:
    """Return the selected token's experts with their weights, and the experts nobody chose."""
    if views_router.refusal(run, selection.block) is not None:
        return None
    count = views_router.num_experts(run, selection.block)
    return {
        "slots": [
            {"expert": slot.expert, "weight": number(slot.weight)}
            for slot in views_router.slots_of(run, selection)
        ],
        "unused": ranges(views_router.unused_experts(run, selection.block)),
        "count": count,
        "unused_count": len(views_router.unused_experts(run, selection.block)),
    }


def attention_summary(run: Run, selection: Selection) -> dict[str, Any] | None:
    """Return the keys that the selected token attends to most in the selected head."""
    if views_attention.refusal(run, selection) is not None:
        return None
    return {
        "strongest": [
            {"token": key, "number": number(value)}
            for key, value in views_attention.most_read_keys(run, selection)
        ]
    }


def comparison_summary(
    before: Run,
    after: Run | None,
    selection: Selection,
    decode: Callable[[int], str],
    count: int = 10,
) -> dict[str, Any]:
    """Return the next-token table at the selected token, with differences under interventions."""
    rows = views_next.top_tokens(before, after, selection, decode, count)
    message: dict[str, Any] = {
        "rows": [
            {
                "token": shown_token(row.text, 24),
                "before": row.before,
                "before_text": percent(row.before),
                "logit": number(row.logit_before),
                **(
                    {}
                    if row.after is None
                    else {
                        "after": row.after,
                        "after_text": percent(row.after),
                        "difference": row.difference,
                        "difference_text": percentage_points(row.difference),
                        "logit_after": None if row.logit_after is None else number(row.logit_after),
                    }
                ),
            }
            for row in rows
        ]
    }
    if after is not None:
        numbers = views_next.summary(before, after, selection)
        message["kl"] = {
            key: None if value is None else value if key == "where" else number(value)
            for key, value in numbers.items()
        }
        message["changed"] = [one.words for one in after.origin.interventions]
    return message


def percent(value: float) -> str:
    """Format a probability: 41.2 %, 0.031 %."""
    return f"{100 * value:.3g} %" if value >= 1e-5 else "< 0.001 %"


def percentage_points(value: float | None) -> str:
    """Format a difference of probabilities in percentage points, always with its sign."""
    points = 100 * (value or 0.0)
    if abs(points) < 1e-3:
        return "0"
    return f"{'+' if points > 0 else '−'}{abs(points):.3g}"


def diagram_marks(run: Run, selection: Selection) -> dict[str, Any]:
    """Return the diagram's live marks: norms of the addends, and the selected token's experts."""
    marks: dict[str, Any] = {
        "block": selection.block,
        "addends": views_residual.line_weights(run, selection),
    }
    if views_router.refusal(run, selection.block) is None:
        marks["experts"] = [slot.expert for slot in views_router.slots_of(run, selection)]
        marks["expert_count"] = views_router.num_experts(run, selection.block)
    return marks


def tensor_summary(run: Run, selection: Selection) -> dict[str, Any]:
    """Describe the selected value: what it is, its statistics, and the code that reads it."""
    try:
        value = views_tensor.value_of(selection.part, run.mixers[selection.block])
    except vocabulary.UnknownValue as error:
        return {"name": selection.part, "refusal": str(error)}
    layer = None if value.host == "model" else selection.block
    path = HOSTS[value.host].path.replace("[i]", f"[{selection.block}]")
    message: dict[str, Any] = {
        "name": value.name,
        "expression": f"{path}.{value.name}",
        "layout": value.typed,
        "meaning": value.meaning,
        "refusal": None,
    }
    if (selection.part, layer) not in run and run.can_be_recorded(selection.part, layer):
        return message | {"refusal": "Being recorded …"}
    tensor = views_tensor.value_to_show(run, selection, selection.part)
    if (selection.part, layer) in run:
        message["code"] = code.value_cell(run.origin, selection.part, layer, value.typed)
    if isinstance(tensor, Refusal):
        return message | {"refusal": tensor.reason}
    message.setdefault("code", code.state_matrix(run, selection) if value.name == "state" else None)
    summary = views_tensor.summarise(tensor, value)
    return message | {
        "facts": [
            ["shape", " × ".join(map(str, summary.shape)) or "one number"],
            ["axes", " ".join(summary.axes)],
            ["dtype", summary.dtype],
            ["minimum", number(summary.minimum)],
            ["mean", number(summary.mean)],
            ["maximum", number(summary.maximum)],
            *([] if summary.finite else [["masked", "left out of the three"]]),
        ]
    }
