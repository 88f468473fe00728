"""Texts of different length in one recording: padding changes nothing for the tokens of a text."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from tests.support.models import specimen

TEXTS = ["In the beginning God created the heaven and the earth", "And God said"]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gptj", "gemma2"])
def test_each_text_has_the_values_it_has_alone(family, side, monkeypatch):
    model = specimen(family)
    monkeypatch.setattr(model.tokenizer, "padding_side", side)
    together = model.record(TEXTS, values=["logits", "layer_output", "attention_probabilities"])
    mask = together.attention_mask
    assert mask is not None and mask.shape == together.input_ids.shape
    for row, text in enumerate(TEXTS):
        alone = model.record(text, values=["logits", "layer_output", "attention_probabilities"])
        real = mask[row].bool()
        assert torch.equal(together.input_ids[row, real], alone.input_ids[0])
        assert_close(together["logits"][row, real], alone["logits"][0], rtol=1e-4, atol=1e-4)
        for layer in range(model.num_layers):
            assert_close(
                together["layer_output", layer][row, real],
                alone["layer_output", layer][0],
                rtol=1e-4,
                atol=1e-4,
            )
            pattern = together["attention_probabilities", layer][row][:, real][:, :, real]
            assert_close(pattern, alone["attention_probabilities", layer][0], rtol=1e-4, atol=1e-5)


def test_what_a_tokenizer_returns_keeps_its_mask():
    model = specimen("gpt2")
    ids = torch.tensor([[0, 0, 5, 77], [1, 2, 3, 4]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    rec = model.record({"input_ids": ids, "attention_mask": mask}, values=["logits"])
    alone = model.record([5, 77], values=["logits"])
    assert_close(rec["logits"][0, 2:], alone["logits"][0], rtol=1e-4, atol=1e-4)
    assert torch.equal(rec.attention_mask, mask)
