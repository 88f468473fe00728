"""``python -m explorer [MODEL] [--port N] [--host H] [--prompt TEXT] [--no-browser]``: the live
explorer.
"""

from __future__ import annotations

import argparse
import sys


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m explorer",
        description=(
            "Look inside a language model while it runs: routers, attention, recurrent state."
        ),
    )
    parser.add_argument(
        "model",
        nargs="?",
        default="specimen:qwen3_next",
        metavar="MODEL",
        help='"specimen:FAMILY" for a small shipped model, a checkpoint folder, a .gguf file, '
        "or a checkpoint id "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=5006,
        metavar="N",
        help="port to serve at, 0 for any free one (default: %(default)s)",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="H",
        help="address to serve at (default: %(default)s, this machine alone)",
    )
    parser.add_argument(
        "--no-token",
        action="store_true",
        help="with a --host that other machines reach: let in who comes without the token",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="the text to start with")
    parser.add_argument(
        "--no-browser", action="store_true", help="print the address and open nothing"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Serve until stopped; 2 and one sentence for what cannot be served."""
    args = parser().parse_args(argv)
    if not 0 <= args.port <= 65535:
        print(f"There is no port {args.port}; ports run from 0 to 65535.", file=sys.stderr)
        return 2
    try:
        from explorer.app.server import Settings, serve

        serve(
            Settings(
                args.model,
                args.prompt,
                args.host,
                args.port,
                browser=not args.no_browser,
                token=not args.no_token,
            )
        )
    except ModuleNotFoundError as error:
        if error.name not in ("panel", "bokeh"):
            raise
        print(f"The explorer needs {error.name}: pip install 'bestiary[app]'.", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
