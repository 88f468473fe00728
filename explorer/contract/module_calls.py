"""What native modules are called with and return, seen by torch's own hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch

from explorer.discovery.trace_graph import tensors

#: The tensors a module was called with, and those it returned.
Call = tuple[list[torch.Tensor], list[torch.Tensor]]


@contextmanager
def module_calls(
    modules: Iterable[torch.nn.Module],
    copied: bool = False,
    calls_before: Mapping[torch.nn.Module, int | None] = MappingProxyType({}),
) -> Iterator[dict[torch.nn.Module, Call]]:
    """Collect the call of each of ``modules`` while the context is open.

    A module that is not called exactly once is left out when the context closes; one with a number
    in ``calls_before`` where it is not called that often before. copied: copy what is returned,
    since some forwards write into tensors that they were passed.
    """
    calls: dict[torch.nn.Module, Call] = {}
    counts: Counter[torch.nn.Module] = Counter()

    def note(module: torch.nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        counts[module] += 1
        returned = list(tensors(output))
        if copied:
            returned = [tensor.clone() for tensor in returned]
        calls[module] = list(tensors((args, kwargs))), returned

    handles = [
        module.register_forward_hook(note, with_kwargs=True) for module in dict.fromkeys(modules)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
        for module, count in counts.items():
            if count != (calls_before.get(module) or 0) + 1:
                del calls[module]
