"""Timing two things against each other in one run, and the peak memory of a third."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Ratio:
    """Medians, in seconds, of two things measured in turn, and their quotient."""

    ours: float
    theirs: float
    repeats: int

    @property
    def value(self) -> float:
        return self.ours / self.theirs


def once(call: Callable[[], object]) -> float:
    """Seconds one call takes, its result dropped after the clock has stopped."""
    gc.collect()
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    del result
    return seconds


def against(ours: Callable[[], object], theirs: Callable[[], object], repeats: int = 7) -> Ratio:
    """Time both in turn, ``repeats`` times after one warm-up each, so that a slow moment meets both alike."""
    once(ours), once(theirs)
    pairs = [(once(ours), once(theirs)) for _ in range(repeats)]
    return Ratio(
        statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs), repeats
    )


def resident() -> int:
    """Bytes of this process in memory now."""
    return _field("VmRSS")


def settled() -> int:
    """Bytes in memory once the allocator has given back what it kept of earlier work, so that a peak counts in full."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return resident()


def peak_above_start(call: Callable[[], object]) -> int:
    """Bytes by which the process grows at its highest while ``call`` runs.

    Reads the kernel's own high-water mark where it can be reset, else samples.
    """
    start = settled()
    try:
        _RESET.write_text("5")
    except OSError:
        return max(0, _sampled(call) - start)
    call()
    return max(0, _field("VmHWM") - start)


def _field(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {name}")


def _sampled(call: Callable[[], object]) -> int:
    highest, done = resident(), threading.Event()

    def sample() -> None:
        nonlocal highest
        while not done.wait(0.002):
            highest = max(highest, resident())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        call()
    finally:
        done.set()
        thread.join()
    return highest


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
