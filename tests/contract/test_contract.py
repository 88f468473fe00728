"""The contract: every specimen passes it, and a broken model fails exactly what it should."""

from __future__ import annotations

import json

import pytest
import torch

from explorer import load
from explorer.contract import check, verified
from explorer.contract.checks import INVARIANTS
from explorer.contract.report import Report
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


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    torch.set_num_threads(1)
    return {family: check(load(f"specimen:{family}")) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_specimen_passes_the_contract(reports, family):
    report = reports[family]
    assert not report.failures, report.failures
    assert report.passed == len(report.checks) > 70 and report.failed == 0
    assert all(each.about.endswith(".") and each.detail for each in report.checks)


def test_invariants_are_listed_where_they_apply(reports):
    mixture, recurrent = (
        {"choice", "ablating an expert", "slots sum"},
        {"replay", "states", "implied attention"},
    )
    dense, pattern = {"neurons"}, {"pattern rows", "scores to probabilities"}
    assert not (mixture | recurrent) & names(reports["llama"]) and dense | pattern <= names(
        reports["llama"]
    )
    assert mixture | pattern <= names(reports["qwen3_moe"]) and not (recurrent | dense) & names(
        reports["qwen3_moe"]
    )
    for hybrid in ("qwen3_next", "qwen3_5_moe_text"):
        assert mixture | recurrent | pattern | dense | {
            "shared expert's gate",
            "addends (bfloat16)",
        } <= names(reports[hybrid])


def test_every_invariant_applies_to_some_specimen(reports):
    met = set().union(*(names(report) for report in reports.values()))
    assert {each.name for each in INVARIANTS} <= met
    assert {f"{each.name} (bfloat16)" for each in INVARIANTS if each.bfloat16 is not None} <= met


def test_a_report_is_plain_data(reports):
    data = json.loads(json.dumps(reports["llama"].to_json()))
    assert set(data) == {"checks", "passed", "failed"}
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


def test_a_model_without_weights_is_checked_for_names_and_layouts():
    report = check(load("HuggingFaceTB/SmolLM2-135M-Instruct", weights=False))
    assert not report.failures, report.failures
    assert {"names", "sizes", "values read", "refusals give a reason", "printout"} == names(report)


def test_values_an_implementation_hides_are_not_checked():
    report = check(load("specimen:llama", attn_implementation="sdpa"))
    assert not report.failures, report.failures
    assert not {"pattern rows", "scores to probabilities", "probabilities mix values"} & names(
        report
    )
    assert {"heads to premix", "writes reach the model", "refusals give a reason"} <= names(report)


def test_a_prompt_of_ones_own_and_progress():
    seen = []
    report = check(
        load("specimen:llama"),
        "And God said, Let there be light",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert not report.failures, report.failures
    assert seen == [(i + 1, len(report.checks)) for i in range(len(report.checks))]


def test_every_value_served_is_compared_by_some_check(reports):
    for family in FAMILIES:
        served = {
            f"{row.host}.{row.name}"
            for row in load(f"specimen:{family}").support()
            if row.available
        }
        assert verified(reports[family].to_json()["checks"]) == served


def test_a_failed_check_takes_the_mark_from_its_values_alone(monkeypatch):
    model = load("specimen:llama")
    monkeypatch.setattr(
        model.layers[1].__class__, "layer_mid", property(lambda self: torch.zeros(1))
    )
    report = check(model)
    every = {f"{row.host}.{row.name}" for row in model.support() if row.available}
    assert every - verified(report.to_json()["checks"]) == {"layers.layer_mid"}
