"""A model class with a configuration whose sizes can be changed: built with few blocks at any
sizes, and run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from explorer.signature.observation import Observation, build, observe, with_first_blocks
from explorer.signature.sizes import Key, changed, choices, derived, figures, named, table

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class ResizableModel:
    """A configuration with few blocks, its class, and the sizes that may change.

    ``names`` are the sizes' names by where they stand in the configuration, ``keys`` the reverse;
    ``numbers`` are the sizes of the first probe by name, which are the configuration's own but for
    ``windows``: those wider than the probes' calls are narrowed. ``released`` are the sizes that
    types are written for. ``derived`` are the names of sizes that the configuration's class
    computes from others where they are not given.

    released_config: the configuration whose sizes types are written for, where ``config`` is a
    small one that is run with weights because the class does not run without. first_blocks: the
    block list's path and how many of its blocks to keep, where no configuration has so few.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        model_class: type,
        released_config: PreTrainedConfig | None = None,
        first_blocks: tuple[str, int] | None = None,
    ) -> None:
        self.config, self.model_class, self.first_blocks = config, model_class, first_blocks
        self.with_weights = released_config is not None
        found = figures(config)
        self.windows = _narrowed_windows(found)
        self.names: dict[Key, str] = named(list(found))
        self.keys = {name: key for key, name in self.names.items()}
        all_figures = figures(released_config or config)
        if lacking := found.keys() - all_figures.keys():
            listed = ", ".join(sorted(".".join(key) for key in lacking))
            raise ValueError(
                f"the configuration has no {listed}, which a small one of its type has"
            )
        self.released = {self.names[key]: all_figures[key] for key in found}
        self.numbers = {
            self.names[key]: self.windows.get(key, value) for key, value in found.items()
        }
        self.derived = {self.names[key] for key in derived(config) if key in self.names}

        #: Sizes that have to stay less than the tokens of a call.
        self.window_names = {
            name for name, key in self.keys.items() if key[-1] in table()["windows"]
        }

    def build(self, numbers: Mapping[str, int] = {}) -> PreTrainedModel:
        """The model with other numbers for some sizes; windows are narrow unless they are among
        them."""
        figures_changed = {**self.windows} | {
            self.keys[name]: number for name, number in numbers.items()
        }
        model = build(changed(self.config, figures_changed), self.model_class, self.with_weights)
        return model if self.first_blocks is None else with_first_blocks(model, *self.first_blocks)

    def observe(
        self, numbers: Mapping[str, int], batch: int, seq: int, sites: Observation | None = None
    ) -> Observation:
        """Run the model with other numbers for some sizes; ``sites`` as `observation.observe` has
        it."""
        return observe(self.build(numbers), batch, seq, products=True, sites=sites)

    def observe_with_wide_windows(self, batch: int, seq: int) -> Observation:
        """Run the model with the windows that the configuration has."""
        return self.observe(
            {self.names[key]: self.released[self.names[key]] for key in self.windows}, batch, seq
        )

    def has_same_sizes(self, other: ResizableModel) -> bool:
        """Whether two configurations differ in numbers alone: they have the same sizes, flags and
        words."""
        return (
            not (self.with_weights or other.with_weights)
            and (self.model_class, self.first_blocks) == (other.model_class, other.first_blocks)
            and self.names == other.names
            and self.windows.keys() == other.windows.keys()
            and choices(self.config) == choices(other.config)
        )


def _narrowed_windows(found: Mapping[Key, int]) -> dict[Key, int]:
    """A number less than the probes' tokens for each window that is wider."""
    narrow: dict[str, int] = table()["windows"]
    return {
        key: narrow[key[-1]] for key, value in found.items() if value > narrow.get(key[-1], value)
    }
