"""The engine, imported in the one order that works.

nnsight puts ``.save`` on ``object``; anyio's sockets module loads lazily and
fails to build its types after that, so it is touched first. Every module of
ours that needs nnsight, or a transformers modeling module, imports this one first.
"""

from __future__ import annotations

import logging
from typing import Any

import anyio
import greenlet
import torch

anyio.connect_tcp  # noqa: B018  loads anyio's sockets module before nnsight changes object

import nnsight  # noqa: E402
from nnsight.intervention.batching import Batcher  # noqa: E402
from nnsight.intervention.envoy import Envoy  # noqa: E402
from nnsight.intervention.eproperty import WriteBack, eproperty  # noqa: E402
from nnsight.intervention.interleaver import Mediator, OutOfOrderError  # noqa: E402
from nnsight.intervention.source import (  # noqa: E402
    BIND,
    NO_SKIP,
    OP,
    SHELL,
    STATE,
    SourceNotAvailable,
    State,
    bind,
    decorator_chain,
    function_like,
    make_op,
    rewrap,
    source_tree,
)
from nnsight.intervention.source import Instrument as EngineInstrument  # noqa: E402
from nnsight.modeling.transformers import TransformersModel  # noqa: E402
from nnsight.tracing.backend import Backend  # noqa: E402
from nnsight.tracing.tracer import WithBlockNotFoundError  # noqa: E402

__all__ = [
    "BIND",
    "NO_SKIP",
    "OP",
    "SHELL",
    "STATE",
    "Backend",
    "Batcher",
    "EngineInstrument",
    "Envoy",
    "Mediator",
    "OutOfOrderError",
    "SourceNotAvailable",
    "State",
    "TransformersModel",
    "WithBlockNotFoundError",
    "WriteBack",
    "bind",
    "decorator_chain",
    "end_wait",
    "eproperty",
    "function_like",
    "make_op",
    "nnsight",
    "rewrap",
    "rows_of_invoke",
    "source_tree",
]


def rows_of_invoke(interleaver: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of a batched tensor [batch …] that belong to the invoke now running."""
    group = Mediator.current("the rows of an invoke").batch_group
    return interleaver.batcher.narrow(tensor, group)


def end_wait(mediator: Mediator) -> None:
    """Have what a block waits for raise OutOfOrderError there; the block may catch it and go on."""
    worker: Any = mediator.worker
    worker.parent = greenlet.getcurrent()
    try:
        mediator.pending = worker.throw(
            OutOfOrderError(f"'{mediator.pending}' was requested and is not reached")
        )
    except BaseException as error:
        # As the engine does: the frames of the block alone, before those of the model join them.
        if not hasattr(error, "__intervention_tb__"):
            error.__intervention_tb__ = error.__traceback__  # pyright: ignore[reportAttributeAccessIssue]
        raise


class _KernelNotices(logging.Filter):
    """Drops the advice to install faster kernels, which nothing here needs."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "falling back to its reference PyTorch implementation" not in record.getMessage()


logging.getLogger("transformers.integrations.hub_kernels").addFilter(_KernelNotices())
