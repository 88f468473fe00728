"""The experts of a mixture as a field of cells."""

from __future__ import annotations

import random

from explorer.widgets.diagram.geometry import Box
from explorer.widgets.diagram.markup import classes, tag


def expert_cells(area: Box, count: int, chosen: int) -> tuple[str, float]:
    """The field's markup, and the y under its last row.

    All cells are one line of dashes per row, and the lit ones a path over it: hundreds of
    elements would be most of a page. Which are lit, the numbers in ``data-lit``, is an
    illustration until a token is selected.
    """
    columns, pitch = cell_grid(count, area.w, area.h)
    side, lit = pitch * 0.76, lit_cells(count, chosen)
    left = area.x + (area.w - columns * pitch + pitch - side) / 2
    rows = [min(columns, count - first) for first in range(0, count, columns)]
    lines = "".join(
        f"M{left:.2f} {area.y + row * pitch + side / 2:.2f}h{(length - 1) * pitch + side:.2f}"
        for row, length in enumerate(rows)
    )
    corners = [(left + cell % columns * pitch, area.y + cell // columns * pitch) for cell in lit]
    square = f"h{side:.2f}v{side:.2f}h-{side:.2f}z"
    every = tag(
        "path",
        class_="bd-every",
        d=lines,
        stroke_width=f"{side:.2f}",
        stroke_dasharray=f"{side:.3f} {pitch - side:.3f}",
    )
    squares = "".join(f"M{x:.2f} {y:.2f}{square}" for x, y in corners)
    field = tag(
        "g",
        every,
        tag("path", class_="bd-lit", d=squares),
        class_=classes("cells", "mlp"),
        role="img",
        data_count=count,
        data_columns=columns,
        data_pitch=f"{pitch:.3f}",
        data_left=f"{left:.2f}",
        data_top=f"{area.y:.2f}",
        data_side=f"{side:.2f}",
        data_lit=" ".join(map(str, lit)),
        aria_label=f"{count} experts, {chosen} chosen for each token",
    )
    return field, area.y + len(rows) * pitch


def cell_grid(count: int, width: float, height: float, most: float = 17.0) -> tuple[int, float]:
    """Columns and pitch of a field of ``count`` cells that fills ``width`` by ``height``.

    Full rows are preferred to larger cells, as long as they cost at most a fifth of the size.
    """

    def pitch(columns: int) -> float:
        return min(most, width / columns, height / -(-count // columns))

    # Of fields with cells of one size, the widest.
    best = max(range(1, count + 1), key=lambda columns: (pitch(columns), columns))
    even = max(
        (columns for columns in range(1, count + 1) if count % columns == 0),
        key=lambda columns: (pitch(columns), columns),
    )
    columns = even if pitch(even) >= 0.8 * pitch(best) else best
    return columns, pitch(columns)


def lit_cells(count: int, chosen: int) -> list[int]:
    """Cells lit for the chosen experts where no token is selected: scattered, always the same."""
    return sorted(random.Random(count).sample(range(count), min(chosen, count)))
