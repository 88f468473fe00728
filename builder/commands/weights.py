"""``python -m builder.commands.weights``: print the path of the installed SmolLM2-135M GGUF
file.
"""

from __future__ import annotations

import sys

from builder.bench.weights import gguf_path


def main() -> int:
    path = gguf_path()
    if path is None:
        print("SmolLM2-135M is not installed: `make weights` installs it.", file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
