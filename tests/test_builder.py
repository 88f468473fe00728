"""The builder's command line and pipeline: what it prints, what it leaves, how it fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from builder import collect, pipeline, write
from builder.__main__ import main


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A copy of the authored site, so that a build leaves the real one alone."""
    copied = tmp_path / "site"
    shutil.copytree("site", copied, ignore=shutil.ignore_patterns("index.md"))
    monkeypatch.setattr(collect, "NOTES", copied / "families")
    return copied


def test_facts_prints_one_record(capsys):
    assert main(["facts", "llama"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["family"] == "llama" and found["contract"]["failed"] == 0 and found["contract"]["passed"] > 10
    assert all(row["verified"] for row in found["values"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["facts", "lama"], "llama"),
        (["facts", "qwen3_moe", "--checkpoint", "Qwen/Qwen3-30B-A3"], "Qwen/Qwen3-30B-A3B"),
        (["facts", "llama", "--checkpoint", "Qwen/Qwen3-30B-A3B"], "is not of the family llama"),
        (["build", "lama"], "llama"),
        (["check", "lama"], "llama"),
        (["build", "llama", "--jobs", "0"], "--jobs"),
    ],
)
def test_bad_words_get_one_sentence_and_exit_2(words, says, capsys):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1 and "Traceback" not in err


def test_a_page_folder_that_cannot_be_written_is_said(tmp_path, capsys):
    (tmp_path / "taken").write_text("a file, not a folder")
    assert main(["build", "llama", "--out", str(tmp_path / "taken")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_family_that_fails_leaves_the_others_built(site, tmp_path):
    notes = site / "families" / "qwen3_moe" / "notes.md"
    notes.write_text(notes.read_text() + "\n```python\nassert model.num_layers == 99, 'not so many'\n```\n")
    failed = pipeline.build(["llama", "qwen3_moe"], tmp_path / "out", jobs=1, site=site)
    assert len(failed) == 1 and failed[0].startswith("qwen3_moe:") and "not so many" in failed[0]
    assert f"{notes}:{len(notes.read_text().splitlines()) - 1}" in failed[0]
    assert (tmp_path / "out" / "families" / "llama" / "index.html").is_file()
    assert not (tmp_path / "out" / "families" / "qwen3_moe" / "index.html").exists()


def test_notes_that_name_an_unknown_value_fail_the_build(site, tmp_path):
    notes = site / "families" / "llama" / "notes.md"
    notes.write_text(notes.read_text() + "\nRead {value:mlp.router_logit} first.\n")
    failed = pipeline.build(["llama"], tmp_path / "out", jobs=1, site=site)
    assert len(failed) == 1 and "router_logits" in failed[0] and "notes.md:" in failed[0]


def test_facts_that_say_the_same_keep_their_date(tmp_path):
    one = {"checkpoint": "a/b", "provenance": {"generated": "2020-01-01"}, "sizes": {"n": 1}}
    later = {**one, "provenance": {"generated": "2026-01-01"}}
    collect.write_facts("llama", [one], tmp_path)
    path = collect.write_facts("llama", [later], tmp_path)
    assert json.loads(path.read_text()) == [one]
    changed = {**later, "sizes": {"n": 2}}
    assert json.loads(collect.write_facts("llama", [changed], tmp_path).read_text()) == [changed]


def test_a_damaged_facts_file_is_written_anew(tmp_path):
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "facts.json").write_text("{not json")
    one = {"checkpoint": "a/b", "provenance": {"generated": "2020-01-01"}}
    assert json.loads(collect.write_facts("llama", [one], tmp_path).read_text()) == [one]


def test_what_is_generated_is_not_committed():
    ignored = Path(".gitignore").read_text()
    assert "site/families/*/index.md" in ignored and write.SITE.name == "site"


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    assert main(["build", "llama", "--out", str(tmp_path)]) == 2
    assert "would be deleted" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_a_built_folder_may_be_built_again(tmp_path):
    write._writable(tmp_path / "out")
    (tmp_path / "out" / "index.html").write_text("old")
    write._writable(tmp_path / "out")
