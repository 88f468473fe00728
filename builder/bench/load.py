"""Loading a model from a folder and from a GGUF file, against transformers' own loading."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from builder.bench import loading
from builder.bench.figures import Figure, Settings, milliseconds
from builder.bench.timing import Ratio, against
from builder.bench.weights import gguf_path, write_random


def measure(settings: Settings) -> Iterator[Figure]:
    from transformers import AutoModelForCausalLM

    from explorer import load

    repeats = min(3, settings.repeats)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_random(folder)
        ratio = against(
            lambda: load(folder),
            lambda: AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"),
            repeats,
        )
        detail = f"random weights of SmolLM2-135M's size: {_times(ratio)}"
        yield Figure("load a folder / from_pretrained", ratio.value, "x", None, detail)
    path = gguf_path()
    if path is not None:
        ratio = against(
            lambda: load(path),
            lambda: AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, attn_implementation="eager"
            ),
            repeats,
        )
        detail = f"{path.name}: {_times(ratio)}"
        yield Figure("load a GGUF file / from_pretrained", ratio.value, "x", None, detail)
        yield from loading.gguf(path, repeats)
    yield from loading.fresh_process(repeats)


def _times(ratio: Ratio) -> str:
    times = f"{milliseconds(ratio.ours)} against {milliseconds(ratio.theirs)}"
    return f"{times}, tokenizer and tracing included"
