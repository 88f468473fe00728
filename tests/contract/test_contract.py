"""The contract: every specimen passes it, and a broken model fails exactly what it should."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch

from explorer import load
from explorer.contract import check, verified
from explorer.contract.checks import INVARIANTS
from explorer.contract.model_under_test import ModelUnderTest
from explorer.contract.report import Report
from explorer.model.language_model import LanguageModel
from explorer.specimens import FAMILIES


@pytest.fixture(autouse=True)
def one_thread():
    """A specimen's tensors are too small to share out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def names(report: Report) -> set[str]:
    return {each.name for each in report.checks}


@cache
def model_of(family: str) -> LanguageModel:
    return load(f"specimen:{family}")


@cache
def report_of(family: str) -> Report:
    return check(model_of(family))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_lengths_are_unlike_every_size(family):
    subject = ModelUnderTest(model_of(family))
    sizes = {
        size
        for block in subject.block_kinds
        for host in block.hosts.values()
        for size in host.sizes.values()
    }
    assert not {subject.batch, subject.seq} & (sizes | set(subject.model.sizes.values()))
    assert subject.ids.shape == (subject.batch, subject.seq)
    assert len({tuple(row) for row in subject.ids.tolist()}) == subject.batch


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_specimen_passes_the_contract_and_every_value_served_is_compared(family):
    report = report_of(family)
    assert not report.failures, report.failures
    assert report.passed == len(report.checks) > 70 and report.failed == 0
    assert all(each.about.endswith(".") and each.detail for each in report.checks)
    served = {f"{row.host}.{row.name}" for row in model_of(family).support() if row.available}
    assert verified(report.to_json()["checks"]) == served


@pytest.mark.slow
def test_invariants_are_listed_where_they_apply():
    mixture, recurrent = (
        {"choice", "ablating an expert", "slots sum"},
        {"replay", "states", "implied attention"},
    )
    dense, pattern = {"neurons"}, {"pattern rows", "scores to probabilities"}
    plain, sparse = names(report_of("llama")), names(report_of("qwen3_moe"))
    assert not (mixture | recurrent) & plain and dense | pattern <= plain
    assert mixture | pattern <= sparse and not (recurrent | dense) & sparse
    for hybrid in ("qwen3_next", "qwen3_5_moe_text"):
        assert mixture | recurrent | pattern | dense | {
            "shared expert's gate",
            "addends (bfloat16)",
        } <= names(report_of(hybrid))


@pytest.mark.slow
def test_every_invariant_applies_to_some_specimen():
    met = set().union(*(names(report_of(family)) for family in (*FAMILIES, "granite_swa")))
    assert {each.name for each in INVARIANTS} <= met
    assert {f"{each.name} (bfloat16)" for each in INVARIANTS if each.bfloat16 is not None} <= met


def test_a_report_is_plain_data():
    data = json.loads(json.dumps(report_of("llama").to_json()))
    assert set(data) == {"checks", "passed", "failed", "not_applicable"}
    assert all(
        set(each) == {"name", "host", "about", "passed", "detail", "worst", "values"}
        for each in data["checks"]
    )
    hosts_met = {each["host"] for each in data["checks"]}
    assert hosts_met == {
        "model",
        "model.layers[i]",
        "model.layers[i].self_attn",
        "model.layers[i].mlp",
    }
    addends = next(each for each in data["checks"] if each["name"] == "addends")
    assert addends["worst"] < 3e-7 and "blocks 0-2" in addends["detail"]


@pytest.mark.slow
def test_a_model_without_weights_is_checked_for_names_and_layouts():
    report = check(load("HuggingFaceTB/SmolLM2-135M-Instruct", weights=False))
    assert not report.failures, report.failures
    assert {"names", "sizes", "values read", "refusals give a reason", "printout"} == names(report)


@pytest.mark.slow
def test_values_an_implementation_hides_are_not_checked():
    report = check(load("specimen:llama", attn_implementation="sdpa"))
    assert not report.failures, report.failures
    assert not {"pattern rows", "scores to probabilities", "probabilities mix values"} & names(
        report
    )
    assert {"heads to premix", "writes reach the model", "refusals give a reason"} <= names(report)


@pytest.mark.slow
def test_a_prompt_of_ones_own_and_progress():
    seen = []
    report = check(
        load("specimen:llama"),
        "And God said, Let there be light",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert not report.failures, report.failures
    assert seen == [(i + 1, len(report.checks)) for i in range(len(report.checks))]


@pytest.mark.slow
def test_a_failed_check_takes_the_mark_from_its_values_alone(monkeypatch):
    model = load("specimen:llama")
    monkeypatch.setattr(
        model.layers[1].__class__, "layer_mid", property(lambda self: torch.zeros(1))
    )
    report = check(model)
    every = {f"{row.host}.{row.name}" for row in model.support() if row.available}
    assert every - verified(report.to_json()["checks"]) == {"layers.layer_mid"}
