"""The site of three families as a fixture: real records, notes as written, everything else as a
build makes it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from builder.notes.html import sections
from builder.notes.read import read_notes
from builder.pages import mkdocs, write
from tests.support.facts_records import records

ROOT = Path(__file__).resolve().parents[2]


FAMILIES = ("llama", "qwen3_moe", "qwen3_next")


PAGES = (
    "index.html",
    "how-the-parts-fit.html",
    "guides/layouts.html",
    "guides/read-your-first-value.html",
    *(f"families/{family}/index.html" for family in FAMILIES),
)


HYBRID = "families/qwen3_next/index.html"


MIXTURE = "families/qwen3_moe/index.html"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of three families, built once: real records, notes as written, everything else as
    a build makes it.
    """
    source, out = tmp_path_factory.mktemp("site") / "site", tmp_path_factory.mktemp("public")
    shutil.copytree(ROOT / "site", source, ignore=shutil.ignore_patterns("index.md"))
    made, meta = [], {}
    for family in FAMILIES:
        notes = read_notes(source / "families" / family / "notes.md")
        meta[family] = notes.meta
        made.append(records(family))
        write.write_family(made[-1], sections(notes.blocks), notes.meta, site=source)
    write.write_index(made, meta, site=source)
    write.write_shared(site=source)
    write.write_coverage({family: meta[family]["title"] for family in FAMILIES}, site=source)
    for name, path in write.guide_sources(source).items():
        notes = read_notes(path)
        write.write_guide(name, sections(notes.blocks), notes.meta, site=source)
    return mkdocs.build_site(
        out,
        families={family: meta[family]["title"] for family in FAMILIES},
        config=ROOT / "mkdocs.yml",
        site=source,
    )


@pytest.fixture(scope="module")
def address(site: Path, serve) -> str:
    return serve(site)


def stage(page) -> tuple[str, str]:
    """Block and shape that are drawn."""
    at = page.locator(".bd-stage")
    return at.get_attribute("data-layer"), at.get_attribute("data-shape")
