"""Families nobody prepared: what is served of them is right, and the rest is refused in words."""

from __future__ import annotations

import re

import pytest
import torch
from torch.testing import assert_close

from explorer import load
from explorer.model.errors import Unavailable
from explorer.specimens import bpe
from explorer.vocabulary.availability import ReasonKind
from tests.support.messages import refused, sentence
from tests.support.models import PROMPT
from tests.support.tiny import random_model, tiny

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

#: Families of other shapes, and what more their configurations need.
OTHERS = {
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "phi3": {},  # fused projections
    "cohere": {},  # attention and MLP side by side
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4},  # sinks
    "granite": {"residual_multiplier": 0.5},  # scaled before it is added
    "olmo2": {},  # norms after the sublayers
    "gemma2": {"head_dim": 8},
    "falcon": {},  # the attention is added to the MLP's output, in place
    "nanochat": {},  # its norm without weights runs on the embedding as well
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", OTHERS)
def test_another_family_is_served_rightly(model_type, tmp_path):
    """What is served as an addend is what the block adds."""
    more = OTHERS[model_type]
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        **more,
    }
    module = random_model(model_type, **sizes)
    module.save_pretrained(tmp_path)
    bpe.load_tokenizer(512).save_pretrained(tmp_path)
    model = load(tmp_path)
    rec = model.record(PROMPT)
    for layer in range(model.num_layers):
        assert [sublayer.host for sublayer in model.anatomy.block(layer).sublayers] == [
            "self_attn",
            "mlp",
        ]
        total = (
            rec["layer_input", layer] + rec["attention_output", layer] + rec["mlp_output", layer]
        )
        assert_close(total, rec["layer_output", layer], rtol=1e-5, atol=1e-6)
        pattern, values = rec["attention_probabilities", layer], rec["attention_values", layer]
        values = values.repeat_interleave(pattern.shape[1] // values.shape[1], dim=1)
        assert_close(
            (pattern @ values).transpose(1, 2),
            rec["attention_head_outputs", layer],
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("longcat_flash", "self_attn"),
        ("deepseek_v4", "plus a sum"),
        ("cpmant", "one vector"),
        ("hrm_text", "[0-9]+ times"),
        ("mllama", "token ids alone"),
        ("gemma4_assistant", "inputs_embeds"),
    ],
)
def test_a_block_that_cannot_be_followed_is_refused_in_a_sentence(model_type, reason):
    label = f"specimen:{model_type}"
    error = refused("not_traceable", lambda: load(label), label=label)
    assert re.search(reason, error.reason)


