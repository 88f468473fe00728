"""The next-token distribution: before, after, and the difference an intervention makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from explorer.widgets.views.picture import Curve, Curves, Refusal
from explorer.widgets.views.selection import Recorded, Selection, token_axis

#: Where the logits ``[vocab_size]`` of one token are, by its position, when those of all tokens would not fit.
ROW = "logits of token"


@dataclass(frozen=True)
class TokenRow:
    """One vocabulary entry with its probability and logit, before and (where there is one) after."""

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
    """``[vocab_size]`` logits of the token after ``position`` in float32, None while they are not there."""
    if "logits" in rec:
        return rec["logits"][0, position].float()
    return rec[ROW, position].float() if (ROW, position) in rec else None


def top_tokens(
    before: Recorded,
    after: Recorded | None,
    chosen: Selection,
    decode: Callable[[int], str],
    count: int = 10,
) -> tuple[TokenRow, ...]:
    """The likeliest next tokens at the chosen position, those of either run, likeliest before first.

    ``decode`` turns a vocabulary entry into text. Tokens that are near the top in only
    one of the runs are in the table too: they are what the intervention moved.
    Empty while the logits of the position are not there.
    """
    logits = [None if rec is None else logits_at(rec, chosen.token) for rec in (before, after)]
    if logits[0] is None or (after is not None and logits[1] is None):
        return ()
    first, second = (None if one is None else one.log_softmax(-1) for one in logits)
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
            float(logits[0][token]),
            None if second is None else float(second[token].exp()),
            None if logits[1] is None else float(logits[1][token]),
        )
        for token in ids
    )


def divergence(before: Recorded, after: Recorded) -> np.ndarray:
    """KL(before ‖ after) of the next-token distribution at every position, in nats: ``[seq]``.

    Worked through a few positions at a time, so that a large vocabulary does not
    hold both distributions of a long prompt at once.
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
            "the table above compares the chosen token."
        )
    values = divergence(before, after)
    return Curves(
        title="KL(before ‖ after) of the next-token distribution",
        x=token_axis(before),
        unit="nats",
        lines=(Curve("KL", values, "stream"),),
        note=f"Largest at token {int(values.argmax())}: {values.max():.3g} nats; mean {values.mean():.3g}.",
    )


def summary(before: Recorded, after: Recorded, chosen: Selection) -> dict[str, float | None]:
    """The numbers of a comparison: KL at the chosen token, mean and largest KL, and where; None where unknown."""
    if "logits" in before and "logits" in after:
        values = divergence(before, after)
        return {
            "at_token": float(values[chosen.token]),
            "mean": float(values.mean()),
            "largest": float(values.max()),
            "where": int(values.argmax()),
        }
    rows = [logits_at(rec, chosen.token) for rec in (before, after)]
    at = None if any(row is None for row in rows) else float(_kl(*rows))
    return {"at_token": at, "mean": None, "largest": None, "where": None}
