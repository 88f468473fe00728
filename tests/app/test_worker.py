"""The model worker: one thread, a queue, progress and cancelling."""

from __future__ import annotations

import threading

import pytest

from explorer.app.worker import Job, Worker
from tests.support.app_page import PATIENCE
from tests.support.explorer_server import explorer  # noqa: F401  a fixture


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    worker.close()


def finished(worker: Worker, work, **options) -> Job:
    done = threading.Event()
    job = Job("test", work, lambda job: done.set(), **options)
    worker.submit(job)
    assert done.wait(PATIENCE)
    return job


def test_jobs_run_one_after_the_other_in_one_thread(worker):
    threads, order = set(), []

    def work(number):
        threads.add(threading.get_ident())
        order.append(number)

    for number in range(5):
        worker.submit(Job("test", lambda job, number=number: work(number), lambda job: None))
    finished(worker, lambda job: None)
    assert order == list(range(5)) and len(threads) == 1 and threading.get_ident() not in threads


def test_a_job_that_fails_leaves_the_worker_working(worker):
    job = finished(worker, lambda job: 1 / 0)
    assert isinstance(job.error, ZeroDivisionError) and not job.cancelled
    assert finished(worker, lambda job: 7).result == 7


def test_a_waiting_job_can_be_cancelled_and_a_running_one_stops_where_it_asks(worker):
    started, go = threading.Event(), threading.Event()

    def slow(job):
        started.set()
        go.wait(PATIENCE)
        job.stage("next")

    ended = [threading.Event(), threading.Event()]
    first = worker.submit(Job("slow", slow, lambda job: ended[0].set()))
    second = worker.submit(Job("waiting", lambda job: "ran", lambda job: ended[1].set()))
    assert started.wait(PATIENCE)
    first.cancel(), second.cancel(), go.set()
    assert all(event.wait(PATIENCE) for event in ended)
    assert first.cancelled and second.cancelled and second.result is None
