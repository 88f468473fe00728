"""Records in, pages out: Markdown text of the family pages, the index and the layouts page.

A page is made from its records (and notes, which are executed elsewhere) and from
nothing else: what is not in the record does not stand on the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from builder.pages import costs, figures, index
from builder.pages import signature as typed
from builder.pages.measured import measured_figures
from builder.pages.printout import printout_html
from explorer import vocabulary
from explorer.widgets.diagram import element
from explorer.widgets.diagram.describe import attribute_of_host, attribute_of_path
from explorer.widgets.palette import role_of

Record = Mapping[str, Any]

_HEADING = re.compile(r'<h[23] id="([^"]+)">(.*?)</h[23]>', re.DOTALL)
_CODE = re.compile(r"<code[^>]*>(.*?)</code>", re.DOTALL)


@cache
def environment() -> Environment:
    """The templates, escaping everything that is not marked as HTML."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parents[1] / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        count=figures.count,
        thousands=figures.thousands,
        size=figures.size,
        ranges=figures.layer_ranges,
        printout=printout_html,
        attribute_of_path=attribute_of_path,
        shown=shown,
        front=front_matter,
        typed=typed.type_html,
        bound=typed.bound_html,
        whole_terms=costs.whole_terms,
    )
    made.globals.update(role_of=role_of, anchor=value_anchor)
    return made


def family_page(
    records: Sequence[Record],
    notes_html: str | None = None,
    *,
    title: str | None = None,
    summary: str | None = None,
    facts_file: str | None = None,
) -> str:
    """The page of a family as Markdown with HTML blocks.

    ``records``: one per checkpoint, the first is the default; all of one family.
    ``notes_html``: the executed notes (trusted HTML). ``title`` and ``summary`` stand in
    for the record's. ``facts_file``: relative address of the machine-readable record.
    Raises ValueError without records or with records of several families.
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
            notes=sections(notes_html or ""),
            diagram=Markup(element(records)),
            hosts=host_tables(records),
            varying=lambda part: varying(records, part),
            figures=figures.figures,
            host_sizes=host_sizes,
            checks=check_groups,
            measured=lambda record: measured_figures(
                record["provenance"]["specimen"].get("measured") or {}
            ),
            facts_file=facts_file,
            printed=lambda record: record["printout"],
            cost=costs,
            cost_rows=costs.rows(records, varying),
            **typed.context(records, varying),
        )
    )


def index_page(
    families: Sequence[Sequence[Record]], notes: Mapping[str, Mapping[str, str]] | None = None
) -> str:
    """The index: one card per family, with the filters by trait and value name.

    ``families``: the records of each family, default checkpoint first. ``notes``: front
    matter of each family's notes by family (``title``, ``summary``).
    """
    return environment().get_template("index.md.jinja").render(index.context(families, notes or {}))


def layouts_page() -> str:
    """The page that explains layouts, its tables made from the vocabulary."""
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


def guide_page(title: str, summary: str, html: str) -> str:
    """A guide whose code was executed; ``html`` is trusted, as the notes' is."""
    return (
        environment()
        .get_template("guide.md.jinja")
        .render(title=title, summary=summary, sections=sections(html))
    )


def sections(html: str) -> list[dict[str, Any]]:
    """HTML of notes cut at its headings: ``[{id, title, body}]``, the title as Markdown.

    The headings become Markdown ones, so that the page's list of sections has them; what
    stands before the first has the id "".
    """
    before, *rest = _HEADING.split(html)
    found = [{"id": "", "title": "", "body": Markup(before)}] if before.strip() else []
    for anchor, title, body in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        plain = Markup(_CODE.sub(r"`\1`", title)).striptags()
        found.append({"id": anchor, "title": plain, "body": Markup(body)})
    return found


def value_anchor(host: str, name: str) -> str:
    """The id of a value's row: ``value-mlp-router_logits``."""
    return f"value-{attribute_of_path(host)}-{name}"


def value_link(record: Record) -> Callable[[str], str | None]:
    """How notes link a value's name (``router_logits`` or ``mlp.router_logits``) to its row, None without one."""
    rows = [(attribute_of_path(row["host"]), row["name"]) for row in record["values"]]

    def link(name: str) -> str | None:
        host, _, bare = name.rpartition(".")
        found = next((row for row in rows if row[1] == bare and (not host or row[0] == host)), None)
        return f"#{value_anchor(*found)}" if found else None

    return link


def shown(value: Any) -> str:
    """A configuration value as text."""
    if isinstance(value, list | tuple):
        items = [shown(item) for item in value]
        text = ", ".join(items)
        return text if len(text) <= 90 else f"{', '.join(items[:8])}, … ({len(items)} entries)"
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(item)}" for key, item in value.items())
    return str(value)


