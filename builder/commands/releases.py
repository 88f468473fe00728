"""Run a command of the builder under another release of a package that values depend on.

The release is installed once, without what it depends on, into a folder of its own among the cached
results, and shadows the installed one for the command alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from builder.records import cache

#: The packages that may be another release: those whose range `pyproject.toml` states.
PACKAGES = ("transformers", "nnsight")

_RELEASE = re.compile(rf"({'|'.join(PACKAGES)})==(\d+(\.\d+)*)")


class ReleaseError(ValueError):
    """A release that is not written as one, or that pip cannot install."""


def run_under(release: str, arguments: Sequence[str]) -> int:
    """Run ``python -m builder`` with ``arguments`` under a release; return its exit code.

    release: such as ``transformers==5.20.0``. Raises ReleaseError.
    """
    paths = [str(installed(release)), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "builder", *arguments]
    return subprocess.run(command, env=environment, check=False).returncode


def installed(release: str) -> Path:
    """Return the folder a release is installed in, installed there with pip where it is not yet."""
    if not _RELEASE.fullmatch(release):
        raise ReleaseError(
            f"'{release}' is no release: write one of {' or '.join(PACKAGES)} with its number, "
            "such as transformers==5.20.0."
        )
    folder = cache.folder() / "releases" / release.replace("==", "-")
    if not folder.is_dir():
        part = folder.with_name(f"{folder.name}.part-{os.getpid()}")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        done = subprocess.run(
            [*pip, "--no-deps", "--target", str(part), release],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            shutil.rmtree(part, ignore_errors=True)
            said = done.stderr.strip().splitlines() or ["it said nothing"]
            raise ReleaseError(f"pip cannot install {release}: {said[-1]}")
        part.rename(folder)
    return folder
