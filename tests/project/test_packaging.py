"""What is shipped: the wheel is whole, the vocabulary is light, nothing points off this machine,
files stay short.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("explorer", "builder")
#: Folders that are made, not written; so is every folder with a dot but the pipeline's.
MADE = {"public", "site_build", "build", "dist", "__pycache__", "node_modules"}
TEXT = {
    ".py",
    ".js",
    ".css",
    ".jinja",
    ".html",
    ".svg",
    ".json",
    ".toml",
    ".yml",
    ".yaml",
    ".md",
    ".txt",
    ".cfg",
    "",
}
#: Hosts an address in shipped code may name: links a reader clicks, the names of XML
#: formats, this machine. Nothing of it is asked for when a page or the app runs.
LINKED = {"huggingface.co", "www.w3.org", "127.0.0.1", "localhost", "arxiv.org", "github.com"}
LONGEST = 450


def written_files() -> list[Path]:
    """Every file of the repository that somebody wrote."""

    def walk(folder: Path):
        for path in sorted(folder.iterdir()):
            made = path.name in MADE or path.name.endswith(".egg-info")
            hidden = path.name.startswith(".") and path.is_dir() and path.name != ".ci"
            if made or hidden or path.is_symlink():
                continue
            yield from walk(path) if path.is_dir() else [path]

    return list(walk(ROOT))


FILES = written_files()


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The distribution, built from a copy so that the repository stays as it is."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        str(out),
        str(copy),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(out.glob("bestiary-*.whl"))


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_packages(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    wanted = {named(path) for path in FILES if named(path).split("/")[0] in PACKAGES}
    assert wanted and not wanted - inside, f"not in the wheel: {sorted(wanted - inside)}"


def test_the_wheel_imports_and_says_its_version(wheel):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import explorer, explorer.vocabulary; "
        "print(explorer.__version__, explorer.__file__)"
    )
    out = subprocess.run(
        [sys.executable, "-I", "-c", code, str(wheel)], capture_output=True, text=True, check=True
    ).stdout
    version, place = out.split(maxsplit=1)
    assert f"bestiary-{version}-" in wheel.name and str(wheel) in place


@pytest.mark.parametrize("module", ["explorer", "explorer.vocabulary"])
def test_imports_without_torch(module):
    heavy = "torch transformers nnsight panel bokeh numpy"
    code = f"import sys, {module}; print(*[m for m in '{heavy}'.split() if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert out.split() == []


def test_no_file_names_a_place_on_somebodys_machine():
    # Spelt in pieces, so that this file passes its own test.
    machine = re.compile("/(?:" + "|".join(("work", "root", "home", "Users")) + r")/\w")
    found = [
        f"{named(path)}: {match.group()}"
        for path in FILES
        if path.suffix in TEXT
        for match in machine.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_shipped_code_names_no_other_host():
    address = re.compile(r"(?:https?:|wss?:|[\"'(=]\s*)//([A-Za-z0-9.-]+\.[A-Za-z]{2,}|localhost)")
    shipped = [
        path
        for path in FILES
        if path.suffix in TEXT - {".md"} and named(path).split("/")[0] != "tests"
    ]
    found = [
        f"{named(path)}: {match.group(1)}"
        for path in shipped
        for match in address.finditer(path.read_text(encoding="utf-8"))
        if match.group(1) not in LINKED
    ]
    assert not found


def test_no_styles_or_scripts_are_imported_from_elsewhere():
    loading = re.compile(
        r"(?:@import\s+|url\(|import\s*\(?|from\s+|src=|<link[^>]+href=)[\"']?\s*(?:https?:)?//",
        re.I,
    )
    shipped = [path for path in FILES if path.suffix in {".js", ".css", ".jinja", ".html"}]
    found = [
        f"{named(path)}: {match.group()}"
        for path in shipped
        for match in loading.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_no_pickled_weights_are_shipped():
    assert not [
        named(path)
        for path in FILES
        if path.suffix in {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}
    ]


def test_files_stay_short():
    long = {
        named(path): lines
        for path in FILES
        if path.suffix in {".py", ".js"}
        if (lines := path.read_text(encoding="utf-8").count("\n")) > LONGEST
    }
    assert not long
