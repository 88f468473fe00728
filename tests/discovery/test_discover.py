"""Discovery: values on released sizes and under other implementations, and what a run records."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from explorer import load
from explorer.checkpoints import cards
from explorer.discovery.backbone import NotADecoder, find_backbone
from explorer.discovery.trace_recorder import record_graph
from explorer.meta_device import build_meta, probe_lengths
from explorer.model.errors import Unavailable
from explorer.specimens import config_of
from explorer.vocabulary.availability import ReasonKind
from tests.support.models import FAMILIES, HYBRIDS, MIXTURES, PROMPT, shapes, specimen
from tests.support.not_there import NOT_THERE
from tests.support.tiny import tiny


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", ["specimen", "released"])
def test_every_value_a_family_has_is_found_and_no_other(family, size):
    model = specimen(family) if size == "specimen" else shapes(cards.family_checkpoints(family)[0])
    for row in model.support():
        others = (
            set()
            if row.host in ("model", "layers", "linear_attn", "self_attn", "mlp", "shared_experts")
            else "all"
        )
        absent = NOT_THERE[family].get(row.host, others)
        assert row.available == (absent != "all" and row.name not in absent), (row.host, row.name)
    linear = sum(kind == "linear_attn" for kind in model.kinds)
    assert linear == (0 if family not in HYBRIDS else 3 * model.num_layers // 4)
    for row in model.support():
        mixers = {"linear_attn": linear, "self_attn": model.num_layers - linear}
        if row.available and row.host != "model":
            assert len(row.layers) == mixers.get(row.host, model.num_layers), (row.host, row.name)


@pytest.mark.parametrize("family", FAMILIES)
def test_places_do_not_depend_on_the_size_of_the_model(family):
    small, large = specimen(family), shapes(cards.family_checkpoints(family)[0])
    for layer in (0, 3) if family in HYBRIDS else (0,):
        for name, host in large.anatomy.block(layer).hosts.items():
            found = small.anatomy.block(layer).hosts[name]
            assert found.module == host.module and set(found.missing) == set(host.missing)
            for value, hook_points in host.hook_points.items():
                assert [
                    (p.module, p.operation, p.side, p.element, p.arrangement) for p in hook_points
                ] == [
                    (p.module, p.operation, p.side, p.element, p.arrangement)
                    for p in found.hook_points[value]
                ], value


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hook_point_is_printed_as_the_modeling_code_writes_it(family):
    for row in specimen(family).support():
        if row.available:
            assert row.read_at and "None" not in row.read_at and "_0" not in row.read_at
        else:
            assert row.reasons and all(
                len(str(reason)) > 15 and not str(reason).endswith(".")
                for reason in row.reasons.values()
            )


# -- other implementations ---------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_5_moe_text"])
def test_a_fused_attention_takes_away_the_pattern_and_nothing_else(family):
    eager, fused = specimen(family), load(f"specimen:{family}", attn_implementation="sdpa")
    taken = {"attention_scores", "attention_probabilities"}
    for row, same in zip(fused.support(), eager.support(), strict=True):
        assert row.available == (same.available and row.name not in taken)
    row = fused.support()["attention_scores"]
    assert "eager" in row.condition and all(
        "eager" in r.text and r.kind is ReasonKind.NEEDS_SETTING
        for number, r in row.reasons.items()
        if fused.kinds[number] == "self_attn"
    )
    names = [row.name for row in fused.support() if row.host == "self_attn" and row.available]
    a, b = fused.record(PROMPT, names), eager.record(PROMPT, names)
    for key, tensor in a.values.items():
        assert_close(tensor, b[key], rtol=1e-4, atol=1e-5)
    layer = fused.kinds.index("self_attn")
    with pytest.raises(Unavailable, match="eager"):
        fused.record(PROMPT, ["attention_probabilities"])
    with pytest.raises(Unavailable, match=rf"layers\[{layer}\].*attention_scores.*eager"):
        with fused.trace(PROMPT):
            fused.layers[layer].self_attn.attention_scores.save()


def test_on_a_fused_attention_the_values_are_written_too():
    model = load("specimen:llama", attn_implementation="sdpa")
    with model.trace(PROMPT):
        clean = model.logits.save()
    with model.trace(PROMPT):
        model.layers[1].self_attn.attention_queries[:, 3] = 0
        heads = model.layers[1].self_attn.attention_head_outputs.save()
        edited = model.logits.save()
    values = model.record(PROMPT, ["attention_values"])["attention_values", 1]
    # With its query at zero a head looks at all it may with equal weight.
    assert_close(heads[0, -1, 3], values[0, 3 // (model.num_heads // model.num_kv_heads)].mean(0))
    assert not torch.equal(clean, edited)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_other_experts_implementations_read_the_same_or_say_what_they_lack(implementation):
    default, other = (
        specimen("qwen3_moe"),
        load("specimen:qwen3_moe", experts_implementation=implementation),
    )
    lacking = {
        row.name
        for row, same in zip(other.support(), default.support(), strict=True)
        if row.available != same.available
    }
    assert lacking == ({"expert_outputs"} if implementation == "eager" else set())
    names = [row.name for row in other.support() if row.host == "mlp" and row.available]
    a, b = other.record(PROMPT, names), default.record(PROMPT, names)
    for key, tensor in a.values.items():
        assert_close(tensor, b[key], rtol=1e-4, atol=1e-5)
    if implementation == "eager":
        reason = other.support()["expert_outputs"].reasons[0]
        assert "experts_implementation" in reason.text and reason.kind is ReasonKind.NEEDS_SETTING
        with pytest.raises(Unavailable, match="grouped_mm"):
            other.record(PROMPT, ["expert_outputs"])


def test_equal_sizes_do_not_mix_up_the_axes():
    """Four heads of width four on a stream of sixteen: every axis could be another."""
    model = tiny(
        "llama",
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=4,
        max_position_embeddings=64,
    )
    attention = model.hf.model.layers[0].self_attn
    prompt = torch.tensor([[5, 6, 7, 8]])
    rec = model.record(
        prompt,
        [
            "attention_norm_output",
            "attention_queries",
            "attention_values",
            "attention_premix",
            "attention_head_outputs",
            "attention_output",
        ],
    )
    normed = rec["attention_norm_output", 0]
    queries = attention.q_proj(normed).view(1, 4, 4, 4)
    assert_close(
        rec["attention_queries", 0][0, :, 0], queries[0, 0]
    )  # the first position is not rotated
    values = attention.v_proj(normed).view(1, 4, 4, 4)
    assert_close(rec["attention_values", 0], values.transpose(1, 2))
    assert_close(
        rec["attention_head_outputs", 0][0, 0], values[0, 0]
    )  # the first token sees only itself
    assert_close(
        rec["attention_output", 0], attention.o_proj(rec["attention_premix", 0].flatten(2))
    )


def test_a_router_that_chooses_every_expert_has_no_margin():
    model = tiny(
        "qwen3_moe",
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        max_position_embeddings=64,
    )
    reason = model.support()["router_margin"].reasons[0]
    assert "every expert is chosen" in reason.text and reason.by_nature
    assert ("router_margin", 0) not in model.record(PROMPT)
    with pytest.raises(Unavailable, match="every expert is chosen"):
        with model.trace(PROMPT):
            model.layers[0].mlp.router_margin.save()


def test_a_router_that_chooses_one_expert_has_a_layout():
    model = tiny(
        "qwen3_moe",
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=24,
        num_experts=3,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        max_position_embeddings=64,
    )
    rec = model.record(torch.tensor([[5, 6, 7], [8, 9, 10]]))
    assert rec["expert_indices", 0].shape == (2, 3, 1) and rec["expert_outputs", 0].shape == (
        2,
        3,
        1,
        24,
    )
    assert_close(rec["expert_outputs", 0].sum(2), rec["routed_output", 0])
    assert rec["attention_probabilities", 0].shape == (2, 1, 3, 3)


@pytest.mark.parametrize("family", MIXTURES)
def test_the_probe_has_lengths_of_its_own(family):
    model = build_meta(config_of(family))
    batch, seq = probe_lengths(model)
    taken = {extent for parameter in model.parameters() for extent in parameter.shape}
    assert batch != seq and not {batch, seq, batch * seq} & taken


def test_a_model_without_blocks_between_embedding_and_head_is_refused():
    module = torch.nn.Module()
    module.get_input_embeddings = lambda: None
    module.get_output_embeddings = lambda: None
    with pytest.raises(NotADecoder, match="no list of blocks"):
        find_backbone(module)


# -- the recording of a run ----------------------------------------------------


def test_following_a_forward_leaves_the_model_as_it_was():
    model = build_meta(config_of("qwen3_next"))
    before = [
        (
            name,
            type(module),
            dict(module._forward_hooks),
            dict(module._forward_pre_hooks),
            sorted(module.__dict__),
        )
        for name, module in model.named_modules()
    ]
    with torch.no_grad(), record_graph(model, ["model.layers.0"]) as flow:
        model(torch.zeros(3, 5, dtype=torch.long, device="meta"))
    assert flow.ops and flow.calls
    with (
        pytest.raises(ZeroDivisionError),
        record_graph(model, ["model.layers.0", "model.layers.3"]),
    ):
        1 / 0
    after = [
        (
            name,
            type(module),
            dict(module._forward_hooks),
            dict(module._forward_pre_hooks),
            sorted(module.__dict__),
        )
        for name, module in model.named_modules()
    ]
    assert before == after


def test_an_operation_is_kept_with_what_it_read_and_made():
    model = build_meta(config_of("llama"))
    with torch.no_grad(), record_graph(model, ["model.layers.0.mlp"]) as flow:
        model(torch.zeros(3, 5, dtype=torch.long, device="meta"))
    call = flow.module("model.layers.0.mlp")
    down = flow.module("model.layers.0.mlp.down_proj")
    assert call.start <= down.start < down.stop <= call.stop and down in flow.inside(call)
    assert id(call.output) in flow.back(id(call.output)) and set(flow.back(id(call.output))) & set(
        flow.onward(id(down.output))
    )
    products = [
        i for i in range(call.start, call.stop) if flow.ops[i].name in ("mm", "addmm", "bmm")
    ]
    assert (
        len(products) == 3
        and [flow.maker(id(flow.tensors[flow.ops[i].makes[0]])) for i in products] == products
    )
