"""The coverage page: every decoder of transformers and the outcome of the contract on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from builder.pages.environment import environment
from builder.records.coverage import VERDICTS, CoverageData, Outcome
from builder.records.coverage_text import count_verdicts, details, percent, resolved


class Row(TypedDict):
    """A model type's row. page: the address of its page, "" where there is none. types: the
    share of resolved axes.
    """

    family: str
    class_name: str
    verdict: str
    served: list[str]
    hosts: set[str]
    details: list[str]
    page: str
    types: str


def coverage_page(data: CoverageData, pages: Mapping[str, str]) -> str:
    """Return the page as Markdown with HTML blocks.

    ``data``: of a full run. ``pages``: titles by model type, of the families that have a page.
    """
    families = data["families"]
    rows = [_row(family, outcome, family in pages) for family, outcome in families.items()]
    hosts = sorted({host for row in rows for host in row["hosts"]})
    return (
        environment()
        .get_template("coverage.md.jinja")
        .render(
            rows=rows,
            counts=count_verdicts(families.values()),
            verdicts=VERDICTS,
            hosts=[(host, sum(host in row["hosts"] for row in rows)) for host in hosts],
            resolved=resolved(families),
            versions=data["versions"],
            names=sorted({name.rpartition(".")[2] for row in rows for name in row["served"]}),
        )
    )


def _row(family: str, outcome: Outcome, has_page: bool) -> Row:
    served = outcome.get("served", [])
    return {
        "family": family,
        "class_name": outcome.get("class", ""),
        "verdict": outcome["verdict"],
        "served": served,
        "hosts": {name.rpartition(".")[0] for name in served} - {"model", "layers"},
        "details": details(outcome),
        "page": f"families/{family}/index.html" if has_page else "",
        "types": percent(outcome),
    }
