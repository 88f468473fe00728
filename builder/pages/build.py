"""Building the site: families side by side, then the pages that lean on all of them, then mkdocs."""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from builder.notes.run import SnippetError
from builder.pages import write
from builder.records import collect

#: Families that one process works on, more or less, before another takes its place: what the libraries keep of each adds up.
_IN_A_PROCESS = 48


@dataclass(frozen=True)
class Built:
    """What became of a build: the families with a page, those of which something had to be made anew, and what failed, in words.

    ``left_out``: families that were tried and are not followed; ``seconds``: how long its parts took, by name.
    """

    families: list[str]
    anew: dict[str, tuple[str, ...]]
    failed: list[str]
    left_out: list[str]
    seconds: dict[str, float] = field(default_factory=dict)


def build(
    asked: list[str],
    out: Path,
    jobs: int,
    site: Path = write.SITE,
    *,
    everything: bool = False,
    fresh: bool = False,
) -> Built:
    """Build the pages of ``asked`` families (those with notes when empty) and the site.

    everything: every family that is proven, with notes or without; where that is not known, every decoder, and those whose
    forward is not followed are left out. fresh: use nothing kept from an earlier build.
    Without names, pages of other families are taken away. A family that fails leaves the others built and has no page.
    Raises UnknownFamily, and BuildError when pages cannot be written at all.
    """
    from explorer.specimens import small

    known = collect.proven(site) if everything else None
    wanted = collect.families(asked) if not everything else list(known or small.types())
    if not write.CONFIG.is_file() or not site.is_dir():
        raise write.BuildError(
            f"There is no {write.CONFIG} with a folder {site} here: run the builder from the root of the repository."
        )
    write._writable(out)
    if not asked:
        write.remove_others(wanted, site=site)
    built = Built([], {}, [], [])
    clock = _Clock(built.seconds)
    with tqdm(total=len(wanted) + 2, unit="step", desc="pages", file=sys.stderr) as bar:
        for family, outcome in _collected(wanted, jobs, fresh, bar):
            try:
                if isinstance(outcome, BaseException):
                    raise outcome
                collect.write_facts(family, outcome.records, site / "families")
                write.write_family(outcome.records, outcome.notes_html, outcome.meta, site=site)
                built.families.append(family)
                built.anew.update({family: outcome.made} if outcome.made else {})
            except write.BuildError:
                raise
            except Exception as error:  # whatever it is, the other families are still built
                unknown = everything and known is None and not collect.has_notes(family)
                (built.left_out if unknown else built.failed).append(
                    f"{family}: {_words(error, quiet=unknown)}"
                )
                write.remove_family(family, site=site)
            bar.update()
        clock.passed("families")
        bar.set_postfix_str("guides and index")
        titles, failed = _shared(site, fresh)
        built.failed.extend(failed)
        bar.update()
        clock.passed("guides and index")
        bar.set_postfix_str("mkdocs")
        # The navigation names those with notes; the index and the coverage page lead to all.
        write.build_site(
            out,
            families={
                family: title for family, title in titles.items() if collect.has_notes(family)
            },
            site=site,
        )
        bar.update()
        clock.passed("mkdocs")
        bar.set_postfix_str("")
    return built


class _Clock:
    """Notes how long each part took, from one call to the next."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.since = seconds, time.perf_counter()

    def passed(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part], self.since = now - self.since, now


def _collected(families: list[str], jobs: int, fresh: bool, bar: Any) -> Iterator[tuple[str, Any]]:
    """(family, what was collected or the error): what is kept from before first, then in the order they finish."""
    changed = []
    for family in families:
        bar.set_postfix_str(family)
        found = None if fresh else collect.cached_or_none(family)
        if found is not None:
            yield family, found
        else:
            changed.append(family)
    jobs = min(jobs, len(changed))
    if jobs <= 1:
        _quiet()
        for family in changed:
            bar.set_postfix_str(family)
            try:
                yield family, collect.collect(family, fresh, bar.set_postfix_str)
            except Exception as error:
                yield family, error
        return
    # Fresh processes: torch's threads do not survive a fork. And new ones after a while.
    for start in range(0, len(changed), jobs * _IN_A_PROCESS):
        yield from _side_by_side(changed[start : start + jobs * _IN_A_PROCESS], jobs, fresh, bar)


def _side_by_side(
    families: list[str], jobs: int, fresh: bool, bar: Any
) -> Iterator[tuple[str, Any]]:
    with ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_quiet
    ) as pool:
        running = {pool.submit(collect.collect, family, fresh): family for family in families}
        for future in as_completed(running):
            family = running.pop(future)  # and with it, what was collected
            bar.set_postfix_str(family)
            yield family, future.exception() or future.result()


def _quiet() -> None:
    """Leave the terminal to the build's own progress bar."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _words(error: BaseException, quiet: bool = False) -> str:
    """What failed, in words; an error nobody wrote a sentence for also shows where it came from, unless ``quiet``."""
    if isinstance(error, (ValueError, SnippetError)):
        return str(error)
    if not quiet:
        traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


def _shared(site: Path, fresh: bool = False) -> tuple[dict[str, str], list[str]]:
    """The pages that belong to no family; returns the titles of the families that have a page, and what failed."""
    failed = []
    write.write_shared(site=site)
    for name, path in write.guide_sources(site).items():
        try:
            write.write_guide(name, *collect.guide(path, fresh), site=site)
        except Exception as error:  # a guide that does not hold has no page
            failed.append(f"guide {name}: {_words(error)}")
            write.remove_guide(name, site=site)
    _remove_outdated(site)
    records, metas = _records(site), _metas(site)
    titles = {
        family: metas.get(family, {}).get("title", found[0]["title"])
        for family, found in records.items()
    }
    write.write_index(list(records.values()), metas, site=site)
    write.write_coverage(titles, site=site)
    return titles, failed


def _records(site: Path) -> dict[str, list[dict[str, Any]]]:
    """The records of every family that has a page, by family."""
    found = {}
    for path in sorted((site / "families").glob("*/facts.json")):
        if (path.parent / "index.md").exists():
            found[path.parent.name] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _remove_outdated(site: Path) -> None:
    """Take away the pages whose records an earlier builder wrote in another form: the index and the search cannot read them."""
    from explorer.facts.record import SCHEMA

    for family, records in _records(site).items():
        if any(record["schema"] != SCHEMA for record in records):
            write.remove_family(family, site=site)


def _metas(site: Path) -> dict[str, dict[str, str]]:
    from builder.notes.run import read_notes

    return {
        path.parent.name: read_notes(path).meta for path in (site / "families").glob("*/notes.md")
    }
