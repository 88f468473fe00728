"""The model under test, the tokens it is run on, and what one clean run of it gave."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from explorer import vocabulary
from explorer.discovery.details import HostDetails

if TYPE_CHECKING:
    from explorer.model.language_model import LanguageModel
    from explorer.model.recording import Recording

#: A value of one block (None for the model's own).
Key = tuple[vocabulary.Value, int | None]

#: Some English for a model that brings no prompt of its own.
PROMPT = "In the beginning God created the heaven and the earth. And the earth was without form, and void"

#: The model's own values in the order of the forward: before its blocks, and after.
_BEFORE_BLOCKS = ("input_ids", "attention_mask", "token_embeddings")
_AFTER_BLOCKS = ("final_norm_output", "lm_head_output", "logits")


class ModelUnderTest:
    """One model, ready to be asked.

    ids: [batch seq], rows that differ, their lengths unlike any size of the model, so that
    a layout cannot be right by accident. ``other`` is a second model in the same process, or None.
    """

    def __init__(
        self, model: LanguageModel, prompt: str | None = None, other: LanguageModel | None = None
    ) -> None:
        self.model, self.other = model, other
        self.text = prompt or PROMPT
        self.hf = model.hf
        self.blocks = model.anatomy.blocks
        self.dtype = next(model.hf.parameters()).dtype
        self.meta = next(model.hf.parameters()).device.type == "meta"
        self.rows = list(model.support())
        self.batch, self.seq = self._lengths()
        self.ids = self._ids()
        self.hooks = sum(
            len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.hf.modules()
        )
        #: Runs that several laws look at, by name.
        self.memo: dict[str, Any] = {}
        #: Values the law now run has looked at; the tally of that law holds the same set.
        self.looked: set[vocabulary.Value] = set()

    def _lengths(self) -> tuple[int, int]:
        taken = {
            size
            for block in self.blocks
            for host in block.hosts.values()
            for size in host.sizes.values()
        }
        taken |= set(self.model.sizes.values())
        free = [n for n in (2, 3, 5, 7, 11, 13, 17, 19, 23) if n not in taken]
        batch = free[0]
        return batch, next(n for n in free if n > max(batch, 10))

    def _ids(self) -> torch.Tensor:
        tokens = self.model.tokenizer(self.text)["input_ids"]
        row = [tokens[i % len(tokens)] for i in range(self.seq)]
        return torch.tensor(
            [row[r:] + row[:r] for r in range(self.batch)], device=next(self.hf.parameters()).device
        )

    # -- what is there --------------------------------------------------------

    def has(self, host: str) -> bool:
        return any(row.available for row in self.rows if row.host == host)

    def layers(self, host: str, *names: str) -> list[int | None]:
        """Blocks on which all ``names`` of a host are available; ``[None]`` on the model itself."""
        rows = [row for row in self.rows if row.host == host and (not names or row.name in names)]
        if host == "model":
            return [None] if all(row.available for row in rows) or not names else []
        if len(rows) < len(names):
            return []
        sets = [set(row.layers) for row in rows if row.available or names]
        joined = set.intersection(*sets) if names else set().union(*sets)
        return sorted(joined)

    def first(self, host: str, *names: str) -> list[int]:
        """One block of each kind on which all ``names`` are available."""
        there = self.layers(host, *names)
        return [block.layers[0] for block in self.blocks if block.layers[0] in there]

    def details(self, host: str, layer: int) -> HostDetails:
        return self.model.anatomy.block(layer).hosts[host].details

    def module(self, layer: int, path: str) -> torch.nn.Module:
        """A native module by its path within a block."""
        block = self.hf.get_submodule(f"{self.model.anatomy.backbone.blocks}.{layer}")
        return block.get_submodule(path) if path else block

    def first_read(self, host: str, layer: int) -> int:
        """When a block's forward comes to a host: the position of the host's first value among all it passes."""
        return next(
            i for i, (name, _) in enumerate(self.model.anatomy.block(layer).order) if name == host
        )

    def part(self, host: str, layer: int) -> bool:
        """Whether a host is part of its block's forward, without a module."""
        return self.model.anatomy.block(layer).hosts[host].part

    def envoy(self, host: str, layer: int | None) -> Any:
        """The object that carries a host's values, by the expression pages print for it."""
        found = self.model
        for part in vocabulary.HOSTS[host].path.split(".")[1:]:
            found = found.layers[layer] if part == "layers[i]" else getattr(found, part)
        return found

    def read(self, key: Key) -> Any:
        """Inside a trace: the value, as a user reads it."""
        value, layer = key
        return getattr(self.envoy(value.host, layer), value.name)

    def write(self, key: Key, new: Any) -> None:
        """Inside a trace: assign the value, as a user does."""
        value, layer = key
        setattr(self.envoy(value.host, layer), value.name, new)

    def extent(self, key: Key, axis: str) -> int:
        """The length an axis must have: the call's, or the size its host names."""
        value, layer = key
        call = {"batch": self.batch, "seq": self.seq, "query": self.seq, "key": self.seq}
        details = self.model.top.details if layer is None else self.details(value.host, layer)
        if axis == "hidden_size" and (width := details.own_widths.get(value.name)) is not None:
            return width
        return call[axis] if axis in call else getattr(self.envoy(value.host, layer), axis)

    def order(self, derived: bool = False, step: bool = False) -> list[Key]:
        """Every value of the model in the order its forward passes them; derived ones only if asked for.

        step: in the order of a decoding step.
        """
        keys = self._own(_BEFORE_BLOCKS)
        for layer in range(self.model.num_layers):
            keys += self._block_order(layer, step)
        keys += self._own(_AFTER_BLOCKS)
        return self._with_derived(keys) if derived else keys

    def _own(self, names: tuple[str, ...]) -> list[Key]:
        there = {row.name for row in self.rows if row.host == "model" and row.available}
        return [(vocabulary.BY_HOST["model"][name], None) for name in names if name in there]

    def _block_order(self, layer: int, step: bool) -> Iterator[Key]:
        for host, name in self.model.anatomy.block(layer).passes(step):
            yield vocabulary.BY_HOST[host][name], layer

    def _with_derived(self, keys: list[Key]) -> list[Key]:
        found = list(keys)
        for row in self.rows:
            if not row.value.derived or row.name == "state":  # which is read step by step
                continue
            for layer in [None] if row.host == "model" else row.layers:
                source = vocabulary.BY_HOST[row.host][row.value.source]
                found.insert(found.index((source, layer)) + 1, (row.value, layer))
        return found

    # -- what a clean run gave --------------------------------------------------

    @cached_property
    def clean(self) -> Recording:
        """Everything, recorded in one forward, per-token states included."""
        names = [
            f"{row.host}.{row.name}" for row in self.rows if row.available and row.name != "state"
        ]
        return self.model.record(self.ids, names)

    def get(self, host: str, name: str, layer: int | None = None) -> Any:
        """A value of the clean run, in the model's own dtype."""
        self.looks(host, name)
        return self.recorded((vocabulary.BY_HOST[host][name], layer))

    def recorded(self, key: Key) -> Any:
        """A value of the clean run, by its entry in the vocabulary."""
        value, layer = key
        return self.clean[
            f"{value.host}.{value.name}" if value.host != "model" else value.name, layer
        ]

    def looks(self, host: str, *names: str) -> None:
        """Note that the law now run looks at these values."""
        self.looked.update(vocabulary.BY_HOST[host][name] for name in names)

    def named(self, key: str, layer: int | None) -> vocabulary.Value:
        """The value a recording keeps under ``key`` on a block."""
        other = set(vocabulary.MIXERS) - set(self.model.mixers[layer] if layer is not None else ())
        bare = [value for value in vocabulary.lookup(key) if value.host not in other]
        mixers = self.model.mixers[layer] if layer is not None else ()
        return min(bare, key=lambda value: mixers.index(value.host) if value.host in mixers else 0)

    @cached_property
    def plain(self) -> torch.Tensor:
        """The logits [batch seq vocab_size] of the transformers model called as anyone would call it."""
        return self.forward(self.ids).logits

    @cached_property
    def masks(self) -> bool:
        """Whether the transformers model heeds a mask at all."""
        mask = torch.ones_like(self.ids)
        mask[:, :2] = 0
        return not torch.equal(self.forward(self.ids, attention_mask=mask).logits, self.plain)

    @cached_property
    def causal(self) -> bool:
        """Whether the transformers model itself reads no later token: some choose, from the whole text, what may be looked at."""
        ids = self.ids.clone()
        ids[:, -1] = (ids[:, -1] + 1) % self.model.vocab_size
        return torch.allclose(
            self.forward(ids).logits[:, :-1], self.plain[:, :-1], rtol=1e-4, atol=1e-5
        )

    @cached_property
    def rows_apart(self) -> bool:
        """Whether the transformers model itself gives a row of a batch what it gives the row alone."""
        return torch.allclose(
            self.forward(self.ids[:1]).logits, self.plain[:1], rtol=1e-3, atol=1e-4
        )

    @cached_property
    def differentiable(self) -> bool:
        """Whether autograd goes through the transformers model: some forwards write over what it needs."""
        try:
            with torch.enable_grad():
                self.hf(self.ids).logits.float().sum().backward()
        except RuntimeError:
            return False
        finally:
            self.hf.zero_grad(set_to_none=True)
        return True

    @property
    def runs(self) -> bool:
        """Whether the transformers model itself runs at all: some have parts that stay in float32 and do not take bfloat16."""
        try:
            self.plain  # noqa: B018  it is made and kept
        except RuntimeError:
            return False
        return True

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.hf(input_ids, **kwargs)

    @cached_property
    def traced(self) -> dict[Key, Any]:
        """Every value, read in one trace in the order of the forward."""
        found: dict[Key, Any] = {}
        keys = self.order(derived=True)
        with torch.no_grad(), self.model.trace(self.ids):
            for key in keys:
                found[key] = self.read(key)
        return found

    @cached_property
    def continues(self) -> bool:
        """Whether a forward hands its cache on, so that another can go on from it."""
        return getattr(self.forward(self.ids, use_cache=True), "cache", None) is not None

    def goes_on(self, start: int, stop: int) -> bool:
        """Whether the untouched model, run on tokens ``start`` to ``stop`` with a cache of those before, says what it says of the whole.

        Some kernels take no state with several tokens at once: they start anew, or fail.
        """
        if not self.continues:
            return False
        try:
            found = self.forward(
                **self.continued(start, stop), cache=self.prefilled(start), use_cache=True
            ).logits.float()
        except (RuntimeError, ValueError):
            return False
        return torch.allclose(
            found,
            self.plain[:, start:stop].float(),
            rtol=1e-3,
            atol=1e-3 * float(self.plain.abs().max()),
        )

    def indifferent(self, key: Key) -> bool:
        """Whether a router's value goes into no weight: it decides the choice alone, or the only chosen one's weight is made one."""
        value, layer = key
        if (
            value.host != "mlp"
            or value.name not in ("router_scores", "router_logits")
            or (scoring := self.details("mlp", layer).scoring) is None
        ):
            return False
        alone = (
            scoring.renormalised
            and self.model.anatomy.block(layer).hosts["mlp"].sizes["top_k"] == 1
        )
        return alone or (value.name == "router_scores" and scoring.choice_only)

    def stepped(self, key: Key) -> bool:
        """Whether a router's value may change a little with nothing moved: slots chosen one after another weigh the same but next to a tie."""
        value, layer = key
        if (
            value.host != "mlp"
            or value.name not in ("router_scores", "router_logits")
            or (scoring := self.details("mlp", layer).scoring) is None
        ):
            return False
        return scoring.repeated

    def prompt_only(self, key: Key) -> bool:
        value, layer = key
        return (
            layer is not None
            and value.name in self.model.anatomy.block(layer).hosts[value.host].prompt_only
        )

    def prefilled(self, length: int) -> Any:
        """A cache that holds the first ``length`` tokens, a fresh copy each time."""
        name = f"cache of {length}"
        if name not in self.memo:
            self.memo[name] = self.forward(self.ids[:, :length], use_cache=True).cache
        return copy.deepcopy(self.memo[name])

    def continued(self, start: int, stop: int | None = None) -> dict[str, torch.Tensor]:
        """The inputs of tokens ``start`` to ``stop`` (one, where not said), their mask as long as the text so far."""
        stop = start + 1 if stop is None else stop
        mask = (
            {
                "attention_mask": torch.ones(
                    self.batch, stop, dtype=torch.long, device=self.ids.device
                )
            }
            if self._masked
            else {}
        )
        positions = (
            {
                "position_ids": torch.arange(start, stop, device=self.ids.device).expand(
                    self.batch, -1
                )
            }
            if self._placed
            else {}
        )
        return {"input_ids": self.ids[:, start:stop], **mask, **positions}

    @cached_property
    def _placed(self) -> bool:
        """Whether the forward takes positions, as generation tells it."""
        return "position_ids" in inspect.signature(type(self.hf).forward).parameters

    @property
    def _masked(self) -> bool:
        """Whether a step takes the mask of the whole text: recurrent mixers multiply their input with it, as long as it is."""
        return all(mixers == ("self_attn",) for mixers in self.model.mixers)


def attempt(action: Any) -> BaseException | None:
    """Do something inside a trace; what it raised, or None."""
    try:
        action()
    except Exception as error:  # whatever it is, it is what the law looks at
        return error
    return None
