"""What loading costs beyond what nobody can save: reading the numbers, importing libraries."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from builder.bench.figures import Figure, milliseconds
from builder.bench.timing import Ratio, against

#: What a model cannot do without: torch, the engine, and transformers down to the model's class.
_IMPORTS = (
    "import explorer.engine.nnsight_api; from transformers import LlamaForCausalLM, AutoTokenizer"
)
_LOAD = "from explorer import load; load('specimen:llama')"


def gguf(path: Path, repeats: int) -> Iterator[Figure]:
    """Load a GGUF file, against parsing it and dequantising its tensors with the package gguf."""
    import torch
    from gguf import GGUFReader, dequantize

    from explorer import load

    def read() -> list[torch.Tensor]:
        tensors = GGUFReader(path).tensors
        return [torch.from_numpy(dequantize(one.data, one.tensor_type)) for one in tensors]

    ratio = against(lambda: load(path), read, repeats)
    yield _figure("load a GGUF file / read and dequantise it", ratio, 1.5, path.name)


def fresh_process(repeats: int) -> Iterator[Figure]:
    """Load a specimen in a process of its own, against one that imports the libraries alone."""

    def run(code: str) -> None:
        command = [sys.executable, "-W", "ignore", "-c", code]
        subprocess.run(command, check=True, capture_output=True)

    ratio = against(lambda: run(_LOAD), lambda: run(_IMPORTS), repeats)
    yield _figure("load specimen:llama / import the libraries", ratio, 1.2, "fresh processes")


def _figure(name: str, ratio: Ratio, aim: float, of: str) -> Figure:
    times = f"{milliseconds(ratio.ours)} against {milliseconds(ratio.theirs)}"
    return Figure(name, ratio.value, "x", aim, f"{of}: {times}")
