"""How long a prompt may be: the limit follows the rotary embedding's scaling, and is hard only
where positions are looked up in a table.
"""

from __future__ import annotations

import copy
import warnings
from functools import cache

import pytest
import torch

from explorer.discovery.discover import discover
from explorer.model.language_model import LanguageModel
from explorer.specimens import bpe
from tests.support.messages import refused, sentence
from tests.support.tiny import random_model, tiny

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}

_BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}

#: Rotary parameters and the length that each is for, of a model of 16 positions.
SCALED = [
    ({"rope_type": "default"}, 16),
    ({"rope_type": "yarn", "factor": 4.0}, 64),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}, 32),
    ({"rope_type": "linear", "factor": 2.0}, 32),
    ({"rope_type": "dynamic", "factor": 2.0}, 32),
    ({"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 4, **_BANDS}, 16),
    ({"rope_type": "longrope", "original_max_position_embeddings": 8, **_FACTORS}, 16),
]


@cache
def scaled(index: int):
    rope = {"rope_theta": 1e4, **SCALED[index][0]}
    module = random_model("llama", max_position_embeddings=16, rope_parameters=rope, **SIZES)
    anatomy = discover(copy.deepcopy(module))  # not on meta: one kind looks at the positions
    return LanguageModel(module, bpe.load_tokenizer(512), anatomy, "scaled", "random, seed 3")


def prompt(length: int) -> torch.Tensor:
    return torch.arange(1, length + 1)[None]


@pytest.mark.parametrize("index", range(len(SCALED)))
def test_a_soft_limit_follows_the_scaling_and_warns_once(index):
    model, most = scaled(index), SCALED[index][1]
    model.warned_of_length = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.record(prompt(most), ["logits"])
    said = sentence("longer_than_made_for", count=most + 1, most=most)
    with pytest.warns(UserWarning, match=said):
        found = model.record(prompt(most + 1), ["logits"])["logits"]
    with torch.no_grad():
        assert torch.equal(found, model.hf(prompt(most + 1)).logits)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.record(prompt(most + 2), ["logits"])


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("gpt2", {"n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}),
        ("gptj", {"n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2, "rotary_dim": 8}),
        (
            "opt",
            {
                "max_position_embeddings": 16,
                "hidden_size": 32,
                "word_embed_proj_dim": 32,
                "ffn_dim": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
        ),
    ],
)
def test_a_table_of_positions_is_a_hard_limit(family, sizes):
    model = tiny(family, **sizes)
    assert model.record(prompt(16), ["logits"])["logits"].isfinite().all()
    refused("too_long", lambda: model.record(prompt(17)), count=17, most=16)
    with pytest.raises((IndexError, RuntimeError)):
        model.hf(prompt(17))
