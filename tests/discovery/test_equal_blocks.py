"""Which blocks are equal: what a plain number, a word or a configuration's entry makes of them."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from explorer.discovery.backbone import equal_blocks


def _blocks(count=3, **settings):
    """Return blocks of one matrix whose attributes are ``settings`` of their number."""
    blocks = [torch.nn.Sequential(torch.nn.Linear(2, 2, device="meta")) for _ in range(count)]
    for number, block in enumerate(blocks):
        for name, of in settings.items():
            setattr(block[0], name, of(number))
    return blocks


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("top_k", lambda number: number + 1),
        ("sliding_window", lambda number: [None, 128, 64][number]),
        ("scaling", lambda number: 0.5**number),
        ("attention_dropout", lambda number: 0.1 * number),
        ("rope_theta", lambda number: 10.0 ** (number + 3)),
        ("rope_parameters", lambda number: {"rope_type": "default", "factor": number}),
        ("rope_kind", lambda number: ["default", "linear", "yarn"][number]),
        ("groups", lambda number: [1, number]),
        ("config", lambda number: LlamaConfig(num_key_value_heads=2**number)),
    ],
)
def test_blocks_that_differ_in_a_plain_setting_are_different(name, of):
    assert equal_blocks(_blocks(**{name: of})) == [(0,), (1,), (2,)]


@pytest.mark.parametrize("name", ["layer_idx", "layer_id", "layer_number", "idx"])
def test_blocks_that_only_differ_in_their_index_are_equal(name):
    assert equal_blocks(_blocks(**{name: lambda number: number + 1})) == [(0, 1, 2)]


def test_a_dropout_module_of_another_probability_makes_another_block():
    blocks = [torch.nn.Sequential(torch.nn.Dropout(p)) for p in (0.1, 0.2, 0.1)]
    assert equal_blocks(blocks) == [(0, 2), (1,)]


def test_blocks_of_other_entries_in_the_configuration_are_different():
    config = LlamaConfig(num_hidden_layers=3)
    config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    config.eos_token_id = [1, 2, 3]  # as many as there are blocks, and not of blocks
    assert equal_blocks(_blocks(), config) == [(0, 2), (1,)]


def test_a_fraction_of_each_of_many_blocks_own_makes_no_kind_but_a_whole_number_does():
    many = {"rate": lambda number: number / 40, "top_k": lambda number: 1 + number // 30}
    assert equal_blocks(_blocks(40, **many)) == [tuple(range(30)), tuple(range(30, 40))]