def test_a_pattern_that_is_a_difference_of_two_is_not_served():
    model = tiny("diffllama", **SIZES)
    reason = model.support(0)["attention_probabilities"].reasons[0]
    assert reason.kind is ReasonKind.NOT_TRACED and "several" in reason.text
    rec = model.record(PROMPT)
    assert_close(
        rec["layer_input", 1] + rec["attention_output", 1] + rec["mlp_output", 1],
        rec["layer_output", 1],
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_norm_that_runs_elsewhere_too_is_read_at_the_call_before_the_head():
    model = tiny("nanochat", **SIZES)
    assert "call 2" in model.support()["final_norm_output"].read_at
    norm = model.hf.get_submodule(model.anatomy.norm)
    seen = []
    handle = norm.register_forward_hook(lambda module, args, out: seen.append(out.detach().clone()))
    rec = model.record(PROMPT, ["layer_output", "final_norm_output", "logits"])
    handle.remove()
    assert (
        len(seen) == 2
        and torch.equal(rec["final_norm_output"], seen[1])
        and not torch.equal(seen[0], seen[1])
    )
    assert_close(
        model.project_on_vocab(rec["layer_output", 1]), rec["logits"], rtol=1e-4, atol=1e-5
    )
    with torch.no_grad(), model.trace(PROMPT):
        embedded = model.layers[0].layer_input.save()
        model.final_norm_output[:] = 0
        logits = model.logits.save()
    assert_close(embedded, model.record(PROMPT, ["layer_input"])["layer_input", 0])
    assert not logits.any()


def test_the_runs_of_a_norm_that_runs_twice_are_distinguished_at_every_step():
    model = tiny("nanochat", **SIZES)
    with torch.no_grad(), model.generate(PROMPT, max_new_tokens=2, do_sample=False) as tracer:
        seen = [].save()
        for _ in tracer.iter[0:2]:
            seen.append((model.final_norm_output.save(), model.lm_head.input.save()))
    assert len(seen) == 2 and seen[1][0].shape[1] == 1
    for normed, read in seen:
        assert torch.equal(normed[:, -1:], read)


def test_a_name_that_another_module_has_means_the_standard_one():
    """The model's own lm_head is a transform before its head; after it is no norm of the stream."""
    model = load("specimen:modernbert-decoder")
    assert model.anatomy.norm == "model.final_norm" and model.lm_head._module is model.hf.decoder
    assert model.E_lm_head._module is model.hf.lm_head
    assert "(E_lm_head): ModernBertDecoderPredictionHead" in repr(
        model
    ) and "(lm_head/decoder): Linear" in repr(model)
    with torch.no_grad(), model.trace(PROMPT):
        normed = model.final_norm_output.save()
        made = model.E_lm_head.output.save()
        read = model.lm_head.input.save()
    assert_close(model.hf.model.final_norm(model.record(PROMPT)["layer_output", 2]), normed)
    assert torch.equal(made, read)


def test_an_image_model_is_followed_on_text_and_keeps_what_its_later_blocks_read():
    model = load("specimen:gemma4")
    with pytest.raises(Unavailable, match="keeps for others"):
        with model.trace(PROMPT):
            model.skip_layers(0, 0)


@pytest.mark.slow
def test_shapes_alone_are_given_a_mask_where_the_forward_would_look_for_packed_sequences():
    model = load("default:gemma4", weights=False)
    assert model.anatomy.masked and not load("default:llama", weights=False).anatomy.masked
    rec = model.record([[1, 2, 3]], ["layer_output"])
    assert rec["layer_output", model.num_layers - 1].shape == (1, 3, model.hidden_size)
    with model.trace([[1, 2, 3]]):
        assert model.layers[0].layer_output.shape == (1, 3, model.hidden_size)


def test_an_activation_in_a_module_that_blocks_share_is_each_block_s_own():
    model = load("specimen:openai-gpt")
    blocks = model.layers
    assert blocks[0].mlp.act._module is blocks[1].mlp.act._module
    rec = model.record(PROMPT, ["mlp_activation", "mlp_neurons", "mlp_input"])
    for layer in range(model.num_layers):
        mlp = model.hf.transformer.h[layer].mlp
        assert_close(
            rec["mlp_activation", layer], mlp.act(mlp.c_fc(rec["mlp_input", layer])).detach()
        )
    with torch.no_grad(), model.trace(PROMPT):
        before = blocks[0].mlp.mlp_neurons.save()
        blocks[1].mlp.mlp_activation[:] = 0
        after = blocks[1].mlp.mlp_neurons.save()
    assert torch.equal(before, rec["mlp_neurons", 0]) and not after.any()


def test_an_activation_that_is_written_out_is_its_last_product():
    model = load("specimen:minimax_m3_vl_text")
    rec = model.record(PROMPT, ["mlp_input", "mlp_activation", "mlp_neurons"])
    mlp = model.hf.get_submodule(f"{model.anatomy.backbone.blocks}.0.mlp")
    gate, up = mlp.gate_up_proj(rec["mlp_input", 0]).detach().chunk(2, dim=-1)
    gate = gate.clamp(max=mlp.swiglu_limit)
    assert_close(rec["mlp_activation", 0], gate * torch.sigmoid(gate * mlp.swiglu_alpha))
    up = up.clamp(min=-mlp.swiglu_limit, max=mlp.swiglu_limit)
    assert_close(rec["mlp_neurons", 0], (up + 1) * rec["mlp_activation", 0])


@pytest.mark.filterwarnings("ignore:Module .* has a submodule named 'output'")
def test_an_mlp_of_two_modules_is_one_part_and_its_input_is_not_the_stream():
    """Each half alone is no MLP. What the first reads stays in the stream: edits do not mix."""
    model = load("specimen:git")
    assert model.anatomy.block(0).hosts["mlp"].inline
    plain = model.record(PROMPT, ["layer_mid", "mlp_input", "mlp_output"])
    assert torch.equal(plain["layer_mid", 1], plain["mlp_input", 1])
    with torch.no_grad(), model.trace(PROMPT):
        model.layers[1].mlp_input[:] = 0
        made = model.layers[1].mlp.mlp_output.save()
        out = model.layers[1].layer_output.save()
    block = model.hf.git.encoder.layer[1]
    assert_close(out, block.output.LayerNorm(plain["layer_mid", 1] + made).detach())
    assert not torch.allclose(made, plain["mlp_output", 1])


def test_two_names_of_one_tensor_are_one_edit():
    """Cohere's attention and MLP read one norm: reading one name keeps an edit by the other."""
    model = tiny("cohere", **SIZES)
    with model.trace(PROMPT):
        plain = model.logits.save()
    with model.trace(PROMPT):
        model.layers[1].attention_norm_output[:] = 0
        seen = model.layers[1].mlp_norm_output.save()
        edited = model.logits.save()
    assert not seen.any() and not torch.allclose(plain, edited)


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("mistral", {}),
        ("cohere", {}),
        ("gemma2", {"head_dim": 8}),
        ("granite", {"logits_scaling": 3.0}),
    ],
)
def test_a_lens_goes_through_what_the_model_does_to_its_logits(model_type, more):
    model = tiny(model_type, **SIZES, **more)
    rec = model.record(PROMPT, ["layer_output", "logits"])
    assert_close(
        model.project_on_vocab(rec["layer_output", 1]), rec["logits"], rtol=1e-4, atol=1e-5
    )
    assert_close(
        model.project_on_vocab(rec["layer_output", 1][0, -1]),
        rec["logits"][0, -1],
        rtol=1e-4,
        atol=1e-5,
    )


