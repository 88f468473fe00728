"""Files and functions stay short enough to be read, or say why not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from builder.pages import write

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for top in ("explorer", "builder", "tests", "site/assets")
    for path in (ROOT / top).rglob("*")
    if (path.suffix in (".py", ".js", ".css") and path.name not in write.SHARED)
    or (path.parent.name == "assets" and path.suffix in (".js", ".css") and "widgets" in path.parts)
)
MOST_LINES, MOST_FUNCTION_LINES = 400, 60
REASON = "Longer than 60 lines because"


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_file_is_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", [path for path in SOURCES if path.suffix == ".py"], ids=name_of)
def test_a_function_is_short_or_says_why_not(path):
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    long = [
        node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno >= MOST_FUNCTION_LINES
        and not any(REASON in line for line in lines[node.lineno - 1 : node.end_lineno])
    ]
    assert not long


def test_no_test_file_imports_another():
    """What several tests share lies in ``tests/support``, so that each file runs by itself."""
    importing = [
        f"{path}: {line.strip()}"
        for path in (ROOT / "tests").rglob("*.py")
        for line in path.read_text().splitlines()
        if re.match(r"\s*(from|import) tests\.\w+\.test_", line)
    ]
    assert importing == []
