"""Models and runs of all sessions, bounded by bytes. The worker alone loads and runs models."""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from explorer.app.runs import (
    Key,
    Run,
    TooLong,
    deferred_values,
    head_counts,
    logits_source,
    plan_recording,
    recordable_values,
    value_bytes,
)
from explorer.app.worker import Cancelled, Job
from explorer.model import edits
from explorer.model.errors import Cancelled as RecordingCancelled
from explorer.model.prompts import model_inputs, token_texts
from explorer.specimens.recipes import recipe
from explorer.vocabulary.formatting import size_in_bytes
from explorer.widgets.views import next_token as views_next
from explorer.widgets.views import state as views_state
from explorer.widgets.views.code import Intervention, Origin
from explorer.widgets.views.picture import Refusal
from explorer.widgets.views.selection import recurrence_of
from explorer.widgets.views.tensor import value_of

#: For a model nobody gave a prompt for.
ANY_PROMPT = "The Eiffel Tower is in the city of"

MODEL_BYTES = 8_000_000_000
RUN_BYTES = 4_000_000_000
#: What runs may take in all, those that open pages hold among them.
LIVE_BYTES = 8_000_000_000
#: What was asked for later, of all runs.
EXTRA_BYTES = 1_000_000_000


class BoundedCache:
    """A cache that forgets the least recently used until its sizes fit; any thread may use it."""

    def __init__(self, limit: int, size: Callable[[Any], int]) -> None:
        self.limit, self.size = limit, size
        self._kept: OrderedDict[Any, Any] = OrderedDict()
        self._lock = threading.RLock()

    def get(self, key: Any) -> Any:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def __contains__(self, key: Any) -> bool:
        with self._lock:
            return key in self._kept

    def items(self) -> list[tuple[Any, Any]]:
        """What is kept now, least recently used first."""
        with self._lock:
            return list(self._kept.items())

    def put(self, key: Any, value: Any) -> None:
        """Keep ``value``, however large; older ones make room for it."""
        with self._lock:
            self._kept[key] = value
            self._kept.move_to_end(key)
            while len(self._kept) > 1 and self.bytes > self.limit:
                self._kept.popitem(last=False)

    def drop(self, unwanted: Callable[[Any], bool]) -> None:
        """Forget everything under a key that is ``unwanted``."""
        with self._lock:
            for key in [key for key in self._kept if unwanted(key)]:
                del self._kept[key]

    def drop_oldest(self) -> bool:
        """Forget the least recently used; False when nothing is kept."""
        with self._lock:
            return bool(self._kept) and self._kept.popitem(last=False) is not None

    @property
    def bytes(self) -> int:
        with self._lock:
            return sum(self.size(value) for value in self._kept.values())


def weight_bytes(model: Any) -> int:
    """Return the bytes of a model's parameters and buffers; meta tensors take none."""
    return sum(
        tensor.numel() * tensor.element_size()
        for tensors in (model._module.parameters(), model._module.buffers())
        for tensor in tensors
        if tensor.device.type != "meta"
    )


def tensor_bytes(value: Any) -> int:
    """Return the bytes of a recorded tensor, 0 for anything else."""
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


#: Of each file that a model is loaded from: name, bytes, time of the last change.
FileStamps = tuple[tuple[str, int, int], ...]


def file_stamps(source: str) -> FileStamps:
    """Return the stamps of a checkpoint folder's files, or of a file; none for other sources."""
    try:
        path = Path(source).expanduser()
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        stats = [(file.name, file.stat()) for file in files if file.is_file()]
    except (OSError, RuntimeError, ValueError):
        return ()
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


