"""Values that are computed from other values of the same host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from explorer.model.errors import Unavailable
from explorer.recurrence.replay import Replay


def implied_attention(replay: Replay, expression: str) -> torch.Tensor:
    """Return the implied attention [batch heads query key] of a recurrence.

    Raises Unavailable where a state entered the call. ``expression`` names the value in the
    message.
    """
    if not replay.fresh:
        raise Unavailable(
            f"{expression} is unavailable: this call continues from a cached state, and the "
            "implied attention is that of a fresh prompt. Trace the whole sequence at once."
        )
    return replay.state_attention()


def replayed_value(name: str, replay: Replay, expression: str) -> torch.Tensor:
    """Return ``states`` or ``state_attention``, by running a recurrence again."""
    return replay.states() if name == "states" else implied_attention(replay, expression)


def router_margin(scores: torch.Tensor, sizes: dict[str, int]) -> torch.Tensor:
    """Return the last chosen expert's score minus the first rejected one's: [batch seq]."""
    best = scores.topk(sizes["top_k"] + 1, dim=-1).values
    return best[..., -2] - best[..., -1]


#: How a value is computed from the value it derives from and the sizes of their host.
DERIVATIONS: dict[str, Callable[[torch.Tensor, dict[str, int]], Any]] = {
    "router_margin": router_margin,
    "next_token_probs": lambda logits, sizes: logits[:, -1].softmax(-1),
    "input_size": lambda ids, sizes: tuple(ids.shape),
}
