"""Traits: those of each family with a page, and the tests that decide them."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch.testing import assert_close

from explorer import load
from explorer.checkpoints import cards
from explorer.model.language_model import LanguageModel
from explorer.specimens.small import types
from explorer.traits import catalogue, traits
from tests.support.models import shapes
from tests.support.traits_helpers import found

#: What most decoders since Llama have.
PLAIN = "rotary pre_norm rms_norm gated_mlp activation_silu"


GPT = "pre_norm layer_norm plain_mlp mlp_bias"


DELTA = (
    "hybrid delta_rule short_convolution grouped_value grouped_query qk_norm head_gate "
    "partial_rotary pre_norm rms_norm "
    "one_plus_gain gated_mlp activation_silu mixture router_softmax renormalised "
    "shared_expert shared_expert_gated"
)


SIGMOID = "mixture router_sigmoid selection_bias renormalised routed_factor shared_expert"


#: Every trait of each family with a page, at the checkpoint its page opens with.
EXPECTED = {
    "llama": f"{PLAIN} grouped_query tied_head",
    "qwen3_moe": f"{PLAIN} grouped_query qk_norm mixture router_softmax renormalised",
    "qwen3_next": DELTA,
    "qwen3_5_moe_text": f"{DELTA} mrope",
    "gpt2": f"{GPT} fused_qkv qkv_bias output_bias learned_positions activation_gelu_tanh "
    "tied_head",
    "gpt_neox": f"{GPT} fused_qkv qkv_bias output_bias partial_rotary parallel activation_gelu",
    "gptj": f"{GPT} partial_rotary parallel activation_gelu_tanh head_bias",
    "bloom": f"{GPT} fused_qkv qkv_bias output_bias alibi embedding_norm activation_gelu_tanh "
    "tied_head",
    "opt": f"{GPT} qkv_bias output_bias learned_positions activation_relu tied_head",
    "gemma2": "grouped_query attention_cap sliding_window mixed_window rotary sandwich_norm "
    "rms_norm one_plus_gain gated_mlp "
    "activation_gelu_tanh embedding_multiplier logit_cap tied_head",
    "olmo2": "qk_norm rotary post_norm rms_norm gated_mlp activation_silu",
    "cohere": "rotary pre_norm layer_norm_no_bias parallel gated_mlp activation_silu "
    "logits_multiplier tied_head",
    "granite": f"{PLAIN} grouped_query embedding_multiplier residual_multiplier "
    "attention_multiplier logits_multiplier tied_head",
    "mixtral": f"{PLAIN} grouped_query mixture router_softmax renormalised",
    "gpt_oss": "grouped_query qkv_bias output_bias attention_sinks sliding_window mixed_window "
    "rotary pre_norm rms_norm "
    "gated_mlp activation_quick_gelu mixture router_softmax_chosen expert_bias",
    "deepseek_v3": "latent_attention latent_queries partial_rotary pre_norm rms_norm gated_mlp "
    f"activation_silu {SIGMOID} "
    "expert_groups dense_first attention_multiplier",
    "mamba": "selective_scan short_convolution no_position pre_norm rms_norm one_sublayer "
    "tied_head",
    "mamba2": "ssd short_convolution grouped_value no_position pre_norm rms_norm one_sublayer",
    "jamba": "hybrid selective_scan short_convolution grouped_query no_position pre_norm rms_norm "
    "gated_mlp activation_silu "
    "mixture some_mixtures router_softmax",
    "nemotron_h": "hybrid ssd short_convolution grouped_value grouped_query no_position pre_norm "
    "rms_norm one_sublayer plain_mlp "
    "activation_relu_squared",
    "falcon_h1": f"{PLAIN} hybrid side_by_side ssd short_convolution grouped_value grouped_query "
    "embedding_multiplier "
    "residual_multiplier attention_multiplier logits_multiplier",
    "recurrent_gemma": "hybrid gated_recurrence short_convolution multi_query output_bias "
    "sliding_window partial_rotary pre_norm rms_norm one_plus_gain gated_mlp mlp_bias "
    "activation_gelu_tanh embedding_multiplier logit_cap tied_head",
    "lfm2": f"{PLAIN} hybrid convolution_mixer grouped_query qk_norm tied_head",
    "kimi_linear": "hybrid delta_rule_channel short_convolution latent_attention "
    f"no_position pre_norm rms_norm gated_mlp activation_silu {SIGMOID} dense_first",
}


#: Other checkpoints of these families, by what their first one has not and what it has beyond them.
OTHERS = {
    "CohereForAI/c4ai-command-r-plus": ("grouped_query qk_norm", ""),
    "google/gemma-2-27b": ("attention_multiplier", ""),
    "EleutherAI/gpt-neox-20b": ("activation_gelu_tanh", "activation_gelu"),
    "moonshotai/Moonlight-16B-A3B": ("", "latent_queries expert_groups attention_multiplier"),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (SIGMOID, ""),
}


#: Figures in the evidence of some traits, at the first checkpoint.
FIGURES = {
    ("gemma2", "sliding_window"): "the last 4096 tokens",
    ("gemma2", "attention_cap"): "±50",
    ("gemma2", "logit_cap"): "as 30",
    ("gemma2", "embedding_multiplier"): "by 48",
    (
        "gpt_oss",
        "sliding_window",
    ): "12 of 24 blocks, block 0 first, the mask admits the last 128 tokens",
    ("recurrent_gemma", "sliding_window"): "the last 2048 tokens",
    ("recurrent_gemma", "partial_rotary"): "128 of 256",
    ("gpt_neox", "partial_rotary"): "16 of 64",
    ("gptj", "partial_rotary"): "64 of 256",
    ("deepseek_v3", "partial_rotary"): "64 of 192",
    (
        "deepseek_v3",
        "latent_attention",
    ): "512-dimensional output of kv_a_proj_with_mqa; queries and keys are 192 wide",
    ("deepseek_v3", "expert_groups"): "128 of 256 experts",
    ("deepseek_v3", "routed_factor"): "by 2.5",
    ("deepseek_v3", "dense_first"): "a dense MLP in 3 of 61 blocks",
    ("granite", "embedding_multiplier"): "by 12",
    ("granite", "residual_multiplier"): "by 0.22",
    ("granite", "logits_multiplier"): "times 0.125",
    ("granite", "attention_multiplier"): "times 0.01562",
    ("cohere", "parallel"): "the same norm",
    ("gpt_neox", "parallel"): "different norms",
    ("cohere", "logits_multiplier"): "times 0.0625",
    ("gpt2", "learned_positions"): "wpe has 1024 vectors",
    ("qwen3_next", "partial_rotary"): "64 of 256",
    ("qwen3_next", "hybrid"): "self_attn in 12 of 48 blocks",
    ("qwen3_5_moe_text", "mrope"): "mrope_section",
    ("olmo2", "qk_norm"): "4096 dimensions",
    ("lfm2", "qk_norm"): "one head",
    ("falcon_h1", "attention_multiplier"): "times 0.04883",
    ("bloom", "alibi"): "0.003906 to 0.7071",
}


#: Single traits of other types, on their specimens: there, and not there.
SPOTS = {
    "gpt_neo": (
        "sliding_window mixed_window attention_multiplier learned_positions",
        "no_position rotary",
    ),
    "falcon": ("multi_query fused_qkv parallel rotary", "alibi"),
    "mpt": ("alibi fused_qkv", "score_bias rotary"),
    "inkling_text": ("score_bias", "no_position side_by_side"),
    "doge": ("rotary qk_norm", "score_bias hybrid other_mixer"),
    "olmo": ("norm_no_weight layer_norm_no_bias pre_norm", "rms_norm"),
    "nanochat": ("norm_no_weight rms_norm qk_norm embedding_norm logit_cap", "sliding_window"),
    "openai-gpt": ("stream_norm fused_qkv learned_positions", "pre_norm attention_multiplier"),
    "llama4_text": ("chunked_attention mixed_window rotary_some qk_norm", "sliding_window"),
    "cohere2": ("sliding_window rotary_some parallel", "rotary_bases"),
    "gemma3_text": (
        "rotary_bases sliding_window mixed_window qk_norm sandwich_norm",
        "attention_cap",
    ),
    "gemma4_text": ("rotary partial_rotary qk_norm routed_factor", ""),
    "mistral": ("sliding_window", "mixed_window"),
    "smollm3": ("rotary_some rotary", "no_position"),
    "phi3": ("fused_qkv", "qkv_bias partial_rotary"),
    "phi": ("parallel partial_rotary qkv_bias head_bias", "fused_qkv"),
    "qwen2": ("qkv_bias", "output_bias"),
    "qwen2_moe": ("shared_expert_gated router_softmax", "renormalised"),
    "afmoe": ("shared_expert selection_bias router_sigmoid", "shared_expert_gated"),
    "deepseek_v2": ("router_softmax routed_factor latent_attention", "renormalised selection_bias"),
    "minicpm3": ("latent_attention latent_queries logits_multiplier residual_multiplier", ""),
    "zamba2": ("hybrid ssd", "no_position one_sublayer"),
    "apertus": ("activation_other plain_mlp qk_norm", ""),
    "bitnet": ("activation_relu_squared gated_mlp", ""),
    "ctrl": ("fixed_positions embedding_multiplier head_bias", "learned_positions"),
    "biogpt": ("learned_positions embedding_multiplier", "rotary"),
    "lfm3": ("convolution_mixer rotary partial_rotary", ""),
    "dbrx": ("fused_qkv layer_norm_no_bias mixture", "called_again"),
    "rwkv": ("other_mixer", "no_position"),
}


#: Of each of these a model has one at most.
APART = (
    "grouped_query multi_query",
    "router_softmax router_sigmoid",
    "dense_first some_mixtures",
    "no_position rotary partial_rotary alibi learned_positions fixed_positions score_bias",
)


@pytest.fixture(scope="module")
def released() -> dict[str, dict[str, str]]:
    """The evidence of each trait at the first checkpoint of each family."""
    return {family: found(shapes(cards.family_checkpoints(family)[0])) for family in EXPECTED}


@pytest.mark.slow
@pytest.mark.parametrize("family", EXPECTED)
def test_a_family_has_the_traits_it_is_known_for_and_no_other(released, family):
    assert sorted(released[family]) == sorted(EXPECTED[family].split())


@pytest.mark.parametrize(("family", "trait"), FIGURES)
def test_evidence_has_the_figures(released, family, trait):
    assert FIGURES[family, trait] in released[family][trait]


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", OTHERS)
def test_other_checkpoints_of_a_family_have_their_own_traits(checkpoint):
    more, fewer = (set(names.split()) for names in OTHERS[checkpoint])
    assert (
        set(found(shapes(checkpoint)))
        == set(EXPECTED[cards.card(checkpoint).family].split()) - fewer | more
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Module .* has a submodule named:UserWarning")  # rwkv's output
def test_types_that_load_have_traits_of_the_catalogue():
    """Those whose traits are known, and one in eight of the rest, picked by hash."""
    known, seen = set(catalogue.BY_NAME), {}
    picked = [
        family
        for family in types()
        if family in SPOTS or int(hashlib.sha256(family.encode()).hexdigest(), 16) % 8 == 0
    ]
    for family in picked:
        model = loaded(family)
        if model is None:
            continue
        seen[family] = found(model)
        assert set(seen[family]) <= known and all(seen[family].values()), family
        for names in APART:
            both = set(names.split()) & set(seen[family])
            assert len(both) <= 1 or both == {"rotary", "partial_rotary"}, (family, both)
        roles = {sub.role for kind in model.anatomy.blocks for sub in kind.sublayers}
        assert ("mixture" in seen[family]) == ("experts" in roles), family
    for family, (there, absent) in SPOTS.items():
        assert set(there.split()) <= set(seen[family]), (
            family,
            set(there.split()) - set(seen[family]),
        )
        assert not set(absent.split()) & set(seen[family]), (
            family,
            set(absent.split()) & set(seen[family]),
        )


def loaded(family: str) -> LanguageModel | None:
    """The small model of a type, with weights where it needs some; None where it cannot load."""
    for weights in (False, True):
        try:
            return load(f"specimen:{family}", weights=weights)
        except (ValueError, ImportError):
            continue
    return None


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "recurrent_gemma", "qwen3_next", "gptj"])
def test_weights_decide_no_trait(family):
    assert found(load(f"specimen:{family}")) == found(load(f"specimen:{family}", weights=False))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "granite", "deepseek_v3"])
def test_attention_implementations_have_the_same_traits(family):
    assert found(load(f"specimen:{family}", attn_implementation="sdpa")) == found(
        load(f"specimen:{family}")
    )


@pytest.mark.slow
def test_a_loop_over_the_experts_has_the_same_traits():
    assert found(load("specimen:mixtral", experts_implementation="eager")) == found(
        load("specimen:mixtral")
    )


def test_traits_leave_a_model_as_it_was():
    model = load("specimen:qwen3_next")
    ids = torch.arange(5)[None]
    before, blocks = model.hf(ids).logits, list(model.hf.model.layers)
    state = torch.random.get_rng_state()
    traits(model)
    assert_close(model.hf(ids).logits, before, rtol=0, atol=0)
    assert list(model.hf.model.layers) == blocks and torch.equal(
        torch.random.get_rng_state(), state
    )
    assert (
        model.record("In the beginning", ["logits"])["logits", None].shape[-1] == model.vocab_size
    )
