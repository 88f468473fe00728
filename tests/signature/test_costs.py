"""Costs as formulas: against counts of the model itself, its caches' real tensors, and torch's own
counter of operations."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
import torch

from explorer.accounting import counts as accounting
from explorer.signature import signature
from tests.support.models import shapes
from tests.support.signatures import FIRST, MORE, calls, counted, signed, value

#: Families whose costs stop growing or never grow, which a short text shows.
SHORT_TOO = ("gemma2", "qwen3_next")


def model(family: str) -> torch.nn.Module:
    return shapes({**FIRST, **MORE}[family]).hf


@pytest.mark.parametrize("family", [*FIRST, *MORE])
def test_parameters_are_those_counted(family):
    found, numbers = (
        signed(family)["costs"],
        {row["name"]: row["number"] for row in signed(family)["generics"]},
    )
    truth = accounting.parameters(model(family))
    assert (
        found["parameters"]["number"]
        == truth["total"]
        == value(found["parameters"]["formula"], **numbers)
    )
    assert found["parameters"]["active"]["number"] == truth["active"]
    assert [
        (row["part"], row["number"], row["active"]["number"])
        for row in found["parameters"]["by_part"]
    ] == [(row["part"], row["count"], row["active"]) for row in truth["by_part"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "id", ["ai21labs/Jamba-v0.1", "google/recurrentgemma-2b", "tiiuae/Falcon-H1-0.5B-Base"]
)
def test_costs_of_hybrids_are_those_of_the_model(id):
    """Mixtures on some blocks, a state that modules keep themselves, two mixers side by side."""
    module = shapes(id).hf
    found, truth = signature(module)["costs"], accounting.parameters(module)
    assert (found["parameters"]["number"], found["parameters"]["active"]["number"]) == (
        truth["total"],
        truth["active"],
    )
    assert calls(found["cache"], S=40, B=2) == accounting.measured_cache_bytes(module, 40, 2)


@pytest.mark.parametrize("family", [*FIRST, *MORE])
def test_bytes_of_weights_are_those_of_the_tensors(family):
    truth: dict[str, int] = {}
    for parameter in model(family).parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        truth[name] = truth.get(name, 0) + parameter.nbytes
    assert {row["dtype"]: row["number"] for row in signed(family)["costs"]["weights"]} == truth


@pytest.mark.parametrize(
    ("family", "tokens", "batch"),
    [*((family, 90, 3) for family in (*FIRST, *MORE)), *((family, 17, 1) for family in SHORT_TOO)],
)
def test_bytes_kept_are_those_of_the_cache(family, tokens, batch):
    assert calls(
        signed(family)["costs"]["cache"], S=tokens, B=batch
    ) == accounting.measured_cache_bytes(model(family), tokens, batch)


@pytest.mark.parametrize(
    ("family", "context"),
    [*((family, 130) for family in (*FIRST, *MORE)), *((family, 12) for family in SHORT_TOO)],
)
def test_operations_are_those_torch_counts(family, context):
    assert calls(signed(family)["costs"]["flops"], T=context) == counted(model(family), context)


def test_a_window_is_where_bytes_and_operations_stop_growing():
    costs = signed("gemma2")["costs"]
    assert costs["cache"]["where"]["Held"] == {
        "formula": "min(S, -1 + Window)",
        "numbers": "min(S, 4095)",
    }
    grows = [
        calls(costs["cache"], S=tokens + 1, B=1) - calls(costs["cache"], S=tokens, B=1)
        for tokens in (100, 5000)
    ]
    assert grows[0] == 2 * grows[1] > 0
    more = [
        calls(costs["flops"], T=tokens + 1) - calls(costs["flops"], T=tokens)
        for tokens in (100, 5000)
    ]
    assert more[0] == 2 * more[1] > 0


def test_kinds_of_blocks_are_counted_under_names_of_their_own():
    kinds = {row["name"]: row["number"] for row in signed("deepseek_v3")["costs"]["kinds"]}
    assert kinds == {"MLPLayers": 3, "MoELayers": 58}
    kinds = {row["name"]: row["number"] for row in signed("qwen3_5_moe_text")["costs"]["kinds"]}
    assert kinds == {"GatedDeltaNetLayers": 30, "AttentionLayers": 10}


@pytest.mark.parametrize("family", [*FIRST, *MORE])
def test_costs_over_the_context_are_what_the_formulas_come_to(family):
    costs = signed(family)["costs"]
    for name, cost in (("S", costs["cache"]), ("T", costs["flops"])):
        lengths = [row[0] for row in cost["over"]]
        assert all(after == 2 * before for before, after in pairwise(lengths[:-1])), (
            "doublings, and the longest last"
        )
        assert (
            lengths[-1]
            == next(row["number"] for row in signed(family)["generics"] if row["name"] == "MaxSeq")
            > lengths[-2]
        )
        for length, grows, constant in cost["over"]:
            assert grows + constant == calls(
                cost, **{name: length}, **({"B": 1} if name == "S" else {})
            )
        assert len({constant for _, _, constant in cost["over"]}) == 1 and all(
            b[1] >= a[1] for a, b in pairwise(cost["over"])
        )


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "gemma2"])
def test_costs_over_the_context_are_those_of_the_model(family):
    costs, module = signed(family)["costs"], model(family)
    length, grows, constant = costs["cache"]["over"][0]
    assert grows + constant == accounting.measured_cache_bytes(module, length, 1)
    length, grows, constant = costs["flops"]["over"][0]
    assert grows + constant == counted(module, length)


def test_what_does_not_grow_is_the_state_of_one_size():
    """Of a hybrid the recurrent and convolution state, by the types of its cache; of other decoders
    nothing."""
    found = signed("qwen3_next")
    layers, tensors = found["cache"][0]["layers"], found["cache"][0]["tensors"]
    sizes = {"bfloat16": 2, "float32": 4}
    one = sum(
        sizes[row["after_prefill"]["dtype"]] * prod(row["after_prefill"]["numbers"][1:])
        for row in tensors
    )
    assert {row[2] for row in found["costs"]["cache"]["over"]} == {len(layers) * one}
    assert {row[2] for row in signed("llama")["costs"]["cache"]["over"]} == {0}
