"""What comes after the blocks: the final norm on the stream's way, and the head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from explorer.discovery.backbone import Backbone
from explorer.discovery.trace_graph import tensors


@dataclass
class FinalNormProbe:
    """What ran around the blocks: norms that the stream leaving the last block went through, in order, what they returned, and the head's call."""

    calls: Counter[str] = field(default_factory=Counter)
    after: list[tuple[str, int]] = field(default_factory=list)
    made: dict[str, torch.Tensor] = field(default_factory=dict)
    left: torch.Tensor | None = None
    read: torch.Tensor | None = None
    head: torch.Tensor | None = None
    open: bool = False

    def block_done(self, left: object) -> None:
        self.left, self.after, self.open = next(tensors(left), None), [], True

    def ran(self, path: str, module: torch.nn.Module, made: object) -> None:
        """A module without children outside the blocks; a norm is one that has no matrix, and behind a matrix is no stream."""
        self.open = self.open and all(parameter.dim() == 1 for parameter in module.parameters())
        if self.open:
            self.made[path] = made
            self.after.append((path, self.calls[path]))
        self.calls[path] += 1

    def norm(self) -> tuple[str | None, int | None]:
        """The last norm before the head, and which of its calls that is where it makes several; None where there is none."""
        path, turn = self.after[-1] if self.after else (None, None)
        return path, turn if path is not None and self.calls[path] > 1 else None

    def head_reads(self, norm: str | None) -> bool:
        """Whether the head was called with what a norm (or, without one, the last block) returned, itself or a view of it."""
        made = self.made.get(norm) if norm is not None else self.left if not self.after else None
        return (
            isinstance(made, torch.Tensor)
            and self.read is not None
            and (
                self.read is made or self.read._base is (made if made._base is None else made._base)
            )
        )


@contextmanager
def watched(twin: torch.nn.Module, base: Backbone) -> Iterator[FinalNormProbe]:
    """Watch the modules outside the blocks as the run goes on."""
    ending = FinalNormProbe()
    inside = f"{base.blocks}."
    last = twin.get_submodule(base.blocks)[-1]

    def headed(module: torch.nn.Module, args: tuple, out: torch.Tensor) -> None:
        ending.read, ending.head = args[0], out

    hooks = [last.register_forward_hook(lambda own, args, out: ending.block_done(out))]
    hooks.append(twin.get_submodule(base.head).register_forward_hook(headed))
    for path, module in twin.named_modules():
        if (
            path
            and not path.startswith(inside)
            and path != base.head
            and not any(True for _ in module.children())
        ):
            hooks.append(
                module.register_forward_hook(
                    lambda own, args, out, path=path: ending.ran(path, own, out)
                )
            )
    try:
        yield ending
    finally:
        for hook in hooks:
            hook.remove()
