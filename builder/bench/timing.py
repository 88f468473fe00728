"""Time two functions against each other in one run, and measure peak memory."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

#: Linux only: writing 5 resets the peak that ``status`` reports as VmHWM.
_RESET_PEAK = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Ratio:
    """Medians, in seconds, of two functions measured in turn, and their quotient."""

    ours: float
    theirs: float
    repeats: int

    @property
    def value(self) -> float:
        return self.ours / self.theirs


def once(call: Callable[[], object]) -> float:
    """Return the seconds that one call takes; its result is dropped after the clock has stopped."""
    gc.collect()
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    del result
    return seconds


def in_turn(calls: Sequence[Callable[[], object]], repeats: int = 7) -> list[float]:
    """Return the median seconds of each call. They are timed in turn, so that a slow machine slows
    all, after one warm-up each unless ``repeats`` is 1.
    """
    if repeats > 1:
        for call in calls:
            once(call)
    rounds = [[once(call) for call in calls] for _ in range(repeats)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def against(ours: Callable[[], object], theirs: Callable[[], object], repeats: int = 7) -> Ratio:
    """Time both as `in_turn` does."""
    first, second = in_turn((ours, theirs), repeats)
    return Ratio(first, second, repeats)


def processor_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def resident_bytes() -> int:
    """Return this process's resident memory."""
    return psutil.Process().memory_info().rss


def peak_above_start(call: Callable[[], object]) -> int:
    """Return by how many bytes the process grows at its highest while ``call`` runs.

    Reads the kernel's high-water mark where it can be reset, else samples every two milliseconds.
    """
    gc.collect()
    # Return freed memory to the system, so that using it again counts.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    start = resident_bytes()
    try:
        _RESET_PEAK.write_text("5")
    except OSError:
        return max(0, sampled_peak(call) - start)
    call()
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return max(0, int(line.split()[1]) * 1024 - start)


def sampled_peak(call: Callable[[], object]) -> int:
    """Return the highest resident memory seen while ``call`` runs."""
    highest, done = resident_bytes(), threading.Event()

    def sample() -> None:
        nonlocal highest
        while not done.wait(0.002):
            highest = max(highest, resident_bytes())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        call()
    finally:
        done.set()
        thread.join()
    return highest


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
