"""The traces of one model run one at a time, from whatever thread, and fail at the user's line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from explorer.engine.nnsight_api import Backend, WithBlockNotFoundError, nnsight
from explorer.engine.observers import ModelBusy

_PACKAGE = Path(__file__).parents[1]
#: Files whose frames show how a value is served, not where it was asked for.
_SERVING = tuple(
    str(_PACKAGE / name)
    for name in (
        "model/envoys.py",
        "model/host_values.py",
        "model/served_values.py",
        "model/derived.py",
        "model/language_model.py",
        "engine/serialize.py",
    )
)
_NNSIGHT = str(Path(nnsight.__file__).parent)


class SerializedBackend(Backend):
    """Runs a trace when no other trace or recording of its model is running.

    The engine gathers a trace's blocks on the model before it runs them, so the
    wait begins before that.
    """

    def __call__(self, tracer: Any) -> None:
        model = tracer.envoy
        with model.lock:
            if model.interleaver.interleaving:
                raise ModelBusy
            try:
                super().__call__(tracer)
            except Exception as error:
                _end_traceback_at_user(error.__traceback__)
                raise


def serialized(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an engine method that a block may trace, for models used from several threads.

    The engine takes any run in progress for the one this call is made in; here only a run of
    this thread counts.
    """
    plain = method.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]  set by the engine's decorator

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            if self.interleaver.interleaving:
                return plain(self, *args, **kwargs)
        fn = plain.__get__(self, type(self))
        tracer = self.trace(*args, fn=fn, **kwargs)
        try:
            tracer.capture()  # looks for the block two frames up, which is where this was called
        except WithBlockNotFoundError:
            return self.interleave(fn, *args, **kwargs)
        return tracer

    return wrapper


def _end_traceback_at_user(traceback: TracebackType | None) -> None:
    """Where serving a value failed, let the traceback end at the line that asked for the value."""
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    files = [frame.tb_frame.f_code.co_filename for frame in frames]
    if files and files[-1].startswith(_SERVING):
        of_users = [
            frame
            for frame, file in zip(frames, files, strict=True)
            if not file.startswith((*_SERVING, _NNSIGHT))
        ]
        if of_users:
            of_users[-1].tb_next = None
