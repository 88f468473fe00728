"""One probe: a model built on the meta device and run, with the shape and dtype of every tensor
that passes a name.

This is the only module here that runs torch.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from explorer.discovery.recorded_run import RecordedRun, named_arguments, named_tensors
from explorer.meta_device import build_meta, cache_argument, cache_of, without_padding_warning

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: How a call is called whose tensors a site is of; parameters and buffers are of no call.
PREFILL, DECODE = "prefill", "decode"


class TensorSite(NamedTuple):
    """Where a tensor is: of which call, at which module's path, as what, and its name there.

    ``what`` is "parameter", "buffer", "in", "out", "cache", "held" (by a module, for the next call)
    or "matmul".
    """

    call: str
    path: str
    what: str
    name: str


class TensorShape(NamedTuple):
    """A tensor's shape and dtype."""

    shape: tuple[int, ...]
    dtype: str


Observation = dict[TensorSite, TensorShape]

#: Which arguments of an operation are the matrices that are multiplied; all others of torch come
#: down to these.
_OPERANDS = {
    "aten.mm": (0, 1),
    "aten.addmm": (1, 2),
    "aten.bmm": (0, 1),
    "aten.baddbmm": (1, 2),
    "aten.convolution": (0, 1),
    "aten._grouped_mm": (0, 1),
}

#: Those of them that have a matrix on the right for each on the left.
_BATCHED = ("aten.bmm", "aten.baddbmm")

#: The file that calls a module's forward.
_MODULE_FILE = os.path.join("nn", "modules", "module.py")


def build(config: Any, model_class: Any, numbers: bool = False) -> PreTrainedModel:
    """A model of a configuration: of shapes alone, in bfloat16; or with random numbers, in float32
    on the processor."""
    if not numbers:
        return build_meta(config, model_class=model_class)
    return model_class._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def with_first_blocks(model: PreTrainedModel, path: str, count: int) -> PreTrainedModel:
    """The same model with its first ``count`` blocks alone."""
    owner, _, name = path.rpartition(".")
    blocks: Any = model.get_submodule(path)
    setattr(model.get_submodule(owner), name, blocks[:count])
    return model


def of_parameters(model: torch.nn.Module) -> Observation:
    """The parameters of a model, as `observe` notes them."""
    sites: Observation = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        _note(sites, "", name.rpartition(".")[0], "parameter", name.rpartition(".")[2], parameter)
    return sites


def of_recorded_run(run: RecordedRun) -> Observation:
    """What a recorded run shows, products of matrices left out."""
    sites = of_parameters(run.model)
    for call, forward in ((PREFILL, run.prompt), (DECODE, run.step)):
        if forward is None:
            continue
        for path, one in forward.module_calls():
            for argument, value in named_arguments(one).items():
                keywords = argument == "kwargs" and isinstance(value, dict)
                for name, tensor in named_tensors("" if keywords else argument, value):
                    _note(sites, call, path, "in", name, tensor)
            for name, tensor in named_tensors("", one.output):
                _note(sites, call, path, "out", name, tensor)
        for cached in forward.cache:
            layer = "" if cached.layer is None else str(cached.layer)
            _note(sites, call, layer, "cache", cached.name, cached.tensor)
        for (path, name), tensor in forward.held.items():
            _note(sites, call, path, "held", name, tensor)
    return sites


