"""The standard values and sizes as attributes of the engine's envoys.

Reading a value inside a trace waits for the forward to reach its hook point and returns
a copy: what the model does to its tensor later does not show in it. When the block
moves on, what it made of the copy (an in-place edit, an assignment) goes back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from explorer import vocabulary
from explorer.engine.nnsight_api import Envoy, eproperty
from explorer.model.errors import Unavailable
from explorer.model.host_values import HostValues

_Class = TypeVar("_Class")


class ValueProperty(eproperty):
    """One standard value on the envoys of its host."""

    def __init__(self, value: vocabulary.Value) -> None:
        super().__init__(key=value.name, description=value.meaning)
        self.value = value
        self.name = value.name
        self.__doc__ = f"{value.typed}: {value.meaning}"

    def __str__(self) -> str:
        return f"({self.name}) -> {self.value.typed}: {self.value.meaning}"

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        if obj is None:
            return self
        return self._host_values(obj).read(self.value)

    def __set__(self, obj: Any, value: Any) -> None:
        self._host_values(obj).write(self.value, value)

    def _host_values(self, obj: Any) -> HostValues:
        """Return the values of an envoy's host.

        A module of the same class elsewhere in the model has none.
        """
        values = host_values(obj)
        if values is None:
            raise Unavailable(
                f"{obj.path} hosts no standard values, so it has no {self.value.name}."
            )
        return values


def host_values(envoy: Any) -> HostValues | None:
    """Return the standard values of what an envoy hosts, None where it hosts none."""
    return envoy.__dict__.get("_host_values")


class _ValueAttributes:
    """Sizes as read-only attributes beside the values, and messages for names that do not exist."""

    def __getattr__(self, name: str) -> Any:
        values = host_values(self)
        if values is not None and name in values.sizes:
            return values.sizes[name]
        try:
            engine: Any = super()
            return engine.__getattr__(name)
        except AttributeError:
            if values is None:
                raise
            raise AttributeError(values.unknown(name)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        values = host_values(self)
        if values is not None:
            if name in values.sizes:
                raise AttributeError(f"{name} is a size of the built model and cannot be set.")
            exists = name in self.__dict__ or hasattr(type(self), name)
            if not exists and values.resembles_value(name):
                raise AttributeError(values.unknown(name))
        super().__setattr__(name, value)


class HostEnvoy(_ValueAttributes, Envoy):
    """An envoy with standard values."""


class _NoOtherAttributes:
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class ModulelessHost(_ValueAttributes, _NoOtherAttributes):
    """A host that is a part of its block's forward, without a module: values and sizes alone.

    ``path`` is the engine's name of the block.
    """

    path: str
    _host_values: HostValues

    def __init__(self, path: str, values: HostValues) -> None:
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "_host_values", values)

    def __repr__(self) -> str:
        name = self._host_values.expression("").rstrip(".")
        return f"({name}): part of {self.path}, no module of its own"


class BlocksEnvoy(Envoy):
    """The list of blocks; an index out of range raises an error that gives the range."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int) and not -len(self) <= key < len(self):
            raise IndexError(f"There is no block {key}: the model has blocks 0 to {len(self) - 1}.")
        return super().__getitem__(key)


def with_values(host: str) -> Callable[[type[_Class]], type[_Class]]:
    """Return a decorator that gives a class the standard values of a host as attributes."""

    def add(decorated: type[_Class]) -> type[_Class]:
        for value in vocabulary.BY_HOST[host].values():
            setattr(decorated, value.name, ValueProperty(value))
        return decorated

    return add


def _host_class(host: str, base: type) -> type:
    """Return the class of a host's envoys, derived from ``base``."""
    return with_values(host)(type(f"{host.title().replace('_', '')}Envoy", (base,), {}))


#: The classes of the hosts below the model, by host name: with a module, and without one.
HOST_CLASSES = {name: _host_class(name, HostEnvoy) for name in vocabulary.HOSTS if name != "model"}
MODULELESS_CLASSES = {name: _host_class(name, ModulelessHost) for name in HOST_CLASSES}
