"""What a standard value is: its host, its layout, its meaning, and how it may be used and drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from explorer.vocabulary.layouts import LAYOUTS


class RecordWhen(Enum):
    """When a value is recorded, from always to only by name."""

    NEEDED = "with every run: the views of a run are made from it"
    FITTING = "with a run, as long as the run stays below its budget"
    VIEWED = "by `record`; in the app when it is looked at"
    NAMED = "only when it is asked for by name"


@dataclass(frozen=True)
class Value:
    """One standard value on one host.

    Attributes:
        role: The colour role it is drawn in (`explorer.widgets.palette.ROLES`).
        written: Whether an assignment and an in-place edit reach the model.
        optional: Whether it may be None in a call.
        source: For a derived value, the value of the same host it is computed from. A derived value
            is read-only.
        description: How a derived value is computed.
        fixed: Whether it is a constant of the model, the same in every call.
        low, high: Bounds of its numbers, where it has them; views use them as the ends of a scale.
        signed: Whether a picture of it is centred on zero when it has negative numbers.
        own_width: Whether its last axis may differ from the stream's width although its layout is
            the stream's.
        latent: Its layout on a mixture whose experts work on a width of their own, which then has
            the size ``latent_size``.
        recorded: When it is recorded.
    """

    host: str
    name: str
    layout: str
    meaning: str
    role: str
    written: bool = True
    optional: bool = False
    source: str | None = None
    description: str = ""
    fixed: bool = False
    low: float | None = None
    high: float | None = None
    signed: bool = True
    own_width: bool = False
    latent: str = ""
    recorded: RecordWhen = RecordWhen.FITTING

    @property
    def unwritten(self) -> str:
        """Why it cannot be written; ``{name}`` is replaced by the name that was used."""
        if self.fixed:
            return "{name} is a constant of the model: change its parameter or buffer."
        if self.derived:
            return "{name} is computed from other values and cannot be written."
        return "{name} is only read: the kernel takes it on a decoding step alone."

    @property
    def derived(self) -> bool:
        """Whether it is computed from other values."""
        return self.source is not None

    @property
    def axes(self) -> tuple[str, ...]:
        return LAYOUTS[self.layout].axes

    @property
    def key(self) -> str:
        """The name a recording stores it under; a shared expert's and a dense branch's names are
        also the MLP's.
        """
        inner = self.host in ("shared_experts", "dense_mlp")
        return f"{self.host}.{self.name}" if inner else self.name

    def on(self, sizes: Mapping[str, int]) -> Value:
        """Return the value with the layout it has on a host with these sizes."""
        latent = self.latent and "latent_size" in sizes
        return replace(self, layout=self.latent) if latent else self

    @property
    def typed(self) -> str:
        """The layout as the printout shows it: name, optional mark, axes."""
        mark = " | None" if self.optional else ""
        return f"{self.layout}{mark} [{' '.join(self.axes)}]"


#: Name, layout and meaning of a value, and further fields of it.
Row = tuple[str, str, str] | tuple[str, str, str, dict[str, Any]]


def values_of(host: str, role: str, *rows: Row) -> tuple[Value, ...]:
    """Values of one host from rows ``(name, layout, meaning)``, with further fields as a dict.

    ``role`` is that of the rows whose fields name none.
    """
    found: list[Value] = []
    for name, layout, meaning, *further in rows:
        fields: dict[str, Any] = {"role": role, **(further[0] if further else {})}
        found.append(Value(host, name, layout, meaning, **fields))
    return tuple(found)


def computed(source: str, description: str, **fields: Any) -> dict[str, Any]:
    """The fields of a value that is derived from ``source``, with further ones."""
    return {"written": False, "source": source, "description": description, **fields}
