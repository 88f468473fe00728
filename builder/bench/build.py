"""A whole build: its time against the models it has to build and run at least, and the memory of
one family.

Each measurement has a process of its own, so that it does not profit from modules that another has
imported. The contract is run before the clock starts, as its reports are cached between builds;
everything else is made anew, and kept for later builds.
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

from builder.bench.facts import meta_run
from builder.bench.figures import MEGABYTE, Figure, Settings
from builder.bench.timing import cores, peak_above_start, processor_seconds, resident_bytes
from builder.records import cache, collect

ROOT = Path(__file__).resolve().parents[2]

#: What files of contract reports in the cache are called.
_REPORTS = "contract-*.json"


def measure(settings: Settings) -> Iterator[Figure]:
    """Yield figures for a build of the requested families, or of all that are proven."""
    families = list(settings.families) if settings.requested else proven()
    if not all(_has_report(family) for family in families):
        families = _in_fresh_process(checked_families, families)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_sources(folder)
        results = folder / "cache" / "bestiary"
        results.mkdir(parents=True)
        for report in cache.folder().glob(_REPORTS):
            shutil.copy(report, results)
        with _cache_folder(folder / "cache"):
            yield from _build_figures(folder, families)
            if not settings.quick:
                yield _memory_figure(folder, families)
        for result in results.glob("*.json"):
            shutil.copy(result, cache.folder())


def copy_sources(folder: Path) -> None:
    """Copy the authored site into ``folder``, so that a build leaves the repository's pages as
    they are.
    """
    generated = shutil.ignore_patterns("index.md", "facts.json")
    shutil.copytree(ROOT / "site", folder / "site", ignore=generated)
    shutil.copy(ROOT / "mkdocs.yml", folder)


@contextmanager
def _cache_folder(folder: Path) -> Iterator[None]:
    """Keep results in ``folder`` meanwhile, in the processes that are started too."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("XDG_CACHE_HOME")
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before


def _build_figures(folder: Path, families: list[str]) -> Iterator[Figure]:
    """Yield figures of a build of everything, and of one after it with nothing changed."""
    jobs = min(2, cores())
    least, models = _in_fresh_process(meta_runs, families)
    first, again, failed = _in_fresh_process(build_twice, folder, families, jobs)
    wall = sum(first.steps.values())
    failures = f"; {failed} failed" if failed else ""
    count = "1 family" if len(families) == 1 else f"{len(families)} families"
    detail = (
        f"{wall:.1f} s with {jobs} processes ({_steps(first.steps)}) against {least:.1f} s for "
        f"{models} meta builds and forwards; contract reports were cached{failures}"
    )
    yield Figure(f"build of {count}", wall / least, "x", 2.0, detail)
    detail = f"{first.processor:.1f} s of processor time in all"
    yield Figure("processor time per family", first.processor / len(families), "s", 5.0, detail)
    detail = f"{again.processor:.1f} s of processor time; {_steps(again.steps)}"
    yield Figure("build again, nothing changed", sum(again.steps.values()), "s", None, detail)


def _memory_figure(folder: Path, families: list[str]) -> Figure:
    peaks, growth = _in_fresh_process(memory, folder, families)
    worst = max(peaks, key=peaks.get)
    return Figure(
        "memory of collecting a family",
        statistics.median(peaks.values()) / MEGABYTE,
        "MB",
        None,
        f"peak above the start, median of {len(peaks)}; the most for {worst}; "
        f"{growth / MEGABYTE:.0f} MB stay after all",
        peaks[worst] / MEGABYTE,
    )


def _steps(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {took:.1f} s" for name, took in seconds.items())


def _has_report(family: str) -> bool:
    """Whether the cache has the contract's report on a family."""
    try:
        key = cache.contract_key(family)
        return cache.ResultCache().get("contract", family, key) is not None
    except Exception:
        return False


def proven() -> list[str]:
    """Return the families that a build with ``--all`` makes; those with notes where the data is
    of other versions.
    """
    return collect.proven_families(ROOT / "site") or collect.families_with_notes()


def _in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


# -- run in processes of their own ------------------------------------------------


class BuildTime:
    """What a build took: seconds by step, and seconds of processor time."""

    def __init__(self, steps: dict[str, float], processor: float) -> None:
        self.steps, self.processor = steps, processor


def checked_families(families: list[str]) -> list[str]:
    """Run the contract on the families without a cached report; return those on which it could
    be run.
    """
    checked = []
    for family in families:
        try:
            collect.contract_report(family)
        except Exception:
            continue
        checked.append(family)
    return checked


def meta_runs(families: list[str]) -> tuple[float, int]:
    """Return the seconds to build every checkpoint on the meta device and run it once, and how
    many those are.
    """
    import explorer.engine.nnsight_api  # noqa: F401  before a modeling module of transformers is imported
    from explorer.facts.record import checkpoints

    total, models = 0.0, 0
    for family in families:
        for checkpoint in checkpoints(family):
            start = time.perf_counter()
            try:
                meta_run(family, checkpoint)
            except Exception:
                continue
            total += time.perf_counter() - start
            models += 1
    return total, models


def build_twice(folder: Path, families: list[str], jobs: int) -> tuple[BuildTime, BuildTime, int]:
    """Build twice in ``folder``; return the times of both and how many families failed."""
    from builder.pages import build as pipeline

    os.chdir(folder)
    times, failed = [], 0
    for _ in range(2):
        start = processor_seconds()
        built = pipeline.build(families, Path("public"), jobs)
        times.append(BuildTime(built.seconds, processor_seconds() - start))
        failed = max(failed, len(built.failed))
    return times[0], times[1], failed


def memory(folder: Path, families: list[str]) -> tuple[dict[str, int], int]:
    """Collect each family anew, one after the other.

    Returns the peak bytes of each above its start, and by how much the process has grown after all.
    """
    os.chdir(folder)
    _delete_results("*.json")
    collect.collect(families[0])  # imports what all families need
    _delete_results(f"*-{families[0]}-*.json")
    start = resident_bytes()
    peaks: dict[str, int] = {}
    for family in families:
        try:
            peaks[family] = peak_above_start(lambda family=family: collect.collect(family))
        except Exception:
            continue
    return peaks, resident_bytes() - start


def _delete_results(pattern: str) -> None:
    """Delete cached results but contract reports."""
    reports = set(cache.folder().glob(_REPORTS))
    for path in set(cache.folder().glob(pattern)) - reports:
        path.unlink()
