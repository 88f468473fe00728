"""The loaded model: an engine model with standard names and values."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from explorer import vocabulary
from explorer.discovery.anatomy import Anatomy
from explorer.discovery.backbone import after_blocks
from explorer.engine.expanded_rows import ExpandedBatcher
from explorer.engine.nnsight_api import TransformersModel, rows_of_invoke
from explorer.engine.observers import TraceObserver
from explorer.engine.serialize import SerializedBackend, serialized
from explorer.meta_device import without_padding_warning
from explorer.model.chat import chat_text, is_messages
from explorer.model.edits import Edit
from explorer.model.envoys import HostEnvoy, with_values
from explorer.model.errors import Unavailable
from explorer.model.host_taps import HostTaps
from explorer.model.host_values import HostValues
from explorer.model.model_host import mixers_of, model_host, model_sizes, size_notes
from explorer.model.printout import printout
from explorer.model.prompts import (
    check_call,
    check_given,
    encode,
    model_inputs,
    text_config,
    token_texts,
)
from explorer.model.record_request import request_values
from explorer.model.recorder import Progress, record
from explorer.model.recording import Recording, abbreviated_repr, as_int
from explorer.model.snapshots import ChangeHistory
from explorer.model.standard_names import add_alias, bind_host, envoy_at, envoy_classes
from explorer.model.steering import steered
from explorer.model.support import Support, support
from explorer.model.taps import Taps

#: The engine's class: its methods have no types.
_ENGINE: Any = TransformersModel


@with_values("model")
class LanguageModel(HostEnvoy, TransformersModel):
    """A transformers language model under the engine, with standard names and values.

    ``label`` is what was loaded; ``weights`` is where its numbers come from (``"trained"``,
    ``"random, seed 0"``, ``"from the hub"``, ``"none: shapes only"``); ``family`` is its
    model type. ``mixers`` are the hosts that mix positions on each block, attention first
    where it is shown beside another. ``hf`` is the transformers model itself. ``reload`` loads
    the same model once more, in a dtype or by default in its usual one; None where that is
    not cheap.
    """

    #: Sizes, read off the built model.
    num_layers: int
    hidden_size: int
    vocab_size: int
    tokenizer: PreTrainedTokenizerBase  # pyright: ignore[reportIncompatibleVariableOverride]  never None
    reload: Callable[[torch.dtype | None], LanguageModel] | None = None
    _batcher_class: Any = ExpandedBatcher

    def __init__(
        self,
        module: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        anatomy: Anatomy,
        label: str,
        weights: str,
    ) -> None:
        self.anatomy, self.label, self.weights = anatomy, label, weights
        self.lock = threading.RLock()
        self.mixers = mixers_of(anatomy)
        self.change_history: ChangeHistory = {}
        self.padding_effects: dict[str, float] = {}
        self.warned_of_length = False
        super().__init__(
            module,
            tokenizer=tokenizer,
            task="text-generation",
            device=module.device,  # or the pipeline would move the model to one it likes
            envoys=envoy_classes(module, anatomy),
        )
        for alias, path in anatomy.names.items():
            add_alias(self, alias, envoy_at(self, path), path)
        config = text_config(module)
        embedding: Any = module.get_input_embeddings()
        self.top = model_host(anatomy, config, embedding.weight.shape[1])
        self.taps = Taps(module, anatomy, self.path, self.top)
        for layer in range(anatomy.backbone.num_layers):
            for host in anatomy.block(layer).hosts.values():
                if host.hook_points:
                    taps = self.taps.hosts[host.name, layer]
                    values = HostValues(self, host.name, layer, taps, host.missing, host.sizes)
                    bind_host(self.layers[layer], host, values)
        # Last: from here on, setting a name that resembles a value's is refused.
        self._host_values = HostValues(
            self,
            "model",
            None,
            self.taps.hosts["model", None],
            self.top.missing,
            model_sizes(anatomy, config),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> LanguageModel:
        """Return a model of its own on a copy of the weights.

        The tokenizer and what was found of the structure are shared.
        """
        copied = LanguageModel(
            copy.deepcopy(self.hf, memo), self.tokenizer, self.anatomy, self.label, self.weights
        )
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "A loaded model cannot be pickled: keep what it was loaded from, its weights "
            "(model.hf.state_dict()) and its recordings, which can."
        )

    # -- what is there -------------------------------------------------------

    @property
    def hf(self) -> PreTrainedModel:
        """The transformers model."""
        return self._module  # pyright: ignore[reportReturnType]  what __init__ was given

    @property
    def family(self) -> str:
        """The model type."""
        return text_config(self.hf).model_type

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the whole model, by name."""
        return dict(self._host_values.sizes)

    @property
    def size_notes(self) -> dict[str, str]:
        """What to know of a size: that the configuration names it and no block has it."""
        return size_notes(self.anatomy, self.sizes)

    @property
    def kinds(self) -> list[str]:
        """Each block's (first) mixer, by host name; ``"none"`` where it has none."""
        return [mixers[0] if mixers else "none" for mixers in self.mixers]

    def layer_index(self, layer: int) -> int:
        """Return ``layer`` counted from 0; raise ValueError where there is no such block."""
        number = as_int(layer)
        if number is None or not -self.num_layers <= number < self.num_layers:
            raise ValueError(
                f"There is no block {abbreviated_repr(layer)}: {self.label} has blocks 0 to "
                f"{self.num_layers - 1}."
            )
        return number % self.num_layers

    def support(self, layer: int | None = None) -> Support:
        """Return what can be served, on all blocks or on one, and why not the rest."""
        return support(self.anatomy, self.top, None if layer is None else self.layer_index(layer))

    def reading_order(self, layer: int) -> list[str]:
        """Return the names of a block's values in the order the forward passes them.

        That is the forward now running, or else one over a prompt.
        """
        step = self.taps.call_sizes.get("seq") == 1
        return [
            f"{host}.{value}" if host != "layers" else value
            for host, value in self.anatomy.block(layer).value_order(step)
        ]

    def writable(self, name: str, layer: int | None) -> tuple[vocabulary.Value, HostTaps]:
        """Return the value called ``name`` on a block, to be written, and the taps of its host.

        Raises UnknownValue for a name there is not, ValueError for a block there is not,
        and Unavailable with the reason where the value cannot be written.
        """
        index = None if layer is None else self.layer_index(layer)
        values = vocabulary.lookup(name, () if index is None else self.mixers[index])
        readable = [
            (value, taps)
            for value in values
            if (taps := self.taps.hosts.get((value.host, index))) is not None
            and value.name in taps.addresses
        ]
        for value, taps in readable:
            if value.written:
                return value, taps
        if readable or all(not value.written for value in values):
            value = readable[0][0] if readable else values[0]
            raise Unavailable(value.unwritten.format(name=name))
        if index is not None and values[0].host == "model":
            raise Unavailable(f"{name} is a value of the whole model: edit it with layer None.")
        if index is None and values[0].host != "model":
            raise Unavailable(f"{name} is a value of a block: say which.")
        rows = (row for row in self.support(index) if row.value in values and index in row.reasons)
        row = next(rows, None)
        reason = "it is not there" if row is None else row.reasons[index]
        raise Unavailable(f"{name} of block {layer} is unavailable: {reason}.")

    def __repr__(self) -> str:
        return printout(self)

    # -- running -------------------------------------------------------------

    def trace(self, *inputs: Any, backend: Any = None, **kwargs: Any) -> Any:
        """Open the engine's trace; those of several threads run one after the other."""
        return super().trace(*inputs, backend=backend or SerializedBackend(), **kwargs)

    def scan(self, *inputs: Any, backend: Any = None, **kwargs: Any) -> Any:
        """Open the engine's scan, a trace of shapes alone."""
        return super().scan(*inputs, backend=backend or SerializedBackend(), **kwargs)

    generate = serialized(_ENGINE.generate)
    pipe = serialized(_ENGINE.pipe)

    def interleave(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the engine's driver of every trace, with the taps open meanwhile."""
        if self.hf.device.type == "meta" and getattr(fn, "__name__", "") in ("generate", "pipe"):
            raise ValueError(
                f"{self.label} was loaded without weights: it can be traced for its shapes, "
                "not generate."
            )
        no_warning = without_padding_warning(self.hf) if self.taps.on_meta else nullcontext()
        with self.lock, no_warning, self.taps.opened(TraceObserver(self.interleaver)):
            engine: Any = super()
            return engine.interleave(fn, *args, **kwargs)

    def _batch(self, invokes: list[tuple[Any, Any]], fn: Any) -> tuple[Any, dict[str, Any]]:
        """Assemble the call as the engine does, and check the prompts."""
        for inputs, _ in invokes:
            for prompt in inputs:
                check_given(self, prompt)
        engine: Any = super()
        args, kwargs = engine._batch(invokes, fn)
        check_call(self, kwargs)
        return args, kwargs

    def record(
        self,
        prompt: Any,
        values: Iterable[str] | None = None,
        layers: Iterable[int] | None = None,
        edits: Sequence[Edit] = (),
        progress: Progress | None = None,
        cancel: Callable[[], bool] | None = None,
    ) -> Recording:
        """Run ``prompt`` once and return the values asked for, in whatever order.

        prompt: a text, a list of texts or of token ids, a tensor of ids [batch seq], what the
        tokenizer returns, whose ``attention_mask`` hides padding, or the messages of a conversation
        where the tokenizer has a chat template, whose text is then the recording's ``text``.
        values: names (None for everything but per-token states). layers: the blocks to record on
        (None for all). edits: made in the same forward. progress: called with (blocks done,
        blocks). cancel: called after each block; where it returns True the run stops.

        Raises UnknownValue for a name there is not, Unavailable for a value or an edit that cannot
        be had on these blocks, PromptError for a prompt that cannot be run, Cancelled
        where ``cancel`` says so, ModelBusy in the middle of a trace of this model, and
        ValueError for a block there is not and for an edit that does not fit the value.
        """
        requested, missing = request_values(self, values, layers)
        inputs = model_inputs(self, prompt)
        recorded = record(self, inputs, requested, edits, progress, cancel)
        ids, mask = encode(self, prompt)
        has_data = ids.device.type != "meta"
        return Recording(
            label=self.label,
            weights=self.weights,
            input_ids=ids,
            tokens=token_texts(self.tokenizer, [int(one) for one in ids[0]]) if has_data else [],
            mixers=self.mixers,
            values=recorded.values,
            missing=missing,
            seconds=recorded.seconds,
            edits=tuple(edit.description or edit.value for edit in edits),
            shared=recorded.shared,
            attention_mask=mask,
            text=chat_text(self, prompt) if is_messages(prompt) else None,
        )

    # -- acting on the stream --------------------------------------------------

    def skip_layers(self, start: int, end: int, skip_with: torch.Tensor | None = None) -> None:
        """Inside a trace: leave out blocks ``start`` to ``end``, both included.

        The stream entering ``start``, or ``skip_with`` [batch seq hidden_size], goes on
        to the block after ``end``. Raises ValueError for a block there is not and for an
        empty range, OutsideTrace where no forward is running, AlreadyPassed where it has
        gone past ``start``, Unavailable where the model needs what else a block returns
        or keeps.
        """
        start, end = self.layer_index(start), self.layer_index(end)
        if not self.anatomy.blocks_skippable:
            raise Unavailable(
                "This model needs what else a block returns or keeps for others beside the stream, "
                "so no block can be left out."
            )
        if end < start:
            raise ValueError(f"skip_layers skips upwards: {start} to {end} is empty.")
        stream = self.layers[start].layer_input if skip_with is None else skip_with
        for layer in range(start, end + 1):
            count = self.anatomy.block(layer).hosts["layers"].details.returns
            self.layers[layer].skip(stream if count is None else (stream, *[None] * (count - 1)))

    def steer(
        self,
        layers: int | Iterable[int],
        vector: torch.Tensor,
        factor: float = 1.0,
        positions: int | slice | Sequence[int] | None = None,
        batch_index: int | None = None,
    ) -> None:
        """Inside a trace: add ``factor * vector`` [hidden_size] to the stream leaving ``layers``.

        positions: which tokens (all by default), counted in each row from its first token that is
        no padding; batch_index: which row (all by default).
        Raises ValueError for a block, position or row there is not and for a vector of
        another width, OutsideTrace where no forward is running, AlreadyPassed where it
        has gone past the block.
        """
        if getattr(vector, "shape", None) != (self.hidden_size,):
            given = list(getattr(vector, "shape", [])) or type(vector).__name__
            raise ValueError(
                f"The stream is {self.hidden_size} wide; the vector to steer with is {given}."
            )
        single = as_int(layers) is not None or not isinstance(layers, Iterable)
        indices: Any = [layers] if single else layers
        for layer in sorted({self.layer_index(index) for index in indices}):
            stream = self.layers[layer].layer_output
            mask = self.taps.call_mask
            if mask is not None:
                mask = rows_of_invoke(self.interleaver, mask)
            self.layers[layer].layer_output = steered(
                stream, (factor * vector).to(stream), positions, batch_index, mask
            )

    def project_on_vocab(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [… vocab_size] of a stream [… hidden_size], as after the last block.

        The stream goes through the final norm and the head (the logit lens). Where the model scales
        or caps what they return, it goes through the model's own forward with the blocks left out;
        that raises Unavailable inside a trace.
        """
        with self.lock:  # or a run in another thread would take this for a part of its forward
            if self.anatomy.head_is_last and self.anatomy.head_reads_norm:
                normed = self.norm(hidden) if self.anatomy.norm is not None else hidden
                # Some streams are in float32, whatever the weights are in.
                model: Any = self.hf
                return self.lm_head(normed.to(model.get_output_embeddings().weight.dtype))
            if self.interleaver.interleaving:
                raise Unavailable(
                    "This model scales or caps its logits: save the stream, "
                    "and call project_on_vocab after the trace."
                )
            last = self.anatomy.block(self.num_layers - 1)
            return after_blocks(
                self.hf,
                self.anatomy.backbone.blocks,
                last.hosts["layers"].details.returns,
                hidden,
                use_cache=False,
            )

    def top_tokens(self, hidden: torch.Tensor, k: int = 5) -> list[Any]:
        """Return the ``k`` likeliest next tokens of a stream [hidden_size] with probabilities.

        They are (token, probability), likeliest first; for more than one vector, nested lists in
        the shape of the leading axes.
        """
        if as_int(k) is None or not 1 <= k <= self.vocab_size:
            raise ValueError(
                f"k is a number of tokens from 1 to {self.vocab_size}, not {abbreviated_repr(k)}."
            )
        if hidden.dim() > 1:
            return [self.top_tokens(row, k) for row in hidden]
        best = self.project_on_vocab(hidden).detach().float().softmax(-1).topk(k)
        tokenizer: Any = self.tokenizer
        return [
            (token_texts(tokenizer, [int(token)])[0], float(probability))
            for token, probability in zip(best.indices, best.values, strict=True)
        ]