def test_a_lens_that_runs_the_model_is_not_for_a_trace():
    model = tiny("cohere", **SIZES)
    with pytest.raises(Unavailable, match="after the trace"):
        with model.trace(PROMPT):
            model.project_on_vocab(model.layers[0].layer_output)


def test_sinks_are_read_and_written():
    model = tiny("gpt_oss", **SIZES, head_dim=8, num_local_experts=4)
    rec = model.record(PROMPT, ["attention_sinks", "attention_scores", "attention_probabilities"])
    sinks, scores = rec["attention_sinks", 0], rec["attention_scores", 0]
    assert torch.equal(sinks, model.hf.model.layers[0].self_attn.sinks.detach())
    beside = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    assert_close(rec["attention_probabilities", 0], beside.softmax(-1)[..., :-1])
    with torch.no_grad(), model.trace(PROMPT):
        model.layers[0].self_attn.attention_sinks[:] = -1e9
        pattern = model.layers[0].self_attn.attention_probabilities.save()
    assert_close(pattern.sum(-1), torch.ones(pattern.shape[:-1]))


def test_a_state_with_fixed_decays_is_followed_through_blocks_of_tokens():
    """MiniMax's lightning attention works in blocks of 256 tokens; values are served whole."""
    model = load("specimen:minimax")
    layer = model.mixers.index(("retention",))
    mixer, rows = model.layers[layer].linear_attn, model.support(layer)
    assert rows["decays"].available and not rows["decays"].value.written
    ids = torch.arange(600).view(2, 300) % 200
    rec = model.record(
        ids,
        [
            "retention.decays",
            "retention.states",
            "attention_head_outputs",
            "state_output",
            "attention_queries",
            "attention_keys",
            "attention_values",
        ],
    )
    native = model.hf.model.layers[layer].self_attn
    assert torch.equal(rec["decays", layer], -native.slope_rate.flatten())
    outputs, state = rec.replay(layer).run()
    assert_close(outputs, rec["attention_head_outputs", layer], rtol=1e-3, atol=1e-5)
    assert_close(state, rec["state_output", layer], rtol=1e-3, atol=1e-5)
    assert_close(
        rec["retention.states", layer][:, -1], rec["state_output", layer], rtol=1e-3, atol=1e-5
    )
    with pytest.raises(Unavailable, match=sentence("constant")):
        with model.trace(PROMPT):
            mixer.decays = torch.zeros(mixer.heads)
    with pytest.raises(Unavailable, match=sentence("written_into_derived")):
        with model.trace(PROMPT):
            mixer.decays[:] = 0
            model.logits.save()


