"""Models the core's tests share, each loaded once in a run of the tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from builder.bench.weights import gguf_path
from explorer import load
from explorer.specimens.recipes import recipe

FAMILIES = ("llama", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text")
MIXTURES = FAMILIES[1:]
HYBRIDS = FAMILIES[2:]

PROMPT = "In the beginning God created the heaven"


@cache
def specimen(family: str, dtype: torch.dtype = torch.float32):
    torch.set_num_threads(1)
    return load(f"specimen:{family}", dtype=dtype)


@cache
def shapes(checkpoint: str):
    """A checkpoint at its full size, without weights."""
    return load(checkpoint, weights=False)


def prompt(family: str) -> str:
    return recipe(family).prompt


def ids(model, text: str = PROMPT) -> torch.Tensor:
    return model.tokenizer(text, return_tensors="pt")["input_ids"]


def attention_of(model):
    """The first softmax attention of a model."""
    return model.layers[model.kinds.index("self_attn")].self_attn


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M: a test that asks for it gets the mark ``real``."""
    path = gguf_path()
    assert path is not None, "`make weights` installs SmolLM2-135M"
    return path


@pytest.fixture(params=FAMILIES)
def any_model(request):
    return specimen(request.param)


@pytest.fixture(params=HYBRIDS)
def hybrid(request):
    return specimen(request.param)


@pytest.fixture
def model():
    """The one with every host: recurrent and softmax blocks, a mixture with a shared expert, narrow
    key heads.
    """
    return specimen("qwen3_5_moe_text")
