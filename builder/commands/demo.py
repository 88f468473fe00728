"""The built site and the explorer, served together until Ctrl-C: ``python -m builder.commands.demo --site DIR``.

Each wants a fixed port, so that a bookmark lasts; where another program has it,
a free one is taken instead and named.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

HOST = "127.0.0.1"
SITE_PORT = 8000
EXPLORER_PORT = 5006
#: The explorer imports torch and loads a model first; slow disks need their time.
EXPLORER_PATIENCE = 180.0


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Static files without a line per request; modules get the type browsers demand."""

    extensions_map = {
        **http.server.SimpleHTTPRequestHandler.extensions_map,
        ".js": "text/javascript",
    }

    def log_message(self, *args: object) -> None:
        pass


def serve_folder(folder: Path, port: int = 0) -> http.server.ThreadingHTTPServer:
    """Serve ``folder`` on 127.0.0.1 from a thread; ``server.shutdown()`` stops it.

    Raises OSError where the port is taken; port 0 takes a free one.
    """
    handler = functools.partial(Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer((HOST, port), handler)
    threading.Thread(target=server.serve_forever, name="site", daemon=True).start()
    return server


def choose_port(wanted: int) -> int:
    """``wanted`` if it is free, else one the system gives."""
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
    """Whether ``address`` answers before ``patience`` seconds are over; gives up when ``alive`` says no."""
    end = time.monotonic() + patience
    while alive() and time.monotonic() < end:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return True
        except OSError:
            time.sleep(0.2)
    return False


def start_explorer(port: int, extra: list[str]) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "explorer",
        "--port",
        str(port),
        "--host",
        HOST,
        "--no-browser",
        *extra,
    ]
    return subprocess.Popen(command)


def announce(name: str, wanted: int, port: int) -> None:
    if port != wanted:
        print(f"Port {wanted} is busy, so the {name} takes {port}.", flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m builder.commands.demo", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--site", type=Path, default=Path("public"), help="the built site (default: public)"
    )
    parser.add_argument("--site-port", type=int, default=SITE_PORT)
    parser.add_argument("--explorer-port", type=int, default=EXPLORER_PORT)
    parser.add_argument("model", nargs="*", help="handed to the explorer: a model and its options")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if not (args.site / "index.html").is_file():
        print(f"There is no built site in {args.site}: `make site` builds it.", file=sys.stderr)
        return 2
    ports = choose_port(args.site_port), choose_port(args.explorer_port)
    announce("site", args.site_port, ports[0])
    announce("explorer", args.explorer_port, ports[1])
    site = serve_folder(args.site, ports[0])
    explorer = start_explorer(ports[1], args.model)
    try:
        return watch(explorer, ports)
    except KeyboardInterrupt:
        print("\nStopped.")
        return 0
    finally:
        site.shutdown()
        stop(explorer)


def watch(explorer: subprocess.Popen[bytes], ports: tuple[int, int]) -> int:
    """Print both addresses once both answer, then wait for the explorer or Ctrl-C."""
    live = f"http://{HOST}:{ports[1]}/"
    print("Starting the explorer ...", flush=True)
    if not wait_for(live, lambda: explorer.poll() is None, EXPLORER_PATIENCE):
        print("The explorer did not start; what it said stands above.", file=sys.stderr)
        return 1
    print(
        f"\nThe site:     http://{HOST}:{ports[0]}/\nThe explorer: {live}\nCtrl-C stops both.",
        flush=True,
    )
    return explorer.wait()


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
