"""The loaded model: an engine model with standard names and values."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from explorer import vocabulary
from explorer.discovery.anatomy import Anatomy, HostAnatomy
from explorer.discovery.backbone import after_blocks
from explorer.discovery.details import HostDetails
from explorer.discovery.hook_point import HookPoint
from explorer.engine.nnsight_api import TransformersModel
from explorer.engine.observers import TraceObserver
from explorer.engine.serialize import SerializedBackend, serialized
from explorer.meta_device import without_padding_warning
from explorer.model.edits import Edit
from explorer.model.envoys import (
    HOST_CLASSES,
    PART_CLASSES,
    BlocksEnvoy,
    HostEnvoy,
    Standard,
    Unavailable,
    host_class,
    implied,
)
from explorer.model.printout import printout
from explorer.model.prompts import PromptError, checked, checked_text, pieces, prepared, token_ids
from explorer.model.recording import Recording, choose, record, timed
from explorer.model.support import Row, Support, support
from explorer.model.taps import HostTaps, Taps
from explorer.vocabulary.availability import Unavailability


def _top(anatomy: Anatomy, config: Any, embedding: int) -> HostAnatomy:
    """The model's own host: its values are its modules' inputs and outputs."""
    frame = anatomy.backbone

    def place(
        value: str, module: str, side: str, element: int | str | None, description: str
    ) -> tuple[str, tuple[HookPoint, ...]]:
        axes = vocabulary.BY_HOST["model"][value].axes
        return value, (HookPoint(module, side, element, tuple((a,) for a in axes), description),)

    hook_points = dict(
        (
            place("logits", "", "output", "logits", "the output of the model"),
            place(
                "token_embeddings",
                frame.embedding,
                "output",
                None,
                f"the output of the module {frame.embedding}",
            ),
            place(
                "lm_head_output",
                frame.head,
                "output",
                None,
                f"the output of the module {frame.head}",
            ),
            place("input_ids", "", "input", "input_ids", "the model's argument input_ids"),
            place(
                "attention_mask",
                "",
                "input",
                "attention_mask",
                "the model's argument attention_mask",
            ),
        )
    )
    missing: dict[str, Unavailability] = {}
    widths = {} if anatomy.embedding_fits else {"token_embeddings": embedding}
    if anatomy.norm is None:
        missing["final_norm_output"] = anatomy.no_norm
    else:
        turn = anatomy.norm_turn
        description = f"the output of the module {anatomy.norm}" + (
            ""
            if turn is None
            else f", of its call {turn + 1} in a forward, the last before the head"
        )
        name, (found,) = place("final_norm_output", anatomy.norm, "output", None, description)
        hook_points[name] = (replace(found, call_index=turn),)
    return HostAnatomy(
        "model",
        "",
        {"hidden_size": anatomy.width, "vocab_size": config.vocab_size},
        hook_points,
        missing,
        HostDetails(own_widths=widths),
    )


class LanguageModel(
    host_class("model", base=type("ModelEnvoy", (HostEnvoy, TransformersModel), {}))
):
    """A transformers language model under the engine, with standard names and values.

    ``label`` says what was loaded, ``weights`` what its numbers are (``"trained"``,
    ``"random, seed 0"``, ``"from the hub"``, ``"none: shapes only"``), ``family`` its
    model type. ``hf`` is the transformers model itself. ``reload`` loads the same model once more,
    in a dtype or by default in its usual one; None where that is not cheap.
    """

    reload: Callable[[torch.dtype | None], LanguageModel] | None = None

    def __init__(
        self, module: torch.nn.Module, tokenizer: Any, anatomy: Anatomy, label: str, weights: str
    ) -> None:
        self.anatomy, self.label, self.weights = anatomy, label, weights
        self.lock = threading.RLock()
        blocks = anatomy.backbone.blocks
        envoys = {
            blocks: BlocksEnvoy,
            **_host_envoys(module.get_submodule(blocks), blocks, anatomy),
        }
        super().__init__(  # the device is said, or the pipeline would move the model to one it likes
            module, tokenizer=tokenizer, task="text-generation", device=module.device, envoys=envoys
        )
        for alias, path in anatomy.names.items():
            _alias(self, alias, path)
        config = module.config.get_text_config()
        self.top = _top(anatomy, config, module.get_input_embeddings().weight.shape[1])
        self.taps = Taps(module, anatomy, self.path, self.top)
        self._standard = Standard(
            self,
            "model",
            None,
            self.taps.hosts["model", None],
            self.top.missing,
            self._sizes(config),
        )
        object.__setattr__(
            self,
            "_mixers",
            [
                tuple(
                    sorted(
                        (
                            name
                            for name, host in anatomy.block(layer).hosts.items()
                            if host.hook_points and vocabulary.HOSTS[name].mixer
                        ),
                        key=lambda name: name != "self_attn",
                    )
                )
                for layer in range(anatomy.backbone.num_layers)
            ],
        )
        for layer in range(anatomy.backbone.num_layers):
            for host in anatomy.block(layer).hosts.values():
                self._bind(layer, host)

    def __deepcopy__(self, memo: dict[int, Any]) -> LanguageModel:
        """A model of its own on a copy of the weights; the tokenizer and what was found of the structure are shared."""
        copied = LanguageModel(
            copy.deepcopy(self.hf, memo), self.tokenizer, self.anatomy, self.label, self.weights
        )
        memo[id(self)] = copied
        return copied

    def _bind(self, layer: int, host: HostAnatomy) -> None:
        envoy = self.layers[layer]
        if not host.hook_points:
            return
        standard = Standard(
            self, host.name, layer, self.taps.hosts[host.name, layer], host.missing, host.sizes
        )
        if host.part:
            object.__setattr__(
                envoy,
                vocabulary.HOSTS[host.name].attribute,
                PART_CLASSES[host.name](envoy.path, standard),
            )
        else:
            found = at(envoy, host.module)
            object.__setattr__(found, "_standard", standard)
            if host.module and host.name != "shared_experts":
                _alias(envoy, vocabulary.HOSTS[host.name].attribute, host.module)
        for path, alias in (
            (host.details.router, "router"),
            (host.details.experts, "experts"),
            (host.details.shared, "shared_experts"),
        ):
            if path:
                within = path.removeprefix(host.module).lstrip(".") if host.module else path
                _alias(
                    at(envoy, host.module) if host.module else envoy.mlp,
                    alias,
                    within,
                    envoy if host.part else None,
                )

    def _sizes(self, config: Any) -> dict[str, int]:
        """Sizes of the whole model: of its first attention and MLP where blocks have them."""
        sizes = {
            "num_layers": self.anatomy.backbone.num_layers,
            "hidden_size": self.anatomy.width,
            "vocab_size": config.vocab_size,
        }
        for block in self.anatomy.blocks:
            for name in ("num_heads", "num_kv_heads", "head_dim", "qk_head_dim"):
                if name in block.hosts["self_attn"].sizes:
                    sizes.setdefault(name, block.hosts["self_attn"].sizes[name])
        widths = [
            block.hosts["mlp"].sizes["intermediate_size"]
            for block in self.anatomy.blocks
            if "mlp_neurons" in block.hosts["mlp"].hook_points
        ]
        mlps = any(block.hosts["mlp"].hook_points for block in self.anatomy.blocks)
        dense = (
            widths[0] if widths else getattr(config, "intermediate_size", None) if mlps else None
        )
        if isinstance(dense, int):
            sizes["intermediate_size"] = dense
        return sizes

    # -- what is there -------------------------------------------------------

    @property
    def hf(self) -> torch.nn.Module:
        """The transformers model."""
        return self._module

    @property
    def family(self) -> str:
        return self._module.config.get_text_config().model_type

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self._standard.sizes)

    @property
    def size_notes(self) -> dict[str, str]:
        """What to know of a size: one that the configuration names and no block has."""
        width = self.sizes.get("intermediate_size")
        widths = {
            block.hosts["mlp"].sizes.get("intermediate_size") for block in self.anatomy.blocks
        }
        if width is None or width in widths:
            return {}
        return {
            "intermediate_size": "the configuration names this width of an MLP, but no block has one"
        }

    @property
    def kinds(self) -> list[str]:
        """Each block's (first) mixer, by host name; ``"none"`` where it has none."""
        return [mixers[0] if mixers else "none" for mixers in self.mixers]

    @property
    def mixers(self) -> list[tuple[str, ...]]:
        """The hosts that mix positions on each block; attention first where it stands beside another."""
        return self._mixers

    def layer_index(self, layer: int) -> int:
        """``layer`` as an index from 0, or ValueError when there is no such block."""
        if not -self.num_layers <= layer < self.num_layers:
            raise ValueError(
                f"There is no block {layer}: {self.label} has blocks 0 to {self.num_layers - 1}."
            )
        return layer % self.num_layers

    def support(self, layer: int | None = None) -> Support:
        """What can be served, on all blocks or on one, and why not the rest."""
        return support(self.anatomy, self.top, None if layer is None else self.layer_index(layer))

    def reading_order(self, layer: int) -> list[str]:
        """The values of a block in the order the forward now running, or else one over a prompt, passes them."""
        step = self.taps.call.get("seq") == 1
        return [
            f"{host}.{value}" if host != "layers" else value
            for host, value in self.anatomy.block(layer).passes(step)
        ]

    def writable(self, name: str, layer: int | None) -> tuple[vocabulary.Value, HostTaps]:
        """The value called ``name`` on a block, to be written; raises with the reason when it cannot be."""
        index = None if layer is None else self.layer_index(layer)
        values = vocabulary.lookup(name, () if index is None else self.mixers[index])
        there = [
            value
            for value in values
            if (taps := self.taps.hosts.get((value.host, index))) is not None
            and value.name in taps.reach
        ]
        for value in there:
            if value.written:
                return value, self.taps.hosts[value.host, index]
        if there or all(not value.written for value in values):
            raise Unavailable((there or values)[0].unwritten.format(name=name))
        if (index is None) != (values[0].host == "model"):
            whole = (
                "the whole model: edit it with layer None"
                if index is not None
                else "a block: say which"
            )
            raise Unavailable(f"{name} is a value of {whole}.")
        reason = next(
            (
                r.reasons[index]
                for r in self.support(index)
                if r.value in values and index in r.reasons
            ),
            "it is not there",
        )
        raise Unavailable(f"{name} of block {layer} is unavailable: {reason}.")

    def __repr__(self) -> str:
        return printout(self)

    # -- running -------------------------------------------------------------

    def trace(self, *inputs: Any, backend: Any = None, **kwargs: Any) -> Any:
        """The engine's trace; blocks in several threads take turns."""
        return super().trace(*inputs, backend=backend or SerializedBackend(), **kwargs)

    def scan(self, *inputs: Any, backend: Any = None, **kwargs: Any) -> Any:
        """The engine's scan, a trace of shapes alone; it takes turns like any trace."""
        return super().scan(*inputs, backend=backend or SerializedBackend(), **kwargs)

    generate = serialized(TransformersModel.generate)
    pipe = serialized(TransformersModel.pipe)

    def interleave(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """The engine's driver of every trace, with the taps open for its duration."""
        if self.hf.device.type == "meta" and getattr(fn, "__name__", "") in ("generate", "pipe"):
            raise ValueError(
                f"{self.label} was loaded without weights: it can be traced for its shapes, not generate."
            )
        shapes = without_padding_warning(self.hf) if self.taps.shapes else nullcontext()
        with self.lock, shapes, self.taps.armed(TraceObserver(self.interleaver)):
            return super().interleave(fn, *args, **kwargs)

    def _batch(self, invokes: list, fn: Any) -> tuple:
        """The engine's assembly of the call, without a mask that would do harm.

        A model without weights cannot look into one; and beside a cache, one as long
        as the new tokens alone would hide what the cache holds.
        """
        for inputs, _ in invokes:
            for text in (
                t
                for part in inputs
                for t in (part if isinstance(part, list) else [part])
                if isinstance(t, str)
            ):
                if not self.tokenizer(checked_text(text))["input_ids"]:
                    raise PromptError("The prompt is empty; write at least one word.")
            for ids in (
                part for part in inputs if isinstance(part, torch.Tensor) and part.dim() == 2
            ):
                checked(self, ids)
        args, kwargs = super()._batch(invokes, fn)
        if isinstance(kwargs.get("input_ids"), torch.Tensor):
            checked(self, kwargs["input_ids"])
        mask, cached = (
            kwargs.get("attention_mask"),
            kwargs.get("cache") or kwargs.get("past_key_values"),
        )
        if self.hf.device.type == "meta":
            kwargs.pop("attention_mask", None)
            if self.anatomy.masked and isinstance(kwargs.get("input_ids"), torch.Tensor):
                kwargs["attention_mask"] = torch.ones_like(kwargs["input_ids"])
        elif (
            mask is not None
            and cached is not None
            and mask.shape == kwargs["input_ids"].shape
            and bool(mask.all())
        ):
            del kwargs["attention_mask"]
        return args, kwargs

    def record(
        self,
        prompt: Any,
        values: Iterable[str] | None = None,
        layers: Iterable[int] | None = None,
        edits: Sequence[Edit] = (),
        progress: Callable[[int, int], None] | None = None,
        cancel: Callable[[], bool] | None = None,
    ) -> Recording:
        """Run ``prompt`` once and keep the values asked for, in any order.

        prompt: text, a list of token ids, or a tensor [batch seq]. values: names
        (None for everything but per-token states). layers: the blocks to record on (None for all).
        edits: made in the same forward. progress: called with (blocks done, blocks).
        cancel: asked after each block.

        Raises UnknownValue for a name there is not, Unavailable for a value or an edit that cannot
        be had on these blocks, PromptError for a prompt that is none, Cancelled when told to stop, Busy
        in the middle of a trace of this model, and ValueError for a block there is not and for
        an edit that does not fit the value.
        """
        rows, missing = choose(self, values, layers)
        inputs = prepared(self, prompt)
        with torch.no_grad():
            found, seconds = timed(lambda: record(self, inputs, rows, edits, progress, cancel))
        ids = token_ids(self, prompt)
        tokens = pieces(self.tokenizer, ids[0].tolist()) if ids.device.type != "meta" else []
        return Recording(
            self.label,
            self.weights,
            ids,
            tokens,
            self.mixers,
            found,
            missing,
            seconds,
            tuple(edit.description or edit.value for edit in edits),
        )

    def _replayed(self, key: tuple[str, int | None], replay: Any) -> torch.Tensor:
        name, layer = key
        name = name.rpartition(".")[2]
        expression = f"model.layers[{layer}].{vocabulary.HOSTS[replay.host].attribute}.{name}"
        return replay.states() if name == "states" else implied(replay, expression)

    # -- acting on the stream --------------------------------------------------

    def skip_layers(self, start: int, end: int, skip_with: torch.Tensor | None = None) -> None:
        """Inside a trace: leave out blocks ``start`` to ``end``, both included.

        The stream entering ``start``, or ``skip_with`` [batch seq hidden_size], goes on to the block after ``end``.
        Raises ValueError for a block there is not and for an empty range, OutsideTrace where no forward is
        running, PassedBy where it has gone past ``start``, Unavailable where the model needs what else a block returns or keeps.
        """
        start, end = self.layer_index(start), self.layer_index(end)
        if not self.anatomy.passable:
            raise Unavailable(
                "This model needs what else a block returns or keeps for others beside the stream, so no block can be left out."
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
        """Inside a trace: add ``factor * vector`` [hidden_size] to the stream leaving each of ``layers``.

        positions: which tokens (all by default); batch_index: which row (all by default).
        Raises ValueError for a block, position or row there is not and for a vector of another width,
        OutsideTrace where no forward is running, PassedBy where it has gone past the block.
        """
        if vector.shape != (self.hidden_size,):
            raise ValueError(
                f"The stream is {self.hidden_size} wide; the vector to steer with is {list(vector.shape)}."
            )
        rows = slice(None) if batch_index is None else [batch_index]
        where = (
            slice(None)
            if positions is None
            else [positions]
            if isinstance(positions, int)
            else positions
        )
        for layer in sorted(
            {self.layer_index(i) for i in ([layers] if isinstance(layers, int) else layers)}
        ):
            stream = self.layers[layer].layer_output
            _within("row", [] if batch_index is None else rows, stream.shape[0])
            _within("position", [] if isinstance(where, slice) else where, stream.shape[1])
            added = torch.zeros_like(stream)
            chosen = torch.zeros(stream.shape[:2], dtype=torch.bool, device=stream.device)
            chosen[rows, where] = True
            added[chosen] = (factor * vector).to(stream)
            self.layers[layer].layer_output = stream + added

    def project_on_vocab(self, hidden: torch.Tensor) -> torch.Tensor:
        """The lens: logits [… vocab_size] of a stream [… hidden_size], through all that comes after the last block.

        That is the final norm and the head, and where the model scales or caps what they return, its own forward
        with the blocks left out. Raises Unavailable for the latter inside a trace.
        """
        with self.lock:  # or a run in another thread would take this for a part of itself
            if self.anatomy.head_is_last and self.anatomy.head_reads_norm:
                normed = self.norm(hidden) if self.anatomy.norm is not None else hidden
                return self.lm_head(
                    normed.to(self.hf.get_output_embeddings().weight.dtype)
                )  # some streams are in float32
            if self.interleaver.interleaving:
                raise Unavailable(
                    "This model scales or caps its logits: save the stream, and call project_on_vocab after the trace."
                )
            last = self.anatomy.block(self.num_layers - 1)
            return after_blocks(
                self.hf,
                self.anatomy.backbone.blocks,
                last.hosts["layers"].details.returns,
                hidden,
                use_cache=False,
            )

    def top_tokens(self, hidden: torch.Tensor, k: int = 5) -> list:
        """The ``k`` likeliest next tokens of a stream vector [hidden_size], as (token, probability).

        For more than one vector, nested lists in the shape of the leading axes.
        """
        if hidden.dim() > 1:
            return [self.top_tokens(row, k) for row in hidden]
        best = self.project_on_vocab(hidden).float().softmax(-1).topk(k)
        return [
            (self.tokenizer.decode([token]), probability)
            for token, probability in zip(best.indices.tolist(), best.values.tolist())
        ]


def _within(what: str, indices: Iterable[int], length: int) -> None:
    """Raise ValueError for the first index that a call of this length has not."""
    for index in indices:
        if not -length <= index < length:
            raise ValueError(
                f"There is no {what} {int(index)}: this call has {what}s 0 to {length - 1}."
            )


def _host_envoys(
    blocks: torch.nn.ModuleList, path: str, anatomy: Anatomy
) -> dict[type | str, type]:
    """Which envoy class each host gets: by its module's class, or by path where one class plays two parts."""
    parts: dict[type, dict[str, list[str]]] = {}
    for block in anatomy.blocks:
        for host in block.hosts.values():
            if host.hook_points and not host.part:
                module = blocks[block.layers[0]].get_submodule(host.module)
                where = [f"{path}.{layer}.{host.module}".rstrip(".") for layer in block.layers]
                parts.setdefault(type(module), {}).setdefault(host.name, []).extend(where)
    envoys: dict[type | str, type] = {}
    for module_class, hosts in parts.items():
        for name, where in hosts.items():
            envoys |= (
                {module_class: HOST_CLASSES[name]}
                if len(hosts) == 1
                else dict.fromkeys(where, HOST_CLASSES[name])
            )
    return envoys


def at(envoy: Any, path: str) -> Any:
    """The envoy of a module below another, whatever name the engine (or `_alias`) gave one whose own name it needs."""
    for part in path.split(".") if path else ():
        envoy = (
            envoy.__dict__[other if (other := f"E_{part}") in envoy.__dict__ else part]
            if not part.isdigit()
            else envoy[int(part)]
        )
    return envoy


def _alias(envoy: Any, alias: str, path: str, root: Any = None) -> None:
    """Give a module below ``root`` (``envoy`` itself, where that is not said) its standard name on ``envoy``, on this block alone.

    Another module that goes by that name is mounted as the engine mounts those whose own names it needs: ``E_lm_head``.
    """
    target = at(root or envoy, path)
    if envoy.__dict__.get(alias) is target:
        return
    if alias in envoy.__dict__:
        object.__setattr__(envoy, f"E_{alias}", envoy.__dict__[alias])
    object.__setattr__(envoy, alias, target)
    if isinstance(envoy, HostEnvoy):
        envoy._aliases[alias] = path


__all__ = ["LanguageModel", "Row"]