def observe(
    model: Any, batch: int, seq: int, products: bool = False, sites: Observation | None = None
) -> Observation:
    """Run ``model`` on a prompt [batch seq] and one further token, and note every tensor.

    products: note the matrices multiplied in the decoding step too; sites: where to note, which
    tells how far a forward came that raises. Raises whatever the forward raises.
    """
    sites = {} if sites is None else sites
    sites |= of_parameters(model)
    for name, buffer in model.named_buffers():
        _note(sites, "", name.rpartition(".")[0], "buffer", name.rpartition(".")[2], buffer)
    ids = torch.zeros(batch, seq, dtype=torch.long, device=model.device)
    before = {
        path: {name for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
        for path, module in model.named_modules()
    }
    with (
        torch.no_grad(),
        without_padding_warning(model) if model.device.type == "meta" else nullcontext(),
    ):
        with _noting_calls(model, sites, PREFILL):
            out = model(ids, use_cache=True)
        again = cache_of(out, state=True) or _filled_cache(model, ids)
        _note_cache(sites, PREFILL, model, again, before)
        if again is not None:
            with _noting_calls(model, sites, DECODE) as stack:
                with _NotingProducts(sites, stack) if products else nullcontext():
                    out = model(ids[:, :1], use_cache=True, **again)
            _note_cache(sites, DECODE, model, cache_of(out, state=True) or again, before)
    return sites


def _note(
    sites: Observation, call: str, path: str, what: str, name: str, tensor: torch.Tensor
) -> None:
    sites.setdefault(
        TensorSite(call, path, what, name),
        TensorShape(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")),
    )


@lru_cache(maxsize=4096)
def _signature_of_forward(kind: type) -> inspect.Signature:
    return inspect.signature(kind.forward)


def _filled_cache(model: Any, ids: torch.Tensor) -> dict[str, Any] | None:
    """A cache filled by a call that gets it and does not hand it back; None where the class takes
    none."""
    from transformers import DynamicCache

    name = cache_argument(model)
    if name is None:
        return None
    cache = DynamicCache(config=model.config)
    try:
        model(ids, use_cache=True, **{name: cache})
    except Exception:
        return None
    return (
        {name: cache}
        if any(
            tensor.dim() for layer in cache.layers for _, tensor in named_tensors("", vars(layer))
        )
        else None
    )


@contextmanager
def _noting_calls(model: torch.nn.Module, sites: Observation, call: str) -> Iterator[list[str]]:
    """Note what modules are called with and return, the first time they run; gives the stack of
    running modules."""
    stack: list[str] = []
    handles = []

    def enter(path: str) -> Any:
        def hook(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            stack.append(path)
            try:
                given = dict(
                    _signature_of_forward(type(module)).bind(module, *args, **kwargs).arguments
                )
                given.pop("self", None)
            except TypeError:
                given = {"input": args, **kwargs}
            for name, value in given.items():
                for whole, tensor in named_tensors(
                    "" if name == "kwargs" and isinstance(value, dict) else name, value
                ):
                    _note(sites, call, path, "in", whole, tensor)

        return hook

    def leave(path: str) -> Any:
        def hook(module: torch.nn.Module, args: tuple, output: Any) -> None:
            stack.pop()
            for name, tensor in named_tensors("", output):
                _note(sites, call, path, "out", name, tensor)

        return hook

    try:
        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(enter(path), with_kwargs=True))
            handles.append(module.register_forward_hook(leave(path)))
        yield stack
    finally:
        for handle in handles:
            handle.remove()


def _note_cache(
    sites: Observation,
    call: str,
    model: torch.nn.Module,
    again: dict[str, Any] | None,
    before: Mapping[str, set[str]],
) -> None:
    """What is kept for the next call: in what that is given, or by modules themselves."""
    kept = next(iter(again.values())) if again is not None and "state" not in again else None
    layers = getattr(kept, "layers", None)
    for at, layer in enumerate(layers if layers is not None else [] if kept is None else [kept]):
        for name, value in vars(layer).items() if hasattr(layer, "__dict__") else ():
            for whole, tensor in named_tensors(name, value):
                if tensor.dim():
                    _note(
                        sites, call, str(at) if layers is not None else "", "cache", whole, tensor
                    )
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.dim() > 1 and name not in before[path]:
                _note(sites, call, path, "held", name, value)


class _NotingProducts(TorchDispatchMode):
    """Notes the operands of every product of matrices, under the module that runs.

    What one line of it multiplies again and again, as for each expert, is one product that has all
    their rows: how often it is done may depend on sizes.
    """

    def __init__(self, sites: Observation, stack: list[str]) -> None:
        super().__init__()
        self.sites, self.stack = sites, stack
        #: How many products a module has, and by module, line and other axes the name of the first.
        self.counts: Counter[str] = Counter()
        self.first: dict[tuple, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        kind = str(func).rpartition(".")[0]
        if kind in _OPERANDS:
            path = self.stack[-1] if self.stack else ""
            left, right = (args[at] for at in _OPERANDS[kind])
            key = (
                path,
                kind,
                _source_lines(),
                left.shape[1:],
                right.shape[kind in _BATCHED :],
                out.shape[1:],
            )
            again = key in self.first
            if not again:
                self.first[key] = f"{self.counts[path]}.{kind}"
                self.counts[path] += 1
            for side, tensor, grows in (
                ("left", left, True),
                ("right", right, kind in _BATCHED),
                ("out", out, True),
            ):
                site = TensorSite(DECODE, path, "matmul", f"{self.first[key]}.{side}")
                _note(self.sites, *site, tensor)
                if again and grows:
                    rows, *others = self.sites[site].shape
                    self.sites[site] = TensorShape(
                        (rows + tensor.shape[0], *others), self.sites[site].dtype
                    )
        return out


def _source_lines() -> tuple[tuple[str, int], ...]:
    """Where in the running module's own forward an operation is, the calls on the way there
    included."""
    found, frame = [], sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.endswith(_MODULE_FILE):
        found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)
