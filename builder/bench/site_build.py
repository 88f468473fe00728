"""Measuring a whole build: its wall time against the models it has to build and run at least, and what a family takes of memory.

Each measurement has a process of its own, so that none finds modules another has imported.
The contract is proven before the clock starts, as in any build after the first; everything else is made anew.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from builder.bench.timing import cores, peak_above_start, resident
from builder.records import cache as reuse

ROOT = Path(__file__).resolve().parents[2]
MEGABYTE = 1_000_000


def build_rows(settings: Any) -> Iterator[tuple]:
    """Rows of `bench.Figure` (all but the section) for a build of the families asked for, or of all that are proven."""
    families = list(settings.families) if settings.named else proven()
    if not all(_held(family) for family in families):
        families = _apart(prove, families)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        shutil.copytree(
            ROOT / "site", place / "site", ignore=shutil.ignore_patterns("index.md", "facts.json")
        )
        shutil.copy(ROOT / "mkdocs.yml", place)
        kept = place / "cache" / "bestiary"
        kept.mkdir(parents=True)
        for proof in reuse.folder().glob("contract-*.json"):
            shutil.copy(proof, kept)
        with _cache(place / "cache"):
            yield from _built(place, families)
            if not settings.quick:
                yield _memory(place, families)


@contextmanager
def _cache(folder: Path) -> Iterator[None]:
    """Results are kept in ``folder`` meanwhile, by the processes started too."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("XDG_CACHE_HOME")
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before


def _built(place: Path, families: list[str]) -> Iterator[tuple]:
    """A build of everything, and one after it of what has not changed."""
    jobs = min(2, cores())
    least, models = _apart(floor, families)
    first, again, failed = _apart(build_twice, place, families, jobs)
    what = "1 family" if len(families) == 1 else f"{len(families)} families"
    whole, lost = sum(first.values()), f"; {failed} failed" if failed else ""
    yield (
        f"build of {what}",
        whole / least,
        "x",
        2.0,
        f"{whole:.1f} s with {jobs} processes ({_parts(first)}) against {least:.1f} s for {models} meta builds and forwards; the contract was kept{lost}",
    )
    yield "the same again, nothing changed", sum(again.values()), "s", None, _parts(again)


def _memory(place: Path, families: list[str]) -> tuple:
    peaks, grown = _apart(memory, place, families)
    worst = max(peaks, key=peaks.get)
    return (
        "memory of collecting a family",
        statistics.median(peaks.values()) / MEGABYTE,
        "MB",
        None,
        f"peak above the start, median of {len(peaks)}; most of {worst}; {grown / MEGABYTE:.0f} MB stay after all of them",
        peaks[worst] / MEGABYTE,
    )


def _parts(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {took:.1f} s" for name, took in seconds.items())


def _held(family: str) -> bool:
    """Whether a proof of the family is kept."""
    try:
        return reuse.ResultCache().there("contract", family, reuse.proof_key(family)) is not None
    except Exception:
        return False


def proven() -> list[str]:
    """The families a build with ``--all`` makes, by the committed data; those with notes where the data are of other versions."""
    from builder.records import collect

    return collect.proven(ROOT / "site") or collect.noted()


def _apart(function: Callable[..., Any], *given: Any) -> Any:
    """``function(*given)`` in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *given).result()


def prove(families: list[str]) -> list[str]:
    """Prove the families of which no proof is kept; returns those that could be."""
    from builder.records.collect import one_thread, proof

    held = []
    with one_thread():
        for family in families:
            try:
                proof(family)
            except Exception:
                continue
            held.append(family)
    return held


def floor(families: list[str]) -> tuple[float, int]:
    """Seconds to build every checkpoint of the families on the meta device and run it once, and how many those are."""
    import torch

    import explorer.engine.nnsight_api  # noqa: F401  before a modeling module of transformers is imported
    from builder.records.collect import one_thread
    from explorer.checkpoints import cards
    from explorer.facts.record import checkpoints
    from explorer.meta_device import build_meta, without_padding_warning
    from explorer.specimens.small import default_config

    total, models = 0.0, 0
    ids = torch.zeros(2, 7, dtype=torch.long, device="meta")
    for family in families:
        for checkpoint in checkpoints(family):
            start = time.perf_counter()
            try:
                model = build_meta(
                    cards.config(checkpoint) if checkpoint in cards.IDS else default_config(family)
                )
                with one_thread(), torch.no_grad(), without_padding_warning(model):
                    model(input_ids=ids)
            except Exception:
                continue
            total += time.perf_counter() - start
            models += 1
    return total, models


def build_twice(
    place: Path, families: list[str], jobs: int
) -> tuple[dict[str, float], dict[str, float], int]:
    """Two builds in ``place``: seconds by part of each, and how many families failed."""
    from builder.pages import build as pipeline

    os.chdir(place)
    first = pipeline.build(families, Path("public"), jobs)
    again = pipeline.build(families, Path("public"), jobs)
    return first.seconds, again.seconds, len(first.failed)


def memory(place: Path, families: list[str]) -> tuple[dict[str, int], int]:
    """Peak bytes above the start of collecting each family anew, one after the other, and by how much the process has grown after all."""
    from builder.records import collect

    os.chdir(place)
    for kept in reuse.folder().glob("*.json"):
        if not kept.name.startswith("contract-"):
            kept.unlink()
    collect.collect(families[0])  # imports what all need
    for kept in reuse.folder().glob(f"*-{families[0]}-*.json"):
        if not kept.name.startswith("contract-"):
            kept.unlink()
    start = resident()
    peaks: dict[str, int] = {}
    for family in families:
        try:
            peaks[family] = peak_above_start(lambda family=family: collect.collect(family))
        except Exception:
            continue
    return peaks, resident() - start
