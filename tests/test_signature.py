"""Signatures: what the inferred types of whole families say, and that they hold on the models themselves."""

from __future__ import annotations

from functools import cache

import pytest

from explorer.signature import signature
from tests.models import shapes

#: A checkpoint of each of the first families.
FIRST = {
    "llama": "HuggingFaceTB/SmolLM2-135M-Instruct", "qwen3_moe": "Qwen/Qwen3-30B-A3B",
    "qwen3_next": "Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3_5_moe_text": "Qwen/Qwen3.6-35B-A3B",
}


#: A sliding window, and latent attention with dense blocks before the mixtures.
MORE = {"gemma2": "google/gemma-2-2b", "deepseek_v3": "deepseek-ai/DeepSeek-V3"}


@cache
def signed(family: str) -> dict:
    return signature(shapes({**FIRST, **MORE}[family]))


@pytest.mark.parametrize("family", FIRST)
def test_every_axis_of_the_first_families_resolves(family):
    found = signed(family)["resolved"]
    assert found["unresolved"] == [] and found["resolved"] == found["axes"] > 300 and found["probes"] > 10


@pytest.mark.parametrize("family", FIRST)
def test_parameters_have_the_numbers_of_the_model(family):
    module = shapes(FIRST[family]).hf
    checked = 0
    for block in signed(family)["blocks"]:
        for path in block["paths"]:
            own = module.get_submodule(path)
            for part in block["parameters"]:
                if part["type"]["numbers"] is not None:
                    assert list(getattr(own, part["name"]).shape) == part["type"]["numbers"], (path, part)
                    checked += 1
    assert checked > 3
