"""Pages from records: the Markdown of the family pages, the index, the guides and the layouts page.

A page is made from its records and its executed notes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup

from builder.notes.html import Section, value_anchor
from builder.pages import costs, index, signature
from builder.pages.checkpoints import Record, by_checkpoint
from builder.pages.environment import environment
from builder.pages.measured import measured_figures
from builder.pages.values import check_groups, host_sections, host_sizes
from explorer import vocabulary
from explorer.widgets.diagram import element
from explorer.widgets.diagram.describe import attribute_of_path


def family_page(
    records: Sequence[Record],
    notes: Sequence[Section] = (),
    *,
    title: str | None = None,
    summary: str | None = None,
    facts_file: str | None = None,
) -> str:
    """Return the page of a family as Markdown with HTML blocks.

    ``records``: one per checkpoint, the default first; all of one family. ``notes``: the executed
    notes (trusted HTML). ``title`` and ``summary`` replace the record's. ``facts_file``: relative
    address of the records as data. Raises ValueError without records or with records of several
    families.
    """
    families = {record["family"] for record in records}
    if len(families) != 1:
        raise ValueError(f"A page needs the records of one family, not of {len(families)}.")
    first = records[0]
    return (
        environment()
        .get_template("family.md.jinja")
        .render(
            records=records,
            first=first,
            title=title or first["title"],
            summary=summary or first.get("summary") or "",
            notes=notes,
            diagram=Markup(element(records)),
            hosts=host_sections(records),
            host_sizes=host_sizes,
            printouts=by_checkpoint(records, lambda record: record["printout"]),
            costs=by_checkpoint(records, costs.numbers),
            formulas=costs.formula_rows(records),
            measured=by_checkpoint(records, _measured),
            checks=by_checkpoint(records, check_groups),
            left_out=by_checkpoint(
                records, lambda record: record["contract"].get("not_applicable", [])
            ),
            facts_file=facts_file,
            types=signature.context(records),
        )
    )


def _measured(record: Record) -> list:
    return measured_figures(record["provenance"]["specimen"].get("measured") or {})


def index_page(
    families: Sequence[Sequence[Record]], notes: Mapping[str, Mapping[str, str]] | None = None
) -> str:
    """Return the index: one card per family, with filters by trait and value name.

    ``families``: the records of each family, default checkpoint first. ``notes``: the front matter
    of each family's notes by family (``title``, ``summary``).
    """
    context = index.context(families, notes or {})
    return environment().get_template("index.md.jinja").render(context)


def layouts_page() -> str:
    """Return the page that explains layouts, its tables made from the vocabulary."""
    by_layout = {
        name: [value for value in vocabulary.VALUES if value.layout == name]
        for name in vocabulary.LAYOUTS
    }
    return (
        environment()
        .get_template("layouts.md.jinja")
        .render(
            layouts=vocabulary.LAYOUTS.values(),
            values=by_layout,
            hosts=vocabulary.HOSTS,
            call_axes=vocabulary.CALL_AXES,
        )
    )


def guide_page(title: str, summary: str, sections: Sequence[Section]) -> str:
    """Return the page of an executed guide; the sections' HTML is trusted."""
    template = environment().get_template("guide.md.jinja")
    return template.render(title=title, summary=summary, sections=sections)


def value_link(record: Record) -> Callable[[str], str | None]:
    """Return a function from a value's name, with or without its host, to the address of its row
    on the page.
    """
    rows = [(attribute_of_path(row["host"]), row["name"]) for row in record["values"]]

    def link(name: str) -> str | None:
        host, _, bare = name.rpartition(".")
        row = next((row for row in rows if row[1] == bare and (not host or row[0] == host)), None)
        return f"#{value_anchor(*row)}" if row else None

    return link
