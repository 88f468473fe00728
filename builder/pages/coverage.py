"""The coverage page: every decoder of transformers and the outcome of the contract on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from builder.pages.environment import environment
from builder.records import variants_text
from builder.records.coverage import VERDICTS, CoverageData, Outcome
from builder.records.coverage_text import count_verdicts, details, percent, resolved
from builder.records.variants import FamilyVariants, VariantsData


class VariantRow(TypedDict):
    """One variant of a model type: the field and its value, the outcome, what there is to say."""

    change: str
    verdict: str
    details: str


class Row(TypedDict):
    """A model type's row. page: the address of its page, "" where there is none. types: the
    share of resolved axes. tried: how many variants were tried and came out how, "" where none
    were.
    """

    family: str
    class_name: str
    verdict: str
    served: list[str]
    hosts: set[str]
    details: list[str]
    page: str
    types: str
    tried: str
    variants: list[VariantRow]


def coverage_page(
    data: CoverageData, pages: Mapping[str, str], variants: VariantsData | None = None
) -> str:
    """Return the page as Markdown with HTML blocks.

    ``data``: of a full run. ``pages``: titles by model type, of the families that have a page.
    ``variants``: of the families whose options were tried.
    """
    families = data["families"]
    tried = {} if variants is None else variants["families"]
    rows = [
        _row(family, outcome, family in pages, tried.get(family))
        for family, outcome in families.items()
    ]
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
            tried=variants_text.counts(tried.values()) if tried else "",
            families_tried=len(tried),
            versions=data["versions"],
            names=sorted({name.rpartition(".")[2] for row in rows for name in row["served"]}),
        )
    )


def _row(family: str, outcome: Outcome, has_page: bool, tried: FamilyVariants | None) -> Row:
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
        "tried": "" if tried is None else variants_text.summary(tried),
        "variants": [
            {
                "change": variants_text.change_text(one["change"]),
                "verdict": one["verdict"],
                "details": "; ".join(variants_text.details(one)),
            }
            for one in (tried["variants"] if tried is not None else ())
        ],
    }
