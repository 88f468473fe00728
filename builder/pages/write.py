"""Pages on disk, and mkdocs over them.

What is generated lies beside what is authored in the ``site`` folder and is never
committed: ``families/<model type>/index.md`` (the whole folder where there are no notes in it),
``guides/<name>.md`` (from ``guides/<name>/notes.md``), ``guides/layouts.md``,
``index.md``, ``coverage.md`` (from ``coverage.json``), and copies of shared assets.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from builder.notes.run import read_notes
from builder.pages import render
from builder.records import coverage
from explorer.widgets import palette
from explorer.widgets.diagram import ASSETS

Record = Mapping[str, Any]

SITE = Path("site")
CONFIG = Path("mkdocs.yml")

#: What tells a folder that was built here; mkdocs leaves names with a dot alone.
MARK = ".bestiary-site"

#: What the pages take from the assets that site and app share.
SHARED = ("drawing-file.js", "block-diagram.js", "block-diagram.css")

#: What the theme calls the two schemes.
SCHEMES = {"light": ":root, [data-md-color-scheme=default]", "dark": "[data-md-color-scheme=slate]"}


class BuildError(Exception):
    """The site cannot be written or built; the message says what stands in the way."""


def write_family(
    records: Sequence[Record],
    notes_html: str | None = None,
    meta: Mapping[str, str] | None = None,
    *,
    site: Path = SITE,
) -> Path:
    """Write a family's page and return its path.

    ``records``: one per checkpoint, default first. ``notes_html`` and ``meta`` (``title``,
    ``summary``): from the family's executed notes. Raises BuildError where the folder cannot be written.
    """
    folder = site / "families" / records[0]["family"]
    facts = "facts.json" if (folder / "facts.json").exists() else None
    meta = meta or {}
    page = render.family_page(
        records, notes_html, title=meta.get("title"), summary=meta.get("summary"), facts_file=facts
    )
    written = _write(folder / "index.md", page)
    _mark(folder)
    return written


def _mark(folder: Path) -> None:
    """Keep a family's folder out of the repository while everything in it was generated."""
    ignored = folder / ".gitignore"
    if (folder / "notes.md").exists():
        ignored.unlink(missing_ok=True)
    else:
        _write(ignored, "# Generated; gone once there are notes here.\n*\n")


def remove_family(family: str, *, site: Path = SITE) -> None:
    """Take a family's page away, so that a failed build leaves no stale one; where it has no notes, the folder too."""
    folder = site / "families" / family
    (folder / "index.md").unlink(missing_ok=True)
    if not (folder / "notes.md").exists():
        for name in ("facts.json", ".gitignore"):
            (folder / name).unlink(missing_ok=True)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def remove_others(families: Collection[str], *, site: Path = SITE) -> None:
    """Take away every family's page but those of ``families``."""
    for page in (site / "families").glob("*/index.md"):
        if page.parent.name not in families:
            remove_family(page.parent.name, site=site)


def write_index(
    families: Sequence[Sequence[Record]],
    notes: Mapping[str, Mapping[str, str]] | None = None,
    *,
    site: Path = SITE,
) -> Path:
    """Write the index of ``families`` (each its records, default first); ``notes``: their front matter by family."""
    return _write(site / "index.md", render.index_page(families, notes))


def write_guide(name: str, html: str, meta: Mapping[str, str], *, site: Path = SITE) -> Path:
    """Write the page of an executed guide, ``guides/<name>.md``, from its HTML and front matter."""
    page = render.guide_page(meta.get("title", name), meta.get("summary", ""), html)
    return _write(site / "guides" / f"{name}.md", page)


def remove_guide(name: str, *, site: Path = SITE) -> None:
    """Take a guide's page away: its code no longer holds."""
    (site / "guides" / f"{name}.md").unlink(missing_ok=True)


def guide_sources(site: Path = SITE) -> dict[str, Path]:
    """The authored guides by name, ``guides/<name>/notes.md``, in the order of the ``place`` in their front matter."""
    found = {path.parent.name: path for path in sorted((site / "guides").glob("*/notes.md"))}
    return dict(
        sorted(
            found.items(), key=lambda item: int(read_notes(item[1]).meta.get("place", len(found)))
        )
    )


