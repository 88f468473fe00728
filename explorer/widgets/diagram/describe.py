"""From a facts record to the description of its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from explorer.vocabulary import HOSTS
from explorer.vocabulary.formatting import short_dtype
from explorer.widgets.diagram.description import (
    Attention,
    Block,
    Convolution,
    Experts,
    Inside,
    Mlp,
    Norm,
    NotTraced,
    Pill,
    Recurrence,
    Segment,
    SharedExpert,
    StreamStep,
    Sublayer,
)
from explorer.widgets.diagram.types import Type, type_of

Record = Mapping[str, Any]


def attribute_of_path(path: str) -> str:
    """The attribute a host's path ends in: ``mlp`` of ``model.layers[i].mlp``, ``layers`` of
    ``model.layers[i]``.
    """
    return path.rpartition(".")[2].partition("[")[0]


def attribute_of_host(host: str) -> str:
    """The attribute a block has a host under: ``mixer`` for kinds of mixer such as ``ssd`` and
    ``selective_scan``.
    """
    return HOSTS[host].attribute if host in HOSTS and HOSTS[host].mixer else host


def describe(record: Record) -> list[Block]:
    """The distinct block shapes of a facts record, ordered by their first block."""
    ordered = sorted(record["blocks"], key=lambda block: block["layers"][0])
    return [_Reader(record, block).block() for block in ordered]


class _Reader:
    """Reads one block of a record."""

    def __init__(self, record: Record, block: Record) -> None:
        self.facts = block
        first = block["layers"][0]
        rows = {
            (attribute_of_path(row["host"]), row["name"]): row
            for row in record["values"]
            if row["layers"] is None or first in row["layers"]
        }
        signature = record.get("signature", {})
        inferred = {
            (attribute_of_path(row["host"]), row["name"]): row["type"]
            for row in signature.get("values", ())
            if not row["layers"] or first in row["layers"]
        }
        # Without a signature a record does not state the model's dtype: the embedding's does.
        embedding = rows.get(("model", "token_embeddings"), {})
        self.usual_dtype = short_dtype(signature.get("dtype") or embedding.get("dtype") or "")
        self.values = {
            (host, name): self._pill(host, row, type_of(row, inferred.get((host, name)), first))
            for (host, name), row in rows.items()
        }

    def _pill(self, host: str, row: Record, full_type: Type) -> Pill:
        full_type = full_type.also([f"{host}.{row['name']}"])
        return Pill(
            host,
            row["name"],
            full_type.without_dtype() if full_type.dtype == self.usual_dtype else full_type,
            full_type,
            f"{row['name']}: {row['layout']} [{' '.join(row['dims'])}]",
            not row.get("writable", True),
        )

    def block(self) -> Block:
        sublayers = tuple(
            self._sublayer(index, sub) for index, sub in enumerate(self.facts["sublayers"])
        )
        return Block(
            tuple(self.facts["layers"]),
            self.facts["title"],
            self.facts["identity"],
            self._segments(sublayers),
            sublayers,
            self.values,
            self.usual_dtype,
        )

    def _segments(self, sublayers: tuple[Sublayer, ...]) -> tuple[Segment, ...]:
        """The stream cut at its steps.

        A sublayer is read at the segment of its ``stage``, or, where it reads the stream at several
        points, at that of its add.
        """
        steps = self.facts["stream"]
        adds = [number for number, step in enumerate(steps) if step["kind"] == "add"]
        reads: list[list[Sublayer]] = [[] for _ in steps]
        added: list[list[Sublayer]] = [[] for _ in steps]
        for sub, facts in zip(sublayers, self.facts["sublayers"], strict=True):
            end = adds[facts["turn"] - 1]
            reads[end if facts["stage"] is None else facts["stage"]].append(sub)
            added[end].append(sub)
        return tuple(
            Segment(
                bool(number) and number == self.facts["mid"],
                tuple(reads[number]),
                _step(step),
                tuple(added[number]),
            )
            for number, step in enumerate(steps)
        )

    def _sublayer(self, index: int, sub: Record) -> Sublayer:
        host, output = attribute_of_host(sub["host"]), sub["output"]
        same_name = sum(other["output"] == output for other in self.facts["sublayers"]) > 1
        qualified = f"{host}.{output}"
        values = self._named(host, *(name for name in sub["values"] if name != output))
        if host == "mlp":
            values += tuple(pill for (at, _), pill in self.values.items() if at == "shared_experts")
        return Sublayer(
            index=index,
            host=host,
            role=sub["role"],
            title=sub["title"],
            summary=sub.get("summary") or "",
            norm=self._norm(sub.get("norm")),
            called_with=self._value("layers", "mlp_input") if host == "mlp" else None,
            inside=self._inside(sub, host),
            values=values,
            steps=" · ".join(sub.get("steps") or ()),
            output=self._value(host, output),
            output_label=qualified if same_name else output,
            # Live marks name the addend of attention without its host, whatever is beside it.
            addend=qualified if same_name and host != "self_attn" else output,
            windowed=bool(sub.get("window")),
        )

    def _norm(self, norm: Record | None) -> Norm | None:
        if not norm:
            return None
        output = self._value("layers", norm.get("value") or "")
        return Norm(norm["module"], output, norm["on_stream"], norm["scaled"])

    def _inside(self, sub: Record, host: str) -> Inside:
        role = sub["role"]
        if role == "attention" and (inside := self._attention(host)):
            return inside
        if role == "recurrent":
            return self._recurrence(sub, host)
        if role == "convolution":
            return Convolution(
                self._value(host, "conv_input"),
                self._value(host, "conv_output"),
                self._value(host, "conv_gate"),
            )
        if role == "experts" and sub["experts"]:
            return self._experts(sub, host)
        if role in ("attention", "experts", "mixer", "extra"):
            note = f": {sub['note']}" if sub.get("note") else ""
            return NotTraced(f"What is inside is not traced{note}.")
        return self._mlp(sub, host)

    def _attention(self, host: str) -> Attention | None:
        probabilities = self._value(host, "attention_probabilities")
        values = self._value(host, "attention_values")
        if not probabilities or not values:
            return None
        return Attention(
            probabilities=probabilities,
            values=values,
            queries=self._value(host, "attention_queries"),
            keys=self._value(host, "attention_keys"),
            scores=self._value(host, "attention_scores"),
            sinks=self._value(host, "attention_sinks"),
            head_outputs=self._value(host, "attention_head_outputs"),
            gate=next(iter(self._named(host, "head_gate", "head_scale")), None),
            premix=self._value(host, "attention_premix"),
        )

    def _recurrence(self, sub: Record, host: str) -> Recurrence:
        return Recurrence(
            title=sub["rule"]["title"],
            formulas=tuple(sub["rule"]["lines"]),
            conv_input=self._value(host, "conv_input"),
            queries=self._value(host, "attention_queries"),
            keys=self._value(host, "attention_keys"),
            values=self._value(host, "attention_values"),
            gates=self._named(host, "decays", "betas", "recurrent_gate", "skip"),
            state_input=self._value(host, "state_input"),
            implied_attention=self._value(host, "state_attention"),
            state_output=self._value(host, "state_output"),
            replayed=self._named(host, "state", "states"),
            head_outputs=self._value(host, "attention_head_outputs"),
            gate=self._value(host, "head_gate"),
        )

    def _experts(self, sub: Record, host: str) -> Experts:
        experts, shared = sub["experts"], sub.get("shared")
        return Experts(
            router_module=(sub.get("router") or {}).get("module", ""),
            router=self._named(
                host,
                "router_logits",
                "router_scores",
                "router_margin",
                "expert_weights",
                "expert_indices",
            ),
            count=experts["count"],
            chosen=experts["chosen"],
            width=experts.get("width"),
            outputs=self._named(host, "expert_outputs", "routed_output"),
            shared=SharedExpert(
                self._named("shared_experts", "mlp_activation", "mlp_neurons", "mlp_output"),
                f"× {shared['gate']}" if shared.get("gate") else "",
                self._value(host, "shared_expert_output"),
            )
            if shared
            else None,
        )

    def _mlp(self, sub: Record, host: str) -> Mlp:
        neurons = self._named(host, "mlp_activation", "mlp_neurons")
        output = self._value(host, sub["output"])
        widths = (
            (output.type.numbers[-1], neurons[-1].type.numbers[-1]) if neurons and output else None
        )
        return Mlp(neurons, widths)

    def _value(self, host: str, name: str) -> Pill | None:
        return self.values.get((host, name))

    def _named(self, host: str, *names: str) -> tuple[Pill, ...]:
        return tuple(self.values[host, name] for name in names if (host, name) in self.values)


def _step(step: Record) -> StreamStep:
    by = step.get("by", "")
    if isinstance(by, list):  # one number for each block of the shape
        operand = f"{min(by):.4g} … {max(by):.4g}"
    else:
        operand = by.rpartition(".")[2] if isinstance(by, str) else f"{by:.4g}"
    return StreamStep(step["kind"], operand)
