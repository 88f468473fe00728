"""Building the site: families side by side, then the pages that lean on all of them, then mkdocs."""

from __future__ import annotations

import json
import multiprocessing
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tqdm import tqdm

from builder import collect, write
from builder.snippets import SnippetError


def build(asked: list[str], out: Path, jobs: int, site: Path = write.SITE) -> list[str]:
    """Build the pages of ``asked`` families (all when empty) and the site; return what failed, in words.

    A family that fails leaves the others built and has no page. Raises UnknownFamily,
    and BuildError when pages cannot be written at all.
    """
    wanted = collect.families(asked)
    jobs = min(jobs, len(wanted))
    if not write.CONFIG.is_file() or not site.is_dir():
        raise write.BuildError(f"There is no {write.CONFIG} with a folder {site} here: run the builder from the root of the repository.")
    write._writable(out)
    failed: list[str] = []
    with tqdm(total=len(wanted) + 2, unit="step", desc="pages", file=sys.stderr) as bar:
        for family, outcome in _collected(wanted, jobs, bar):
            try:
                if isinstance(outcome, BaseException):
                    raise outcome
                collect.write_facts(family, outcome.records, site / "families")
                write.write_family(outcome.records, outcome.notes_html, outcome.meta, site=site)
            except write.BuildError:
                raise
            except Exception as error:  # whatever it is, the other families are still built
                failed.append(f"{family}: {_words(error)}")
                write.remove_family(family, site=site)
            bar.update()
        bar.set_postfix_str("guides and index")
        failed += _shared(site)
        bar.update()
        bar.set_postfix_str("mkdocs")
        titles = _titles(site)
        write.build_site(out, families=titles, site=site)
        bar.update()
        bar.set_postfix_str("")
    return failed


def _collected(families: list[str], jobs: int, bar: Any):
    """(family, what was collected or the error), in the order they finish."""
    if jobs <= 1:
        for family in families:
            bar.set_postfix_str(family)
            try:
                yield family, collect.collect(family, bar.set_postfix_str)
            except Exception as error:
                yield family, error
        return
    # Fresh processes: torch's threads do not survive a fork.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(collect.collect, family): family for family in families}
        for future in as_completed(running):
            family = running[future]
            bar.set_postfix_str(family)
            yield family, future.exception() or future.result()


def _words(error: BaseException) -> str:
    """What failed, in words; an error nobody wrote a sentence for also shows where it came from."""
    if isinstance(error, (ValueError, SnippetError)):
        return str(error)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


def _shared(site: Path) -> list[str]:
    """The pages that belong to no family; returns what failed."""
    failed = []
    write.write_shared(site=site)
    for name, path in write.guide_sources(site).items():
        try:
            write.write_guide(name, *collect.guide(path), site=site)
        except Exception as error:  # a guide that does not hold has no page
            failed.append(f"guide {name}: {_words(error)}")
            write.remove_guide(name, site=site)
    write.write_index(list(_records(site).values()), _metas(site), site=site)
    write.write_coverage(_titles(site), site=site)
    return failed


def _records(site: Path) -> dict[str, list[dict[str, Any]]]:
    """The records of every family that has a page, by family."""
    found = {}
    for path in sorted((site / "families").glob("*/facts.json")):
        if (path.parent / "index.md").exists():
            found[path.parent.name] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _metas(site: Path) -> dict[str, dict[str, str]]:
    from builder.snippets import read_notes

    return {path.parent.name: read_notes(path).meta for path in (site / "families").glob("*/notes.md")}


def _titles(site: Path) -> dict[str, str]:
    metas = _metas(site)
    return {name: metas.get(name, {}).get("title", records[0]["title"]) for name, records in _records(site).items()}
