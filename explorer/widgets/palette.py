"""The colours of every surface, as data: one role, one meaning, in both themes.

Pages, diagram and app read this module; none of them writes a colour of its own.
``css()`` gives the roles as custom properties, ``contrast`` the measure they are checked
to, and the heatmap maps are ready for a palette-indexed image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from explorer.vocabulary import HOSTS, VALUES

#: What is drawn on, per theme.
BACKGROUND: Mapping[str, str] = MappingProxyType({"light": "#ffffff", "dark": "#10141b"})


@dataclass(frozen=True)
class Role:
    """What a colour means, and the outline with the same meaning."""

    name: str
    light: str
    dark: str
    label: str
    outline: str

    def on(self, theme: str) -> str:
        return self.light if theme == "light" else self.dark


ROLES: Mapping[str, Role] = MappingProxyType(
    {
        role.name: role
        for role in (
            Role("ink", "#1b2430", "#e7ecf3", "text", "none"),
            Role("muted", "#5b6776", "#9aa7b8", "types and captions", "none"),
            Role("stream", "#1f3f9e", "#9db7ff", "residual stream", "heavy line"),
            Role("attention", "#6a45cc", "#bda8ff", "softmax attention", "circle"),
            Role("recurrent", "#0b7a86", "#63d3df", "recurrent mixer and its state", "diamond"),
            Role("mlp", "#a3540a", "#f2b266", "MLP and experts", "square"),
            Role("router", "#b3135f", "#ff93c3", "router", "triangle"),
            Role("norm", "#4f6357", "#a9bfb2", "norms", "rounded box"),
        )
    }
)

#: The roles of values that are drawn in another role than their host.
_ROLE_OF_VALUE = {
    value.name: value.role for value in VALUES if value.role != HOSTS[value.host].role
}


def role_of(host: str, name: str = "") -> str:
    """The role of a value, by its host (``model.layers[i].mlp`` or ``mlp``) and its name; of a host
    without a name.
    """
    last = host.rpartition(".")[2].removesuffix("[i]")
    return _ROLE_OF_VALUE.get(name) or (HOSTS[last].role if last in HOSTS else "stream")


def css(selectors: Mapping[str, str]) -> str:
    """The roles as custom properties (``--role-attention``), one rule per ``theme: selector``."""
    rules = []
    for theme, selector in selectors.items():
        lines = [f"  --role-{role.name}: {role.on(theme)};" for role in ROLES.values()]
        rules.append(
            "\n".join([f"{selector} {{", f"  --role-ground: {BACKGROUND[theme]};", *lines, "}"])
        )
    return "\n".join(rules) + "\n"


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4


def _channels(colour: str) -> tuple[float, float, float]:
    value = colour.lstrip("#")
    return tuple(int(value[i : i + 2], 16) / 255 for i in (0, 2, 4))  # type: ignore[return-value]


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb`` (WCAG 2.2, definition of relative luminance)."""
    red, green, blue = map(_linear, _channels(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours (WCAG 2.2), from 1 to 21."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def over(colour: str, share: float, ground: str) -> str:
    """``colour`` over ``ground`` at the opacity ``share``, as one opaque colour."""
    mixed = (
        share * a + (1 - share) * b
        for a, b in zip(_channels(colour), _channels(ground), strict=True)
    )
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in mixed)


def _between(stops: Sequence[str], count: int) -> tuple[str, ...]:
    """``count`` colours along the polyline through ``stops``, evenly spaced."""
    colours = []
    for index in range(count):
        place = index * (len(stops) - 1) / (count - 1)
        left = min(int(place), len(stops) - 2)
        colours.append(over(stops[left + 1], place - left, stops[left]))
    return tuple(colours)


def sequential() -> tuple[str, ...]:
    """256 colours for magnitudes, dark to bright: viridis, perceptually even."""
    from bokeh.palettes import Viridis256

    return tuple(colour.lower() for colour in Viridis256)


def diverging(theme: str = "light") -> tuple[str, ...]:
    """255 colours centred on zero: blue below, orange above, the ground's tone in the middle.

    An odd count, so that zero has a colour of its own (index 127). Both arms are even
    in lightness, so that equal magnitudes look equally strong.
    """
    middle = "#f4f5f7" if theme == "light" else "#1a212b"
    low = (
        ("#123a86", "#3f74c4", "#9cbfe8") if theme == "light" else ("#b7d3ff", "#6a9df0", "#2f5596")
    )
    high = (
        ("#eab78a", "#c46a1f", "#7a3603") if theme == "light" else ("#8a4a17", "#e08a3c", "#ffd0a1")
    )
    return _between((*low, middle), 128)[:-1] + _between((middle, *high), 128)
