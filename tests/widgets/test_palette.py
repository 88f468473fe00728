"""The palette: readable on both grounds, and a role for every value."""

from __future__ import annotations

from itertools import pairwise

import pytest

from explorer import vocabulary
from explorer.widgets import palette


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_role_is_readable_on_its_ground(theme: str) -> None:
    ground = palette.BACKGROUND[theme]
    for role in palette.ROLES.values():
        assert palette.contrast(role.on(theme), ground) >= 5, role.name
        # Boxes are filled with their role at five parts in a hundred, inner boxes twice.
        twice = palette.over(role.on(theme), 0.05, palette.over(role.on(theme), 0.05, ground))
        assert palette.contrast(palette.ROLES["ink"].on(theme), twice) >= 7
        assert (
            palette.contrast(
                palette.ROLES["muted"].on(theme), palette.over(role.on(theme), 0.05, ground)
            )
            >= 4.5
        )
        assert palette.contrast(role.on(theme), palette.over(role.on(theme), 0.05, ground)) >= 4.5


def test_contrast_is_that_of_the_definition() -> None:
    assert palette.contrast("#000000", "#ffffff") == pytest.approx(21)
    assert palette.contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_heatmap_maps_have_their_lengths_and_a_centre() -> None:
    assert len(palette.sequential()) == 256 and len(set(palette.sequential())) > 250
    bright = [palette.luminance(colour) for colour in palette.sequential()]
    assert all(after > before - 0.001 for before, after in pairwise(bright))
    for theme, ground in palette.BACKGROUND.items():
        colours = palette.diverging(theme)
        assert len(colours) == 255
        strength = [palette.contrast(colour, ground) for colour in colours]
        assert strength.index(min(strength)) == 127
        assert strength[:128] == sorted(strength[:128], reverse=True) and strength[127:] == sorted(
            strength[127:]
        )


def test_every_value_has_a_role_with_a_colour() -> None:
    for value in vocabulary.VALUES:
        assert palette.role_of(value.host, value.name) in palette.ROLES
        assert palette.role_of(vocabulary.HOSTS[value.host].path, value.name) == palette.role_of(
            value.host, value.name
        )


def test_colours_are_properties_of_each_theme() -> None:
    text = palette.css({"light": ":root", "dark": ".dark"})
    assert text.count("--role-attention:") == 2 and "--role-ground: #10141b;" in text
