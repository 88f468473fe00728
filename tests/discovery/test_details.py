"""What discovery records about a host beside its hook points."""

from __future__ import annotations

import pytest

from explorer.discovery.attention_operations import PRODUCTS, SOFTMAX
from explorer.discovery.details import HostDetails, OutputSteps, RouterScoring, Step
from explorer.discovery.discover import discover
from explorer.discovery.record_run import recorded_run
from explorer.meta_device import build_meta
from explorer.specimens import config_of
from tests.support.models import specimen


@pytest.mark.parametrize("family", ["llama", "bloom", "gemma2"])
def test_the_operations_of_an_attention_are_recorded(family):
    model = build_meta(config_of(family))
    anatomy = discover(model)
    graph = recorded_run(model).prompt.blocks
    for block in anatomy.blocks:
        attention = block.hosts["self_attn"].details.attention
        assert attention is not None and graph.ops[attention.softmax].name in SOFTMAX
        assert {
            graph.ops[op].name for op in (attention.score_product, attention.value_product)
        } <= set(PRODUCTS)
        queries = graph.tensors[attention.queries(graph)]
        keys = graph.tensors[attention.keys(graph)]
        probabilities = graph.tensors[attention.probabilities(graph)]
        assert queries.shape[-1] == keys.shape[-2]
        assert probabilities.shape[-2:] == (queries.shape[-2], keys.shape[-1])
        assert all(
            attention.score_product < op < attention.softmax for op in attention.between[-1:]
        )


def test_an_attention_without_a_softmax_in_the_trace_has_no_operations():
    model = build_meta(config_of("llama"))
    model.set_attn_implementation("sdpa")
    for block in discover(model).blocks:
        assert block.hosts["self_attn"].details.attention is None


def test_a_cap_and_norms_behind_a_sublayer_are_details():
    details = specimen("gemma2").anatomy.block(0).hosts["self_attn"].details
    assert details.score_cap and details.output_projection == "self_attn.o_proj"
    assert details.output_steps.norms == ("post_attention_layernorm",)
    assert details.output_steps.complete and not details.output_steps.has_scale


def test_paths_count_from_the_block():
    block = "model.layers.3"
    details = HostDetails(
        output_projection=f"{block}.attn.o",
        output_norms=(f"{block}.attn.norm",),
        scoring=RouterScoring("softmax", bias=f"{block}.mlp.bias", factor=f"{block}.mlp.scale"),
        constants={"decays": (f"{block}.attn.slope", -1.0)},
        output_steps=OutputSteps((Step("norm", (), 0, by="norm"),)),
        score_cap=30.0,
    ).relative_to(block)
    assert details.output_projection == "attn.o" and details.output_norms == ("attn.norm",)
    assert details.scoring == RouterScoring("softmax", bias="mlp.bias", factor="mlp.scale")
    assert details.constants == {"decays": ("attn.slope", -1.0)}
    assert details.output_steps.norms == ("norm",) and details.score_cap == 30.0
