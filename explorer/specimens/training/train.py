"""Train a family's specimen and measure it: ``python -m explorer.specimens.training FAMILY``.

The number of steps is in the family's recipe, under ``training``; start.py sets initial weights.
The same versions, kind of processor and number of threads give the same
weights. The text is what the ``bible`` command prints; see corpus.py.
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
from explorer.specimens.training import corpus, measure, start
from explorer.specimens.training.batches import Diet, Sampler
from explorer.specimens.training.muon import Muon

FAMILY = "qwen3_next"
ROWS = 8
WARMUP = 60
COPYING_SHARE = (
    0.15  # of all steps, before the text: copying is found much sooner where it is all there is
)
COPYING = Diet(length=96, text=0.0, text_twice=0.0, segment=(8, 24))
READING = Diet(length=192, text=0.5, text_twice=0.3, segment=(8, 72))
REPORT_EVERY = 200
MUON_RATE, HEAD_RATE, EMBEDDING_RATE = 0.02, 4e-3, 1e-2
LAST_RATE = 0.02  # of the peak
WEIGHT_DECAY = 0.1
BALANCE = 0.01
CLIP = 1.0


def encode(texts: list[str]) -> torch.Tensor:
    """All chapters as one stream of token ids, [tokens]."""
    tokenizer = bpe.load_tokenizer(sys.maxsize)
    return torch.tensor([i for text in texts for i in tokenizer(text + "\n")["input_ids"]])


def balance_loss(router_logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """How unevenly one layer's router spreads its tokens: 1 where even, up to num_experts / top_k.

    ``router_logits`` is [tokens, num_experts]. Formula: Switch Transformer, equation 4, for top-k.
    """
    scores = router_logits.float().softmax(-1)
    chosen = torch.zeros_like(scores).scatter(-1, scores.topk(top_k, dim=-1).indices, 1.0 / top_k)
    return scores.shape[-1] * (chosen.mean(0) * scores.mean(0)).sum()


def loss_of(
    model: PreTrainedModel, ids: torch.Tensor, counted: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """The training loss on ``ids`` [batch, seq], and the plain next-token loss inside it in nats.

    Positions whose next token is not ``counted`` [batch, seq] weigh nothing.
    """
    out = model(ids, use_cache=False, output_router_logits=True)
    each = torch.nn.functional.cross_entropy(
        out.logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"
    )
    text = (each * counted[:, 1:]).sum() / each.numel()
    top_k = model.config.num_experts_per_tok
    balance = sum(balance_loss(layer, top_k) for layer in out.router_logits)
    return text + BALANCE * balance, (text * each.numel() / counted[:, 1:].sum()).item()


def rate_at(step: int, steps: int) -> float:
    """Learning rate as a share of the peak: linear warm-up, then half a cosine to LAST_RATE."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    done = (step - WARMUP) / max(1, steps - WARMUP)
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))


