"""The code behind each panel: a complete cell that runs as it is and ends by setting ``shown``.

``shown`` holds the numbers the panel draws, so a test can run the cell and compare. Each function
takes a run, which is a recording that says what it was made from (``run.origin``), and a selection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from explorer import vocabulary
from explorer.widgets.views.selection import Recorded, Selection, recurrent_host
from explorer.widgets.views.state import view_of

_EDIT_CALLS = {"expert": "ablate_expert", "head": "zero_head"}
_EDIT_WORDS = {"expert": "ablate expert", "head": "zero head"}


@dataclass(frozen=True)
class Intervention:
    """One edit of the forward pass: an expert ablated or a head zeroed on one block.

    ``host`` names the mixer the head belongs to, where it is not the block's first.
    """

    kind: str
    layer: int
    index: int
    host: str = ""

    @property
    def call(self) -> str:
        """The call of explorer.model.edits that makes this edit."""
        host = f", {quoted(self.host)}" if self.host else ""
        return f"{_EDIT_CALLS[self.kind]}({self.layer}, {self.index}{host})"

    @property
    def words(self) -> str:
        host = f" ({self.host})" if self.host else ""
        return f"{_EDIT_WORDS[self.kind]} {self.index} of block {self.layer}{host}"


@dataclass(frozen=True)
class Origin:
    """What a recording was made from: the words that make it again."""

    source: str
    prompt: str
    interventions: tuple[Intervention, ...] = ()


class RecordedRun(Recorded, Protocol):
    """A recording that states what it was made from."""

    @property
    def origin(self) -> Origin: ...


def quoted(text: str) -> str:
    """``text`` as a Python string: double quotes where they need no escape, characters that are not
    printable escaped.
    """
    return repr(text) if '"' in text else '"' + repr("'" + text)[2:]


def cell(
    origin: Origin,
    values: Sequence[str],
    layers: Iterable[int] | None,
    lines: Sequence[str],
    imports: str = "",
) -> str:
    """A cell that records ``values`` and computes ``shown`` in ``lines``."""
    names = sorted({_EDIT_CALLS[edit.kind] for edit in origin.interventions} | {"load"})
    arguments = [f"values={list(values)!r}".replace("'", '"')]
    if layers is not None:
        arguments.append(f"layers={list(layers)!r}")
    if origin.interventions:
        arguments.append(f"edits=[{', '.join(edit.call for edit in origin.interventions)}]")
    return "\n".join(
        [
            *([imports, ""] if imports else []),
            f"from explorer import {', '.join(names)}",
            "",
            f"model = load({quoted(origin.source)})",
            f"prompt = {quoted(origin.prompt)}",
            f"rec = model.record(prompt, {', '.join(arguments)})",
            *lines,
            "",
        ]
    )


def router_grid(run: RecordedRun, selection: Selection) -> str:
    block = selection.block
    if selection.router != "weights":
        name = f"router_{selection.router}"
        return cell(
            run.origin, [name], [block], [f'shown = rec["{name}", {block}][0]  # [token expert]']
        )
    return cell(
        run.origin,
        ["router_logits", "expert_indices", "expert_weights"],
        [block],
        [
            f'experts = rec["expert_indices", {block}][0]',
            f'weights = rec["expert_weights", {block}][0]',
            f'shown = torch.full(rec["router_logits", {block}][0].shape, float("nan"))',
            "shown = shown.scatter(1, experts, weights.float())  # [token expert]",
        ],
        "import torch",
    )


def router_load(run: RecordedRun, selection: Selection) -> str:
    return cell(
        run.origin,
        ["router_logits", "expert_indices"],
        None,
        [
            "counts = [",
            "    torch.bincount(",
            '        rec["expert_indices", i].flatten(),',
            '        minlength=rec["router_logits", i].shape[-1],',
            "    )",
            '    for i in rec.layers("expert_indices")',
            "]",
            "shown = torch.stack(counts) / len(rec.tokens)  # [block expert]",
        ],
        "import torch",
    )


def router_margin(run: RecordedRun, selection: Selection) -> str:
    return _row(run.origin, "router_margin", selection.block, "[token]")


def attention_all(run: RecordedRun, selection: Selection) -> str:
    return _row(run.origin, f"attention_{selection.pattern}", selection.block, "[head query key]")


def attention_one(run: RecordedRun, selection: Selection) -> str:
    return _row(
        run.origin,
        f"attention_{selection.pattern}",
        selection.block,
        "[query key]",
        f"[0, {selection.head}]",
    )


def _recurrence(run: RecordedRun, selection: Selection) -> tuple[str, Callable[[str], str]]:
    """The host of the chosen block's recurrence, and how a recording names its values."""
    host = recurrent_host(run, selection.block)
    return host, lambda name: vocabulary.key_of(
        vocabulary.BY_HOST[host][name], run.mixers[selection.block]
    )


