"""The sweep over the options of families: what is kept of it, what is printed, and that the
committed outcomes are still true.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version

import pytest

from builder.__main__ import main
from builder.pages import write
from builder.records import cache, coverage, variants, variants_text
from builder.records.process_limits import NoResult
from builder.records.threads import one_thread
from explorer.specimens import small
from explorer.specimens import variants as specimen_variants

#: How many variants a run of the tests picks.
PICKED = 4

TRIED = {
    "llama": [{"rms_norm_eps": 0.5}, {"attention_bias": True}, {"num_attention_heads": 3}],
    "gpt2": [{"activation_function": "relu"}, {"n_inner": 20}],
}

FOUND: dict = {
    "two": {
        "tried": 4,
        "rejected": 1,
        "same": 0,
        "variants": [
            {"change": {"bias": True}, "verdict": "proven"},
            {
                "change": {"norm": None},
                "verdict": "in part",
                "lacking": [{"value": "layers.layer_mid", "blocks": "block 1", "reason": "<none>"}],
            },
            {
                "change": {"act": "relu"},
                "verdict": "failed",
                "failed": [
                    {"name": "skip", "host": "model", "values": [], "detail": "an error of 0.125"}
                ],
            },
        ],
    },
    "one": {"tried": 0, "rejected": 0, "same": 0, "variants": [], "stopped": "it died of SIGSEGV"},
}


@pytest.fixture
def in_process(monkeypatch, tmp_path):
    """Run each family in this process, with few changes and an empty cache; return what ran."""
    ran: list[str] = []

    def run_each(function, tasks, jobs, limits, preload):
        for task in tasks:
            ran.append(task)
            yield task, function(task)

    monkeypatch.setattr(variants, "run_each", run_each)
    monkeypatch.setattr(specimen_variants, "changes", lambda family: TRIED[family])
    monkeypatch.setattr(cache, "folder", lambda: tmp_path / "cache")
    return ran


def committed() -> variants.VariantsData:
    found = variants.read()
    assert found is not None, (
        f"{variants.DATA} is missing: python -m builder check --variants --all --write makes it"
    )
    return found


def picked() -> list[tuple[str, variants.Variant]]:
    """A few committed variants, others with every release of transformers, the same in every
    run.
    """
    every = [(name, one) for name, of in committed()["families"].items() for one in of["variants"]]

    def rank(item) -> str:
        text = f"{item[0]} {json.dumps(item[1]['change'])} {version('transformers')}"
        return hashlib.sha256(text.encode()).hexdigest()

    return sorted(every, key=rank)[:PICKED]


# -- the command ------------------------------------------------------------------


def test_the_command_keeps_what_changes_the_graph_and_goes_on_where_it_stopped(
    in_process, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(variants, "DATA", tmp_path / "variants.json")
    assert main(["check", "--variants", "llama", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["llama"]
    assert found == {
        "tried": 3,
        "rejected": 1,  # three heads do not share two pairs of keys and values
        "same": 1,
        "variants": [{"change": {"attention_bias": True}, "verdict": "proven"}],
    }
    assert main(["check", "--variants", "llama", "gpt2", "--write"]) == 0
    assert in_process == ["llama", "gpt2"]
    read = variants.read(tmp_path / "variants.json")
    assert read is not None and list(read["families"]) == ["gpt2", "llama"]
    assert [one["change"] for one in read["families"]["gpt2"]["variants"]] == TRIED["gpt2"][:1]
    assert "2 decoders, 5 changes tried: 1 do not run, 2 change no graph" in capsys.readouterr().out
    assert [one for one, _ in variants.sweep(["llama"], fresh=True)] == ["llama"]
    assert in_process == ["llama", "gpt2", "llama"]


def test_what_a_process_does_not_return_is_said_and_tried_again(in_process, monkeypatch):
    monkeypatch.setattr(variants, "family_variants", lambda family: NoResult("it died"))
    for _ in range(2):
        [(_, found)] = variants.sweep(["llama"])
        assert found.get("stopped") == "it died" and not found["variants"]
    assert in_process == ["llama", "llama"]


@pytest.mark.parametrize(
    ("words", "description"),
    [
        (["check", "--fresh"], "goes with --variants"),
        (["check", "--variants", "--all", "llama"], "do not name any"),
        (["check", "--variants", "--jobs", "3"], "1 or 2"),
    ],
)
def test_bad_words_get_one_sentence_and_exit_2(words, description, capsys):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert description in err and err.count("\n") == 1


# -- which changes are variants -----------------------------------------------------


def test_a_graph_that_an_earlier_change_has_is_no_second_variant():
    tried = [{"num_key_value_heads": 10}, {"num_attention_heads": 5}, {"hidden_act": "nothing"}]
    assert variants.distinct("llama", tried) == (1, tried[:1])
    tried = [{"hidden_act": "gelu"}, {"hidden_act": "gelu_10"}, {"hidden_act": "gelu"}]
    assert variants.distinct("llama", tried) == (0, tried[:2])


def test_fields_that_nothing_reads_are_not_built(monkeypatch):
    built = []
    graph_of = variants._graph_of
    monkeypatch.setattr(
        variants, "_graph_of", lambda *given: built.append(given[1]) or graph_of(*given)
    )
    assert variants.distinct("llama", [{"pretraining_tp": 2}, {"rms_norm_eps": 0.5}]) == (0, [])
    assert built == [{}, {"rms_norm_eps": 0.5}]


def test_a_model_whose_logits_are_not_finite_is_no_variant():
    assert variants.distinct("granite", [{"logits_scaling": 0.0}]) == (1, [])


# -- what is kept and shown -----------------------------------------------------------


def test_what_is_kept_is_the_same_at_every_run(tmp_path):
    path = tmp_path / "variants.json"
    text = variants.write(FOUND, path).read_text()
    assert "0.125" not in text and sum('"change"' in line for line in text.splitlines()) == 3
    changed = json.loads(json.dumps(FOUND).replace("0.125", "0.126"))
    assert variants.write(dict(reversed(changed.items())), path).read_text() == text
    other = {"three": FOUND["one"]}
    merged = json.loads(variants.write(other, path, merge=True).read_text())
    assert list(merged["families"]) == ["one", "three", "two"]
    assert list(json.loads(variants.write(other, path).read_text())["families"]) == ["three"]


def test_the_table_names_what_is_not_proven_and_counts():
    lines = variants_text.table(FOUND, 90).splitlines()
    assert lines[0] == "one: it died of SIGSEGV" and all(len(line) <= 90 for line in lines)
    said = " ".join(line.strip() for line in lines)
    assert "in part: norm = null; no layers.layer_mid (block 1): <none>" in said
    assert 'failed: act = "relu"; skip on model: an error of 0.125' in said
    assert "bias" not in said
    assert "2 decoders, 4 changes tried: 1 do not run, 0 change no graph, 3 variants" in said
    assert "1 proven, 1 in part, 1 failed" in said


def test_the_page_folds_the_options_of_each_family(tmp_path):
    outcome: coverage.Outcome = {"verdict": "proven"}
    coverage.write({"one": outcome, "two": outcome, "three": outcome}, tmp_path / "coverage.json")
    page = write.write_coverage({}, site=tmp_path)
    assert page is not None and "<details>" not in page.read_text()
    variants.write(FOUND, tmp_path / "coverage_variants.json")
    write.write_coverage({}, site=tmp_path)
    text = page.read_text()
    assert text.count("<details>") == 2 and text.count("<li>") == 3
    assert "<code>act = &#34;relu&#34;</code> failed" in text and "&lt;none&gt;" in text


# -- the committed data -------------------------------------------------------------


def test_the_committed_data_is_of_decoders_and_of_these_versions():
    kept = committed()
    assert set(kept["families"]) <= set(small.types())
    assert kept["versions"] == {name: version(name) for name in coverage.PACKAGES}
    for found in kept["families"].values():
        assert found["tried"] == found["rejected"] + found["same"] + len(found["variants"])
        assert {one["verdict"] for one in found["variants"]} <= set(coverage.VERDICTS)


@pytest.mark.slow
def test_the_picked_variants_come_out_as_committed():
    for family, kept in picked():
        with one_thread():
            found = variants.variant_outcome(family, kept["change"])
        of: variants.FamilyVariants = FOUND["two"] | {"variants": [found]}
        shown = variants.data({family: of})
        assert json.loads(json.dumps(shown["families"][family]["variants"])) == [kept]
