"""The sweep over every decoder: processes kept in bounds, outcomes as plain data, and the
committed ones still true.
"""

from __future__ import annotations

import hashlib
import json
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from builder.__main__ import main
from builder.commands import check
from builder.pages import mkdocs, write
from builder.records import coverage, coverage_text
from explorer.specimens import small
from explorer.vocabulary.availability import needs_setting, not_in_block, not_present, not_traced

#: How many families a run of the tests picks.
PICKED = 3

PROVEN = {
    "verdict": "proven",
    "class": "A",
    "weights": "random, seed 0",
    "blocks": 3,
    "served": ["model.logits", "mlp.mlp_output"],
    "lacking": [],
    "unproven": [],
    "checks": {"passed": 9, "failed": 0},
    "types": {"axes": 3000, "resolved": 2999},
}
IN_PART = PROVEN | {
    "verdict": "in part",
    "lacking": [
        {"value": "layers.layer_mid", "blocks": "block 1", "reason": "nothing reads it"},
        {"value": "mlp.mlp_activation", "blocks": "", "reason": "nothing reads it"},
    ],
}
FAILED = PROVEN | {
    "verdict": "failed",
    "checks": {"passed": 8, "failed": 1},
    "failed": [
        {
            "name": "addends",
            "host": "model.layers[i]",
            "values": ["layers.layer_output"],
            "detail": "an error of 0.123",
        }
    ],
}
REFUSED = {
    "verdict": "refused",
    "reason": "its addend is <no> module's",
    "class": "B",
    "weights": "random, seed 0",
    "types": {"unknown": "it has no list of blocks"},
}
STOPPED = {"verdict": "stopped", "reason": "it died of SIGSEGV"}
OUTCOMES = {"one": PROVEN, "two": FAILED, "three": IN_PART, "four": REFUSED, "five": STOPPED}


def committed() -> dict:
    kept = coverage.read()
    assert kept is not None, (
        f"{coverage.DATA} is missing: python -m builder check --all --write makes it"
    )
    return kept


def picked() -> list[str]:
    """A handful of families, others with every release of transformers, the same in every run."""

    def rank(name: str) -> str:
        return hashlib.sha256(f"{name} {version('transformers')}".encode()).hexdigest()

    return sorted(small.types(), key=rank)[:PICKED]


# -- outcomes ---------------------------------------------------------------------


def test_an_absence_by_nature_is_no_lack():
    reasons = {
        0: not_in_block("no MLP is in this block"),
        1: not_traced("this was not found"),
        2: not_traced("this was not found"),
        3: needs_setting("this kernel makes none"),
        4: not_present("it has none"),
    }
    assert coverage.lacks("mlp.mlp_output", reasons) == [
        {"value": "mlp.mlp_output", "blocks": "blocks 1-2", "reason": "this was not found"},
        {"value": "mlp.mlp_output", "blocks": "block 3", "reason": "this kernel makes none"},
    ]
    assert coverage.lacks("model.logits", {None: not_traced("it is not there")}) == [
        {"value": "model.logits", "blocks": "", "reason": "it is not there"}
    ]


def test_a_failed_check_makes_an_outcome_failed():
    from explorer.contract.report import Check, Report
    from tests.support.models import specimen

    model = specimen("llama")
    values = tuple(f"{row.host}.{row.name}" for row in model.support() if row.available)
    held = Check("reads", "model", "about", True, "", None, values)
    assert coverage.outcome(model, Report.of([held]))["verdict"] == "proven"
    unread = Check("reads", "model", "about", True, "", None, values[1:])
    found = coverage.outcome(model, Report.of([unread]))
    assert (found["verdict"], found["unproven"]) == ("in part", [values[0]])
    broken = Check("writes", "model", "about", False, "an error of 1", 1.0, values[:1])
    found = coverage.outcome(model, Report.of([held, broken]))
    counts = {"passed": 1, "failed": 1, "not_applicable": 0}
    assert (found["verdict"], found["checks"]) == ("failed", counts)
    assert found["failed"] == [
        {"name": "writes", "host": "model", "values": [values[0]], "detail": "an error of 1"}
    ]


