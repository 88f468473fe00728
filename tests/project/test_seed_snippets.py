"""What researchers already write against these families must run here and hold, on every family
that has it.

Each test is one use of the API as published reference pages show it: a trace, a
few saves, and the arithmetic that must come out. They run on our specimens, in
float32 unless said otherwise.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.testing import assert_close

from explorer import load
from explorer.engine.nnsight_api import OutOfOrderError
from explorer.specimens.recipes import recipe

MIXTURES = ("qwen3_moe", "qwen3_next", "qwen3_5_moe_text")
HYBRIDS = ("qwen3_next", "qwen3_5_moe_text")
EVERY = ("llama", *MIXTURES)


@cache
def loaded(family: str, dtype: torch.dtype = torch.float32):
    torch.set_num_threads(1)
    return load(f"specimen:{family}", dtype=dtype)


def blocks(model, kind: str) -> list[int]:
    types = getattr(model.config, "layer_types", None) or ["full_attention"] * model.num_layers
    return [i for i, t in enumerate(types) if t == kind]


def mixer(model, layer: int):
    block = model.layers[layer]
    return block.linear_attn if layer in blocks(model, "linear_attention") else block.self_attn


@pytest.fixture(params=EVERY)
def any_family(request):
    return loaded(request.param), recipe(request.param).prompt


@pytest.fixture(params=MIXTURES)
def mixture(request):
    return loaded(request.param), recipe(request.param).prompt


@pytest.fixture(params=HYBRIDS)
def hybrid(request):
    return loaded(request.param), recipe(request.param).prompt


def test_the_identity_of_the_addends_is_exact_on_every_block(any_family):
    model, prompt = any_family
    for layer in range(model.num_layers):
        with model.trace(prompt):
            x = model.layers[layer].input.save()
            mix = mixer(model, layer).attention_output.save()
            mlp = model.layers[layer].mlp.mlp_output.save()
            out = model.layers[layer].layer_output.save()
        assert torch.equal(x + mix + mlp, out)


def test_routed_and_shared_make_up_the_mixture(mixture):
    model, prompt = mixture
    moe = model.layers[1].mlp
    shared = model.family in HYBRIDS
    with model.trace(prompt):
        routed = moe.routed_output.save()
        if shared:
            gated = moe.shared_expert_output.save()
        whole = moe.mlp_output.save()
    assert torch.equal(routed + gated if shared else routed, whole)


def test_blocks_of_each_kind_are_picked_from_the_configuration(hybrid):
    model, _ = hybrid
    types = model.config.get_text_config().layer_types
    delta = [i for i, t in enumerate(types) if t == "linear_attention"]
    full = [i for i, t in enumerate(types) if t == "full_attention"]
    assert delta and full and sorted(delta + full) == list(range(model.num_layers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_router_renormalises_the_softmax_of_its_top_experts(mixture, dtype):
    family, prompt = mixture[0].family, mixture[1]
    model = loaded(family, dtype)
    moe = model.layers[1].mlp
    with model.trace(prompt):
        logits = moe.router_logits.save()
        weights = moe.expert_weights.save()
        chosen = moe.expert_indices.save()
    top = logits.float().softmax(-1).topk(moe.top_k, dim=-1)
    assert weights.shape[-1] == moe.top_k and logits.shape[-1] == moe.num_experts
    assert_close((top.values / top.values.sum(-1, keepdim=True)).to(weights.dtype), weights)
    assert torch.equal(top.indices, chosen)


def test_the_slots_sum_to_the_routed_output(mixture):
    model, prompt = mixture
    moe = model.layers[1].mlp
    with model.trace(prompt):
        slots = moe.expert_outputs.save()
        routed = moe.routed_output.save()
    assert slots.shape[2] == moe.top_k
    assert_close(slots.sum(2), routed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ablating_an_expert_changes_exactly_the_tokens_that_chose_it(mixture, dtype):
    family, prompt = mixture[0].family, mixture[1]
    model = loaded(family, dtype)
    moe = model.layers[1].mlp
    with model.trace(prompt):
        idx = moe.expert_indices.save()
        clean = moe.mlp_output.save()
    seen = set()
    for e in range(moe.num_experts):
        with model.trace(prompt):
            moe.expert_weights = moe.expert_weights.masked_fill(moe.expert_indices == e, 0)
            left = moe.expert_weights.save()
            ablated = moe.mlp_output.save()
            logits = model.logits.save()
        changed = (ablated != clean).any(-1)
        assert torch.equal(changed, (idx == e).any(-1)), f"expert {e}"
        assert torch.equal(left == 0, idx == e) and torch.isfinite(logits).all()
        seen.add(bool(changed.any()))
    assert True in seen


def test_the_shared_experts_gate_is_one_sigmoid_per_token(hybrid):
    model, prompt = hybrid
    moe = model.layers[1].mlp
    with model.trace(prompt):
        x = moe.input.save()
        ungated = moe.shared_experts.output.save()
    with model.trace(prompt):
        shared = moe.shared_expert_output.save()
    gate = torch.sigmoid(moe._module.shared_expert_gate(x))
    assert gate.shape[-1] == 1
    # The module sees [tokens, hidden]; its own output keeps that form.
    assert torch.equal(gate * ungated.view_as(shared), shared)


def test_zeroing_the_shared_expert_leaves_the_routed_sum(hybrid):
    model, prompt = hybrid
    moe = model.layers[1].mlp
    with model.trace(prompt):
        routed = moe.routed_output.save()
        moe.shared_expert_output = torch.zeros_like(moe.shared_expert_output)
        whole = moe.mlp_output.save()
    assert torch.equal(routed, whole)


def test_the_shared_expert_comes_before_the_router(hybrid):
    model, prompt = hybrid
    moe = model.layers[1].mlp
    with model.trace(prompt):
        first = moe.shared_experts.output.save()
        then = moe.router_logits.save()
        routed = moe.routed_output.save()
        last = moe.shared_expert_output.save()
    assert all(t.isfinite().all() for t in (first, then, routed, last))
    with pytest.raises(OutOfOrderError, match="shared_expert"):
        with model.trace(prompt):
            then = moe.router_logits.save()
            first = moe.shared_experts.output.save()


def test_the_gate_in_q_proj_multiplies_the_heads(hybrid):
    model, prompt = hybrid
    attn = model.layers[blocks(model, "full_attention")[0]].self_attn
    d = model.head_dim
    with model.trace(prompt):
        q_and_gate = attn.q_proj.output.save()
    query, gate = q_and_gate.unflatten(-1, (-1, 2 * d)).chunk(2, dim=-1)
    with model.trace(prompt):
        heads = attn.attention_head_outputs.save()
        gated = attn.o_proj.input.save()
    assert (
        q_and_gate.shape[-1] == 2 * model.num_heads * d and query.shape == gate.shape == heads.shape
    )
    assert_close(gated, (heads * gate.sigmoid()).flatten(2))


def test_the_rotary_leaves_the_rest_of_a_head_alone(hybrid):
    model, prompt = hybrid
    attn = model.layers[blocks(model, "full_attention")[0]].self_attn
    turned = int(model.head_dim * model.config.rope_parameters["partial_rotary_factor"])
    with model.trace(prompt):
        normed = attn.q_norm.output.save()
        queries = attn.attention_queries.save()
    assert 0 < turned < model.head_dim
    assert torch.equal(queries[..., turned:], normed.transpose(1, 2)[..., turned:])
    assert not torch.equal(queries, normed.transpose(1, 2))


def test_a_key_value_head_reaches_its_group_of_query_heads(any_family):
    model, prompt = any_family
    attn = model.layers[blocks(model, "full_attention")[0]].self_attn
    group = model.num_heads // model.num_kv_heads
    with model.trace(prompt):
        clean = attn.attention_head_outputs.save()
    with model.trace(prompt):
        attn.attention_values[:, 1] = 0
        edited = attn.attention_head_outputs.save()
    touched = (edited != clean).any(-1).any(1)[0]
    assert touched.nonzero().flatten().tolist() == list(range(group, 2 * group))


def test_a_scaled_projection_is_undone_by_the_heads_norm():
    model, prompt = loaded("qwen3_moe"), recipe("qwen3_moe").prompt
    attn, d = model.layers[1].self_attn, model.head_dim
    with model.trace(prompt):
        clean = attn.attention_queries.save()
    with model.trace(prompt):
        attn.q_proj.output[..., :d] *= 5
        scaled = attn.attention_queries.save()
    assert_close(scaled, clean, rtol=1e-4, atol=1e-4)


def test_scores_are_scaled_by_the_root_of_the_head_dimension(any_family):
    model, prompt = any_family
    attn = model.layers[blocks(model, "full_attention")[0]].self_attn
    with model.trace(prompt):
        q = attn.attention_queries.save()
        k = attn.attention_keys.save()
        scores = attn.attention_scores.save()
    raw = (
        q
        @ k.repeat_interleave(model.num_heads // model.num_kv_heads, 1).mT
        * model.qk_head_dim**-0.5
    )
    seen = torch.ones_like(raw[0, 0]).tril().bool()
    assert_close(scores[..., seen], raw[..., seen])


def test_the_fused_projections_regroup_per_key_head():
    model, prompt = loaded("qwen3_next"), recipe("qwen3_next").prompt
    mix = model.layers[0].linear_attn
    with model.trace(prompt):
        qkvz = mix.in_proj_qkvz.output.save()
        ba = mix.in_proj_ba.output.save()
    with model.trace(prompt):
        betas = mix.betas.save()
    q, k, v, _, b, _ = mix._module.fix_query_key_value_ordering(qkvz, ba)
    assert_close(b.sigmoid(), betas)
    with model.trace(prompt):
        conv = mix.conv_input.save()
    assert torch.equal(torch.cat([t.flatten(2) for t in (q, k, v)], -1), conv)


def test_the_separate_projections_are_the_values_they_look_like():
    model, prompt = loaded("qwen3_5_moe_text"), recipe("qwen3_5_moe_text").prompt
    mix = model.layers[0].linear_attn
    with model.trace(prompt):
        qkv = mix.in_proj_qkv.output.save()
        b = mix.in_proj_b.output.save()
    with model.trace(prompt):
        conv = mix.conv_input.save()
    with model.trace(prompt):
        betas = mix.betas.save()
    assert torch.equal(qkv, conv)
    assert_close(b.sigmoid(), betas)


def test_kernel_arguments_are_one_per_value_head(hybrid):
    model, prompt = hybrid
    mix = model.layers[0].linear_attn
    shapes = {}
    for name in (
        "attention_queries",
        "attention_keys",
        "attention_values",
        "decays",
        "betas",
        "state_output",
    ):
        with model.trace(prompt):
            x = getattr(mix, name).save()
        shapes[name] = tuple(x.shape)
        if name in ("attention_queries", "attention_keys"):
            served = mix.heads // mix._module.num_k_heads
            assert torch.equal(x[:, :, ::served], x[:, :, served - 1 :: served])
        if name == "decays":
            assert x.dtype == torch.float32 and (x <= 0).all()
    batch, seq = shapes["decays"][:2]
    assert (
        shapes["attention_queries"]
        == shapes["attention_keys"]
        == (batch, seq, mix.heads, mix.key_dim)
    )
    assert shapes["attention_values"] == (batch, seq, mix.heads, mix.value_dim)
    assert shapes["decays"] == shapes["betas"] == (batch, seq, mix.heads)
    assert shapes["state_output"] == (batch, mix.heads, mix.key_dim, mix.value_dim)


def test_the_head_outputs_pass_a_gated_norm_and_the_projection(hybrid):
    model, prompt = hybrid
    mix = model.layers[0].linear_attn
    with model.trace(prompt):
        y = mix.attention_head_outputs.save()
        fed = mix.norm.input.save()
    assert torch.equal(y.reshape(-1, mix.value_dim), fed.reshape(-1, mix.value_dim))


def test_what_the_head_returns_is_what_the_lens_returns(any_family):
    model, prompt = any_family
    with model.trace(prompt):
        last = model.layers[-1].layer_output.save()
        head = model.lm_head.output.save()
        logits = model.logits.save()
    with model.trace(prompt):
        probs = model.next_token_probs.save()
    assert torch.equal(head, logits)
    assert_close(model.project_on_vocab(last), logits)
    assert_close(logits[:, -1].softmax(-1), probs)
    ids = model.top_tokens(last[:, -1:], 3)
    assert ids is not None


def test_steering_adds_the_vector_to_the_stream(any_family):
    model, prompt = any_family
    with model.trace(prompt):
        clean = model.layers[1].layer_output.save()
        before = model.logits.save()
    vector = torch.linspace(-1, 1, model.hidden_size)
    with model.trace(prompt):
        model.steer(layers=1, vector=vector, factor=2.0, positions=-1)
        steered = model.layers[1].layer_output.save()
        after = model.logits.save()
    assert_close(steered[:, -1], clean[:, -1] + 2 * vector)
    assert torch.equal(steered[:, :-1], clean[:, :-1])
    assert not torch.equal(before, after)


def test_skipping_blocks_passes_their_input_on(any_family):
    model, prompt = any_family
    with model.trace(prompt):
        entering = model.layers[1].layer_input.save()
    with model.trace(prompt):
        model.skip_layers(1, 1)
        after = model.layers[2].layer_input.save()
    assert torch.equal(entering, after)


def test_implementations_that_hide_the_interior_have_reasons():
    fused = load("specimen:llama", attn_implementation="sdpa")
    row = next(r for r in fused.support() if r.name == "attention_probabilities")
    assert not row.layers and "eager" in " ".join(map(str, row.reasons.values()))
    loop = load("specimen:qwen3_moe", experts_implementation="eager")
    row = next(r for r in loop.support() if r.name == "expert_outputs")
    assert not row.layers and "experts_implementation" in " ".join(map(str, row.reasons.values()))


def test_a_dense_block_of_a_mixture_family_has_no_router(tmp_path):
    from transformers import AutoModelForCausalLM

    from explorer import specimens

    config = specimens.config_of("qwen3_moe")
    config.mlp_only_layers = [1]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    specimens.build("qwen3_moe").tokenizer.save_pretrained(tmp_path)
    model = load(tmp_path)
    row = next(r for r in model.support(layer=1) if r.name == "router_logits")
    assert not row.available and "dense" in row.reasons[1].text
    assert next(r for r in model.support(layer=0) if r.name == "router_logits").available
    dense, mixed = model.layers[1].mlp, model.layers[0].mlp
    assert (
        dense.intermediate_size == config.intermediate_size
        and mixed.num_experts == config.num_experts
    )
    with model.trace("Let there be light"):
        neurons = dense.mlp_neurons.save()
        added = dense.mlp_output.save()
    assert_close(neurons @ dense._module.down_proj.weight.T, added)
