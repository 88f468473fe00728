"""What is known of a kind of mixer, in one record; `mixer_kinds` holds the records.

Code that a kind needs (its replay, its finder) lives in rooms above this one, which import torch. A
record names it as an entry point, ``"package.module:function"``, so that the record is complete
and the vocabulary still imports nothing; `resolve` is the one place that imports what is named.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from explorer.vocabulary.hosts import Host
from explorer.vocabulary.values import Value


def resolve(entry_point: str | None) -> Callable[..., Any]:
    """Return the function that ``"package.module:function"`` names.

    Raises AttributeError or ImportError where there is none, ValueError for None.
    """
    if entry_point is None:
        raise ValueError("This kind of mixer has no such function.")
    return pkgutil.resolve_name(entry_point)


@dataclass(frozen=True)
class KernelSignature:
    """How the call of a recurrence's kernel is recognised.

    Attributes:
        takes: Names of parameters that the kernel's function has; for the delta rule, in the order
            of `Mixer.replayed`.
        dims: The name of one argument and how many axes it has, where only this distinguishes
            kinds: their kernels take the same arguments. Kinds with ``dims`` are tried first.
    """

    takes: tuple[str, ...]
    dims: tuple[str, int] | None = None


@dataclass(frozen=True)
class StateView:
    """What the state panel shows of a recurrence at each token.

    Attributes:
        retained: The value that says which share of its state a head retains.
        logarithm: Whether that value is the share's logarithm.
        written: The value that scales what a token writes; None where nothing does.
        title, note: Title and note of the picture of ``written``.
    """

    retained: str = "decays"
    logarithm: bool = True
    written: str | None = "betas"
    title: str = "written: betas"
    note: str = "The share of its own prediction error the token writes into the state."


@dataclass(frozen=True)
class Mixer:
    """One kind of mixer: what every room needs to know of it.

    Attributes:
        host: The host's name, by which all rooms know the kind.
        path: How pages write the host.
        meaning: What the kind is, in words.
        values: Its values, in the vocabulary's order.
        role: The colour role of its values and its box in diagrams.
        sublayer: The `Sublayer.role` it has: "recurrent", "attention", "convolution" or "mixer".
        title: What diagrams call it; empty where that depends on the block.
        trait: The key of its trait in `explorer.traits.catalogue`, None where it has none.
        layer_types: What configurations call blocks of this kind in their ``layer_types``.
        finder: Entry point: ``(graph, call, part) -> HostFindings``, finds its values in a trace;
            None where nothing inside it is found.
        conv_feeds: The values that its short convolution determines with at most an activation
            between, and no norm: where the contract looks for the convolution's reach.

    Of a recurrence alone:
        kernel: How its kernel's call is recognised; None for a recurrence that calls none.
        kernel_values: Entry point: ``(findings, graph, module, call)``, adds the values at the
            kernel's call to the findings.
        replayed: The values that it is run again from, in the order that ``steps`` takes them;
            after them, ``state_input``, the state it starts from.
        steps: Entry point: ``(*replayed, state=, heads=)``, yields output and state per token.
        implied_attention: Entry point: ``(*replayed without attention_values)``, returns the matrix
            that a fresh prompt's values are mixed with.
        rule: Title and lines of how the state moves by one token, as diagrams write it.
        state_view: What the state panel shows.
        reset_gate: A value that is zero where a text begins, which drops a state that entered.
        float32_decays: Whether its decays are float32 in a model of any dtype.
    """

    host: str
    path: str
    meaning: str
    values: tuple[Value, ...]
    role: str = "recurrent"
    sublayer: str = "recurrent"
    title: str = ""
    trait: str | None = None
    layer_types: tuple[str, ...] = ("linear_attention",)
    finder: str | None = "explorer.discovery.recurrent:find_recurrent"
    conv_feeds: tuple[str, ...] = ("attention_values",)
    kernel: KernelSignature | None = None
    kernel_values: str | None = None
    replayed: tuple[str, ...] = ()
    steps: str | None = None
    implied_attention: str | None = None
    rule: tuple[str, tuple[str, ...]] | None = None
    state_view: StateView | None = None
    reset_gate: str | None = None
    float32_decays: bool = True

    @property
    def recurrent(self) -> bool:
        """Whether it passes a state along, and so can be run again."""
        return bool(self.replayed)

    @property
    def as_host(self) -> Host:
        return Host(self.host, self.path, self.meaning, self.role, self.title, True, self.recurrent)
