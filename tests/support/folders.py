"""Checkpoint folders on disk, for the tests of loading."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from explorer import load
from explorer.errors import LoadError
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


def refused(source, description: str, error: type = LoadError, **options) -> str:
    """Load and be refused in one sentence, which is not a library's."""
    with pytest.raises(error, match=description) as caught:
        load(source, **options)
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert (
        "\n" not in message
        and len(message) < 500
        and message[-1] in ".?"
        and "Traceback" not in message
    )
    return message
