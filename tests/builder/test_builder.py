"""The builder's command line and pipeline: what it prints, what it leaves, how it fails."""

from __future__ import annotations

import json
import pickle
import shutil
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest
from tqdm import tqdm

import explorer.checkpoints.load
from builder.__main__ import main
from builder.notes.read import SnippetError
from builder.pages import build as pipeline
from builder.pages import mkdocs, write
from builder.records import cache as reuse
from builder.records import collect
from builder.records.facts_file import write_facts
from explorer.checkpoints import cards
from explorer.errors import LoadError
from explorer.facts.record import SCHEMA
from tests.support.tasks import collect_as_told


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A copy of the authored site with one of its guides, so that a build leaves the real one
    alone.
    """
    copied = tmp_path / "site"
    shutil.copytree("site", copied, ignore=shutil.ignore_patterns("index.md", "adding-*"))
    monkeypatch.setattr(collect, "NOTES", copied / "families")
    return copied


def test_facts_prints_one_record(capsys):
    assert main(["facts", "llama"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["family"] == "llama"
        and found["contract"]["failed"] == 0
        and found["contract"]["passed"] > 10
    )
    assert all(row["verified"] for row in found["values"])


@pytest.mark.parametrize(
    ("words", "description"),
    [
        (["facts", "lama"], "llama"),
        (["facts", "qwen3_moe", "--checkpoint", "Qwen/Qwen3-30B-A3"], "Qwen/Qwen3-30B-A3B"),
        (["facts", "llama", "--checkpoint", "Qwen/Qwen3-30B-A3B"], "is not of the family llama"),
        (["build", "lama"], "llama"),
        (["check", "lama"], "llama"),
        (["build", "llama", "--jobs", "0"], "--jobs"),
        (["build", "llama", "--all"], "do not name any"),
    ],
)
def test_bad_words_get_one_sentence_and_exit_2(words, description, capsys):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert description in err and err.count("\n") == 1 and "Traceback" not in err


def test_a_page_folder_that_cannot_be_written_is_an_error(tmp_path, capsys):
    (tmp_path / "taken").write_text("a file, not a folder")
    assert main(["build", "llama", "--out", str(tmp_path / "taken")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.slow
def test_a_family_that_fails_leaves_the_others_built(site, tmp_path):
    notes = site / "families" / "qwen3_moe" / "notes.md"
    notes.write_text(
        notes.read_text() + "\n```python\nassert model.num_layers == 99, 'not so many'\n```\n"
    )
    failed = pipeline.build(["llama", "qwen3_moe"], tmp_path / "out", jobs=1, site=site).failed
    assert len(failed) == 1 and failed[0].startswith("qwen3_moe:") and "not so many" in failed[0]
    assert f"{notes}:{len(notes.read_text().splitlines()) - 1}" in failed[0]
    assert (tmp_path / "out" / "families" / "llama" / "index.html").is_file()
    assert not (tmp_path / "out" / "families" / "qwen3_moe" / "index.html").exists()


@pytest.mark.slow
def test_notes_that_name_an_unknown_value_fail_the_build(site, tmp_path):
    notes = site / "families" / "llama" / "notes.md"
    notes.write_text(notes.read_text() + "\nRead {value:mlp.router_logit} first.\n")
    failed = pipeline.build(["llama"], tmp_path / "out", jobs=1, site=site).failed
    assert len(failed) == 1 and "router_logits" in failed[0] and "notes.md:" in failed[0]


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """How often a contract, a record and notes were really run; nothing is kept from before, and
    mkdocs is left out.
    """
    import explorer.contract
    import explorer.facts.record
    from builder.notes import run as execution
    from explorer.contract.report import Report

    ran = Counter()

    def counting(what, function):
        def call(*args, **options):
            ran[what] += 1
            return function(*args, **options)

        return call

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        explorer.contract, "check", counting("contract", lambda model, prompt: Report([]))
    )
    monkeypatch.setattr(
        explorer.facts.record, "facts", counting("record", explorer.facts.record.facts)
    )
    monkeypatch.setattr(execution, "run_notes", counting("notes", execution.run_notes))
    monkeypatch.setattr(mkdocs, "build_site", lambda out, **rest: out)
    return ran


@pytest.mark.slow
def test_what_did_not_change_is_not_run_again(site, tmp_path, counted):
    families = ["llama", "opt"]
    guides = len(write.guide_sources(site))

    def build(**options):
        counted.clear()
        built = pipeline.build(families, tmp_path / "out", jobs=1, site=site, **options)
        assert sorted(built.families) == families and built.failed == []
        return dict(counted), built.made

    whole = {
        "contract": 2,
        "record": len(cards.family_checkpoints("llama")) + len(cards.family_checkpoints("opt")),
        "notes": 2 + guides,
    }
    assert build()[0] == whole
    assert build() == ({}, {})
    before = (site / "families" / "opt" / "index.md").read_text()
    notes = site / "families" / "opt" / "notes.md"
    notes.write_text(notes.read_text() + "\nOne more sentence.\n")
    assert build() == ({"notes": 1}, {"opt": ("notes",)})
    assert "One more sentence." in (site / "families" / "opt" / "index.md").read_text() != before
    kept = next(reuse.folder().glob("records-llama-*"))
    kept.write_text("{damaged")
    assert build() == ({"record": 1}, {"llama": ("records",)})
    assert build(fresh=True)[0] == whole


@pytest.mark.slow
def test_what_a_family_fails_with_comes_back_from_its_process(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = dict(pipeline._collected(["llamas", "gpt3", "opal"], 2, False, tqdm(disable=True)))
    assert {
        family: str(error).partition("'")[2].partition("'")[0] for family, error in found.items()
    } == {name: name for name in ("llamas", "gpt3", "opal")}


def test_an_error_of_notes_is_the_same_in_another_process():
    error = pickle.loads(pickle.dumps(SnippetError("notes.md", 3, "no")))
    assert (error.path, error.line, error.message) == ("notes.md", 3, "no")


@pytest.mark.slow
def test_a_process_that_dies_takes_its_own_family_alone(monkeypatch):
    monkeypatch.setattr(pipeline, "collected_or_error", collect_as_told)
    tasks = ["crash", "answer", "exit", "other", "raise"]
    found = dict(pipeline._collected(tasks, 2, True, tqdm(disable=True)))
    assert (found["answer"], found["other"]) == ("answer done", "other done")
    for task, said in (("crash", "SIGSEGV"), ("exit", "exit code 3"), ("raise", "no good")):
        assert isinstance(found[task], pipeline.ProcessEnded)
        assert said in pipeline._error_text(found[task])


@pytest.mark.slow
def test_every_family_that_is_proven_gets_a_page(site, tmp_path, monkeypatch, counted):
    """Those with notes and those without; what a full run refused has none."""
    verdicts = {"gpt2": "proven", "apertus": "in part", "blt": "refused", "phimoe": "failed"}
    versions = {name: version(name) for name in ("transformers", "torch", "nnsight")}
    data = {
        "versions": versions,
        "families": {name: {"verdict": said} for name, said in verdicts.items()},
    }
    (site / "coverage.json").write_text(json.dumps(data))
    assert collect.proven_families(site) == ["gpt2", "apertus"]
    (site / "coverage.json").write_text(
        json.dumps(data | {"versions": versions | {"torch": "1.0"}})
    )
    assert collect.proven_families(site) is None
    (site / "coverage.json").unlink()
    monkeypatch.setattr("explorer.specimens.small.types", lambda: ("gpt2", "apertus", "blt"))
    built = pipeline.build([], tmp_path / "out", jobs=1, site=site, everything=True)
    assert built.families == ["gpt2", "apertus"] and built.failed == []
    assert [line.partition(":")[0] for line in built.left_out] == ["blt"]
    page = (site / "families" / "apertus" / "index.md").read_text()
    assert (
        "no released checkpoint" in page
        and "adding-a-family.html" in page
        and "huggingface.co" not in page
    )
    # What has no notes is generated, all of it, and stays out of the repository.
    assert {path.name for path in (site / "families" / "apertus").iterdir()} == {
        "index.md",
        "facts.json",
        ".gitignore",
    }
    assert (
        not (site / "families" / "gpt2" / ".gitignore").exists()
        and not (site / "families" / "blt").exists()
    )
    # Without it, the families with notes alone.
    built = pipeline.build([], tmp_path / "out", jobs=1, site=site)
    assert built.families == ["gpt2"] and not (site / "families" / "apertus").exists()


@pytest.mark.slow
def test_a_default_that_does_not_run_leaves_the_specimens_sizes(counted, monkeypatch):
    real = explorer.checkpoints.load.load

    def load(source, **options):
        if source == "default:apertus":
            raise LoadError("it does not run.")
        return real(source, **options)

    monkeypatch.setattr("explorer.facts.record.load", load)
    (found,) = collect.collect("apertus").records
    assert (
        found["checkpoint"] == "specimen:apertus"
        and not found["released"]
        and found["sizes"]["hidden_size"] < 200
    )
    assert "the small model made here" in found["provenance"]["sources"]["config"]


def test_equal_facts_keep_their_date(tmp_path):
    one = {"checkpoint": "a/b", "provenance": {"generated": "2020-01-01"}, "sizes": {"n": 1}}
    later = {**one, "provenance": {"generated": "2026-01-01"}}
    write_facts([one], tmp_path)
    path = write_facts([later], tmp_path)
    assert json.loads(path.read_text()) == [one]
    changed = {**later, "sizes": {"n": 2}}
    assert json.loads(write_facts([changed], tmp_path).read_text()) == [changed]


def test_a_damaged_facts_file_is_written_anew(tmp_path):
    (tmp_path / "facts.json").write_text("{not json")
    one = {"checkpoint": "a/b", "provenance": {"generated": "2020-01-01"}}
    assert json.loads(write_facts([one], tmp_path).read_text()) == [one]


def test_what_is_generated_is_not_committed():
    ignored = Path(".gitignore").read_text()
    assert "site/families/*/index.md" in ignored and write.SITE.name == "site"


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    assert main(["build", "llama", "--out", str(tmp_path)]) == 2
    assert "would be deleted" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_a_built_folder_may_be_built_again(tmp_path):
    out = tmp_path / "out"
    mkdocs.prepare_output(out)
    marks = {path.name for path in out.iterdir()}
    (out / "index.html").write_text("old")
    mkdocs.prepare_output(out)
    assert len(marks) == 1 and {path.name for path in out.iterdir()} == marks | {"index.html"}


def test_a_page_of_records_in_another_form_is_taken_away(tmp_path):
    for family, schema in (("llama", SCHEMA), ("gpt2", SCHEMA - 1)):
        folder = tmp_path / "families" / family
        folder.mkdir(parents=True)
        (folder / "index.md").write_text("")
        (folder / "facts.json").write_text(json.dumps([{"schema": schema}]))
    pipeline._remove_outdated(tmp_path)
    assert list(pipeline._records(tmp_path)) == ["llama"]
    assert not (tmp_path / "families" / "gpt2" / "index.md").exists()


def test_records_are_written_so_that_changes_show(tmp_path):
    record = {
        "checkpoint": "c",
        "provenance": {"generated": "now"},
        "layers": [1, 2, 3],
        "dims": [["a, b", "[\n]"], [], {"x": [0.5, None]}],
        "printout": "long " * 40,
    }
    text = write_facts([record], tmp_path).read_text(encoding="utf-8")
    assert json.loads(text) == [record]
    assert '"layers": [1, 2, 3],\n' in text and '[], {"x": [0.5, null]}],\n' in text
