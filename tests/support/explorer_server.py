"""An explorer of its own for a test module: started once, stopped afterwards."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlencode

import pytest

PATIENCE = 240
HYBRID = "specimen:qwen3_5_moe_text"


@dataclass(frozen=True)
class Explorer:
    """Where a running explorer is."""

    host: str
    port: int

    def at(self, **view: object) -> str:
        """The address of a view."""
        return f"http://{self.host}:{self.port}/" + (f"?{urlencode(view)}" if view else "")


def started(process: subprocess.Popen, said: object) -> int:
    """The port it says it serves at."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        said.seek(0)
        for line in said.read().splitlines():
            if line.startswith("The explorer is at http://"):
                return int(line.split("127.0.0.1:")[1].split("/")[0])
        time.sleep(0.1)
    said.seek(0)
    raise AssertionError(f"the explorer did not start: {said.read()}")


@contextmanager
def running(*arguments: str) -> Iterator[Explorer]:
    """``python -m explorer`` with these arguments at a free port; afterwards its log must hold no
    traceback.
    """
    command = [sys.executable, "-m", "explorer", *arguments, "--port", "0", "--no-browser"]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        try:
            yield Explorer("127.0.0.1", started(process, said))
        finally:
            process.terminate()
            process.wait(timeout=30)
            said.seek(0)
            log = said.read()
            assert "Traceback" not in log, log


@pytest.fixture(scope="module")
def explorer() -> Iterator[Explorer]:
    """A running explorer of the hybrid specimen with random weights."""
    with running(HYBRID) as one:
        yield one
