"""The standard values, their layouts, their hosts and the kinds of mixers, as data.

Whatever names a value (discovery, the printout, pages, the app) reads this package. It imports
nothing but the standard library.
"""

from explorer.vocabulary.hosts import Host
from explorer.vocabulary.layouts import CALL_AXES, LAYOUTS, Layout
from explorer.vocabulary.mixers import Mixer, resolve
from explorer.vocabulary.registry import (
    BY_HOST,
    HOSTS,
    MIXERS,
    NAMES,
    RECURRENT,
    VALUES,
    UnknownValue,
    key_of,
    lookup,
    of_attribute,
    recorded_as,
    register,
)
from explorer.vocabulary.values import RecordWhen, Value

__all__ = [
    "BY_HOST",
    "CALL_AXES",
    "HOSTS",
    "LAYOUTS",
    "MIXERS",
    "NAMES",
    "RECURRENT",
    "VALUES",
    "Host",
    "Layout",
    "Mixer",
    "RecordWhen",
    "UnknownValue",
    "Value",
    "key_of",
    "lookup",
    "of_attribute",
    "recorded_as",
    "register",
    "resolve",
]
