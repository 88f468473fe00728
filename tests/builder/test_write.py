"""Writing pages: beside what is authored, unchanged ones untouched, failures in one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from markupsafe import Markup

from builder.notes.html import Section
from builder.pages import mkdocs, write
from explorer.widgets import palette
from tests.support.facts_records import records

NOTES = [Section("", "", Markup("<p>n</p>"))]


def test_pages_are_written_beside_what_is_authored(tmp_path: Path) -> None:
    path = write.write_family(
        records("llama"), NOTES, {"title": "T", "summary": "S"}, site=tmp_path
    )
    assert path == tmp_path / "families" / "llama" / "index.md"
    assert path.read_text(encoding="utf-8").startswith('---\ntitle: "T"\ndescription: "S"\n')
    write.write_index([records("llama")], site=tmp_path)
    shared = write.write_shared(site=tmp_path)
    assert {p.name for p in shared} == {
        "layouts.md",
        "palette.css",
        "drawing-file.js",
        "diagram-card.js",
        "block-diagram.js",
        "block-diagram.css",
    }
    assert palette.ROLES["attention"].dark in (tmp_path / "assets" / "palette.css").read_text()
    write.remove_family("llama", site=tmp_path)
    assert not path.exists()
    write.clear(tmp_path)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_an_unchanged_page_keeps_its_date(tmp_path: Path) -> None:
    path = write.write_family(records("llama"), site=tmp_path)
    os.utime(path, (1, 1))
    write.write_family(records("llama"), site=tmp_path)
    assert path.stat().st_mtime == 1


def test_the_record_is_linked_where_it_is_beside_the_page(tmp_path: Path) -> None:
    assert "facts.json" not in write.write_family(records("llama"), site=tmp_path).read_text(
        encoding="utf-8"
    )
    (tmp_path / "families" / "llama" / "facts.json").write_text("{}")
    assert 'href="facts.json"' in write.write_family(records("llama"), site=tmp_path).read_text(
        encoding="utf-8"
    )


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "families").write_text("a file where a folder should be")
    with pytest.raises(write.BuildError, match="families/llama/index.md"):
        write.write_family(records("llama"), site=tmp_path)
    with pytest.raises(write.BuildError, match="families/public"):
        mkdocs.build_site(tmp_path / "families" / "public", site=tmp_path)


def test_what_mkdocs_refuses_is_one_sentence(tmp_path: Path) -> None:
    config = tmp_path / "mkdocs.yml"
    config.write_text("site_name: x\ntheme: no-such-theme\n")
    (tmp_path / "site").mkdir()
    with pytest.raises(write.BuildError, match="no-such-theme"):
        mkdocs.build_site(tmp_path / "out", config=config, site=tmp_path / "site")


def test_navigation_lists_what_there_is(tmp_path: Path) -> None:
    write.write_guide("first", NOTES, {"title": "First", "summary": ""}, site=tmp_path)
    for name in ("first", "unbuilt"):
        (tmp_path / "guides" / name).mkdir()
        (tmp_path / "guides" / name / "notes.md").write_text("# x")
    assert list(write.guide_sources(tmp_path)) == ["first", "unbuilt"]
    assert mkdocs.navigation({"llama": "Llama"}, tmp_path) == [
        {"Families": ["index.md", {"Llama": "families/llama/index.md"}]},
        {"Guides": ["guides/first.md", "guides/layouts.md"]},
    ]
    write.remove_guide("first", site=tmp_path)
    assert mkdocs.navigation({}, tmp_path)[1] == {"Guides": ["guides/layouts.md"]}
