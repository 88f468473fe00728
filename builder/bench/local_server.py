"""Serve a folder on 127.0.0.1, find free ports, wait for another server and stop it."""

from __future__ import annotations

import functools
import http.server
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Static files without a log line per request; scripts have the type that browsers require
    of modules.
    """

    extensions_map = http.server.SimpleHTTPRequestHandler.extensions_map | {
        ".js": "text/javascript"
    }

    def log_message(self, format: str, *args: Any) -> None:
        pass


def serve_folder(folder: Path, port: int = 0) -> http.server.ThreadingHTTPServer:
    """Serve ``folder`` on 127.0.0.1 from a thread; ``server.shutdown()`` stops it.

    Raises OSError where the port is taken; port 0 takes a free one.
    """
    handler = functools.partial(_Handler, directory=str(folder))
    server = http.server.ThreadingHTTPServer((HOST, port), handler)
    threading.Thread(target=server.serve_forever, name="site", daemon=True).start()
    return server


def choose_port(wanted: int) -> int:
    """Return ``wanted`` if it is free, else a free port."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise OSError(f"no free port on {HOST}")


def wait_for(address: str, alive: Callable[[], bool], patience: float) -> bool:
    """Return whether ``address`` answers within ``patience`` seconds; stop waiting once
    ``alive()`` is false.
    """
    end = time.monotonic() + patience
    while alive() and time.monotonic() < end:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return True
        except OSError:
            time.sleep(0.2)
    return False


def stop(process: subprocess.Popen[Any]) -> None:
    """Terminate a process, and kill it where it does not end within ten seconds."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