def front_matter(text: str) -> Markup:
    """A string as a YAML scalar on one line, its HTML escaped: the theme puts it into its pages as it is."""
    escaped = escape(" ".join(text.split()), quote=False).replace("\\", "\\\\").replace('"', '\\"')
    return Markup(f'"{escaped}"')


def varying(
    records: Sequence[Record], part: Callable[[Record], Any]
) -> list[tuple[str, Any, bool]]:
    """A part of the page for every checkpoint, equal ones once: ``[(ids, content, first shown?)]``.

    ``ids`` are the checkpoints' ids, space-separated, or empty where all agree.
    """
    groups: dict[str, tuple[list[str], Any]] = {}
    for record in records:
        content = part(record)
        groups.setdefault(str(content), ([], content))[0].append(record["checkpoint"])
    if len(groups) == 1:
        return [("", next(iter(groups.values()))[1], True)]
    return [
        (" ".join(ids), content, records[0]["checkpoint"] in ids)
        for ids, content in groups.values()
    ]


def host_tables(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The values by host, in the vocabulary's order: ``[{path, key, meaning, of, on}]`` of each host any checkpoint has.

    ``of`` gives a checkpoint's rows, ``on`` its blocks that have the host.
    """
    there = {
        name for record in records for block in record["blocks"] for name in block["hosts"]
    } | {"model", "layers"}
    paths = dict.fromkeys(host.path for host in vocabulary.HOSTS.values())
    paths |= dict.fromkeys(row["host"] for record in records for row in record["values"])
    tables = []
    for path in paths:
        if any(row["host"] == path for record in records for row in record["values"]):
            # Kinds of one thing have one path: what is said is what is there.
            meaning = "; ".join(
                host.meaning
                for host in vocabulary.HOSTS.values()
                if host.path == path and host.name in there
            )
            tables.append(
                {
                    "path": path,
                    "key": attribute_of_path(path),
                    "meaning": meaning,
                    "of": lambda record, path=path: _table(record, path),
                    "on": lambda record, path=path: _on(record, path),
                }
            )
    return tables


def _table(record: Record, path: str) -> dict[str, Any]:
    """One host's rows in one checkpoint."""
    rows = [row for row in record["values"] if row["host"] == path]
    layers = _layers(record, path)
    return {
        "class": rows[0].get("class", "") if rows else "",
        "rows": [
            {
                **{
                    key: row.get(key)
                    for key in (
                        "name",
                        "layout",
                        "dims",
                        "meaning",
                        "read_at",
                        "condition",
                        "writable",
                        "optional",
                        "verified",
                    )
                },
                "some": figures.layer_ranges(row["layers"])
                if row["layers"] is not None and set(row["layers"]) != layers
                else "",
            }
            for row in rows
        ],
    }


def _on(record: Record, path: str) -> str:
    """The blocks of one checkpoint that have a host, in words."""
    layers, count = _layers(record, path), record["sizes"]["num_layers"]
    if not layers:
        return ""
    return (
        f"on all {count} blocks"
        if len(layers) == count
        else f"on {len(layers)} of {count} blocks: {figures.layer_ranges(sorted(layers))}"
    )


def _layers(record: Record, path: str) -> set[int]:
    return {
        layer for row in record["values"] if row["host"] == path for layer in row["layers"] or ()
    }


def host_sizes(record: Record) -> list[tuple[str, Mapping[str, Any]]]:
    """The sizes that hosts have of their own, by path, from the first block of each shape that has the host."""
    found: dict[str, Mapping[str, Any]] = {}
    for block in sorted(record["blocks"], key=lambda block: block["layers"][0]):
        for name, host in block["hosts"].items():
            if host.get("sizes"):
                # A part without a module goes by its standard name.
                found.setdefault(
                    name,
                    {
                        "path": f"layers[{block['layers'][0]}].{host['path'] or attribute_of_host(name)}",
                        **host["sizes"],
                    },
                )
    return [
        (sizes["path"], {key: size for key, size in sizes.items() if key != "path"})
        for sizes in found.values()
    ]


def check_groups(record: Record) -> list[dict[str, Any]]:
    """The contract's checks by law: ``[{name, about, checks, failed}]``, those with a failure first.

    ``about`` is what the law says, where its checks agree on it.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for check in record["contract"]["checks"]:
        groups.setdefault(check["name"], []).append(check)
    found = []
    for name, checks in groups.items():
        said = {check["about"] for check in checks}
        found.append(
            {
                "name": name,
                "about": said.pop() if len(said) == 1 else "",
                "checks": checks,
                "failed": sum(not check["passed"] for check in checks),
            }
        )
    return sorted(found, key=lambda group: -group["failed"])
