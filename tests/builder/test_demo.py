"""The demo: both servers come up, say where, make way for others, and stop together."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from builder.bench import local_server
from builder.commands import demo

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def site(tmp_path):
    (tmp_path / "index.html").write_text("<!doctype html><p>the site</p>")
    return tmp_path


@pytest.fixture
def busy_port():
    with socket.socket() as holder:
        holder.bind((local_server.HOST, 0))
        holder.listen()
        yield holder.getsockname()[1]


def test_a_folder_is_served(site):
    server = local_server.serve_folder(site)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_address[1]}/") as answer:
        assert b"the site" in answer.read()
    server.shutdown()
    server.server_close()


def test_a_free_port_is_kept_and_a_busy_one_left(busy_port):
    assert local_server.choose_port(busy_port) not in (0, busy_port)
    free = local_server.choose_port(0)
    assert local_server.choose_port(free) == free


def test_waiting_ends_when_the_program_has_ended(busy_port):
    assert (
        local_server.wait_for(
            f"http://127.0.0.1:{local_server.choose_port(0)}/", lambda: False, patience=60
        )
        is False
    )


def test_without_a_site_it_says_what_to_do(tmp_path, capsys):
    assert demo.main(["--site", str(tmp_path)]) == 2
    assert "make site" in capsys.readouterr().err


def test_both_are_served_until_interrupted(site, busy_port):
    command = [
        sys.executable,
        "-m",
        "builder.commands.demo",
        "--site",
        str(site),
        "--site-port",
        str(busy_port),
        "--explorer-port",
        str(local_server.choose_port(0)),
    ]
    # A session of its own, interrupted as a terminal does it: every process of the group at once.
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    said = []
    try:
        for line in process.stdout:
            said.append(line)
            if "Ctrl-C stops both" in line:
                break
        text = "".join(said)
        addresses = re.findall(r"http://127\.0\.0\.1:\d+/", text)
        assert f"Port {busy_port} is busy" in text and len(set(addresses)) >= 2, text
        site_address, explorer_address = addresses[-2:]
        assert b"the site" in urllib.request.urlopen(site_address).read()
        assert b"<html" in urllib.request.urlopen(explorer_address).read().lower()
    finally:
        os.killpg(process.pid, signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, "".join(said) + rest
    assert "Traceback" not in rest
    for address in (site_address, explorer_address):
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(address, timeout=5)
