"""Processes within limits: results come back, and what takes too long, dies or grows too large
is reported.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from builder.records import coverage
from builder.records.process_limits import Limits, NoResult, run_each
from builder.time_limit import OutOfTime, processor_time_limit
from tests.support.tasks import do

MINUTE = Limits(60, 4 << 30)


def outcomes(*tasks: str, jobs: int = 1, limits: Limits = MINUTE) -> dict:
    return dict(run_each(do, tasks, jobs, limits))


def test_each_task_gives_its_result_and_prints_nothing(capfd):
    assert outcomes("a", "shout", "b", jobs=2) == {
        "a": "a done",
        "shout": "shout done",
        "b": "b done",
    }
    assert capfd.readouterr() == ("", "")


def test_a_process_that_hangs_is_ended_and_the_others_go_on():
    found = outcomes("hang", "answer", limits=Limits(seconds=3))
    assert found["answer"] == "answer done"
    assert isinstance(found["hang"], NoResult) and "3 seconds" in found["hang"].reason


@pytest.mark.parametrize(
    ("task", "reason"),
    [("exit", "exit code 3"), ("crash", "SIGSEGV"), ("raise", "ValueError: no good at all")],
)
def test_the_reason_a_process_died_is_reported(task, reason):
    found = outcomes(task, "answer")
    assert found["answer"] == "answer done"
    assert isinstance(found[task], NoResult) and reason in found[task].reason


def test_a_process_that_eats_memory_is_ended():
    found = outcomes("eat", limits=Limits(60, 2 << 30))
    assert isinstance(found["eat"], NoResult) and "2 GiB" in found["eat"].reason


def test_no_process_is_left_when_the_consumer_stops():
    running = run_each(do, ["a", "hang", "hang"], 2)
    assert next(running) == ("a", "a done")
    began = [child.pid for child in multiprocessing.active_children()]
    running.close()
    assert began and not [pid for pid in began if alive(pid)]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_ctrl_c_ends_the_sweep_with_one_word_and_no_process_left():
    command = [sys.executable, "-m", "builder", "check", "--all"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Tests that a shell runs in the background ignore it, and so would the sweep.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as sweep:
        # Then the first family is through, and the second at work.
        shown, begun = "", f" 1/{len(coverage.types())} "
        while begun not in shown:
            shown += (read := sweep.stderr.read(1))
            assert read, shown
        sweep.send_signal(signal.SIGINT)
        out, err = sweep.communicate(timeout=60)
    assert sweep.returncode == 130 and out == ""
    assert err.rstrip().endswith("Stopped.") and "Traceback" not in err
    for _ in range(100):
        try:
            os.killpg(sweep.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("a process of the sweep is still there")


def test_what_takes_too_long_is_stopped_though_it_goes_on_after_any_error():
    def stubborn():
        while True:
            with contextlib.suppress(Exception):
                sum(range(10_000))

    with pytest.raises(OutOfTime, match="more than 0.2 seconds"), processor_time_limit(0.2):
        stubborn()
    with processor_time_limit(60):
        pass
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
