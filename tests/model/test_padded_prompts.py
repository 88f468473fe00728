"""Texts of different length in one recording: padding changes nothing for the tokens of a text."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from explorer import load
from explorer.model.errors import PromptError
from tests.support.messages import refused
from tests.support.models import specimen

TEXTS = ["In the beginning God created the heaven and the earth", "And God said"]

#: Families in whose own forward the padding beside a text goes through a recurrence, a convolution
#: or a choice of blocks as if it were text.
CHANGED_BY_PADDING = ["xlstm", "minimax_m3_vl_text", "recurrent_gemma", "rwkv", "doge"]


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


@pytest.mark.parametrize("family", CHANGED_BY_PADDING)
def test_a_family_whose_texts_padding_changes_refuses_it(family):
    model = load(f"specimen:{family}")
    refused("padding_changes", lambda: model.record(TEXTS), family=family, side="left")
    with pytest.raises(PromptError, match="changes what"), model.trace() as tracer:
        for text in TEXTS:
            with tracer.invoke(text):
                model.logits.save()
    assert model.record([TEXTS[0]] * 2, values=["logits"])["logits"].isfinite().all()


def test_the_effect_of_padding_is_measured_once_for_each_side(monkeypatch):
    model = load("specimen:llama")
    model.record(TEXTS, values=["logits"])
    assert set(model.padding_effects) == {"left"} and model.padding_effects["left"] < 1e-5
    forwards = []
    handle = model.hf.register_forward_hook(lambda *call: forwards.append(1))
    model.record(TEXTS, values=["logits"])
    monkeypatch.setattr(model.tokenizer, "padding_side", "right")
    model.record(TEXTS, values=["logits"])
    handle.remove()
    assert len(forwards) == 1 + 3 and set(model.padding_effects) == {"right", "left"}


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_to_steer_are_counted_from_the_first_token_of_each_text(
    family, side, monkeypatch
):
    model = specimen(family)
    monkeypatch.setattr(model.tokenizer, "padding_side", side)
    vector = torch.linspace(-2, 2, model.hidden_size)
    for positions in (0, -1, slice(1, 3), [0, 2]):
        with torch.no_grad(), model.trace() as tracer:
            with tracer.invoke(TEXTS[0]):
                model.steer(1, vector, positions=positions)
            with tracer.invoke(TEXTS[1]):
                model.steer(1, vector, positions=positions)
                together = model.layers[1].layer_output.save()
        with torch.no_grad(), model.trace(TEXTS[1]):
            model.steer(1, vector, positions=positions)
            alone = model.layers[1].layer_output.save()
        length = alone.shape[1]
        real = together[:, -length:] if side == "left" else together[:, :length]
        assert_close(real, alone, rtol=1e-4, atol=1e-4)
