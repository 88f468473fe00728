"""Signatures of released checkpoints, and the costs they state as numbers, for several tests."""

from __future__ import annotations

from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from explorer.meta_device import without_padding_warning
from explorer.signature import signature
from tests.support.models import shapes

#: A checkpoint of each of the first families.
FIRST = {
    "llama": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "qwen3_moe": "Qwen/Qwen3-30B-A3B",
    "qwen3_next": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "qwen3_5_moe_text": "Qwen/Qwen3.6-35B-A3B",
}

#: A sliding window, and latent attention with dense blocks before the mixtures.
MORE = {"gemma2": "google/gemma-2-2b", "deepseek_v3": "deepseek-ai/DeepSeek-V3"}


@cache
def signed(family: str) -> dict:
    return signature(shapes({**FIRST, **MORE}[family]))


def value(text: str, **names: int) -> int:
    """What a formula comes to; it is plain arithmetic, with ``min`` for what is capped."""
    return eval(text, {"__builtins__": {}, "min": min}, names)


def calls(cost: dict, **names: int) -> int:
    """A cost of a call: its numbers, with what its further names stand for."""
    more = {name: value(meaning["numbers"], **names) for name, meaning in cost["where"].items()}
    return value(cost["numbers"], **names, **more)


def grouped(left: tuple, right: tuple, *args: object, **options: object) -> int:
    """What torch's counter leaves out: each row times the matrix of its expert."""
    return 2 * left[0] * left[1] * right[-1]


def counted(module: torch.nn.Module, context: int) -> int:
    ids = torch.zeros(1, context, dtype=torch.long, device="meta")
    with torch.no_grad(), without_padding_warning(module):
        out = module(ids[:, 1:], use_cache=True)
        with FlopCounterMode(
            display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped}
        ) as counter:
            module(ids[:, :1], cache=out.cache, use_cache=True)
    return counter.get_total_flops()
