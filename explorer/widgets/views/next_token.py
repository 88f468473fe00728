"""The next-token distribution: before, after, and the difference an intervention makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from explorer.widgets.views.picture import Curve, Curves, Refusal
from explorer.widgets.views.selection import Recorded, Selection, token_axis

#: Name of the logits ``[vocab_size]`` of one token, with its position in place of a layer: recorded
#: where the logits of all tokens would not fit in memory.
LOGITS_OF_TOKEN = "logits of token"


@dataclass(frozen=True)
class TokenRow:
    """One vocabulary entry with its probability and logit, before and, if edited, after."""

    token_id: int
    text: str
    before: float
    logit_before: float
    after: float | None = None
    logit_after: float | None = None

    @property
    def difference(self) -> float | None:
        return None if self.after is None else self.after - self.before


def logits_at(rec: Recorded, position: int) -> torch.Tensor | None:
    """``[vocab_size]`` logits of the token after ``position`` in float32, None where they are not
    recorded yet.
    """
    if "logits" in rec:
        return rec["logits"][0, position].float()
    return rec[LOGITS_OF_TOKEN, position].float() if (LOGITS_OF_TOKEN, position) in rec else None


def top_tokens(
    before: Recorded,
    after: Recorded | None,
    selection: Selection,
    decode: Callable[[int], str],
    count: int = 10,
) -> tuple[TokenRow, ...]:
    """The likeliest next tokens at the selected position, of either run, ordered by the first.

    ``decode`` turns a vocabulary entry into text. Tokens that are near the top in only
    one of the runs are in the table too: they are what the intervention moved.
    Empty while the logits of the position are not recorded yet.
    """
    logits = logits_at(before, selection.token)
    logits_after = None if after is None else logits_at(after, selection.token)
    if logits is None or (after is not None and logits_after is None):
        return ()
    first = logits.log_softmax(-1)
    second = None if logits_after is None else logits_after.log_softmax(-1)
    ids = first.topk(min(count, len(first))).indices.tolist()
    if second is not None:
        ids += [
            token
            for token in second.topk(min(count, len(second))).indices.tolist()
            if token not in ids
        ]
    return tuple(
        TokenRow(
            token,
            decode(token),
            float(first[token].exp()),
            float(logits[token]),
            None if second is None else float(second[token].exp()),
            None if logits_after is None else float(logits_after[token]),
        )
        for token in ids
    )


def divergence(before: Recorded, after: Recorded) -> np.ndarray:
    """KL(before ‖ after) of the next-token distribution at every position, in nats: ``[seq]``.

    Computed a few positions at a time: both distributions of a long prompt may not fit in memory.
    """
    first, second = before["logits"][0], after["logits"][0]
    parts = []
    for start in range(0, first.shape[0], 64):
        parts.append(_kl(*(x[start : start + 64].float() for x in (first, second))))
    return torch.cat(parts).numpy()


def _kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """KL(first ‖ second) ``[…]`` in nats of logits ``[… vocab_size]``."""
    p, q = first.log_softmax(-1), second.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp(min=0)


def divergence_by_position(before: Recorded, after: Recorded | None) -> Curves | Refusal:
    """How far the intervention moved the prediction at every position."""
    if after is None:
        return Refusal(
            "Switch an intervention on and run it: this shows how far it moves every position."
        )
    if "logits" not in before or "logits" not in after:
        return Refusal(
            "The logits of all tokens would not fit beside the rest of so long a run: "
            "the table above compares the selected token."
        )
    values = divergence(before, after)
    return Curves(
        title="KL(before ‖ after) of the next-token distribution",
        x=token_axis(before),
        unit="nats",
        lines=(Curve("KL", values, "stream"),),
        note=f"Largest at token {int(values.argmax())}: {values.max():.3g} nats; "
        f"mean {values.mean():.3g}.",
    )


def summary(before: Recorded, after: Recorded, selection: Selection) -> dict[str, float | None]:
    """The numbers of a comparison: KL at the selected token, mean KL, largest KL and its position;
    None where unknown.
    """
    if "logits" in before and "logits" in after:
        values = divergence(before, after)
        return {
            "at_token": float(values[selection.token]),
            "mean": float(values.mean()),
            "largest": float(values.max()),
            "where": int(values.argmax()),
        }
    first, second = (logits_at(rec, selection.token) for rec in (before, after))
    at = None if first is None or second is None else float(_kl(first, second))
    return {"at_token": at, "mean": None, "largest": None, "where": None}
