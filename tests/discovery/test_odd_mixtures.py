"""Mixtures of experts of unusual kinds: what is served of them is right."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from explorer import load
from explorer.model.edits import Edit, ablate_expert
from explorer.specimens import bpe
from explorer.vocabulary.availability import ReasonKind
from explorer.widgets.views import router as views_router
from explorer.widgets.views.selection import Selection
from tests.support.models import PROMPT
from tests.support.tiny import random_model

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def test_slots_of_a_mixture_that_runs_every_expert_are_those_of_the_chosen():
    """Llama 4 weights its experts' inputs and runs all; the selected experts' share is served."""
    model = load("specimen:llama4_text")
    layer = 1
    rec = model.record(
        PROMPT,
        [
            "mlp_input",
            "router_logits",
            "router_margin",
            "expert_indices",
            "expert_weights",
            "expert_outputs",
            "routed_output",
        ],
        [layer],
    )
    logits, chosen = rec["router_logits", layer], rec["expert_indices", layer]
    best = logits.topk(chosen.shape[-1], dim=-1)
    assert torch.equal(chosen, best.indices)
    assert_close(rec["expert_weights", layer], best.values.sigmoid())
    experts = model.hf.model.layers[layer].feed_forward.experts
    token, slot = 2, 1
    expert = chosen[0, token, slot]
    gate, up = (
        rec["mlp_input", layer][0, token]
        * rec["expert_weights", layer][0, token, slot]
        @ experts.gate_up_proj[expert]
    ).chunk(2)
    assert_close(
        rec["expert_outputs", layer][0, token, slot],
        (up * experts.act_fn(gate)) @ experts.down_proj[expert],
    )
    assert_close(rec["expert_outputs", layer].sum(2), rec["routed_output", layer])
    without = model.record(
        PROMPT,
        ["expert_weights", "expert_outputs"],
        [layer],
        edits=[ablate_expert(layer, int(expert))],
    )
    gone = chosen == expert
    assert (
        not without["expert_weights", layer][gone].any()
        and not without["expert_outputs", layer][gone].any()
    )
    assert torch.equal(without["expert_outputs", layer][~gone], rec["expert_outputs", layer][~gone])
    with pytest.raises(ValueError, match="There are experts 0 to 7"):
        with model.trace(PROMPT):
            model.layers[layer].mlp.expert_indices[:] = 8


def test_slots_chosen_one_after_another_have_scores():
    model = load("specimen:phimoe")
    rec = model.record(
        PROMPT, ["router_logits", "router_scores", "router_margin", "expert_indices"]
    )
    for layer in range(model.num_layers):
        best = rec["router_scores", layer].topk(3, dim=-1)
        assert torch.equal(best.indices[..., :2], rec["expert_indices", layer])
        assert torch.equal(rec["router_scores", layer], rec["router_logits", layer])
        assert_close(rec["router_margin", layer], best.values[..., 1] - best.values[..., 2])


def test_a_null_expert_is_a_choice_that_adds_nothing():
    """ZAYA's router can select no expert; one then runs with a weight of zero."""
    model = load("specimen:zaya")
    gate, count = model.hf.model.layers[1].mlp.gate, model.layers[1].mlp.num_experts
    names = ["expert_indices", "expert_weights", "routed_output", "router_scores"]
    rec = model.record(PROMPT, names, [1])
    assert (
        rec["router_scores", 1].shape[-1]
        == count
        == len(model.hf.model.layers[1].mlp.experts.down_proj) + 1
    )
    assert torch.equal(rec["router_scores", 1].argmax(-1, keepdim=True), rec["expert_indices", 1])
    none = Edit("expert_indices", 1, lambda chosen: torch.full_like(chosen, count - 1))
    edited = model.record(PROMPT, names, [1], edits=[none])
    assert (
        (edited["expert_indices", 1] == count - 1).all()
        and not edited["expert_weights", 1].any()
        and not edited["routed_output", 1].any()
    )
    gate.balancing_biases[-1] = 9.0
    assert (model.record(PROMPT, names, [1])["expert_indices", 1] == count - 1).all()


