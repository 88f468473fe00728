"""The model under test, the tokens it is run on, and what one run without edits recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from explorer import vocabulary
from explorer.contract.native import NativeModel

if TYPE_CHECKING:
    from explorer.discovery.anatomy import BlockAnatomy, HostAnatomy
    from explorer.discovery.details import HostDetails, RouterScoring
    from explorer.model.language_model import LanguageModel
    from explorer.model.recording import Recording

#: A value of one block, or of the model itself where the block is None.
ValueKey = tuple[vocabulary.Value, int | None]

_T = TypeVar("_T")

#: English text for a model that brings no prompt of its own.
PROMPT = (
    "In the beginning God created the heaven and the earth. "
    "And the earth was without form, and void"
)

#: The model's own values in the order of the forward: before its blocks, and after them.
_BEFORE_BLOCKS = ("input_ids", "attention_mask", "token_embeddings")
_AFTER_BLOCKS = ("final_norm_output", "lm_head_output", "logits")

#: Lengths for the batch and the sequence, all prime.
_LENGTHS = (2, 3, 5, 7, 11, 13, 17, 19, 23)


class ModelUnderTest:
    """One model with the token ids it is run on, and what is known of it.

    ids: [batch seq], with rows that differ and lengths that equal no size of the model, so that
    no layout is right by accident. ``native`` is the plain transformers model, ``other`` a
    second model in the same process or None, ``support`` the rows of the model's own report of
    what it serves, ``block_kinds`` the distinct kinds of block.
    """

    def __init__(
        self, model: LanguageModel, prompt: str | None = None, other: LanguageModel | None = None
    ) -> None:
        self.model, self.other = model, other
        self.text = prompt or PROMPT
        self.hf: Any = model.hf
        self.block_kinds = model.anatomy.blocks
        parameter = next(model.hf.parameters())
        self.dtype = parameter.dtype
        self.on_meta = parameter.device.type == "meta"
        self.support = list(model.support())
        self.batch, self.seq = self._lengths()
        self.ids = self._ids(parameter.device)
        self.native = NativeModel(
            self.hf, self.ids, all(mixers == ("self_attn",) for mixers in model.mixers)
        )
        self.hook_count = self.count_hooks()
        #: Values that the running invariant has read; the same set as its `Comparisons.current`.
        self.values_read: set[vocabulary.Value] = set()
        self._results: dict[str, Any] = {}

    def _lengths(self) -> tuple[int, int]:
        hosts = [host for block in self.block_kinds for host in block.hosts.values()]
        taken = {size for host in hosts for size in host.sizes.values()}
        taken |= set(self.model.sizes.values())
        free = [n for n in _LENGTHS if n not in taken]
        batch = free[0]
        return batch, next(n for n in free if n > max(batch, 10))

    def _ids(self, device: torch.device) -> torch.Tensor:
        tokens = self.model.tokenizer(self.text)["input_ids"]
        row = [tokens[i % len(tokens)] for i in range(self.seq)]
        return torch.tensor([row[r:] + row[:r] for r in range(self.batch)], device=device)

    def once(self, name: str, compute: Callable[[], _T]) -> _T:
        """Return the result of a run that several checks use, computed by the first of them."""
        if name not in self._results:
            self._results[name] = compute()
        return self._results[name]

    def count_hooks(self) -> int:
        """Return how many forward hooks the transformers model has."""
        return sum(
            len(module._forward_hooks) + len(module._forward_pre_hooks)
            for module in self.hf.modules()
        )

    # -- what is available ------------------------------------------------------

    def has(self, host: str) -> bool:
        """Return whether any value of a host is available."""
        return any(row.available for row in self.support if row.host == host)

    def reason(self, host: str, name: str) -> str:
        """Return why a value is unavailable, on whichever block that is known of first."""
        rows = [row for row in self.support if (row.host, row.name) == (host, name)]
        return str(next(iter(rows[0].reasons.values()), "")) if rows else ""

    def layers(self, host: str, *names: str) -> list[Any]:
        """Return the blocks on which all ``names`` are available; ``[None]`` for the model."""
        rows = [
            row for row in self.support if row.host == host and (not names or row.name in names)
        ]
        if host == "model":
            return [None] if all(row.available for row in rows) or not names else []
        if len(rows) < len(names):
            return []
        sets = [set(row.layers) for row in rows if row.available or names]
        return sorted(set.intersection(*sets) if names else set().union(*sets))

    def one_per_kind(self, host: str, *names: str) -> list[int]:
        """Return one block of each kind on which all ``names`` are available."""
        available = self.layers(host, *names)
        return [block.layers[0] for block in self.block_kinds if block.layers[0] in available]

    # -- the structure of a block -------------------------------------------------

    def block(self, layer: int) -> BlockAnatomy:
        """Return what discovery found on a block."""
        return self.model.anatomy.block(layer)

    def host(self, host: str, layer: int) -> HostAnatomy:
        """Return what discovery found of a host on a block."""
        return self.block(layer).hosts[host]

    def details(self, host: str, layer: int) -> HostDetails:
        """Return what discovery found of a host beyond its values and sizes."""
        return self.host(host, layer).details

    def is_part(self, host: str, layer: int) -> bool:
        """Return whether a host is a part of its block's own forward, without a module."""
        return self.host(host, layer).inline

    def module(self, layer: int, path: str) -> Any:
        """Return a native module by its path within a block."""
        block = self.hf.get_submodule(f"{self.model.anatomy.backbone.blocks}.{layer}")
        return block.get_submodule(path) if path else block

    def envoy(self, host: str, layer: int | None) -> Any:
        """Return the object that serves a host's values, by the expression that pages print."""
        envoy = self.model
        for name in vocabulary.HOSTS[host].path.split(".")[1:]:
            envoy = envoy.layers[layer] if name == "layers[i]" else getattr(envoy, name)
        return envoy

    # -- reading and writing in a trace ---------------------------------------------

    def read(self, key: ValueKey) -> Any:
        """Inside a trace: read a value as a user does."""
        value, layer = key
        return getattr(self.envoy(value.host, layer), value.name)

    def write(self, key: ValueKey, new: Any) -> None:
        """Inside a trace: assign a value as a user does."""
        value, layer = key
        setattr(self.envoy(value.host, layer), value.name, new)

    def axis_length(self, key: ValueKey, axis: str) -> int:
        """Return the length an axis must have: the call's, or the size its host names."""
        value, layer = key
        call = {"batch": self.batch, "seq": self.seq, "query": self.seq, "key": self.seq}
        details = self.model.top.details if layer is None else self.details(value.host, layer)
        if axis == "hidden_size" and value.name in details.own_widths:
            return details.own_widths[value.name]
        return call[axis] if axis in call else getattr(self.envoy(value.host, layer), axis)

    def reading_order(self, derived: bool = False, decoding: bool = False) -> list[ValueKey]:
        """Return every available value in the order the forward reaches them.

        derived: include derived values. decoding: in the order of a decoding step.
        """
        keys = self._own(_BEFORE_BLOCKS)
        for layer in range(self.model.num_layers):
            keys += self._block_order(layer, decoding)
        keys += self._own(_AFTER_BLOCKS)
        return self._with_derived(keys) if derived else keys

    def _own(self, names: tuple[str, ...]) -> list[ValueKey]:
        available = {row.name for row in self.support if row.host == "model" and row.available}
        return [(vocabulary.BY_HOST["model"][name], None) for name in names if name in available]

    def _block_order(self, layer: int, decoding: bool) -> Iterator[ValueKey]:
        for host, name in self.block(layer).value_order(decoding):
            yield vocabulary.BY_HOST[host][name], layer

    def _with_derived(self, keys: list[ValueKey]) -> list[ValueKey]:
        keys = list(keys)
        for row in self.support:
            if row.value.source is None or row.name == "state":  # it is read step by step
                continue
            source = vocabulary.BY_HOST[row.host][row.value.source]
            for layer in [None] if row.host == "model" else row.layers:
                keys.insert(keys.index((source, layer)) + 1, (row.value, layer))
        return keys

    # -- what a run without edits recorded ---------------------------------------------

    @cached_property
    def recordable(self) -> list[str]:
        """The names of all values that one call of ``record`` returns."""
        return [
            f"{row.host}.{row.name}"
            for row in self.support
            if row.available and row.name != "state"
        ]

    @cached_property
    def clean(self) -> Recording:
        """Everything recorded in one forward without edits, states after every token included."""
        return self.model.record(self.ids, self.recordable)

    @cached_property
    def traced(self) -> dict[ValueKey, Any]:
        """Every value, read in one trace in the order of the forward."""
        values: dict[ValueKey, Any] = {}
        keys = self.reading_order(derived=True)
        with torch.no_grad(), self.model.trace(self.ids):
            for key in keys:
                values[key] = self.read(key)
        return values

    def get(self, host: str, name: str, layer: int | None = None) -> Any:
        """Return a value of the clean run in the model's own dtype, and note that it was read."""
        self.note_read(host, name)
        return self.recorded((vocabulary.BY_HOST[host][name], layer))

    def recorded(self, key: ValueKey) -> Any:
        """Return a value of the clean run by its entry in the vocabulary."""
        value, layer = key
        name = value.name if value.host == "model" else f"{value.host}.{value.name}"
        return self.clean[name, layer]

    def note_read(self, host: str, *names: str) -> None:
        """Note that the running invariant has read these values."""
        self.values_read.update(vocabulary.BY_HOST[host][name] for name in names)

    def value_named(self, key: str, layer: int | None) -> vocabulary.Value:
        """Return the value that a recording keeps under ``key`` on a block."""
        mixers = () if layer is None else self.model.mixers[layer]
        return vocabulary.lookup(key, mixers)[0]

    # -- what a value does -----------------------------------------------------------

    def _scoring(self, key: ValueKey) -> RouterScoring | None:
        """Return how a router scores where the value is one of its scores or logits, else None."""
        value, layer = key
        if value.host != "mlp" or value.name not in ("router_scores", "router_logits"):
            return None
        return None if layer is None else self.details("mlp", layer).scoring

    def never_weighs(self, key: ValueKey) -> bool:
        """Return whether a router's value only decides which experts run and enters no weight.

        It is so where only the choice reads it, or where a single weight is normalised to one.
        """
        value, layer = key
        scoring = self._scoring(key)
        if scoring is None or layer is None:
            return False
        if value.name == "router_scores" and scoring.choice_only:
            return True
        if self.host("mlp", layer).sizes["top_k"] != 1 or layer not in self.layers(
            "mlp", "expert_weights"
        ):
            return False
        weights = self.clean["mlp.expert_weights", layer]
        return bool((weights == weights.flatten()[0]).all())

    def piecewise_constant(self, key: ValueKey) -> bool:
        """Return whether a small change of a router's value may move no weight.

        It is so where slots are chosen one after another and weigh the same except near a tie.
        """
        scoring = self._scoring(key)
        return scoring is not None and scoring.repeated

    def prompt_only(self, key: ValueKey) -> bool:
        """Return whether a decoding step does not hold a value."""
        value, layer = key
        return layer is not None and value.name in self.host(value.host, layer).prompt_only


def attempt(action: Callable[[], object]) -> Exception | None:
    """Run an action, inside a trace say, and return what it raised, or None."""
    try:
        action()
    except Exception as error:  # whatever it is, it is what the invariant looks at
        return error
    return None
