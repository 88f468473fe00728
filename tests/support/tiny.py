"""Tiny random models of any type transformers has."""

from __future__ import annotations

import torch
import transformers

from explorer.discovery.discover import discover
from explorer.meta_device import build_meta
from explorer.model.language_model import LanguageModel
from explorer.specimens import bpe


def random_model(model_type: str, **sizes) -> torch.nn.Module:
    """Return a random model of a type in float32; ``sizes`` are arguments of its configuration."""
    config = transformers.AutoConfig.for_model(
        model_type, vocab_size=2048, pad_token_id=0, eos_token_id=0, bos_token_id=0, **sizes
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        ).eval()


def tiny(model_type: str, **sizes) -> LanguageModel:
    """Return a `random_model` under standard names."""
    module = random_model(model_type, **sizes)
    return LanguageModel(
        module,
        bpe.load_tokenizer(512),
        discover(build_meta(module.config)),
        model_type,
        "random, seed 3",
    )
