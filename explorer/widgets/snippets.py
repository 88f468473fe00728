"""The code behind each panel: a complete cell that runs as it is and ends with ``shown``.

``shown`` holds the numbers the panel draws, so a test can run the cell and compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from explorer.widgets.selection import Selection

_EDIT_CALLS = {"expert": "ablate_expert", "head": "zero_head"}
_EDIT_WORDS = {"expert": "ablate expert", "head": "zero head"}


@dataclass(frozen=True)
class Intervention:
    """One edit of the forward pass: an expert ablated or a head zeroed on one block."""

    kind: str
    layer: int
    index: int

    @property
    def call(self) -> str:
        """The call of explorer.edits that makes this edit."""
        return f"{_EDIT_CALLS[self.kind]}({self.layer}, {self.index})"

    @property
    def words(self) -> str:
        return f"{_EDIT_WORDS[self.kind]} {self.index} of block {self.layer}"


@dataclass(frozen=True)
class Origin:
    """What a recording was made from: the words that make it again."""

    source: str
    prompt: str
    interventions: tuple[Intervention, ...] = ()


def quoted(text: str) -> str:
    """``text`` as a Python string: double quotes where they need no escape, what is not printable escaped."""
    return repr(text) if '"' in text else '"' + repr("'" + text)[2:]


def cell(
    origin: Origin, values: Sequence[str], layers: Iterable[int] | None, lines: Sequence[str], imports: str = "",
) -> str:
    """A cell that records ``values`` and works out ``shown`` in ``lines``."""
    names = sorted({_EDIT_CALLS[edit.kind] for edit in origin.interventions} | {"load"})
    arguments = [f"values={list(values)!r}".replace("'", '"')]
    if layers is not None:
        arguments.append(f"layers={list(layers)!r}")
    if origin.interventions:
        arguments.append(f"edits=[{', '.join(edit.call for edit in origin.interventions)}]")
    return "\n".join([
        *([imports, ""] if imports else []), f"from explorer import {', '.join(names)}", "",
        f"model = load({quoted(origin.source)})",
        f"prompt = {quoted(origin.prompt)}",
        f"rec = model.record(prompt, {', '.join(arguments)})",
        *lines, "",
    ])


def router_grid(origin: Origin, chosen: Selection) -> str:
    block = chosen.block
    if chosen.router != "weights":
        name = f"router_{chosen.router}"
        return cell(origin, [name], [block], [f'shown = rec["{name}", {block}][0]  # [token expert]'])
    return cell(origin, ["router_logits", "expert_indices", "expert_weights"], [block], [
        f'experts, weights = rec["expert_indices", {block}][0], rec["expert_weights", {block}][0]',
        f'shown = torch.full(rec["router_logits", {block}][0].shape, float("nan"))',
        "shown = shown.scatter(1, experts, weights.float())  # [token expert]",
    ], "import torch")


def router_load(origin: Origin, chosen: Selection) -> str:
    return cell(origin, ["router_logits", "expert_indices"], None, [
        "counts = [",
        '    torch.bincount(rec["expert_indices", i].flatten(), minlength=rec["router_logits", i].shape[-1])',
        '    for i in rec.layers("expert_indices")',
        "]",
        "shown = torch.stack(counts) / len(rec.tokens)  # [block expert]",
    ], "import torch")


def router_margin(origin: Origin, chosen: Selection) -> str:
    return _row(origin, "router_margin", chosen.block, "[token]")


def attention_all(origin: Origin, chosen: Selection) -> str:
    return _row(origin, f"attention_{chosen.pattern}", chosen.block, "[head query key]")


def attention_one(origin: Origin, chosen: Selection) -> str:
    return _row(origin, f"attention_{chosen.pattern}", chosen.block, "[query key]", f"[0, {chosen.head}]")


def state_kept(origin: Origin, chosen: Selection) -> str:
    return _row(origin, "decays", chosen.block, "[head token]", "[0].exp().T")


def state_written(origin: Origin, chosen: Selection) -> str:
    return _row(origin, "betas", chosen.block, "[head token]", "[0].T")


def state_all(origin: Origin, chosen: Selection) -> str:
    return _row(origin, "state_attention", chosen.block, "[head query key]")


def state_one(origin: Origin, chosen: Selection) -> str:
    return _row(origin, "state_attention", chosen.block, "[query key]", f"[0, {chosen.head}]")


_KERNEL = ["attention_queries", "attention_keys", "attention_values", "decays", "betas"]


def state_matrix(origin: Origin, chosen: Selection) -> str:
    return cell(origin, _KERNEL, [chosen.block], [
        f"shown = rec.state({chosen.block}, {chosen.head}, {chosen.token})[0]  # [key_dim value_dim]",
    ])


def state_norm(origin: Origin, chosen: Selection) -> str:
    return cell(origin, _KERNEL, [chosen.block], [
        f"shown = torch.stack([state[0].norm() for state in rec.states({chosen.block}, {chosen.head})])  # [token]",
    ], "import torch")


def stream_addends(origin: Origin, chosen: Selection) -> str:
    return cell(origin, ["layer_input", "attention_output", "mlp.mlp_output"], None, [
        "shown = torch.stack([",
        '    rec[name, i][0].norm(dim=-1) / rec["layer_input", i][0].norm(dim=-1)',
        '    for i in range(rec.num_layers) for name in ("attention_output", "mlp_output")',
        "]).log10()  # [block and sublayer, token]",
    ], "import torch")


def stream_norms(origin: Origin, chosen: Selection) -> str:
    return cell(origin, ["layer_input", "layer_output"], None, [
        'stream = [rec["layer_input", i][0] for i in range(rec.num_layers)]',
        'stream.append(rec["layer_output", rec.num_layers - 1][0])',
        "shown = torch.stack([x.norm(dim=-1) for x in stream]).log10()  # [place token]",
    ], "import torch")


def part(origin: Origin, key: str, layer: int | None, typed: str) -> str:
    """The cell that reads one value, whole."""
    where = f'"{key}"' if layer is None else f'"{key}", {layer}'
    return cell(origin, [key], None if layer is None else [layer], [f"shown = rec[{where}]  # {typed}"])


def compare(origin: Origin, chosen: Selection) -> str:
    """The cell behind before, after and difference: how far the edits move every position."""
    functions = sorted({_EDIT_CALLS[edit.kind] for edit in origin.interventions} | {"load"})
    calls = ", ".join(edit.call for edit in origin.interventions)
    return "\n".join([
        f"from explorer import {', '.join(functions)}", "",
        f"model = load({quoted(origin.source)})",
        f"prompt = {quoted(origin.prompt)}",
        'before = model.record(prompt, values=["logits"])["logits"][0].log_softmax(-1)',
        f'after = model.record(prompt, values=["logits"], edits=[{calls}])["logits"][0].log_softmax(-1)',
        "shown = (before.exp() * (before - after)).sum(-1)  # [token]",
        f"difference = after[{chosen.token}].exp() - before[{chosen.token}].exp()  # [vocab_size]",
        f"for token in before[{chosen.token}].topk(5).indices.tolist():",
        f"    print(repr(model.tokenizer.decode([token])), float(before[{chosen.token}, token].exp()), float(difference[token]))", "",
    ])


def _row(origin: Origin, name: str, layer: int, typed: str, index: str = "[0]") -> str:
    return cell(origin, [name], [layer], [f'shown = rec["{name}", {layer}]{index}  # {typed}'])
