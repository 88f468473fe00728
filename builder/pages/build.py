"""Build the site: families in parallel, then the pages that need all of them, then mkdocs."""

from __future__ import annotations

import json
import pickle
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from builder.notes.html import sections
from builder.notes.read import SnippetError, read_notes
from builder.pages import mkdocs, write
from builder.pages.checkpoints import Record
from builder.pages.render import value_link
from builder.records import collect
from builder.records.facts_file import write_facts
from builder.records.process_limits import Limits, NoResult, run_each

#: What collecting one family may use; most take seconds.
_LIMITS = Limits(seconds=1800.0, memory=8 << 30)

#: What every process that collects a family needs, imported once for all of them.
_PRELOAD = ("explorer", "explorer.contract", "explorer.facts.record", "builder.records.collect")


class ProcessEnded(Exception):
    """The process that collected a family gave no result: it died, or used more than its limits."""


#: What was collected of a family, or the error that it failed with.
_Outcome = collect.Collected | BaseException


@dataclass(frozen=True)
class Built:
    """What came out of a build.

    families: those with a page. made: of each, the kinds of results that were not in the cache.
    failed, left_out: a sentence for each family or guide that failed, and for each that was only
    tried and cannot be traced. seconds: how long each step took.
    """

    families: list[str] = field(default_factory=list)
    made: dict[str, tuple[str, ...]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


def build(
    names: list[str],
    out: Path,
    jobs: int,
    site: Path = write.SITE,
    *,
    everything: bool = False,
    fresh: bool = False,
) -> Built:
    """Build the pages of the named families (those with notes where none is named) and the site.

    everything: every proven family, with notes or without; where that is not known, every decoder,
    and those that cannot be traced are left out. fresh: use no results of earlier builds. Without
    names, pages of other families are deleted. A family that fails has no page; the others are
    still built. Raises UnknownFamily, and BuildError when pages cannot be written at all.
    """
    from explorer.specimens import small

    known = collect.proven_families(site) if everything else None
    wanted = list(known or small.types()) if everything else collect.requested_families(names)
    if not mkdocs.CONFIG.is_file() or not site.is_dir():
        raise write.BuildError(
            f"There is no {mkdocs.CONFIG} with a folder {site} here: "
            "run the builder from the root of the repository."
        )
    mkdocs.prepare_output(out)
    if not names:
        write.remove_others(wanted, site=site)
    built = Built()
    started = time.perf_counter()

    def step_done(name: str) -> None:
        built.seconds[name] = time.perf_counter() - started - sum(built.seconds.values())

    with tqdm(total=len(wanted) + 2, unit="step", desc="pages", file=sys.stderr) as bar:
        for family, outcome in _collected(wanted, jobs, fresh, bar):
            only_tried = everything and known is None and not collect.has_notes(family)
            _write_family(family, outcome, built, site, only_tried)
            bar.update()
        step_done("families")
        bar.set_postfix_str("guides and index")
        titles, failed = _write_shared_pages(site, fresh)
        built.failed.extend(failed)
        bar.update()
        step_done("guides and index")
        bar.set_postfix_str("mkdocs")
        # The navigation lists the families with notes; the index and the coverage page link all of
        # them.
        listed = {name: title for name, title in titles.items() if collect.has_notes(name)}
        mkdocs.build_site(out, families=listed, site=site)
        bar.update()
        step_done("mkdocs")
        bar.set_postfix_str("")
    return built


def _write_family(
    family: str, outcome: _Outcome, built: Built, site: Path, only_tried: bool
) -> None:
    """Write a family's records and page, or note why it has none."""
    try:
        if isinstance(outcome, BaseException):
            raise outcome
        write_facts(outcome.records, site / "families" / family)
        notes = sections(outcome.blocks or (), value_link(outcome.records[0]))
        write.write_family(outcome.records, notes, outcome.meta, site=site)
        built.families.append(family)
        if outcome.made:
            built.made[family] = outcome.made
    except write.BuildError:
        raise
    except Exception as error:  # whatever it is, the other families are still built
        failures = built.left_out if only_tried else built.failed
        failures.append(f"{family}: {_error_text(error, quiet=only_tried)}")
        write.remove_family(family, site=site)


def _collected(
    families: list[str], jobs: int, fresh: bool, bar: Any
) -> Iterator[tuple[str, _Outcome]]:
    """Yield what was collected of each family, cached ones first, then in the order they finish."""
    changed = []
    for family in families:
        bar.set_postfix_str(family)
        cached = None if fresh else collect.collect_cached(family)
        if cached is not None:
            yield family, cached
        else:
            changed.append(family)
    jobs = min(jobs, len(changed))
    if jobs <= 1:
        _silence_transformers()
        for family in changed:
            bar.set_postfix_str(family)
            try:
                yield family, collect.collect(family, fresh, bar.set_postfix_str)
            except Exception as error:
                yield family, error
        return
    collect_one = partial(collected_or_error, fresh=fresh)
    for family, outcome in run_each(collect_one, changed, jobs, _LIMITS, _PRELOAD):
        bar.set_postfix_str(family)
        yield family, ProcessEnded(outcome.reason) if isinstance(outcome, NoResult) else outcome


def collected_or_error(family: str, fresh: bool = False) -> _Outcome:
    """Return what was collected of a family, or the error it failed with, to be sent to another
    process; where the error came from is a note on it.
    """
    try:
        return collect.collect(family, fresh)
    except Exception as error:
        error.add_note(traceback.format_exc())
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # some errors cannot be made again from their arguments
            return RuntimeError(f"{type(error).__name__}: {error}")
        return error


def _silence_transformers() -> None:
    """Leave the terminal to the build's own progress bar."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _error_text(error: BaseException, quiet: bool = False) -> str:
    """Return an error as text; one without a sentence of its own also prints its traceback,
    unless ``quiet``.
    """
    if isinstance(error, ValueError | SnippetError):
        return str(error)
    if isinstance(error, ProcessEnded):
        return f"its process gave no result: {error}"
    if not quiet:
        traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


def _write_shared_pages(site: Path, fresh: bool) -> tuple[dict[str, str], list[str]]:
    """Write the pages of no single family; return the titles of the families that have a page,
    and what failed.
    """
    failed = []
    write.write_shared(site=site)
    for name, path in write.guide_sources(site).items():
        try:
            blocks, meta = collect.execute_guide(path, fresh)
            write.write_guide(name, sections(blocks), meta, site=site)
        except Exception as error:  # a guide whose code fails has no page
            failed.append(f"guide {name}: {_error_text(error)}")
            write.remove_guide(name, site=site)
    _remove_outdated(site)
    records, metas = _records(site), _metas(site)
    titles: dict[str, str] = {
        family: metas.get(family, {}).get("title") or found[0]["title"]
        for family, found in records.items()
    }
    write.write_index(list(records.values()), metas, site=site)
    write.write_coverage(titles, site=site)
    return titles, failed


def _records(site: Path) -> dict[str, list[Record]]:
    """Return the records of every family that has a page, by family."""
    return {
        path.parent.name: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((site / "families").glob("*/facts.json"))
        if (path.parent / "index.md").exists()
    }


def _remove_outdated(site: Path) -> None:
    """Delete pages whose records have another schema: the index cannot read them."""
    from explorer.facts.record import SCHEMA

    for family, records in _records(site).items():
        if any(record["schema"] != SCHEMA for record in records):
            write.remove_family(family, site=site)


def _metas(site: Path) -> dict[str, dict[str, str]]:
    """Return the front matter of every family's notes, by family."""
    paths = (site / "families").glob("*/notes.md")
    return {path.parent.name: read_notes(path).meta for path in paths}
