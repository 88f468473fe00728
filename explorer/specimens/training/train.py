"""Train a family's specimen and measure it: ``python -m explorer.specimens.training FAMILY``.

The number of steps is in the family's recipe, under ``training``. The same versions, kind of
processor and number of threads give the same weights. The text is what the ``bible`` command
prints; see corpus.py.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from explorer.specimens import bpe, weights
from explorer.specimens.building import untrained
from explorer.specimens.errors import SpecimenError, UnknownFamily
from explorer.specimens.recipes import FOLDER, Recipe, recipe
from explorer.specimens.training import corpus, initial_weights, metrics
from explorer.specimens.training.batches import BatchSampler, SequenceMix
from explorer.specimens.training.muon import Muon

DEFAULT_FAMILY = "qwen3_next"
BATCH_SIZE = 8
WARMUP_STEPS = 60
#: The share of all steps that train on repeated random tokens alone, before the text: copying is
#: learned much sooner where there is nothing else to learn.
COPY_PHASE_SHARE = 0.15
COPY_PHASE = SequenceMix(
    length=96, text_share=0.0, repeated_text_share=0.0, segment_lengths=(8, 24)
)
TEXT_PHASE = SequenceMix(
    length=192, text_share=0.5, repeated_text_share=0.3, segment_lengths=(8, 72)
)
REPORT_EVERY = 200
MUON_RATE, ADAM_RATE, EMBEDDING_RATE = 0.02, 4e-3, 1e-2
FINAL_RATE = 0.02  # of the peak
WEIGHT_DECAY = 0.1
BALANCE_WEIGHT = 0.01
MAX_GRADIENT_NORM = 1.0


def encode(texts: list[str]) -> torch.Tensor:
    """Return all chapters as one stream of token ids, [tokens]."""
    tokenizer = bpe.load_tokenizer(sys.maxsize)
    return torch.tensor([i for text in texts for i in tokenizer(text + "\n")["input_ids"]])


def balance_loss(router_logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return one layer's load balancing loss: 1 for even loads, at most num_experts / top_k.

    ``router_logits`` is [tokens, num_experts]. Formula: Switch Transformer, equation 4, for top-k.
    """
    probs = router_logits.float().softmax(-1)
    chosen = torch.zeros_like(probs).scatter(-1, probs.topk(top_k, dim=-1).indices, 1.0 / top_k)
    return probs.shape[-1] * (chosen.mean(0) * probs.mean(0)).sum()


def training_loss(
    model: PreTrainedModel, ids: torch.Tensor, predictable: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Return the training loss on ``ids`` [batch, seq], and its next-token part in nats per token.

    Tokens that are not ``predictable`` [batch, seq] are no targets. The training loss divides by
    all targets, the second number by the predictable ones.
    """
    output = model(ids, use_cache=False, output_router_logits=True)
    losses = torch.nn.functional.cross_entropy(
        output.logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"
    )
    text = (losses * predictable[:, 1:]).sum() / losses.numel()
    top_k = model.config.num_experts_per_tok
    balance = sum(balance_loss(layer, top_k) for layer in output.router_logits)
    return text + BALANCE_WEIGHT * balance, (
        text * losses.numel() / predictable[:, 1:].sum()
    ).item()


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the learning rate as a share of its peak: linear warm-up, then cosine decay to
    FINAL_RATE.
    """
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done))


