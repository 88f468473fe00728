"""What a mixture adds up: every slot's weight is final, and each part that is added is served."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.testing import assert_close
from transformers.models.mixtral import modeling_mixtral as mixtral

from explorer.model.edits import Edit, ablate_expert
from explorer.vocabulary import reasons
from tests.support.models import specimen
from tests.support.tiny import tiny

IDS = torch.tensor([[5, 77, 300, 41, 9, 1200, 88, 3]])
PARTS = ("expert_outputs", "expert_weights", "expert_indices", "routed_output", "mlp_output")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("family", ["laguna", "beam", "minimax_m3_vl_text"])
def test_a_factor_on_the_sum_of_the_slots_is_a_part_of_their_weights(family):
    model, layer = specimen(family), 1
    mlp = model.anatomy.block(layer).hosts["mlp"]
    shared = ["shared_expert_output"] * ("shared_expert_output" in mlp.hook_points)
    names = [*(f"mlp.{name}" for name in (*PARTS, *shared)), "mlp.router_logits"]
    run = model.record(IDS, names, [layer])
    assert mlp.hook_points["expert_weights"][0].scale == mlp.details.scoring.factor == 1.5
    assert_close(run["expert_outputs", layer].sum(2), run["routed_output", layer])
    if shared:
        total = run["routed_output", layer] + run["shared_expert_output", layer]
        assert torch.equal(total, run["mlp_output", layer])
    gone = int(run["expert_indices", layer][0, 0, 0])
    without = model.record(IDS, names, [layer], edits=[ablate_expert(layer, gone)])
    chosen = run["expert_indices", layer] == gone
    assert not without["expert_outputs", layer][chosen].any()
    kept = without["expert_outputs", layer][~chosen]
    assert torch.equal(kept, run["expert_outputs", layer][~chosen])


def test_a_slot_s_weight_in_bfloat16_is_written_at_its_place_alone():
    model, layer = specimen("laguna", torch.bfloat16), 1

    def edit(weights):
        weights = weights.clone()
        weights[0, 2] = 3.0
        return weights

    names = ["mlp.expert_weights", "mlp.expert_outputs"]
    clean = model.record(IDS, names, [layer])
    edited = model.record(IDS, names, [layer], edits=[Edit("expert_weights", layer, edit)])
    others = torch.arange(IDS.shape[1]) != 2
    for name in ("expert_weights", "expert_outputs"):
        assert torch.equal(edited[name, layer][:, others], clean[name, layer][:, others])
    assert (edited["expert_weights", layer][0, 2] == 3).all()
    with model.trace(IDS):
        weights = model.layers[layer].mlp.expert_weights
        weights.requires_grad_()
        (grad,) = torch.autograd.grad(model.logits.float().square().sum(), [weights])
        grad = grad.save()
    assert grad.shape == clean["expert_weights", layer].shape and grad.any()


@pytest.mark.parametrize(
    ("family", "formula"),
    [
        ("qwen3_moe", "mlp_output = routed_output"),
        ("laguna", "mlp_output = routed_output + shared_expert_output"),
        ("cohere2_moe", "mlp_output = 0.5 · (routed_output + shared_expert_output)"),
        ("afmoe", "mlp_output = post_mlp_layernorm(routed_output + shared_expert_output)"),
        ("beam", "mlp_output = 0.447214 · post_feedforward_layernorm(routed_output)"),
        (
            "gemma4_text",
            "mlp_output = post_feedforward_layernorm("
            "post_feedforward_layernorm_2(routed_output) + dense_mlp.mlp_output)",
        ),
    ],
)
def test_the_sum_of_a_mixture_s_parts_is_written_as_a_formula(family, formula):
    assert specimen(family).anatomy.block(1).mixture_sum == formula


@cache
def latent(width: int):
    """A mixture whose experts work on a latent width, between mixers."""
    return tiny(
        "nemotron_h",
        **{**SIZES, "layers_block_type": ["mamba", "moe", "attention"]},
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=20,
        moe_latent_size=width,
        n_group=1,
        topk_group=1,
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=2,
    )


@pytest.mark.parametrize("width", [24, 40])
def test_experts_of_a_latent_width_are_brought_back_before_the_shared_expert_joins(width):
    model = latent(width)
    run = model.record(IDS, [f"mlp.{name}" for name in (*PARTS, "shared_expert_output")], [1])
    slots, routed = run["expert_outputs", 1], run["routed_output", 1]
    assert slots.shape == (1, 8, 2, width) and routed.shape == (1, 8, 32)
    assert model.layers[1].mlp.latent_size == width
    row = model.support(1)["expert_outputs"]
    assert row.shown.layout == "LatentOutputs" and row.shown.axes[-1] == "latent_size"
    assert row.shown.typed in str(model)
    mixer = model.hf.model.layers[1].mixer
    assert_close(routed, mixer.fc2_latent_proj(slots.sum(2)).detach())
    assert torch.equal(routed + run["shared_expert_output", 1], run["mlp_output", 1])


def test_experts_of_the_stream_s_width_have_the_common_layout():
    model = specimen("laguna")
    row = model.support(1)["expert_outputs"]
    assert row.shown == row.value and row.value.layout == "ExpertOutputs"


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": [1, 2, 3]}),
        ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": [2, 3, 4]}),
        ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": [3, 1, 3]}),
    ],
)
def test_blocks_that_choose_other_numbers_of_experts_are_other_kinds(family, sizes):
    model = tiny(family, **SIZES, **sizes)
    run = model.record(IDS, ["mlp.expert_indices", "mlp.routed_output"])
    chosen = sizes["moe_topk"]
    assert [model.layers[layer].mlp.top_k for layer in range(3)] == chosen
    assert [run["expert_indices", layer].shape[-1] for layer in range(3)] == chosen
    assert len(model.anatomy.blocks) == len(set(chosen))


@pytest.mark.parametrize("family", ["gemma4_text", "doge"])
def test_a_dense_mlp_beside_a_mixture_has_a_host_of_its_own(family):
    model, layer = specimen(family), 0
    block = model.hf.model.layers[layer]
    names = ["mlp_activation", "mlp_neurons", "mlp_output"]
    run = model.record(IDS, [*(f"dense_mlp.{name}" for name in names), "mlp.mlp_output"], [layer])
    neurons = run["dense_mlp.mlp_neurons", layer]
    assert neurons.shape[-1] == model.layers[layer].dense_mlp.intermediate_size
    made = block.mlp.down_proj(neurons)
    if family == "gemma4_text":
        made = block.post_feedforward_layernorm_1(made)
        assert model.layers[layer].dense_mlp._module is block.mlp
    assert_close(run["dense_mlp.mlp_output", layer], made.detach())
    why = model.support(layer)["mlp.mlp_neurons"].reasons[layer]
    assert why == reasons.DENSE_BESIDE
    with torch.no_grad(), model.trace(IDS):
        model.layers[layer].dense_mlp.mlp_activation[:] = 0
        silent = model.layers[layer].dense_mlp.mlp_neurons.save()
        rest = model.layers[layer].mlp.mlp_output.save()
    assert not silent.any() and not torch.equal(rest, run["mlp_output", layer])


def _beside(mixture):
    """Return a mixture with the weights of a dense MLP among its own children."""

    class Beside(mixture):
        def __init__(self, config):
            super().__init__(config)
            self.up = torch.nn.Linear(config.hidden_size, 20, bias=False)
            self.down = torch.nn.Linear(20, config.hidden_size, bias=False)

        def forward(self, hidden_states):
            routed = super().forward(hidden_states)
            return routed + self.down(torch.relu(self.up(hidden_states)))

    return Beside


def _with_own_norm(block):
    """Return a block that adds a dense MLP, which reads a norm of its own, to its mixture."""

    class WithDense(block):
        __module__ = block.__module__  # code of others is not followed

        def __init__(self, config, layer_idx):
            super().__init__(config, layer_idx)
            self.own_norm = torch.nn.RMSNorm(config.hidden_size)
            self.dense = torch.nn.Sequential(
                torch.nn.Linear(config.hidden_size, 20),
                torch.nn.GELU(),
                torch.nn.Linear(20, config.hidden_size),
            )

        def forward(self, hidden_states, **kwargs):
            attended = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
            hidden_states = hidden_states + attended[0]
            dense = self.dense(self.own_norm(hidden_states))
            routed = self.mlp(self.post_attention_layernorm(hidden_states))
            return hidden_states + (routed + dense)

    return WithDense


MIXTRAL = {**SIZES, "num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2}


def test_a_dense_mlp_made_of_a_mixture_s_own_matrices_is_served(monkeypatch):
    monkeypatch.setattr(mixtral, "MixtralSparseMoeBlock", _beside(mixtral.MixtralSparseMoeBlock))
    model = tiny("mixtral", **MIXTRAL)
    run = model.record(IDS)
    mlp = model.hf.model.layers[0].mlp
    made = mlp.down(run["dense_mlp.mlp_neurons", 0]).detach()
    assert_close(run["dense_mlp.mlp_output", 0], made)
    assert_close(run["routed_output", 0] + made, run["mlp_output", 0])


def test_a_dense_mlp_that_the_block_adds_to_its_mixture_is_served(monkeypatch):
    monkeypatch.setattr(mixtral, "MixtralDecoderLayer", _with_own_norm(mixtral.MixtralDecoderLayer))
    model = tiny("mixtral", **MIXTRAL)
    run = model.record(IDS)
    dense = model.hf.model.layers[0].dense
    assert_close(run["dense_mlp.mlp_output", 0], dense[2](run["dense_mlp.mlp_neurons", 0]).detach())
    total = run["routed_output", 0] + run["dense_mlp.mlp_output", 0]
    assert_close(total, run["mlp_output", 0])
    assert model.support(0)["shared_expert_output"].reasons[0] == reasons.DENSE_NOT_SHARED
