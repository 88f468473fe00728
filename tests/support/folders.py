"""Checkpoint folders on disk, for the tests of loading."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from explorer import load
from tests.support.messages import refused
from tests.support.models import specimen


@pytest.fixture
def no_network(monkeypatch):
    """Connections are refused and counted."""
    tried = []

    def refuse(*args, **kwargs):
        tried.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tried


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The llama specimen as a transformers checkpoint folder."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = specimen("llama")
    model.hf.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def broken(saved, tmp_path) -> Path:
    """A copy of it to break."""
    return Path(shutil.copytree(saved, tmp_path / "broken"))


def changed(folder: Path, **changes) -> None:
    """Change keys of a folder's configuration."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def not_loaded(source, message: str, options: dict | None = None, /, **named) -> str:
    """Load and be refused with the sentence of that name, which is no library's; return it."""
    error = refused(message, lambda: load(source, **(options or {})), **named)
    assert isinstance(error, ValueError)
    assert str(error)[-1] in ".?" and "Traceback" not in str(error)
    return str(error)
