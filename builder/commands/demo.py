"""The built site and the explorer, served together until Ctrl-C: ``python -m builder.commands.demo
--site DIR``.

Each has a fixed port, so that a bookmark lasts; where another program has it, a free one is taken
and printed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from builder.bench.local_server import HOST, choose_port, serve_folder, stop, wait_for

SITE_PORT = 8000
EXPLORER_PORT = 5006

#: Seconds to wait for the explorer, which imports torch and loads a model first.
EXPLORER_PATIENCE = 180.0


def start_explorer(port: int, extra: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "explorer", "--port", str(port), "--host", HOST]
    return subprocess.Popen([*command, "--no-browser", *extra])


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m builder.commands.demo",
        description="Serve the built site and the explorer until Ctrl-C.",
    )
    parser.add_argument(
        "--site", type=Path, default=Path("public"), help="the built site (default: public)"
    )
    parser.add_argument("--site-port", type=int, default=SITE_PORT)
    parser.add_argument("--explorer-port", type=int, default=EXPLORER_PORT)
    parser.add_argument("model", nargs="*", help="for the explorer: a model and its options")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    for port in (args.site_port, args.explorer_port):
        if not 0 <= port <= 65535:
            print(f"There is no port {port}; ports run from 0 to 65535.", file=sys.stderr)
            return 2
    if not (args.site / "index.html").is_file():
        print(f"There is no built site in {args.site}: `make site` builds it.", file=sys.stderr)
        return 2
    ports = choose_port(args.site_port), choose_port(args.explorer_port)
    _report_busy("site", args.site_port, ports[0])
    _report_busy("explorer", args.explorer_port, ports[1])
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


def _report_busy(name: str, wanted: int, port: int) -> None:
    if port != wanted:
        print(f"Port {wanted} is busy, so the {name} takes {port}.", flush=True)


def watch(explorer: subprocess.Popen[bytes], ports: tuple[int, int]) -> int:
    """Print both addresses once both answer, then wait for the explorer to end; return its exit
    status.
    """
    live = f"http://{HOST}:{ports[1]}/"
    print("Starting the explorer ...", flush=True)
    if not wait_for(live, lambda: explorer.poll() is None, EXPLORER_PATIENCE):
        print("The explorer did not start; see its messages above.", file=sys.stderr)
        return 1
    print(
        f"\nThe site:     http://{HOST}:{ports[0]}/\nThe explorer: {live}\nCtrl-C stops both.",
        flush=True,
    )
    return explorer.wait()


if __name__ == "__main__":
    sys.exit(main())