def make_optimizers(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Return Muon for the blocks' matrices, and AdamW for embedding, head, routers,
    convolutions and vectors.
    """
    embedding = model.model.embed_tokens.weight
    matrices = [
        p
        for name, p in model.model.layers.named_parameters()
        if p.dim() > 1
        and p.shape[0] > 1
        and "conv1d" not in name
        and not _has_row_per_expert(p, model.config.num_experts)
    ]
    assigned = {id(p) for p in (*matrices, embedding)}
    rest = [p for p in model.parameters() if id(p) not in assigned]
    groups = [{"params": rest, "lr": ADAM_RATE}, {"params": [embedding], "lr": EMBEDDING_RATE}]
    return [
        Muon(matrices, lr=MUON_RATE, weight_decay=WEIGHT_DECAY),
        torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-9, weight_decay=0.0, fused=True),
    ]


def _has_row_per_expert(parameter: torch.Tensor, num_experts: int) -> bool:
    """Return whether it is a router's weight or the experts' biases: not to be orthogonalized."""
    return parameter.dim() == 2 and parameter.shape[0] == num_experts


def train(model: PreTrainedModel, stream: torch.Tensor, steps: int, seed: int) -> int:
    """Train ``model`` in place on sequences sampled from ``stream`` [tokens], showing progress.

    Returns the number of tokens it was trained on.
    """
    sampler = BatchSampler(stream, model.config.vocab_size, seed)
    optimizers = make_optimizers(model)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda step: learning_rate_factor(step, steps))
        for one in optimizers
    ]
    segments = metrics.random_segments(model.config.vocab_size, seed)[:16]
    model.train()
    average, tokens = None, 0
    with tqdm(range(steps), unit="step", mininterval=2.0) as bar:
        for step in bar:
            mix = COPY_PHASE if step < COPY_PHASE_SHARE * steps else TEXT_PHASE
            loss, nats = training_loss(model, *sampler.batch(BATCH_SIZE, mix))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
            for one in (*optimizers, *schedules):
                one.step()
            model.zero_grad()
            tokens += BATCH_SIZE * mix.length
            average = nats if average is None else 0.98 * average + 0.02 * nats
            bar.set_postfix(nats=f"{average:.3f}", refresh=False)
            if (step + 1) % REPORT_EVERY == 0:
                bar.write(
                    f"step {step + 1}: {average:.3f} nats, {_copying_report(model, segments)}"
                )
    model.eval()
    return tokens


def _copying_report(model: PreTrainedModel, segments: torch.Tensor) -> str:
    """Return the losses on the two copies of ``segments`` [batch, seq], as text."""
    model.eval()
    with torch.no_grad():
        found = metrics.repetition_metrics(model, segments)
    model.train()
    return f"random segment {found['first_copy']:.2f}, its second copy {found['second_copy']:.2f}"


def train_from_scratch(
    model: PreTrainedModel, how: Recipe, stream: torch.Tensor, steps: int, threads: int
) -> dict[str, int]:
    """Train the freshly drawn ``model`` in place on ``stream`` [tokens].

    Returns what is recorded of the training: steps, tokens, seed, seconds and threads.
    """
    initial_weights.prepare(model, how.std)
    if model._supports_sdpa:
        # The same mathematics as eager attention, faster; the metrics switch back to eager.
        model.set_attn_implementation("sdpa")
    model.set_experts_implementation("eager")
    wall_start, processor_start = time.perf_counter(), time.process_time()
    tokens = train(model, stream, steps, how.seed)
    return {
        "steps": steps,
        "tokens": tokens,
        "seed": how.seed,
        "seconds": round(time.perf_counter() - wall_start),
        "processor_seconds": round(time.process_time() - processor_start),
        "threads": threads,
    }


def recipe_steps(family: str) -> int:
    """Return the number of training steps in the recipe of ``family``.

    Raises UnknownFamily, or SpecimenError where the family's specimen has random weights.
    """
    if recipe(family).weights is None:
        raise SpecimenError(
            f"The specimen of {family} is drawn from a seed, not trained: its recipe names no "
            "weights file."
        )
    return json.loads((FOLDER / f"{family}.json").read_text(encoding="utf-8"))["training"]["steps"]


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write ``data`` to ``path`` as JSON, and print it."""
    text = json.dumps(data, indent=2) + "\n"
    path.write_text(text, encoding="utf-8")
    print(text, end="")


def positive_int(text: str) -> int:
    """Return an option's value as an integer of 1 or more. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, not {text!r}")
    return int(text)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m explorer.specimens.training",
        description="Train a family's specimen and measure it.",
    )
    parser.add_argument(
        "family",
        metavar="FAMILY",
        nargs="?",
        default=DEFAULT_FAMILY,
        help="the specimen to train (%(default)s)",
    )
    parser.add_argument(
        "--steps", type=positive_int, help="optimizer steps (default: the recipe's number)"
    )
    parser.add_argument(
        "--threads", type=positive_int, default=1, help="torch threads (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=FOLDER, help="folder for the weights and the measurements"
    )
    parser.add_argument(
        "--measure-only",
        action="store_true",
        help="measure the weights in the folder without training",
    )
    return parser.parse_args(arguments)


def train_and_measure(
    family: str, out: Path, steps: int | None, threads: int, measure_only: bool
) -> None:
    """Train the specimen of ``family``, or only measure it; write weights and metrics to ``out``.

    Raises UnknownFamily, SpecimenError or CorpusError, each with one sentence.
    """
    default_steps = recipe_steps(family)
    chapters = corpus.chapters(corpus.read_verses())
    trained_on, held_out = (encode(part) for part in corpus.split_held_out(chapters))
    how = recipe(family)
    assert how.weights is not None  # recipe_steps raises for a family that is not trained
    path, metrics_path = out / how.weights.name, out / how.measured_path.name
    model = untrained(family)
    if measure_only:
        weights.load(model, path)
        training = json.loads(metrics_path.read_text(encoding="utf-8"))["training"]
    else:
        out.mkdir(parents=True, exist_ok=True)
        training = train_from_scratch(model, how, trained_on, steps or default_steps, threads)
        weights.save(model, path)
        weights.load(model, path)  # the saved weights are rounded; measure those
    found = metrics.all_metrics(model, untrained(family), trained_on, held_out, how.seed)
    write_json(metrics_path, {"training": training, **found})


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status: 0, or 2 with one sentence on stderr."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    try:
        train_and_measure(**vars(options))
    except (UnknownFamily, SpecimenError, corpus.CorpusError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0