@pytest.mark.slow
def test_a_part_narrower_than_the_stream_is_served_at_its_own_width():
    """Qwen4's stream is three side by side; an MLP mixes them to one and adds to all three."""
    model = load("specimen:qwen4_exp_text")
    names = [
        "token_embeddings",
        "mlp_input",
        "expert_outputs",
        "routed_output",
        "mlp_output",
        "extra_output",
        "layer_input",
    ]
    rec = model.record(PROMPT, names)
    width = model.hf.config.hidden_size
    assert (
        rec["layer_input", 0].shape[-1]
        == rec["mlp_output", 0].shape[-1]
        == model.hidden_size
        == 3 * width
    )
    for name in ("mlp_input", "expert_outputs", "routed_output"):
        assert rec[name, 0].shape[-1] == width
    assert_close(rec["expert_outputs", 0].sum(2), rec["routed_output", 0])
    assert torch.equal(rec["token_embeddings"].repeat(1, 1, 3), rec["layer_input", 0])
    ple = model.hf.model.layers[1].ple
    seen = []
    hook = ple.register_forward_hook(lambda module, args, out: seen.append(out.clone()))
    again = model.record(PROMPT, ["extra_output"])
    hook.remove()
    assert torch.equal(seen[0], again["extra_output", 1])
    with torch.no_grad(), model.trace(PROMPT):
        model.layers[0].mlp.routed_output[0, 2] = 0
        edited = model.layers[0].mlp.mlp_output.save()
    moved = (edited != rec["mlp_output", 0]).any(-1)[0]
    assert moved.nonzero().flatten().tolist() == [2]


def test_an_mlp_with_a_convolution_behind_it_is_an_mlp():
    """Inkling convolves its MLPs' results and scores its shared expert with the others."""
    model = load("specimen:inkling_text")
    rec = model.record(
        PROMPT,
        [
            "router_logits",
            "router_scores",
            "expert_indices",
            "mlp_output",
            "shared_experts.mlp_neurons",
            "shared_experts.mlp_output",
        ],
        [1],
    )
    gate, shared = model.hf.model.layers[1].mlp.gate, model.hf.model.layers[1].mlp.shared_experts
    assert (
        rec["router_logits", 1].shape[-1] == model.layers[1].mlp.num_experts == len(gate.weight) - 1
    )
    assert_close(
        rec["router_scores", 1], rec["router_logits", 1].sigmoid() + gate.e_score_correction_bias
    )
    assert_close(
        rec["shared_experts.mlp_output", 1],
        rec["shared_experts.mlp_neurons", 1] @ shared.down_proj[0].T,
    )
    with torch.no_grad(), model.trace(PROMPT):
        model.layers[1].mlp.router_logits[0, 2] = torch.arange(8.0)
        chosen, after = (
            model.layers[1].mlp.expert_indices.save(),
            model.layers[1].mlp.mlp_output.save(),
        )
    best = (torch.arange(8.0).sigmoid() + gate.e_score_correction_bias).topk(3).indices
    assert set(chosen[0, 2].tolist()) == set(best.tolist()) and torch.equal(
        chosen[0, 3:], rec["expert_indices", 1][0, 3:]
    )
    width = model.hf.model.layers[1].mlp_sconv.conv_kernel_size
    moved = (after != rec["mlp_output", 1]).any(-1)[0].nonzero().flatten()
    assert moved.min() == 2 and moved.max() <= 2 + width - 1