def test_axes_of_types_are_counted_or_a_reason_is_given(monkeypatch):
    from tests.support.models import specimen

    found = coverage.count_axes(specimen("llama"))
    assert found["axes"] == found["resolved"] > 300
    assert coverage.count_axes(torch.nn.Linear(2, 2))["unknown"].startswith("Linear ")
    monkeypatch.setattr(coverage, "_SIGNATURE_SECONDS", 0.05)
    stopped = coverage.count_axes(specimen("qwen3_next"))
    assert set(stopped) == {"unknown"} and "0.05 seconds" in stopped["unknown"]


def test_the_share_of_axes_is_rounded_down_and_given_for_all():
    assert (
        coverage_text.resolved_share([PROVEN]) == 99.9
        and coverage_text.resolved_share([REFUSED, STOPPED]) is None
    )
    assert coverage_text.percent(PROVEN) == "99.9 %" and coverage_text.percent(STOPPED) == ""
    said = coverage_text.resolved(
        OUTCOMES | {"six": PROVEN | {"types": {"axes": 10, "resolved": 9}}}
    )
    assert re.findall(r"[\d.]+", said)[:6] == ["4", "6", "99.9", "0", "98", "3."]
    assert not re.search(r"\d", coverage_text.resolved({"five": STOPPED}))
    printed = coverage_text.table(OUTCOMES, 130)
    assert (
        " 99.9 %  2 values" in printed
        and "types: " + REFUSED["types"]["unknown"] in printed
        and printed.endswith("at least 98 % in 3.")
    )


def test_a_model_that_cannot_be_built_has_the_error_as_its_reason(monkeypatch):
    from explorer import specimens

    def raises(family):
        raise ImportError("This needs the timm library. Please install it.\n")

    monkeypatch.setattr(specimens, "build", raises)
    found = coverage.family_outcome("gemma3n")
    assert found["verdict"] == "not built"
    assert "ImportError" in found["reason"] and "timm" in found["reason"]
    assert "install" not in found["reason"]


def test_a_contract_that_cannot_be_begun_is_a_failure(monkeypatch):
    from explorer import contract

    def raises(model, prompt):
        raise RuntimeError("no copy")

    monkeypatch.setattr(contract, "check", raises)
    found = coverage.family_outcome("llama")
    assert found["verdict"] == "failed" and "RuntimeError: no copy" in found["reason"]


# -- what is printed, and what is kept ----------------------------------------------


def test_the_table_goes_from_best_to_worst_and_counts():
    lines = coverage_text.table(OUTCOMES, 90).splitlines()
    first = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    assert first == ["one", "three", "four", "five", "two", "5", "3"]
    assert "5 decoders: 1 proven, 1 in part, 1 refused, 1 stopped, 1 failed" in lines
    assert all(len(line) <= 90 for line in lines)
    said = " ".join(" ".join(lines).split())
    assert "layers.layer_mid (block 1), mlp.mlp_activation: " in said
    assert "addends on model.layers[i]: " in said and "0.123" in said


def test_a_long_list_of_failures_is_cut():
    failed = [
        {"name": f"number {i}", "host": "model", "values": [], "detail": f"error {i % 6}"}
        for i in range(60)
    ]
    said = coverage_text.details(FAILED | {"failed": failed})
    names = ", ".join(f"number {number} on model" for number in (0, 6, 12, 18))
    assert said[1] == f"{names} and 6 more: error 0"
    assert said[-1] == "and 2 more" and len(said) == 6


