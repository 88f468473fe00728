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

from explorer.specimens.training.batches import FIRST_TEXT_ID
from explorer.specimens.training.head_metrics import head_metrics
from explorer.specimens.training.sink_metrics import sink_metrics

WINDOW_LENGTH = 192
BATCH_SIZE = 16
SEGMENT_LENGTH, SEGMENT_COUNT = 48, 64
PATTERN_SEQUENCES = 16  # how many sequences attention patterns are measured on
SHUFFLES = 5


@torch.no_grad()
def all_metrics(
    model: PreTrainedModel,
    untrained: PreTrainedModel,
    trained_on: Tensor,
    held_out: Tensor,
    seed: int,
) -> dict[str, Any]:
    """Return every metric, as JSON data.

    ``trained_on`` and ``held_out`` are streams of token ids [tokens]. ``untrained`` is the model
    before training, a baseline: a random router also depends on the token. Both models are set to
    evaluation mode and eager attention.
    """
    for one in (model, untrained):
        one.eval().set_attn_implementation("eager")
    windows = held_out[: len(held_out) // WINDOW_LENGTH * WINDOW_LENGTH].view(-1, WINDOW_LENGTH)
    text = held_out[: SEGMENT_COUNT * SEGMENT_LENGTH].view(SEGMENT_COUNT, SEGMENT_LENGTH)
    random = random_segments(model.config.vocab_size, seed)
    of_patterns = windows[:PATTERN_SEQUENCES], random[:PATTERN_SEQUENCES]
    sinks = sink_metrics(model, untrained, *of_patterns)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "text": text_metrics(model, windows, trained_on),
        "router": router_metrics(model, windows, seed)
        | {"untrained_mean_ratio": router_metrics(untrained, windows, seed)["mean_ratio"]},
        "repetition": {
            "segment_tokens": SEGMENT_LENGTH,
            "segments": SEGMENT_COUNT,
            "text": repetition_metrics(model, text),
            "random": repetition_metrics(model, random),
        },
        "heads": head_metrics(model, *of_patterns),
        **({"sinks": sinks} if sinks else {}),
        "versions": versions(),
    }


def random_segments(vocab_size: int, seed: int) -> Tensor:
    """Return the segments of random tokens that copying is measured on: [batch, seq]."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randint(
        FIRST_TEXT_ID, vocab_size, (SEGMENT_COUNT, SEGMENT_LENGTH), generator=generator
    )


def versions() -> dict[str, str]:
    """Return the versions of the packages that the metrics depend on."""
    return {
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }


def text_metrics(model: PreTrainedModel, windows: Tensor, trained_on: Tensor) -> dict[str, Any]:
    """Return the mean loss on ``windows`` [batch, seq], in nats per token, beside two baselines:
    token frequencies in ``trained_on`` [tokens], and the uniform distribution.
    """
    losses = torch.cat(
        [next_token_losses(model, rows).flatten() for rows in windows.split(BATCH_SIZE)]
    )
    targets = windows[:, 1:].flatten()
    size = model.config.vocab_size
    return {
        "held_out_tokens": windows.numel(),
        "window_tokens": windows.shape[1],
        "loss_nats_per_token": _rounded(losses.mean()),
        "unigram_nats_per_token": _rounded(
            cross_entropy(unigram_log_probs(trained_on, size).expand(len(targets), size), targets)
        ),
        "uniform_nats_per_token": _rounded(math.log(size)),
    }


def unigram_log_probs(stream: Tensor, vocab_size: int) -> Tensor:
    """Return the log probability [vocab_size] of each id by its count in ``stream`` [tokens].

    One is added to each count.
    """
    counts = torch.bincount(stream, minlength=vocab_size).float() + 1
    return (counts / counts.sum()).log()


def next_token_losses(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the loss of every next token in nats, [batch, seq - 1], for ``ids`` [batch, seq]."""
    logits = model(ids, use_cache=False).logits
    return cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


def repetition_metrics(model: PreTrainedModel, segments: Tensor) -> dict[str, float]:
    """Return the mean loss in the first and in the second copy of ``segments`` [batch, seq].

    Each copy's first token is left out: the model cannot know that a second copy begins.
    """
    size = segments.shape[1]
    losses = next_token_losses(model, torch.cat([segments, segments], dim=1))
    first, second = losses[:, : size - 1].mean(), losses[:, size:].mean()
    return {
        "first_copy": _rounded(first),
        "second_copy": _rounded(second),
        "lower_by": _rounded(first - second),
    }


def router_metrics(model: PreTrainedModel, windows: Tensor, seed: int) -> dict[str, Any]:
    """Return, by layer, the mutual information of a token's id and its top-1 expert on ``windows``
    [batch, seq], beside that of shuffled choices.
    """
    generator = torch.Generator().manual_seed(seed)
    layers = [
        _layer_metrics(layer, logits, windows, model.config, generator)
        for layer, logits in _router_logits(model, windows)
    ]
    ratios = [layer["ratio"] for layer in layers]
    return {
        "tokens": windows.numel(),
        "shuffles": SHUFFLES,
        "layers": layers,
        "mean_ratio": _rounded(sum(ratios) / len(ratios)),
        "best_ratio": max(ratios),
        "worst_ratio": min(ratios),
    }


def _router_logits(model: PreTrainedModel, windows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield each layer's index and its router logits [tokens, num_experts]."""
    batches = [
        model(rows, use_cache=False, output_router_logits=True).router_logits
        for rows in windows.split(BATCH_SIZE)
    ]
    return ((layer, torch.cat(logits)) for layer, logits in enumerate(zip(*batches, strict=True)))


def _layer_metrics(
    layer: int, logits: Tensor, windows: Tensor, config: Any, generator: torch.Generator
) -> dict[str, Any]:
    """Return the metrics of one layer's router ``logits`` [tokens, num_experts]."""
    tokens, top_expert = windows.flatten(), logits.argmax(-1)
    found = mutual_information(tokens, top_expert)
    shuffled = [
        mutual_information(tokens, top_expert[torch.randperm(len(top_expert), generator=generator)])
        for _ in range(SHUFFLES)
    ]
    chance = sum(shuffled) / SHUFFLES
    chosen = logits.topk(config.num_experts_per_tok, dim=-1).indices.flatten()
    load = torch.bincount(chosen, minlength=config.num_experts) / len(chosen)
    return {
        "layer": layer,
        "mutual_information": _rounded(found),
        "shuffled": _rounded(chance),
        "above_chance": _rounded(found - chance),
        "ratio": _rounded(found / chance, 2),
        "first_expert_entropy": _rounded(entropy(torch.bincount(top_expert))),
        "load": [_rounded(share) for share in load],
    }


def mutual_information(left: Tensor, right: Tensor) -> float:
    """Return the mutual information in nats of ``left`` and ``right`` [samples], from counts.

    Both hold small non-negative integers. The estimate from a finite sample is biased upwards,
    also for independent variables: compare it with that of one side shuffled.
    """
    width = int(right.max()) + 1
    joint = torch.bincount(left * width + right)
    return entropy(torch.bincount(left)) + entropy(torch.bincount(right)) - entropy(joint)


def entropy(counts: Tensor) -> float:
    """Return the entropy in nats of the distribution proportional to ``counts`` [kinds]."""
    share = counts[counts > 0].double()
    share = share / share.sum()
    return float(-(share * share.log()).sum())


def _rounded(number: Tensor | float, digits: int = 4) -> float:
    return round(float(number), digits)