def write_shared(*, site: Path = SITE) -> list[Path]:
    """Write what every page leans on: the layouts page, the colours, the diagram's script and style."""
    written = [
        _write(site / "guides" / "layouts.md", render.layouts_page()),
        _write(site / "assets" / "palette.css", palette.css(SCHEMES)),
    ]
    return written + [
        _write(site / "assets" / name, (ASSETS / name).read_text(encoding="utf-8"))
        for name in SHARED
    ]


def write_coverage(pages: Mapping[str, str], *, site: Path = SITE) -> Path | None:
    """Write the coverage page from the data of the last full run; ``pages``: titles of the families that have one.

    Without data there is no page.
    """
    kept = coverage.read(site / coverage.DATA.name)
    if kept is None:
        (site / "coverage.md").unlink(missing_ok=True)
        return None
    return _write(site / "coverage.md", coverage.page(kept, pages))


def build_site(
    out: Path | str,
    *,
    families: Mapping[str, str] | None = None,
    config: Path = CONFIG,
    site: Path = SITE,
) -> Path:
    """Run mkdocs over ``site`` into ``out`` and return it.

    ``families``: titles by model type, for the navigation, in order; without it mkdocs
    lists what it finds. Raises BuildError with what mkdocs said.
    """
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort, MkDocsException

    out = Path(out).resolve()
    _writable(out)
    said = _Said()
    logger = logging.getLogger("mkdocs")
    logger.addHandler(said)
    try:
        extra = {"nav": navigation(families, site)} if families else {}
        loaded = load_config(str(config), docs_dir=str(site.resolve()), site_dir=str(out), **extra)
        loaded.plugins.on_startup(command="build", dirty=False)
        build(loaded)
        loaded.plugins.on_shutdown()
    except (MkDocsException, Abort, OSError) as error:
        reason = "; ".join(said.errors) or str(error) or type(error).__name__
        raise BuildError(f"mkdocs did not build the site: {reason}") from error
    finally:
        logger.removeHandler(said)
    return out


def navigation(families: Mapping[str, str], site: Path = SITE) -> list[dict[str, Any]]:
    """The pages in reading order: index, families by title, guides, how the parts fit."""
    pages: list[dict[str, Any]] = [
        {
            "Families": [
                "index.md",
                *({title: f"families/{name}/index.md"} for name, title in families.items()),
            ]
        }
    ]
    guides = [
        f"guides/{name}.md"
        for name in guide_sources(site)
        if (site / "guides" / f"{name}.md").exists()
    ]
    pages.append({"Guides": [*guides, "guides/layouts.md"]})
    if (site / "coverage.md").exists():
        pages.append({"Coverage": "coverage.md"})
    if (site / "how-the-parts-fit.md").exists():
        pages.append({"How the parts fit": "how-the-parts-fit.md"})
    return pages


class _Said(logging.Handler):
    """Keeps what mkdocs complains about, for one clear sentence."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.errors.append(record.getMessage())


def _write(path: Path, text: str) -> Path:
    """Write a page, telling apart what is wrong with the folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The same text again keeps its date, so that a rebuild touches what changed.
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BuildError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def _writable(folder: Path) -> None:
    """Find out before mkdocs does, which would stop half-way through, and which empties the folder first.

    Raises BuildError for a folder that cannot be written, and for one that holds
    anything but an earlier build: what is in it would be lost.
    """
    mark = folder / MARK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not mark.exists() and any(folder.iterdir()):
            raise BuildError(
                f"The page folder {folder} holds something other than a built site, which would be deleted; name another one."
            )
        mark.write_text("")
    except OSError as error:
        raise BuildError(
            f"The page folder {folder} cannot be written: {error.strerror or error}."
        ) from error


def clear(site: Path = SITE) -> None:
    """Remove everything this module generated in ``site``."""
    generated = [
        site / "index.md",
        site / "coverage.md",
        site / "guides" / "layouts.md",
        site / "assets" / "palette.css",
    ]
    generated += [site / "assets" / name for name in SHARED]
    generated += [site / "guides" / f"{name}.md" for name in guide_sources(site)]
    for path in generated:
        path.unlink(missing_ok=True)
    remove_others((), site=site)