class Store:
    """Loads models and makes runs, once each."""

    def __init__(self, load: Callable[[str], Any]) -> None:
        self._load = load
        self.models = BoundedCache(MODEL_BYTES, weight_bytes)
        self.runs = BoundedCache(RUN_BYTES, lambda run: run.bytes)
        self._live: weakref.WeakSet[Run] = weakref.WeakSet()
        self.extras = BoundedCache(EXTRA_BYTES, tensor_bytes)
        self._files: dict[str, FileStamps] = {}

    def _forget_changed(self, source: str) -> None:
        """Forget a model, and its runs, whose files are not those it was loaded from any more."""
        stamps = file_stamps(source)
        if self._files.setdefault(source, stamps) != stamps:
            self._files[source] = stamps
            self.models.drop(lambda key: key == source)
            self.runs.drop(lambda key: key[0] == source)

    def model(self, source: str) -> Any:
        """Return the model of ``source``, loading it if needed. Raises what loading raises."""
        self._forget_changed(source)
        model = self.models.get(source)
        if model is None:
            model = self._load(source)
            self.models.put(source, model)
        return model

    def decoder(self, source: str) -> Callable[[int], str]:
        """Return a function from a token id to text that any thread may call.

        It uses a copy of the tokenizer: the worker may be encoding with the model's own at the same
        time.
        """
        tokenizer, lock = copy.deepcopy(self.model(source).tokenizer), threading.Lock()

        @functools.lru_cache(maxsize=4096)
        def decode(token: int) -> str:
            with lock:
                return token_texts(tokenizer, [token])[0]

        return decode

    def run(
        self, source: str, prompt: str, interventions: tuple[Intervention, ...], job: Job
    ) -> Run:
        """Return the run of a prompt, recording it (and its baseline, with interventions) if
        needed.

        Raises PromptError for a prompt that cannot be run, Cancelled when the job is to stop.
        """
        self._forget_changed(source)
        key = (source, prompt, interventions)
        if (run := self.runs.get(key)) is not None:
            return run
        job.stage(f"Loading {shown_source(source)}")
        model = self.model(source)
        tokens = model_inputs(model, prompt)["input_ids"].shape[1]
        baseline = self.run(source, prompt, (), job) if interventions else None
        job.stage(f"Running {tokens} tokens" + (" with interventions" if interventions else ""))
        recorded = plan_recording(recordable_values(model, tokens))
        self._make_room(recorded.bytes)
        recording = self._record(
            model, prompt, job, values=recorded.names, edits=[_edit(one) for one in interventions]
        )
        job.stage("Replaying the recurrent state")
        norms = state_norms(recording, job)
        run = Run(
            Origin(source, prompt, interventions),
            recording,
            head_counts(model),
            *deferred_values(model, recorded.deferred),
            norms,
            baseline,
        )
        self.runs.put(key, run)
        self._live.add(run)
        return run

    def _make_room(self, needed: int) -> None:
        """Drop finished runs until ``needed`` bytes fit beside those that open pages hold.

        Raises TooLong when they do not fit without them either.
        """
        while (used := sum(run.bytes for run in list(self._live))) + needed > LIVE_BYTES:
            if not self.runs.drop_oldest():
                raise TooLong(
                    f"The runs on open pages take {size_in_bytes(used)} and this one would take "
                    f"{size_in_bytes(needed)}, above the limit of {size_in_bytes(LIVE_BYTES)} for "
                    "all runs: close a page, or shorten the prompt."
                )

    def record_more(self, run: Run, keys: Sequence[Key], job: Job) -> None:
        """Record more values of a run, all of one block or of the model, for `with_recorded_since`.

        Values above the limit are stored as a refusal. Raises Unavailable with the reason.
        """
        model = self.model(run.origin.source)
        names, layer = [name for name, _ in keys], keys[0][1]
        needed = sum(
            value_bytes(model, value_of(name, run.mixers[layer or 0]), layer, len(run.tokens))
            for name in names
        )
        if needed > self.extras.limit:
            reason = Refusal(
                f"For {len(run.tokens)} tokens this would take {size_in_bytes(needed)}, above the "
                f"limit of {size_in_bytes(self.extras.limit)}: shorten the prompt."
            )
            self._keep_values(run, dict.fromkeys(keys, reason))
            return
        job.stage(f"Recording {', '.join(names)}")
        recording = self._record(
            model,
            run.origin.prompt,
            job,
            values=names,
            layers=None if layer is None else [layer],
            edits=[_edit(one) for one in run.origin.interventions],
        )
        self._keep_values(run, {key: recording[key] for key in keys})

    def logits(self, run: Run, token: int, job: Job) -> None:
        """Compute the logits of one token of a run that left them out."""
        model = self.model(run.origin.source)
        job.stage(f"Working out the logits of token {token}")
        source = logits_source(model)
        hidden = run[source][0, token].to(model.hf.device)
        with model.lock, torch.no_grad():
            if source[0] == "layer_output":
                logits = model.project_on_vocab(hidden)
            else:
                logits = model.hf.get_submodule(model.anatomy.backbone.head)(hidden)
        self._keep_values(run, {(views_next.LOGITS_OF_TOKEN, token): logits.cpu()})

    def _keep_values(self, run: Run, values: dict[Key, Any]) -> None:
        for key, value in values.items():
            self.extras.put((run.number, *run.key(key)), value)

    def with_recorded_since(self, run: Run) -> Run:
        """Return the run with the values recorded since, to be read from any thread."""
        before = None if run.before is None else run.before.with_extra(self._extras_of(run.before))
        return run.with_extra(self._extras_of(run), before)

    def _extras_of(self, run: Run) -> dict[Key, Any]:
        return {key[1:]: value for key, value in self.extras.items() if key[0] == run.number}

    def _record(self, model: Any, prompt: str, job: Job, **options: Any) -> Any:
        try:
            return model.record(prompt, progress=job.progress, cancel=job.stopping, **options)
        except RecordingCancelled:
            raise Cancelled from None


def state_norms(recording: Any, job: Job) -> dict[int, np.ndarray]:
    """Return the state norms [seq heads] of every recurrent block of a recording."""
    found = {}
    for layer in range(recording.num_layers):
        if recurrence_of(recording, layer) and views_state.refusal(recording, layer) is None:
            job.check()
            found[layer] = views_state.norms_per_token(recording, layer)
            job.progress(layer + 1, recording.num_layers)
    return found


def _edit(one: Intervention) -> edits.Edit:
    if one.kind == "expert":
        return edits.ablate_expert(one.layer, one.index)
    return edits.zero_head(one.layer, one.index, one.host or None)


def default_prompt(model: Any) -> str:
    """Return the prompt used where none is given: the specimen's own, else a short English one."""
    family = model.label.removeprefix("specimen:")
    return recipe(family).prompt if family != model.label else ANY_PROMPT


def shown_source(source: str) -> str:
    """Return a model's name for people: of a path its last part."""
    return (
        Path(source).name if ("/" in source or "\\" in source) and Path(source).exists() else source
    )


def source_choices() -> list[dict[str, str]]:
    """Return what the model picker offers: the shipped specimens."""
    from explorer import specimens

    return [{"source": f"specimen:{family}", "name": family} for family in specimens.FAMILIES]
