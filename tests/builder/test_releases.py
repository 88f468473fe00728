"""The contract under another release of transformers or of the engine."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import nnsight
import pytest
import transformers

from builder.__main__ import main
from builder.commands import releases
from builder.records import cache


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A folder of cached results with a release in it: the installed one, under another number."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cache.folder() / "releases" / "transformers-5.0.99"
    folder.mkdir(parents=True)
    (folder / "transformers").symlink_to(Path(transformers.__file__).parent)
    info = folder / "transformers-5.0.99.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.0.99\n")
    return folder


@pytest.mark.parametrize("release", ["transformers", "torch==2.0", "transformers>=5", "==1", ""])
def test_what_is_no_release_is_one_sentence(release, capsys):
    assert main(["check", "llama", "--with", release]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "transformers==5.20.0" in said


def test_a_release_that_cannot_be_had_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert main(["check", "llama", "--with", "transformers==0.0.1"]) == 2
    assert "pip cannot install transformers==0.0.1: " in capsys.readouterr().err
    assert not list((cache.folder() / "releases").glob("*"))


def test_a_release_shadows_the_installed_one_for_the_command_alone(cached, monkeypatch):
    seen = {}

    def run(command, env, check):
        seen.update(command=command, path=env["PYTHONPATH"])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(releases.subprocess, "run", run)
    words = ["check", "llama", "gpt2", "--json"]
    assert main([*words, "--with", "transformers==5.0.99"]) == 0
    assert seen["command"] == [sys.executable, "-m", "builder", "check", "--json", "llama", "gpt2"]
    assert seen["path"].split(":")[0] == str(cached)
    assert version("transformers") == transformers.__version__ and nnsight.__file__


@pytest.mark.slow
def test_the_contract_is_run_under_it(cached, capfd):
    assert main(["check", "gpt2", "--with", "transformers==5.0.99"]) == 0
    assert " 0 failed" in capfd.readouterr().out