def state_retained(run: RecordedRun, selection: Selection) -> str:
    host, key = _recurrence(run, selection)
    shown = view_of(host)
    if vocabulary.BY_HOST[host][shown.retained].fixed:  # the same at every token
        return _row(
            run.origin,
            key(shown.retained),
            selection.block,
            "[head token]",
            ".exp()[:, None].expand(-1, len(rec.tokens))",
        )
    mean = ".mean(-1)" if len(vocabulary.BY_HOST[host][shown.retained].axes) > 3 else ""
    return _row(
        run.origin,
        key(shown.retained),
        selection.block,
        "[head token]",
        f"[0]{mean}{'.exp()' if shown.logarithm else ''}.T",
    )


def state_written(run: RecordedRun, selection: Selection) -> str:
    host, key = _recurrence(run, selection)
    return _row(
        run.origin, key(view_of(host).written or ""), selection.block, "[head token]", "[0].T"
    )


def state_all(run: RecordedRun, selection: Selection) -> str:
    _, key = _recurrence(run, selection)
    return _row(run.origin, key("state_attention"), selection.block, "[head query key]")


def state_one(run: RecordedRun, selection: Selection) -> str:
    _, key = _recurrence(run, selection)
    return _row(
        run.origin, key("state_attention"), selection.block, "[query key]", f"[0, {selection.head}]"
    )


def _replayed(run: RecordedRun, selection: Selection) -> list[str]:
    """The values a recording needs for a block's recurrence to be replayed from a fresh start."""
    host, key = _recurrence(run, selection)
    return [key(name) for name in vocabulary.MIXERS[host].replayed if name != "state_input"]


def state_matrix(run: RecordedRun, selection: Selection) -> str:
    host, _ = _recurrence(run, selection)
    axes = vocabulary.BY_HOST[host]["state_output"].axes
    block, head, token = selection.block, selection.head, selection.token
    one = f"rec.state({block}, {head}, {token})[0]  # [key_dim value_dim]"
    every = f"rec.replay({selection.block}).state_at({selection.token})"
    channels = (
        f"{every}[0].T  # [key_dim channels]" if len(axes) > 2 else f"{every}  # [batch channels]"
    )
    return cell(
        run.origin,
        _replayed(run, selection),
        [selection.block],
        [f"shown = {one if 'heads' in axes else channels}"],
    )


def state_norm(run: RecordedRun, selection: Selection) -> str:
    return cell(
        run.origin,
        _replayed(run, selection),
        [selection.block],
        [
            f"states = rec.states({selection.block}, {selection.head})",
            "shown = torch.stack([state[0].norm() for state in states])  # [token]",
        ],
        "import torch",
    )


def stream_addends(run: RecordedRun, selection: Selection) -> str:
    made = {name for layer in range(run.num_layers) for name in run.addends(layer)}
    named = ["attention_output", "mlp.mlp_output"] if "mlp_output" in made else ["attention_output"]
    return cell(
        run.origin,
        ["layer_input", *named],
        None,
        [
            "shown = torch.stack([",
            '    rec[name, i][0].norm(dim=-1) / rec["layer_input", i][0].norm(dim=-1)',
            "    for i in range(rec.num_layers) for name in rec.addends(i)",
            "]).log10()  # [block and sublayer, token]",
        ],
        "import torch",
    )


def stream_norms(run: RecordedRun, selection: Selection) -> str:
    return cell(
        run.origin,
        ["layer_input", "layer_output"],
        None,
        [
            'stream = [rec["layer_input", i][0] for i in range(rec.num_layers)]',
            'stream.append(rec["layer_output", rec.num_layers - 1][0])',
            "shown = torch.stack([x.norm(dim=-1) for x in stream]).log10()  # [place token]",
        ],
        "import torch",
    )


def value_cell(origin: Origin, key: str, layer: int | None, typed: str) -> str:
    """The cell that reads one value in full."""
    where = f'"{key}"' if layer is None else f'"{key}", {layer}'
    return cell(
        origin, [key], None if layer is None else [layer], [f"shown = rec[{where}]  # {typed}"]
    )


def compare(run: RecordedRun, selection: Selection) -> str:
    """The cell behind before, after and difference: how far the edits move every position."""
    origin = run.origin
    functions = sorted({_EDIT_CALLS[edit.kind] for edit in origin.interventions} | {"load"})
    calls = ", ".join(edit.call for edit in origin.interventions)
    return "\n".join(
        [
            f"from explorer import {', '.join(functions)}",
            "",
            f"model = load({quoted(origin.source)})",
            f"prompt = {quoted(origin.prompt)}",
            'before = model.record(prompt, values=["logits"])["logits"][0].log_softmax(-1)',
            f'edited = model.record(prompt, values=["logits"], edits=[{calls}])',
            'after = edited["logits"][0].log_softmax(-1)',
            "shown = (before.exp() * (before - after)).sum(-1)  # [token]",
            f"likely = before[{selection.token}].exp()  # [vocab_size]",
            f"difference = after[{selection.token}].exp() - likely  # [vocab_size]",
            "for token in likely.topk(5).indices.tolist():",
            "    text = repr(model.tokenizer.decode([token]))",
            "    print(text, float(likely[token]), float(difference[token]))",
            "",
        ]
    )


def _row(origin: Origin, name: str, layer: int, typed: str, index: str = "[0]") -> str:
    return cell(origin, [name], [layer], [f'shown = rec["{name}", {layer}]{index}  # {typed}'])
