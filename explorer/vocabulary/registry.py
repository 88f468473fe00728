"""Every host, value and kind of mixer by name, and the one resolver of value names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace

from explorer.vocabulary.hosts import POSITIONWISE, POSITIONWISE_VALUES, WHOLE, WHOLE_VALUES, Host
from explorer.vocabulary.mixer_kinds import KINDS
from explorer.vocabulary.mixers import Mixer
from explorer.vocabulary.values import RecordWhen, Value

HOSTS: dict[str, Host] = {}
#: The kinds of mixers, by host.
MIXERS: dict[str, Mixer] = {}
#: The hosts of the mixers that pass a state along.
RECURRENT: list[str] = []
VALUES: list[Value] = []
BY_HOST: dict[str, dict[str, Value]] = {}
#: Every value name, whichever host it is on.
NAMES: list[str] = []


def _add(hosts: Sequence[Host], values: Sequence[Value]) -> None:
    for host in hosts:
        HOSTS[host.name] = host
        BY_HOST[host.name] = {}
    for value in values:
        VALUES.append(value)
        BY_HOST[value.host][value.name] = value
        if value.name not in NAMES:
            NAMES.append(value.name)


def register(kind: Mixer) -> None:
    """Add a kind of mixer.

    Call it before other rooms are imported: the contract chooses its hosts on import.
    Raises ValueError where its name is taken.
    """
    if kind.host in HOSTS:
        raise ValueError(f"There is a host {kind.host!r} already.")
    MIXERS[kind.host] = kind
    if kind.recurrent:
        RECURRENT.append(kind.host)
    # What a recurrence is run again from is in every run: the state panel replays it.
    needed = {"recorded": RecordWhen.NEEDED}
    _add(
        [kind.as_host],
        [replace(v, **needed) if v.name in kind.replayed else v for v in kind.values],
    )


_add(WHOLE, WHOLE_VALUES)
for _kind in KINDS:
    register(_kind)
_add(POSITIONWISE, POSITIONWISE_VALUES)


def of_attribute(attribute: str) -> tuple[str, ...]:
    """The hosts that are called ``attribute`` on a block, of which a block has at most one."""
    return tuple(host.name for host in HOSTS.values() if host.attribute == attribute)


class UnknownValue(ValueError):
    """A value name the vocabulary does not have."""


def _named(name: str, mixers: Sequence[str]) -> list[Value]:
    host, _, bare = name.rpartition(".")
    found = [
        value
        for value in VALUES
        if value.name == bare
        and (host in (value.host, HOSTS[value.host].attribute) if host else value.key == value.name)
    ]
    order = {mixer: place for place, mixer in enumerate(mixers)}
    return sorted(found, key=lambda value: order.get(value.host, len(order)))


def lookup(name: str, mixers: Sequence[str] = ()) -> tuple[Value, ...]:
    """The values ``name`` means: ``"router_logits"`` or, for one host, ``"mlp.router_logits"``.

    With ``mixers``, those of a block in its order, their values come first: the first is the one
    meant on that block. A bare name never means the shared expert's: ask for
    ``"shared_experts.mlp_output"``.

    Raises UnknownValue, offering the nearest names, when there is none.
    """
    if found := _named(name, mixers):
        return tuple(found)
    host, _, bare = name.rpartition(".")
    if host and host not in HOSTS and not of_attribute(host):
        names = dict.fromkeys(
            h.attribute for h in HOSTS.values() if h.name not in ("model", "layers")
        )
        raise UnknownValue(
            f"There is no host {host!r}; the hosts are model, layers, {', '.join(names)}."
        )
    near = difflib.get_close_matches(bare, NAMES, n=3, cutoff=0.5)
    hint = f"the nearest are {', '.join(near)}" if near else "the values page lists every name"
    raise UnknownValue(f"There is no value {name!r}; {hint}.")


def key_of(value: Value, mixers: Sequence[str]) -> str:
    """The name a recording stores a value under on a block with these mixers.

    Values of the second mixer are stored with their host, as the first may have the same names.
    """
    if value.host in mixers[1:]:
        return f"{HOSTS[value.host].attribute}.{value.name}"
    return value.key


def recorded_as(name: str, mixers: Sequence[str]) -> str:
    """The name under which a recording stores what ``name`` means on a block with these mixers.

    A name that means nothing there is returned as it is: nothing is stored under it.
    """
    found = _named(name, mixers)
    if not found:
        return name
    value = found[0]
    of_another_block = "." in name and value.host in MIXERS and value.host not in mixers
    return name if of_another_block else key_of(value, mixers)
