"""Code as the explorer copies it: what it computes, beside what the card draws."""

from __future__ import annotations

import numpy as np

from explorer.widgets.views.picture import Curves, Mosaic


def run_cell(code: str) -> np.ndarray:
    space: dict[str, object] = {}
    exec(compile(code, "<cell>", "exec"), space)
    return space["shown"].numpy()


def numbers_of(view: object) -> np.ndarray:
    """What a view draws; of lines the heavy one."""
    if isinstance(view, Mosaic):
        return np.stack([tile.values for tile in view.tiles])
    return view.lines[-1].values if isinstance(view, Curves) else view.values


def agree(shown: np.ndarray, drawn: np.ndarray) -> None:
    """Equal wherever something is drawn."""
    assert shown.shape == drawn.shape
    known = np.isfinite(drawn)
    assert known.any()
    np.testing.assert_allclose(shown[known], drawn[known], rtol=1e-4, atol=1e-5)
