"""Running a model once and recording it: the making of a `RecordedRun`."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from explorer.discovery.backbone import (
    Backbone,
    NotADecoder,
    PassthroughBlock,
    blocks_at,
    equal_blocks,
    find_backbone,
    swapped_blocks,
)
from explorer.discovery.recorded_run import (
    CachedTensor,
    RecordedForward,
    RecordedRun,
    named_tensors,
)
from explorer.discovery.trace_graph import Call
from explorer.discovery.trace_recorder import Recorder
from explorer.known_numbers import KnownNumbers
from explorer.meta_device import (
    cache_argument,
    cache_of,
    mask_arguments,
    probe_lengths,
    without_padding_warning,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Where a model's record is kept: on the model itself, so that it is there as long as the model is.
_ATTRIBUTE = "_bestiary_recorded_run"

#: Of each kind of block the first so many run: the second shows what the first changes, such as
#: the dtype of the residual stream.
_RUN_OF_EACH_KIND = 2


def recorded_run(model: PreTrainedModel, masked: bool | None = None) -> RecordedRun:
    """Return the record of a transformers model, made on the first call and kept on the model.

    The model must not be in the middle of a trace. It is left as it was found.

    masked: whether to pass an attention mask; None to pass one only where the forward needs it.

    Raises whatever the model's forward raises.
    """
    found = cached_run(model)
    if found is None or masked not in (None, found.masked):
        found = remember(model, record_run(model, masked))
    return found


def cached_run(model: PreTrainedModel) -> RecordedRun | None:
    """Return the record that is kept on a model, None where there is none."""
    return model.__dict__.get(_ATTRIBUTE)


def remember(model: PreTrainedModel, run: RecordedRun) -> RecordedRun:
    """Keep ``run`` as the record of ``model``, which must be built like the model that ran."""
    model.__dict__[_ATTRIBUTE] = run
    return run


def record_run(
    model: PreTrainedModel,
    masked: bool | None = None,
    lengths: tuple[int, int] | None = None,
    every_block: bool = False,
    distinct: bool = False,
    operations: bool = True,
    step: bool = True,
) -> RecordedRun:
    """Run a model and return its record.

    masked: as for `recorded_run`.
    lengths: batch and tokens of the prompt; None for two that no size of the model equals.
    every_block: whether all blocks run. distinct: whether every block is a kind of its own.
    operations: whether operations are recorded. step: whether a decoding step follows the prompt.
    """
    settings = (lengths, every_block, distinct, operations, step)
    try:
        return _Run(model, bool(masked), *settings).record()
    except (NotImplementedError, RuntimeError):
        if next(model.parameters()).device.type != "meta":
            raise
        # Without a mask some forwards look at the positions for packed sequences, and on the meta
        # device there are no positions to look at.
        if masked is None:
            with suppress(NotImplementedError, RuntimeError):
                return _Run(model, True, *settings).record()
        with KnownNumbers():
            return replace(_Run(model, bool(masked), *settings).record(), asks_numbers=True)


class _Run:
    """Makes one `RecordedRun`."""

    def __init__(
        self,
        model: PreTrainedModel,
        masked: bool,
        lengths: tuple[int, int] | None,
        every_block: bool,
        distinct: bool,
        operations: bool,
        step: bool,
    ) -> None:
        self.model, self.masked, self.operations, self.step = model, masked, operations, step
        self.batch, self.seq = lengths or probe_lengths(model)
        self.backbone = _backbone(model, masked)
        base = self.backbone
        self.blocks = [] if base is None else list(model.get_submodule(base.blocks).children())
        count = len(self.blocks)
        self.kinds = (
            [(at,) for at in range(count)] if distinct else equal_blocks(self.blocks, model.config)
        )
        few = sorted(at for group in self.kinds for at in group[:_RUN_OF_EACH_KIND])
        self.ran = tuple(range(count)) if every_block else tuple(few)

    def record(self) -> RecordedRun:
        device = next(self.model.parameters()).device
        ids = torch.arange(self.batch * self.seq, device=device).view(self.batch, self.seq)
        ids = ids % self.model.config.get_text_config().vocab_size
        meta = device.type == "meta"
        with (
            torch.no_grad(),
            without_padding_warning(self.model) if meta else nullcontext(),
            _attributes_restored(self.model) as before,
        ):
            self.before = before
            if len(self.ran) < len(self.blocks):
                try:
                    run = self._forwards(ids)
                    if all(run.visits(layer) == 1 for layer in range(len(self.blocks))):
                        return run
                except Exception:  # a block may need what a replaced one would have made
                    pass
                self.ran = tuple(range(len(self.blocks)))
            return self._forwards(ids)

    def _forwards(self, ids: torch.Tensor) -> RecordedRun:
        with self._with_few_blocks():
            found = None
            with suppress(TypeError):  # some have to be given a cache
                found = self._forward(ids, **mask_arguments(ids, self.masked))
            if found is None or found[1] is None:
                found = self._with_given_cache(ids) or found
            if found is None:
                found = self._forward(ids, **mask_arguments(ids, self.masked))  # raises
            prompt, cache = found
            run = RecordedRun(self.model, self.backbone, self.kinds, self.ran, self.masked, prompt)
            if cache is not None and self.step:
                try:
                    run.step, _ = self._forward(ids[:, :1], **cache)
                except Exception as error:
                    run.step_error = error
            return run

    def _with_given_cache(self, ids: torch.Tensor) -> tuple[RecordedForward, dict[str, Any]] | None:
        """Run the prompt with a given cache; return None where the forward takes or fills none."""
        from transformers import DynamicCache

        name = cache_argument(self.model)
        if name is None:
            return None
        cache = DynamicCache(config=self.model.config)
        try:
            found, _ = self._forward(ids, **{name: cache}, **mask_arguments(ids, self.masked))
        except Exception:
            return None
        found.cache, found.windows = tuple(_cached(cache, found.writers)), _windows(cache)
        return (found, {name: cache}) if found.cache else None

    def _with_few_blocks(self) -> Any:
        if self.backbone is None or len(self.ran) == len(self.blocks):
            return nullcontext()
        return _few_blocks(self.model, self.backbone.blocks, self.kinds, self.ran)

    def _forward(
        self, ids: torch.Tensor, **options: Any
    ) -> tuple[RecordedForward, dict[str, Any] | None]:
        """Run and record one forward; return the cache it returned too, as a keyword argument."""
        blocks = f"{self.backbone.blocks}." if self.backbone is not None else ""
        firsts = [f"{blocks}{group[0]}" for group in self.kinds]
        seconds = [f"{blocks}{group[1]}" for group in self.kinds if len(group) > 1]
        with _Writers() as writers:
            recorder = Recorder(
                self.model,
                firsts if self.operations else (),
                seconds if self.operations else (),
                whole=True,
                operations=self.operations,
                entered=writers.look,
            )
            writers.recorder = recorder
            with recorder:
                out = self.model(input_ids=ids, use_cache=True, **options)
        assert recorder.whole is not None
        found = RecordedForward(
            batch=ids.shape[0],
            seq=ids.shape[1],
            output=out,
            blocks=recorder.blocks,
            whole=recorder.whole,
            writers=writers.wrote,
        )
        cache = cache_of(out, state=True)
        if cache is not None and "state" not in cache:
            found.cache = tuple(_cached(next(iter(cache.values())), writers.wrote))
            found.windows = _windows(next(iter(cache.values())))
        found.held = {
            (path, name): value
            for path, module in self.model.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, torch.Tensor)
            and value.dim() > 1
            and module in self.before
            and value is not self.before[module].get(name)
        }
        return found, cache


def _backbone(model: PreTrainedModel, masked: bool) -> Backbone | None:
    """Return the backbone of a model, None where it has none."""
    try:
        return find_backbone(model, lambda root, paths: _ran(root, paths, masked))
    except NotADecoder:
        return None


def _ran(root: PreTrainedModel, paths: Sequence[str], masked: bool) -> list[str]:
    """Return those of the blocks at ``paths`` that a forward over token ids runs exactly once."""
    ids = torch.zeros(1, 3, dtype=torch.long, device=next(root.parameters()).device)
    counts = dict.fromkeys(paths, 0)

    def count(path: str) -> Any:
        return lambda *_: counts.update({path: counts[path] + 1})

    with ExitStack() as undo, torch.no_grad(), without_padding_warning(root):
        for path in paths:
            undo.callback(root.get_submodule(path).register_forward_hook(count(path)).remove)
        root(ids, **mask_arguments(ids, masked))
    return [path for path, number in counts.items() if number == 1]


@contextmanager
def _few_blocks(
    model: PreTrainedModel, path: str, kinds: Sequence[tuple[int, ...]], ran: Sequence[int]
) -> Iterator[None]:
    """Let the blocks in ``ran`` run; others return what the last equal block before returned."""
    blocks = list(blocks_at(model, path))
    returned: dict[int, Any] = {}
    with ExitStack() as undo:
        for layer in ran:
            hook = blocks[layer].register_forward_hook(
                lambda module, args, out, layer=layer: returned.update({layer: out})
            )
            undo.callback(hook.remove)
        swapped = list(blocks)
        for group in kinds:
            last = group[0]
            for layer in group:
                if layer in ran:
                    last = layer
                else:
                    swapped[layer] = PassthroughBlock(
                        blocks[layer], lambda args, kwargs, last=last: returned[last]
                    )
        undo.enter_context(swapped_blocks(model, path, swapped))
        yield


@contextmanager
def _attributes_restored(model: PreTrainedModel) -> Iterator[dict[torch.nn.Module, dict[str, Any]]]:
    """Restore the attributes of every module afterwards: some models keep their state there."""
    before = {module: dict(vars(module)) for module in model.modules()}
    try:
        yield before
    finally:
        for module, attributes in before.items():
            for name in vars(module).keys() - attributes.keys():
                object.__delattr__(module, name)
            for name, value in attributes.items():
                if vars(module).get(name) is not value:
                    object.__setattr__(module, name, value)


class _Writers:
    """Notes which module is running when something is written to a transformers cache.

    ``wrote`` is, by index in the cache and name of what was written, the path of the module.
    """

    #: By name of a method that writes: the position of the layer index, and what is written.
    METHODS: Mapping[str, tuple[int, tuple[str, ...]]] = {
        "update": (2, ("keys", "values")),
        "update_conv_state": (1, ("conv_states",)),
        "update_recurrent_state": (1, ("recurrent_states",)),
    }

    def __init__(self) -> None:
        self.wrote: dict[tuple[int, str], str] = {}
        self.recorder: Recorder | None = None
        self._caches: list[Any] = []

    def __enter__(self) -> _Writers:
        return self

    def __exit__(self, *exception: object) -> None:
        for cache in self._caches:
            for name in self.METHODS:
                vars(cache).pop(name, None)

    def look(self, path: str, call: Call) -> None:
        """Watch the caches among the arguments of a call."""
        from transformers import Cache

        for _, value in call.arguments():
            if isinstance(value, Cache) and all(value is not one for one in self._caches):
                self._caches.append(value)
                for name, (position, written) in self.METHODS.items():
                    if hasattr(value, name):
                        vars(value)[name] = self._watched(getattr(value, name), position, written)

    def _watched(self, method: Any, position: int, written: Sequence[str]) -> Any:
        """Return a copy of a cache's method that notes the running module first."""

        @functools.wraps(method)
        def write(cache: Any, *args: Any, **kwargs: Any) -> Any:
            layer = kwargs["layer_idx"] if "layer_idx" in kwargs else args[position]
            assert self.recorder is not None
            path = self.recorder.running[-1].module
            self.wrote.update({(layer, name): path for name in written})
            return method(*args, **kwargs)

        return types.MethodType(write, method.__self__)


def _cached(cache: Any, wrote: Mapping[tuple[int, str], str]) -> Iterator[CachedTensor]:
    """Yield the tensors in a cache, without those that are single numbers."""
    layers = getattr(cache, "layers", None)
    for index, layer in enumerate([cache] if layers is None else layers):
        for attribute, value in vars(layer).items() if hasattr(layer, "__dict__") else ():
            for name, tensor in named_tensors(attribute, value):
                if not tensor.dim():
                    continue
                if layers is None:
                    yield CachedTensor(None, name, tensor, "")
                    continue
                # What is not written by these methods belongs to whoever writes the keys or state.
                others = (path for (at, _), path in wrote.items() if at == index)
                writer = wrote.get((index, attribute)) or next(others, "")
                yield CachedTensor(index, name, tensor, writer)


def _windows(cache: Any) -> tuple[int | None, ...]:
    return tuple(getattr(layer, "sliding_window", None) for layer in getattr(cache, "layers", ()))
