"""What a loaded model can serve, and why not the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from explorer import vocabulary
from explorer.discovery.anatomy import Anatomy, HostAnatomy
from explorer.vocabulary.availability import Unavailability, most_informative
from explorer.vocabulary.formatting import ranges

#: What a value needs of the way the model is loaded. A recurrent kernel's values need nothing:
#: they are read where it is called, whichever it is.
CONDITIONS = {
    "attention_scores": 'needs attn_implementation="eager", which is what load uses',
    "attention_probabilities": 'needs attn_implementation="eager", which is what load uses',
    "expert_outputs": 'needs experts_implementation="grouped_mm" (the default) or "batched_mm"',
}


@dataclass(frozen=True)
class Row:
    """One value of one host: where it is available, how it is read, and why not elsewhere.

    layers: the blocks that have it (empty on the model host); read_at: where in the forward;
    condition: what it needs of the way the model is loaded; reasons: why each other block does not
    have it, under None for the model host; available: whether any block, or the model, has it;
    shown: the value with the layout that it has there.
    """

    host: str
    value: vocabulary.Value
    layers: tuple[int, ...]
    read_at: str
    condition: str | None
    reasons: dict[int | None, Unavailability]
    available: bool
    shown: vocabulary.Value

    @property
    def name(self) -> str:
        return self.value.name

    @property
    def writable(self) -> bool:
        return self.value.written


class Support:
    """Rows in the vocabulary's order; printing it lists them."""

    def __init__(self, rows: list[Row], layer: int | None) -> None:
        self.rows, self.layer = rows, layer

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> Row:
        """Return a row by value name, or by ``"host.value"`` where several hosts have it.

        An available one is preferred.
        """
        values = vocabulary.lookup(name)
        rows = [row for row in self.rows if row.value in values]
        return next((row for row in rows if row.available), rows[0])

    def __repr__(self) -> str:
        lines: list[str] = []
        there = {row.host for row in self.rows if row.available}
        for row in self.rows:
            if row.host not in there and row.host not in ("model", "layers"):
                continue
            where = f"{vocabulary.HOSTS[row.host].path}.{row.name}"
            if row.available:
                scope = "" if row.host == "model" else f"  blocks {ranges(row.layers, dash='-')}"
                lines.append(f"  yes  {where:<52} {row.shown.typed}{scope}")
            else:
                lines.append(f"  no   {where:<52} {most_informative(row.reasons.values())}")
        for path in dict.fromkeys(
            vocabulary.HOSTS[row.host].path for row in self.rows if row.host not in there
        ):
            rows = [
                row
                for row in self.rows
                if vocabulary.HOSTS[row.host].path == path and row.host not in there
            ]
            if path not in ("model", "model.layers[i]"):
                kinds = ", ".join(dict.fromkeys(row.host for row in rows))
                reason = most_informative(r for row in rows for r in row.reasons.values())
                lines.append(f"  no   {path + '.*':<52} {kinds}: {reason}")
        return "\n".join(lines)


def support(anatomy: Anatomy, top: HostAnatomy, layer: int | None = None) -> Support:
    """Return what is available, on every block or on one."""
    layers = range(anatomy.backbone.num_layers) if layer is None else (layer,)
    rows: list[Row] = []
    for value in vocabulary.VALUES:
        if value.host == "model":
            there = value.name not in top.missing
            description = read_at(top, value) if there else ""
            reasons: dict[int | None, Unavailability] = (
                {} if there else {None: top.missing[value.name]}
            )
            rows.append(Row("model", value, (), description, None, reasons, there, value))
            continue
        having: list[int] = []
        reasons, description = {}, ""
        for index in layers:
            host = anatomy.block(index).hosts[value.host]
            if value.name in host.missing:
                reasons[index] = host.missing[value.name]
            else:
                having.append(index)
                description = description or read_at(host, value)
        rows.append(
            Row(
                value.host,
                value,
                tuple(having),
                description,
                CONDITIONS.get(value.name),
                reasons,
                bool(having),
                value.on(anatomy.block(having[0]).hosts[value.host].sizes if having else {}),
            )
        )
    return Support(rows, layer)


def read_at(host: HostAnatomy, value: vocabulary.Value) -> str:
    """Return where a value is read, in words."""
    if value.derived:
        return value.description
    description = [place.description for place in host.hook_points[value.name]]
    return (
        description[0]
        if len(description) == 1
        else f"{description[0]} (on a decoding step: {description[1]})"
    )