def test_experts_that_are_rows_of_a_table_are_followed_to_their_sum():
    """Doge looks neurons up by pairs of keys: there is no score for each neuron."""
    model = load("specimen:doge")
    rec = model.record(
        PROMPT,
        [
            "mlp_input",
            "expert_indices",
            "expert_weights",
            "routed_output",
            "shared_expert_output",
            "mlp_output",
        ],
        [0],
    )
    mlp, x, chosen = model.hf.model.layers[0].mlp, rec["mlp_input", 0], rec["expert_indices", 0]
    neurons = (
        mlp.act_fn((mlp.down_embed(chosen) * x[:, :, None]).sum(-1)) * rec["expert_weights", 0]
    )
    assert_close(
        rec["routed_output", 0],
        (neurons[..., None] * mlp.up_embed(chosen)).sum(2),
        rtol=1e-4,
        atol=1e-6,
    )
    dense = mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
    assert_close(rec["shared_expert_output", 0], dense, rtol=1e-4, atol=1e-6)
    rows = model.support(0)
    whole = model.record(PROMPT)
    for view in (
        views_router.token_by_expert(whole, Selection()),
        views_router.layer_by_expert(whole),
        views_router.margins(whole, Selection()),
    ):
        assert "two halves" in view.reason
    for name in ("router_logits", "router_scores", "expert_outputs"):
        assert rows[name].reasons[0].kind is ReasonKind.NOT_PRESENT


def test_experts_run_on_sorted_tokens_serve_no_slot_in_a_wrong_place():
    model = load("specimen:jetmoe")
    rows = model.support(0)
    assert rows["expert_outputs"].reasons[0].kind is ReasonKind.NOT_TRACED
    assert rows["shared_expert_output"].reasons[0].kind is ReasonKind.NOT_PRESENT
    rec = model.record(
        PROMPT,
        [
            "mlp_input",
            "router_logits",
            "expert_indices",
            "expert_weights",
            "routed_output",
            "attention_premix",
            "attention_head_outputs",
        ],
        [0],
    )
    mlp, chosen = model.hf.model.layers[0].mlp, rec["expert_indices", 0]
    assert_close(
        rec["expert_weights", 0],
        rec["router_logits", 0].topk(chosen.shape[-1], dim=-1).values.softmax(-1),
    )
    token = 3
    total = 0
    for expert, weight in zip(chosen[0, token], rec["expert_weights", 0][0, token], strict=True):
        gate, up = (mlp.input_linear.weight[expert] @ rec["mlp_input", 0][0, token]).chunk(2)
        total = total + weight * (mlp.output_linear.weight[expert] @ (mlp.activation(gate) * up))
    assert_close(rec["routed_output", 0][0, token], total, rtol=1e-4, atol=1e-6)
    assert torch.equal(rec["attention_premix", 0], rec["attention_head_outputs", 0])


@pytest.mark.slow
def test_slots_of_one_expert_each_are_put_back_in_order_before_they_are_served(tmp_path):
    """With one expert per token, the slots sorted by expert are as large as the routed output."""
    sizes = load("specimen:jetmoe").config.to_dict() | {"num_experts_per_tok": 1}
    own = {
        key: value
        for key, value in sizes.items()
        if key not in ("model_type", "vocab_size") and "token_id" not in key
    }
    random_model("jetmoe", **own).save_pretrained(tmp_path)
    bpe.load_tokenizer(512).save_pretrained(tmp_path)
    model = load(tmp_path)
    run = model.record(torch.arange(9)[None], ["routed_output", "mlp_output"])
    assert_close(run["routed_output", 0] + model.hf.model.layers[0].mlp.bias, run["mlp_output", 0])
