"""The cache of results: what they depend on, how much they take, and several processes at once."""

from __future__ import annotations

import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from builder.records import cache as reuse
from explorer.checkpoints import cards
from explorer.specimens import recipes


def test_what_is_kept_goes_by_all_it_depends_on(tmp_path, monkeypatch):
    notes = tmp_path / "notes.md"
    notes.write_text("Nothing of another family.")
    elsewhere = tmp_path / "other.md"
    elsewhere.write_text('```python\nload("specimen:opt")\n```')

    def keys():
        return {
            "proof": reuse.contract_key("gpt2"),
            "records": reuse.records_key("gpt2"),
            "notes": reuse.notes_key(notes, "gpt2"),
            "naming opt": reuse.notes_key(elsewhere, "gpt2"),
            "records of opt": reuse.records_key("opt"),
            "records without a card": reuse.records_key("apertus"),
        }

    def changed(before):
        return {name for name, key in keys().items() if key != before[name]}

    before = keys()
    assert keys() == before and len(set(before.values())) == len(before)
    with monkeypatch.context() as patch:
        cards_now = cards.all_cards()
        patch.setattr(
            cards,
            "all_cards",
            lambda: tuple(
                replace(card, title="Another") if card.family == "opt" else card
                for card in cards_now
            ),
        )
        assert changed(before) == {"records of opt", "naming opt"}
    with monkeypatch.context() as patch:
        recipe = recipes.recipe
        patch.setattr(
            recipes,
            "recipe",
            lambda family: replace(recipe(family), seed=9) if family == "gpt2" else recipe(family),
        )
        patch.setattr(reuse, "_recipe", reuse._recipe.__wrapped__)
        assert changed(before) == {"proof", "records", "notes", "naming opt"}
    with monkeypatch.context() as patch:
        patch.setattr(reuse, "version", lambda name: "9.9")
        patch.setattr(reuse, "_sources", reuse._sources.__wrapped__)
        assert changed(before) == set(before)
    notes.write_text("Something else.")
    assert changed(before) == {"notes"}


def test_a_proof_does_not_go_by_what_only_shows(monkeypatch):
    def sources(changed):
        monkeypatch.setattr(
            reuse,
            "_digests",
            lambda paths: [
                [path.name, "changed" if path.as_posix().endswith(changed) else ""]
                for path in paths
            ],
        )
        made = reuse._sources.__wrapped__
        return made(reuse._NOT_CONTRACT), made(reuse._DRAWING)

    as_it_is = sources("nothing")
    assert (
        sources("explorer/widgets/diagram/draw.py") == sources("explorer/app/server.py") == as_it_is
    )
    assert (
        sources("explorer/facts/record.py")[0] == as_it_is[0]
        and sources("explorer/facts/record.py")[1] != as_it_is[1]
    )
    changed = sources("explorer/discovery/residual.py")
    assert all(one != other for one, other in zip(changed, as_it_is, strict=True))


def test_the_least_recently_used_results_make_room(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    results = reuse.ResultCache()
    size = len(json.dumps("x" * 1000))
    monkeypatch.setattr(reuse, "MAX_BYTES", 4 * size)
    for number in range(6):
        results.get_or_make("records", "llama", f"{number:x}", lambda: "x" * 1000)
        os.utime(reuse.folder() / f"records-llama-{number:x}.json", (number, number))
    assert results.get("records", "llama", "2") == "x" * 1000  # now the most recently used
    results.get_or_make("notes", "gpt2", "a", lambda: "x" * 1000)
    left = {path.name for path in reuse.folder().iterdir()}
    assert left == {
        "records-llama-2.json",
        "records-llama-4.json",
        "records-llama-5.json",
        "notes-gpt2-a.json",
    }
    assert results.made == ["records"] * 6 + ["notes"]


def _fill_cache(number):
    for at in range(20):
        reuse.ResultCache().get_or_make("records", "llama", f"{at:x}", lambda: "x" * 50_000)
    return number


def test_two_processes_may_write_the_same_results(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(reuse, "MAX_BYTES", 200_000)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        assert sorted(pool.map(_fill_cache, range(2))) == [0, 1]
    files = list(reuse.folder().iterdir())
    assert 0 < len(files) <= 4
    assert {json.loads(path.read_text()) for path in files} == {"x" * 50_000}


def test_a_cache_folder_that_cannot_be_written_costs_the_reuse_alone(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert reuse.ResultCache().get_or_make("records", "llama", "a", lambda: 1) == 1
