"""The readme is true: its targets exist and its code runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_every_make_target_it_names_exists():
    named = set(re.findall(r"\bmake (?:-s )?([a-z]+)\b", README)) - {"sure"}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert named >= {"demo", "test", "weights"} and named <= targets


def test_every_file_it_links_exists():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links and all((ROOT / link).exists() for link in links)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_its_code_runs(number, tmp_path):
    script = (
        tmp_path / f"block{number}.py"
    )  # a file: the engine reads the source of its trace blocks
    script.write_text(BLOCKS[number], encoding="utf-8")
    code = (
        f"import sys, runpy; sys.path.insert(0, {str(ROOT)!r}); "
        f"runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
