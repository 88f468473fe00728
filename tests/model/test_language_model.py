"""The loaded model: sizes, names, support, methods on the stream, and plain forwards."""

from __future__ import annotations

import re

import pytest

from explorer import vocabulary
from explorer.vocabulary import UnknownValue
from tests.support.models import HYBRIDS, MIXTURES, specimen


def test_sizes_are_those_of_the_modules(any_model):
    hf = any_model.hf
    config = hf.config.get_text_config()
    assert any_model.num_layers == len(hf.model.layers) == len(any_model.layers)
    assert any_model.hidden_size == hf.model.embed_tokens.weight.shape[1]
    assert any_model.vocab_size == hf.lm_head.weight.shape[0]
    attention = hf.model.layers[any_model.kinds.index("self_attn")].self_attn
    assert any_model.num_kv_heads * any_model.qk_head_dim == attention.k_proj.weight.shape[0]
    assert any_model.num_heads * any_model.head_dim == attention.o_proj.weight.shape[1]
    assert (
        any_model.family == config.model_type and any_model.label == f"specimen:{any_model.family}"
    )


@pytest.mark.parametrize("family", MIXTURES)
def test_sizes_of_a_mixture_are_read_off_it(family):
    model = specimen(family)
    moe, experts = model.layers[1].mlp, model.hf.model.layers[1].mlp.experts
    assert moe.num_experts == model.hf.model.layers[1].mlp.gate.weight.shape[0]
    assert moe.top_k == model.config.num_experts_per_tok
    assert moe.intermediate_size == experts.down_proj.shape[-1]
    if family in HYBRIDS:
        assert (
            moe.shared_experts.intermediate_size
            == model.hf.model.layers[1].mlp.shared_expert.up_proj.weight.shape[0]
        )


@pytest.mark.parametrize("family", HYBRIDS)
def test_sizes_of_a_recurrent_mixer_are_read_off_it(family):
    mix, native = (
        specimen(family).layers[0].linear_attn,
        specimen(family).hf.model.layers[0].linear_attn,
    )
    assert (mix.heads, mix.key_heads) == (native.num_v_heads, native.num_k_heads)
    assert (mix.key_dim, mix.value_dim) == (native.head_k_dim, native.head_v_dim)
    assert (
        mix.channels == native.conv1d.weight.shape[0]
        and mix.conv_width == native.conv1d.weight.shape[-1]
    )


def test_a_size_is_not_set(model):
    for host, size in (
        (model, "hidden_size"),
        (model.layers[1].mlp, "top_k"),
        (model.layers[0].linear_attn, "key_dim"),
    ):
        before = getattr(host, size)
        with pytest.raises(AttributeError, match=f"{size} is a size"):
            setattr(host, size, 3)
        assert getattr(host, size) == before


def test_a_size_a_host_has_not_is_refused_with_what_it_has(model):
    with pytest.raises(AttributeError, match="num_expertz.*num_experts"):
        model.layers[1].mlp.num_expertz


def test_standard_names_are_the_native_modules(any_model):
    hf = any_model.hf
    assert (
        any_model.embed_tokens._module is hf.model.embed_tokens
        and any_model.norm._module is hf.model.norm
    )
    assert any_model.lm_head._module is hf.lm_head
    for index, block in enumerate(any_model.layers):
        native = hf.model.layers[index]
        assert block._module is native and getattr(
            block, any_model.kinds[index]
        )._module is getattr(native, any_model.kinds[index])
        assert block.mlp._module is native.mlp
        if any_model.family in MIXTURES:
            assert (
                block.mlp.router._module is native.mlp.gate
                and block.mlp.experts._module is native.mlp.experts
            )
        if any_model.family in HYBRIDS:
            assert block.mlp.shared_experts._module is native.mlp.shared_expert


def test_kinds_are_what_the_configuration_says(any_model):
    types = (
        getattr(any_model.config, "layer_types", None) or ["full_attention"] * any_model.num_layers
    )
    named = {"full_attention": "self_attn", "linear_attention": "linear_attn"}
    assert any_model.kinds == [named[kind] for kind in types]


def test_blocks_are_counted_from_either_end_and_no_further(any_model):
    last = any_model.num_layers - 1
    assert any_model.layers[-1]._module is any_model.layers[last]._module
    assert any_model.layer_index(-1) == last and any_model.layer_index(0) == 0
    for wrong in (last + 1, -last - 2, 99):
        for ask in (
            lambda wrong=wrong: any_model.layers[wrong],
            lambda wrong=wrong: any_model.layer_index(wrong),
            lambda wrong=wrong: any_model.support(wrong),
        ):
            with pytest.raises((ValueError, IndexError), match=rf"block {wrong}: .* 0 to {last}"):
                ask()


def test_support_has_every_value_once_in_the_vocabularys_order(any_model):
    rows = list(any_model.support())
    assert [(row.host, row.name) for row in rows] == [
        (value.host, value.name) for value in vocabulary.VALUES
    ]
    assert len(any_model.support()) == len(rows)


def test_every_block_has_a_value_or_a_reason(any_model):
    for row in any_model.support():
        if row.host == "model":
            assert row.available
            continue
        assert set(row.layers) | set(row.reasons) == set(range(any_model.num_layers))
        assert not set(row.layers) & set(row.reasons) and row.available == bool(row.layers)


def test_support_of_one_block_is_that_blocks(model):
    for layer in range(model.num_layers):
        for row in model.support(layer):
            if row.host != "model":
                assert (layer in row.layers) != (layer in row.reasons) and len(row.layers) + len(
                    row.reasons
                ) == 1
    assert model.support(-1)["attention_scores"].layers == () or model.kinds[-1] == "self_attn"


def test_support_is_asked_by_name_and_refuses_what_is_none(model):
    support = model.support()
    assert support["router_logits"].host == "mlp" and support["linear_attn.betas"].layers == (
        0,
        1,
        2,
    )
    assert support["shared_experts.mlp_output"].value.host == "shared_experts"
    with pytest.raises(UnknownValue, match="router_logits"):
        support["router_logts"]


def test_support_prints_a_line_for_each_value(model):
    text = str(model.support())
    there = {row.host for row in model.support() if row.available}
    shown = [row for row in model.support() if row.host in there]
    absent = (
        set(vocabulary.HOSTS) - there
    )  # one line for each place hosts the model has not would stand at
    assert len(text.splitlines()) == len(shown) + len(
        {vocabulary.HOSTS[host].path for host in absent}
    )
    for row in shown:
        line = next(
            line
            for line in text.splitlines()
            if f"{vocabulary.HOSTS[row.host].path}.{row.name} " in line
        )
        assert line.startswith("  yes" if row.available else "  no")
    assert all(re.search(rf"  no .*\b{host}\b.*: this block", text) for host in absent)
    assert "no sink logits" in text


def test_the_reading_order_is_that_of_the_forward(any_model):
    for layer in range(any_model.num_layers):
        order = any_model.reading_order(layer)
        assert (
            order[0] == "layer_input"
            and order[-1] == "layer_output"
            and len(set(order)) == len(order)
        )
        mixer = any_model.kinds[layer]
        assert (
            order.index(f"{mixer}.attention_output")
            < order.index("layer_mid")
            < order.index("mlp.mlp_output")
        )
