"""What every test shares: no network, one thread for torch, the shared fixtures, and the marks that
follow from them.
"""

from __future__ import annotations

import os

import pytest

# Before anything imports a library that reads them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("PYTHONUNBUFFERED", "1")
# The models are small: a second thread gains little on a quiet machine and waits for ever on a busy
# one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.support.browser import chromium, serve, visit  # noqa: F401  fixtures, found by name
from tests.support.models import any_model, hybrid, model, smollm2  # noqa: F401

#: Fixtures that a test cannot have everywhere, and the mark of the tests that use them.
MARKS = {"chromium": "browser", "smollm2": "real"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what opens a page or needs the real weights, so that no file has to remember it."""
    for item in items:
        for fixture, mark in MARKS.items():
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(mark)
