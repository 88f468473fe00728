"""Loading a model from a folder and from a GGUF file, against transformers' own loading and against
what nobody can save: reading the numbers, importing libraries.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from builder.bench.figures import Figure, Settings, milliseconds
from builder.bench.timing import Ratio, against, in_turn
from builder.bench.weights import gguf_path, write_random

#: What a model cannot do without: torch, the engine, and transformers down to the model's class.
_IMPORTS = (
    "import explorer.engine.nnsight_api; from transformers import LlamaForCausalLM, AutoTokenizer"
)
_LOAD = "from explorer import load; load('specimen:llama')"


def measure(settings: Settings) -> Iterator[Figure]:
    repeats = min(3, settings.repeats)
    yield _folder(repeats)
    path = gguf_path()
    if path is not None:
        yield from _gguf(path, repeats, settings.quick)
    yield _fresh_process(repeats)


def _folder(repeats: int) -> Figure:
    """Load a folder, against transformers."""
    from transformers import AutoModelForCausalLM

    from explorer import load

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_random(folder)
        ratio = against(
            lambda: load(folder),
            lambda: AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"),
            repeats,
        )
    of = "random weights of SmolLM2-135M's size, tokenizer and tracing included"
    return _figure("load a folder / from_pretrained", ratio, None, of)


def _gguf(path: Path, repeats: int, quick: bool) -> Iterator[Figure]:
    """Load a GGUF file, against parsing it and dequantising its tensors with the package gguf and,
    unless ``quick``, against transformers, which takes several times as long.
    """
    from gguf import GGUFReader, dequantize
    from transformers import AutoModelForCausalLM

    from explorer import load

    def native() -> object:
        return AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, attn_implementation="eager"
        )

    def read() -> object:
        tensors = GGUFReader(path).tensors
        return [dequantize(one.data, one.tensor_type) for one in tensors]

    calls = (lambda: load(path), read, *(() if quick else (native,)))
    ours, least, *theirs = in_turn(calls, repeats)
    of = f"{path.name}, tokenizer and tracing included"
    for seconds in theirs:
        ratio = Ratio(ours, seconds, repeats)
        yield _figure("load a GGUF file / from_pretrained", ratio, None, of)
    ratio = Ratio(ours, least, repeats)
    yield _figure("load a GGUF file / read and dequantise it", ratio, 1.5, of)


def _fresh_process(repeats: int) -> Figure:
    """Load a specimen in a process of its own, against one that imports the libraries alone."""

    def run(code: str) -> None:
        command = [sys.executable, "-W", "ignore", "-c", code]
        subprocess.run(command, check=True, capture_output=True)

    ratio = against(lambda: run(_LOAD), lambda: run(_IMPORTS), repeats)
    return _figure("load specimen:llama / import the libraries", ratio, 1.2, "fresh processes")


def _figure(name: str, ratio: Ratio, aim: float | None, of: str) -> Figure:
    times = f"{milliseconds(ratio.ours)} against {milliseconds(ratio.theirs)}"
    return Figure(name, ratio.value, "x", aim, f"{of}: {times}")