def optimizers_of(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices; Adam for embedding, head, routers, convolutions, vectors."""
    embedding = model.model.embed_tokens.weight
    inner = [
        p
        for name, p in model.model.layers.named_parameters()
        if p.dim() > 1
        and p.shape[0] > 1
        and "conv1d" not in name
        and not _row_per_expert(p, model.config.num_experts)
    ]
    placed = {id(p) for p in (*inner, embedding)}
    rest = [p for p in model.parameters() if id(p) not in placed]
    groups = [{"params": rest, "lr": HEAD_RATE}, {"params": [embedding], "lr": EMBEDDING_RATE}]
    return [
        Muon(inner, lr=MUON_RATE, weight_decay=WEIGHT_DECAY),
        torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-9, weight_decay=0.0, fused=True),
    ]


def _row_per_expert(parameter: torch.Tensor, experts: int) -> bool:
    """Whether it is a router or one bias per expert: rows that are no directions of one matrix."""
    return parameter.dim() == 2 and parameter.shape[0] == experts


def train(model: PreTrainedModel, stream: torch.Tensor, steps: int, seed: int) -> int:
    """Trains ``model`` in place on sequences drawn from ``stream`` [tokens], showing progress.

    Returns the number of tokens it was shown.
    """
    sampler = Sampler(stream, model.config.vocab_size, seed)
    optimizers = optimizers_of(model)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda step: rate_at(step, steps))
        for one in optimizers
    ]
    probe = measure.random_segments(model.config.vocab_size, seed)[:16]
    model.train()
    smooth, shown = None, 0
    with tqdm(range(steps), unit="step", mininterval=2.0) as bar:
        for step in bar:
            diet = COPYING if step < COPYING_SHARE * steps else READING
            loss, nats = loss_of(model, *sampler.batch(ROWS, diet))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for one in (*optimizers, *schedules):
                one.step()
            model.zero_grad()
            shown += ROWS * diet.length
            smooth = nats if smooth is None else 0.98 * smooth + 0.02 * nats
            bar.set_postfix(nats=f"{smooth:.3f}", refresh=False)
            if (step + 1) % REPORT_EVERY == 0:
                bar.write(f"step {step + 1}: {smooth:.3f} nats, {_copying(model, probe)}")
    model.eval()
    return shown


def _copying(model: PreTrainedModel, segments: torch.Tensor) -> str:
    model.eval()
    with torch.no_grad():
        found = measure.repetition_figures(model, segments)
    model.train()
    return f"random segment {found['first_copy']:.2f}, its second copy {found['second_copy']:.2f}"


def run(
    model: PreTrainedModel, made: Recipe, seen: torch.Tensor, steps: int, threads: int
) -> dict[str, int]:
    """Trains the freshly drawn ``model`` on ``seen`` [tokens] in place; returns how it was done."""
    start.place(model, made.std)
    if model._supports_sdpa:
        model.set_attn_implementation(
            "sdpa"
        )  # the same mathematics as eager, faster; patterns are read in eager
    model.set_experts_implementation("eager")
    started, worked = time.perf_counter(), time.process_time()
    shown = train(model, seen, steps, made.seed)
    return {
        "steps": steps,
        "tokens": shown,
        "seed": made.seed,
        "seconds": round(time.perf_counter() - started),
        "processor_seconds": round(
            time.process_time() - worked
        ),  # what it takes where nothing else runs
        "threads": threads,
    }


def steps_of(family: str) -> int:
    """How many steps the recipe of ``family`` asks for.

    Raises UnknownFamily, or SpecimenError where the family's specimen is drawn, not trained.
    """
    if recipe(family).weights is None:
        raise SpecimenError(
            f"The specimen of {family} is drawn from a seed, not trained: its recipe names no "
            "weights file."
        )
    return json.loads((FOLDER / f"{family}.json").read_text(encoding="utf-8"))["training"]["steps"]


def write_figures(path: Path, figures: dict[str, Any]) -> None:
    text = json.dumps(figures, indent=2) + "\n"
    path.write_text(text, encoding="utf-8")
    print(text, end="")


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, not {text!r}")
    return int(text)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m explorer.specimens.training",
        description="Train a family's specimen and measure it.",
    )
    parser.add_argument(
        "family",
        metavar="FAMILY",
        nargs="?",
        default=FAMILY,
        help="the specimen to train (%(default)s)",
    )
    parser.add_argument(
        "--steps", type=at_least_one, help="optimizer steps (as many as the recipe says)"
    )
    parser.add_argument(
        "--threads", type=at_least_one, default=1, help="torch threads (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=FOLDER, help="folder for the weights and the measurements"
    )
    parser.add_argument(
        "--measure-only",
        action="store_true",
        help="measure the weights in the folder, train nothing",
    )
    return parser.parse_args(arguments)


def work(family: str, out: Path, steps: int | None, threads: int, measure_only: bool) -> None:
    """Train the specimen of ``family``, or only measure it; write weights and figures to ``out``.

    Raises UnknownFamily, SpecimenError or CorpusError, each with one sentence.
    """
    planned = steps_of(family)
    kept, held_out = corpus.split(corpus.chapters(corpus.read_verses()))
    seen, unseen = encode(kept), encode(held_out)
    made = recipe(family)
    assert made.weights is not None  # steps_of raises for a family that is not trained
    path, figures_path = out / made.weights.name, out / made.measured_path.name
    model = untrained(family)
    if measure_only:
        weights.load(model, path)
        training = json.loads(figures_path.read_text(encoding="utf-8"))["training"]
    else:
        out.mkdir(parents=True, exist_ok=True)
        training = run(model, made, seen, steps or planned, threads)
        weights.save(model, path)
        weights.load(model, path)  # measure what is shipped: the rounded numbers
    figures = measure.all_figures(model, untrained(family), seen, unseen, made.seed)
    write_figures(figures_path, {"training": training, **figures})


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    try:
        work(**vars(options))
    except (UnknownFamily, SpecimenError, corpus.CorpusError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0
