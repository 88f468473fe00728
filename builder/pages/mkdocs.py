"""Run mkdocs over the pages."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from builder.pages.write import SITE, BuildError, guide_sources

CONFIG = Path("mkdocs.yml")

#: Marks a folder that was built here; mkdocs ignores names that begin with a dot.
_MARK = ".bestiary-site"


def build_site(
    out: Path | str,
    *,
    families: Mapping[str, str] | None = None,
    config: Path = CONFIG,
    site: Path = SITE,
) -> Path:
    """Run mkdocs over ``site`` into ``out`` and return it.

    ``families``: titles by model type, for the navigation, in order; without it mkdocs lists what
    it finds. Raises BuildError with what mkdocs reported.
    """
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort, MkDocsException

    out = Path(out).resolve()
    prepare_output(out)
    errors = _ErrorMessages()
    logger = logging.getLogger("mkdocs")
    logger.addHandler(errors)
    try:
        extra: dict[str, Any] = {"nav": navigation(families, site)} if families else {}
        loaded = load_config(str(config), docs_dir=str(site.resolve()), site_dir=str(out), **extra)
        loaded.plugins.on_startup(command="build", dirty=False)
        build(loaded)
        loaded.plugins.on_shutdown()
    except (MkDocsException, Abort, OSError) as error:
        reason = "; ".join(errors.messages) or str(error) or type(error).__name__
        raise BuildError(f"mkdocs did not build the site: {reason}") from error
    finally:
        logger.removeHandler(errors)
    return out


def navigation(families: Mapping[str, str], site: Path = SITE) -> list[dict[str, Any]]:
    """Return the pages in reading order: index, families by title, guides, coverage, how the
    parts fit.
    """
    guides = [name for name in guide_sources(site) if (site / "guides" / f"{name}.md").exists()]
    single = {
        "Coverage": "coverage.md",
        "How the parts fit": "how-the-parts-fit.md",
        "Decisions": "decisions.md",
    }
    return [
        {
            "Families": [
                "index.md",
                *({title: f"families/{name}/index.md"} for name, title in families.items()),
            ]
        },
        {"Guides": [*(f"guides/{name}.md" for name in guides), "guides/layouts.md"]},
        *({title: name} for title, name in single.items() if (site / name).exists()),
    ]


def prepare_output(folder: Path) -> None:
    """Create and mark the folder of the built site, before mkdocs empties it.

    Raises BuildError for a folder that cannot be written, and for one that holds anything but an
    earlier build, which would be lost.
    """
    mark = folder / _MARK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not mark.exists() and any(folder.iterdir()):
            raise BuildError(
                f"The page folder {folder} holds something other than a built site, "
                "which would be deleted; name another one."
            )
        mark.write_text("")
    except OSError as error:
        reason = error.strerror or error
        raise BuildError(f"The page folder {folder} cannot be written: {reason}.") from error


class _ErrorMessages(logging.Handler):
    """Keeps the error messages of mkdocs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