@pytest.mark.parametrize(
    ("names", "code"), [(["one", "three", "four", "five"], 0), (["one", "two"], 1)]
)
def test_only_a_failed_check_is_a_failure(names, code, monkeypatch, capsys):
    monkeypatch.setattr(coverage, "types", lambda: tuple(names))
    monkeypatch.setattr(
        coverage,
        "sweep",
        lambda families, jobs, limits: ((name, OUTCOMES[name]) for name in reversed(families)),
    )
    assert check.check_all(1) == code
    assert f"{len(names)} decoders: " in capsys.readouterr().out
    assert check.check_all(1, as_json=True) == code
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == sorted(names) and printed["one"] == PROVEN


def test_what_is_kept_is_the_same_at_every_run(tmp_path, monkeypatch):
    changed = {name: OUTCOMES[name] for name in reversed(OUTCOMES)}
    changed["two"] = FAILED | {"failed": [FAILED["failed"][0] | {"detail": "an error of 0.124"}]}
    texts = [
        coverage.write(found, tmp_path / name).read_text()
        for found, name in ((OUTCOMES, "a.json"), (changed, "b.json"))
    ]
    assert texts[0] == texts[1] and "0.12" not in texts[0]
    kept = json.loads(texts[0])
    assert list(kept["families"]) == sorted(OUTCOMES) and kept["versions"][
        "transformers"
    ] == version("transformers")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_own_lines_are_those_of_the_family_s_file():
    assert coverage.own_lines("mistral") == 0
    assert coverage.own_lines("llama") == len(
        Path("explorer/specimens/llama.json").read_text().splitlines()
    )


@pytest.mark.parametrize(
    ("words", "description"),
    [
        (["check", "--all", "llama"], "do not name any"),
        (["check", "--jobs", "2"], "go with --all"),
        (["check", "--write", "llama"], "go with --all"),
        (["check", "--all", "--jobs", "3"], "1 or 2"),
        (["check", "--all", "--jobs", "0"], "1 or 2"),
    ],
)
def test_bad_words_get_one_sentence_and_exit_2(words, description, capsys):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert description in err and err.count("\n") == 1


def test_data_is_not_written_where_there_is_no_site(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["check", "--all", "--write"]) == 2
    assert "root of the repository" in capsys.readouterr().err


# -- the committed data -------------------------------------------------------------


def test_the_committed_data_is_of_every_decoder_and_of_these_versions():
    kept = committed()
    assert tuple(kept["families"]) == small.types()
    assert kept["versions"] == {
        name: version(name) for name in ("transformers", "torch", "nnsight")
    }
    assert {found["verdict"] for found in kept["families"].values()} <= {
        "proven",
        "in part",
        "refused",
        "not built",
    }


@pytest.mark.slow
def test_the_picked_families_come_out_as_committed():
    found = coverage.data(dict(coverage.sweep(picked())))["families"]
    kept = committed()["families"]
    assert {name: kept[name] for name in sorted(picked())} == json.loads(json.dumps(found))


# -- the page -----------------------------------------------------------------------


def test_the_page_says_every_outcome_and_links_what_has_a_page(tmp_path):
    coverage.write(OUTCOMES, tmp_path / "coverage.json")
    text = write.write_coverage({"one": "One"}, site=tmp_path).read_text()
    assert (
        '<a href="families/one/index.html"><code>one</code></a>' in text
        and "families/three" not in text
    )
    assert "its addend is &lt;no&gt; module" in text and "<no>" not in text
    assert 'data-trait="in-part"' in text and 'data-traits="in-part mlp"' in text
    assert (
        text.count("<tr class=") == len(OUTCOMES)
        and text.count('<td class="number">99.9 %</td>') == 3
    )
    assert (
        "3 of 5 model types have a signature" in text and "types: it has no list of blocks" in text
    )
    assert {"Coverage": "coverage.md"} in mkdocs.navigation({"one": "One"}, tmp_path)
    write.clear(tmp_path)
    assert not (tmp_path / "coverage.md").exists() and (tmp_path / "coverage.json").exists()


def test_without_data_there_is_no_page(tmp_path):
    (tmp_path / "coverage.md").write_text("an old one")
    assert write.write_coverage({}, site=tmp_path) is None
    assert list(tmp_path.iterdir()) == []
