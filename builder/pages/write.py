"""Write pages to disk.

Generated files are written beside the authored ones in the ``site`` folder and are never committed:
``families/<model type>/index.md`` (the whole folder where it has no notes), ``guides/<name>.md``
(from ``guides/<name>/notes.md``), ``guides/layouts.md``, ``index.md``, ``coverage.md`` (from
``coverage.json``), and copies of the assets that site and app share.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from builder.notes.html import Section
from builder.notes.read import read_notes
from builder.pages import render
from builder.pages.checkpoints import Record
from builder.pages.coverage import coverage_page
from builder.records import coverage, variants
from explorer.widgets import palette
from explorer.widgets.diagram import ASSETS

SITE = Path("site")

#: The shared assets that pages need.
SHARED = ("drawing-file.js", "diagram-card.js", "block-diagram.js", "block-diagram.css")

#: The theme's selectors of its two colour schemes.
SCHEMES = {"light": ":root, [data-md-color-scheme=default]", "dark": "[data-md-color-scheme=slate]"}


class BuildError(Exception):
    """The site cannot be written or built; the message says why."""


def write_family(
    records: Sequence[Record],
    notes: Sequence[Section] = (),
    meta: Mapping[str, str] | None = None,
    *,
    site: Path = SITE,
) -> Path:
    """Write a family's page and return its path.

    ``records``: one per checkpoint, the default first. ``notes`` and ``meta`` (``title``,
    ``summary``): from the family's executed notes. Raises BuildError where the folder cannot be
    written.
    """
    folder = site / "families" / records[0]["family"]
    facts = "facts.json" if (folder / "facts.json").exists() else None
    meta = meta or {}
    page = render.family_page(
        records, notes, title=meta.get("title"), summary=meta.get("summary"), facts_file=facts
    )
    written = _write(folder / "index.md", page)
    _update_gitignore(folder)
    return written


def _update_gitignore(folder: Path) -> None:
    """Keep a family's folder out of the repository while everything in it is generated."""
    ignored = folder / ".gitignore"
    if (folder / "notes.md").exists():
        ignored.unlink(missing_ok=True)
    else:
        _write(ignored, "# Generated; deleted once there are notes here.\n*\n")


def remove_family(family: str, *, site: Path = SITE) -> None:
    """Delete a family's page, so that a failed build leaves no old one; where it has no notes,
    the folder too.
    """
    folder = site / "families" / family
    (folder / "index.md").unlink(missing_ok=True)
    if not (folder / "notes.md").exists():
        for name in ("facts.json", ".gitignore"):
            (folder / name).unlink(missing_ok=True)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def remove_others(families: Collection[str], *, site: Path = SITE) -> None:
    """Delete every family's page but those of ``families``."""
    for page in (site / "families").glob("*/index.md"):
        if page.parent.name not in families:
            remove_family(page.parent.name, site=site)


def write_index(
    families: Sequence[Sequence[Record]],
    notes: Mapping[str, Mapping[str, str]] | None = None,
    *,
    site: Path = SITE,
) -> Path:
    """Write the index of ``families`` (each its records, default first); ``notes``: their front
    matter by family.
    """
    return _write(site / "index.md", render.index_page(families, notes))


def write_guide(
    name: str, sections: Sequence[Section], meta: Mapping[str, str], *, site: Path = SITE
) -> Path:
    """Write the page of an executed guide, ``guides/<name>.md``, from its sections and front
    matter.
    """
    page = render.guide_page(meta.get("title", name), meta.get("summary", ""), sections)
    return _write(site / "guides" / f"{name}.md", page)


def remove_guide(name: str, *, site: Path = SITE) -> None:
    """Delete a guide's page, since its code fails."""
    (site / "guides" / f"{name}.md").unlink(missing_ok=True)


def guide_sources(site: Path = SITE) -> dict[str, Path]:
    """Return the authored guides by name, in the order of ``place`` in their front matter."""
    found = {path.parent.name: path for path in sorted((site / "guides").glob("*/notes.md"))}

    def place(name: str) -> int:
        return int(read_notes(found[name]).meta.get("place", len(found)))

    return {name: found[name] for name in sorted(found, key=place)}


def write_shared(*, site: Path = SITE) -> list[Path]:
    """Write what every page needs: the layouts page, the colours, the diagram's script and
    style.
    """
    return [
        _write(site / "guides" / "layouts.md", render.layouts_page()),
        _write(site / "assets" / "palette.css", palette.css(SCHEMES)),
        *(
            _write(site / "assets" / name, (ASSETS / name).read_text(encoding="utf-8"))
            for name in SHARED
        ),
    ]


def write_coverage(pages: Mapping[str, str], *, site: Path = SITE) -> Path | None:
    """Write the coverage page from the data of the last full run, or delete it where there is none.

    ``pages``: titles of the families that have a page.
    """
    data = coverage.read(site / coverage.DATA.name)
    if data is None:
        (site / "coverage.md").unlink(missing_ok=True)
        return None
    tried = variants.read(site / variants.DATA.name)
    return _write(site / "coverage.md", coverage_page(data, pages, tried))


def clear(site: Path = SITE) -> None:
    """Delete everything that this module generated in ``site``."""
    generated = [
        site / "index.md",
        site / "coverage.md",
        site / "guides" / "layouts.md",
        site / "assets" / "palette.css",
        *(site / "assets" / name for name in SHARED),
        *(site / "guides" / f"{name}.md" for name in guide_sources(site)),
    ]
    for path in generated:
        path.unlink(missing_ok=True)
    remove_others((), site=site)


def _write(path: Path, text: str) -> Path:
    """Write a file; unchanged text keeps its date, so that a rebuild touches only what changed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BuildError(f"{path} cannot be written: {error.strerror or error}") from error
    return path
