"""What a trained specimen has learned, measured on chapters it was not trained on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from explorer.specimens.training import heads, sink_shares
from explorer.specimens.training.batches import FIRST_WORD_ID

WINDOW = 192
ROWS_AT_ONCE = 16
SEGMENT, SEGMENTS = 48, 64
HEAD_ROWS = 16
SHUFFLES = 5


@torch.no_grad()
def all_figures(
    model: PreTrainedModel, untrained: PreTrainedModel, seen: Tensor, unseen: Tensor, seed: int
) -> dict[str, Any]:
    """Every figure, as plain numbers. ``seen`` and ``unseen`` are streams of token ids, [tokens].

    ``untrained`` is the same model before training: a router of random numbers also follows the
    token, so its figure stands beside the trained one's. Both are left in evaluation mode, eager.
    """
    for one in (model, untrained):
        one.eval().set_attn_implementation("eager")
    windows = unseen[: len(unseen) // WINDOW * WINDOW].view(-1, WINDOW)
    from_text = unseen[: SEGMENTS * SEGMENT].view(SEGMENTS, SEGMENT)
    from_chance = random_segments(model.config.vocab_size, seed)
    sinks = sink_shares.figures(model, untrained, windows[:HEAD_ROWS], from_chance[:HEAD_ROWS])
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "text": text_figures(model, windows, seen),
        "router": router_figures(model, windows, seed)
        | {"untrained_mean_ratio": router_figures(untrained, windows, seed)["mean_ratio"]},
        "repetition": {
            "segment_tokens": SEGMENT,
            "segments": SEGMENTS,
            "text": repetition_figures(model, from_text),
            "random": repetition_figures(model, from_chance),
        },
        "heads": heads.figures(model, windows[:HEAD_ROWS], from_chance[:HEAD_ROWS]),
        **({"sinks": sinks} if sinks else {}),
        "versions": versions(),
    }


def random_segments(vocab_size: int, seed: int) -> Tensor:
    """The segments of tokens drawn evenly that repetition is measured on: [SEGMENTS, SEGMENT]."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randint(FIRST_WORD_ID, vocab_size, (SEGMENTS, SEGMENT), generator=generator)


def versions() -> dict[str, str]:
    return {
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }


def text_figures(model: PreTrainedModel, windows: Tensor, seen: Tensor) -> dict[str, Any]:
    """Loss in nats per token on ``windows`` [rows, seq], beside that of the unigram counts."""
    losses = torch.cat(
        [next_token_losses(model, rows).flatten() for rows in windows.split(ROWS_AT_ONCE)]
    )
    targets = windows[:, 1:].flatten()
    size = model.config.vocab_size
    return {
        "held_out_tokens": windows.numel(),
        "window_tokens": windows.shape[1],
        "loss_nats_per_token": _short(losses.mean()),
        "unigram_nats_per_token": _short(
            cross_entropy(unigram(seen, size).expand(len(targets), size), targets)
        ),
        "uniform_nats_per_token": _short(math.log(size)),
    }


def unigram(stream: Tensor, size: int) -> Tensor:
    """Log probability of every token id by its count in ``stream``, one added to each: [size]."""
    counts = torch.bincount(stream, minlength=size).float() + 1
    return (counts / counts.sum()).log()


def next_token_losses(model: PreTrainedModel, rows: Tensor) -> Tensor:
    """Loss of every next token, in nats: [batch, seq - 1] for ``rows`` [batch, seq]."""
    logits = model(rows, use_cache=False).logits
    return cross_entropy(logits[:, :-1].transpose(1, 2), rows[:, 1:], reduction="none")


def repetition_figures(model: PreTrainedModel, segments: Tensor) -> dict[str, float]:
    """Mean loss inside the first and inside the second copy of ``segments`` [rows, seq].

    The first token of a copy is left out of both: nothing announces a second copy.
    """
    size = segments.shape[1]
    losses = next_token_losses(model, torch.cat([segments, segments], dim=1))
    first, second = losses[:, : size - 1].mean(), losses[:, size:].mean()
    return {
        "first_copy": _short(first),
        "second_copy": _short(second),
        "lower_by": _short(first - second),
    }


def router_figures(model: PreTrainedModel, windows: Tensor, seed: int) -> dict[str, Any]:
    """Mutual information of a token's id and its first expert, by layer; and of shuffled tokens."""
    generator = torch.Generator().manual_seed(seed)
    choices = _routing(model, windows)
    layers = [
        _layer_figures(layer, logits, windows, model.config, generator) for layer, logits in choices
    ]
    ratios = [layer["ratio"] for layer in layers]
    return {
        "tokens": windows.numel(),
        "shuffles": SHUFFLES,
        "layers": layers,
        "mean_ratio": _short(sum(ratios) / len(ratios)),
        "best_ratio": max(ratios),
        "worst_ratio": min(ratios),
    }


def _routing(model: PreTrainedModel, windows: Tensor) -> Iterator[tuple[int, Tensor]]:
    parts = [
        model(rows, use_cache=False, output_router_logits=True).router_logits
        for rows in windows.split(ROWS_AT_ONCE)
    ]
    return ((layer, torch.cat(logits)) for layer, logits in enumerate(zip(*parts, strict=True)))


def _layer_figures(
    layer: int, logits: Tensor, windows: Tensor, config: Any, generator: torch.Generator
) -> dict[str, Any]:
    tokens, first = windows.flatten(), logits.argmax(-1)
    found = mutual_information(tokens, first)
    shuffled = [
        mutual_information(tokens, first[torch.randperm(len(first), generator=generator)])
        for _ in range(SHUFFLES)
    ]
    chance = sum(shuffled) / SHUFFLES
    chosen = logits.topk(config.num_experts_per_tok, dim=-1).indices.flatten()
    load = torch.bincount(chosen, minlength=config.num_experts) / len(chosen)
    return {
        "layer": layer,
        "mutual_information": _short(found),
        "shuffled": _short(chance),
        "above_chance": _short(found - chance),
        "ratio": _short(found / chance, 2),
        "first_expert_entropy": _short(entropy(torch.bincount(first))),
        "load": [_short(share) for share in load],
    }


def mutual_information(left: Tensor, right: Tensor) -> float:
    """Mutual information in nats of two lists of small integers of one length, from counts.

    Counts of a finite sample give more than nothing even where there is nothing, which is why a
    figure is always shown beside that of the same list shuffled.
    """
    width = int(right.max()) + 1
    joint = torch.bincount(left * width + right)
    return entropy(torch.bincount(left)) + entropy(torch.bincount(right)) - entropy(joint)


def entropy(counts: Tensor) -> float:
    """Entropy in nats of the distribution that ``counts`` [kinds] stand for."""
    share = counts[counts > 0].double()
    share = share / share.sum()
    return float(-(share * share.log()).sum())


def _short(number: Tensor | float, digits: int = 4) -> float:
    return round(float(number), digits)
