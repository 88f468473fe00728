"""Attentions and recurrences that do not go the usual way, served as what they are."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from explorer import load
from tests.support.models import PROMPT, specimen
from tests.support.tiny import tiny


@pytest.mark.parametrize("family", ["granite_swa", "granitemoe_swa"])
def test_sinks_that_scale_the_heads_are_served_as_sinks(family):
    """They join no softmax: each head keeps the share of the weight that a softmax would."""
    model = load(f"specimen:{family}")
    names = ("attention_sinks", "attention_scores", "attention_probabilities", "head_scale")
    rec = model.record(PROMPT, names)
    sinks, scores = rec["attention_sinks", 0], rec["attention_scores", 0]
    assert torch.equal(sinks, model.hf.model.layers[0].self_attn.sinks.detach())
    beside = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    kept = beside.softmax(-1)[..., :-1].sum(-1)
    assert_close(rec["head_scale", 0], kept.transpose(1, 2), rtol=1e-5, atol=1e-6)
    assert_close(rec["attention_probabilities", 0].sum(-1), torch.ones_like(kept))
    with torch.no_grad(), model.trace(PROMPT):
        model.layers[0].self_attn.attention_sinks[:] = -1e9
        scale = model.layers[0].self_attn.head_scale.save()
    assert_close(scale, torch.ones_like(scale))


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_size_of_the_blocks_does_not_show_in_a_state_with_fixed_decays(block_size):
    """16 is the size of a key too; the prompt is longer than a block and no multiple of it."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    experts = {"intermediate_size": 48, "num_local_experts": 4}
    model = tiny("minimax", **sizes, **kinds, **experts, block_size=block_size)
    usual = specimen("minimax")
    layer, other = (one.mixers.index(("retention",)) for one in (model, usual))
    served = {row.name for row in model.support(layer) if row.available}
    assert served == {row.name for row in usual.support(other) if row.available}
    ids = torch.arange(38).view(2, 19)
    names = ["attention_head_outputs", "state_output", "retention.states"]
    inputs = [f"attention_{name}" for name in ("queries", "keys", "values")]
    rec = model.record(ids, [*names, *inputs, "retention.decays"])
    outputs, state = rec.replay(layer).run()
    assert_close(outputs, rec["attention_head_outputs", layer], rtol=1e-3, atol=1e-5)
    assert_close(state, rec["state_output", layer], rtol=1e-3, atol=1e-5)
