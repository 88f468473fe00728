"""Laws about names: what they resolve to, and the sizes that hang on them."""

from __future__ import annotations

from explorer import vocabulary
from explorer.contract.laws import law
from explorer.contract.subject import Subject, attempt
from explorer.contract.tally import Tally

#: Which part of a mixture an alias stands for.
_PARTS = {"router": "router", "experts": "experts", "shared_experts": "shared"}


@law(
    "names",
    "Each standard name is the native module that plays the part: embedding, blocks, final norm, head, mixers, MLP and its parts.",
    "model", "layers", "self_attn", "linear_attn", "mlp", "shared_experts", shapes=True,
)
def names_resolve(s: Subject, host: str, t: Tally) -> None:
    if host == "model":
        _frame(s, t)
        return
    for layer in s.layers(host):
        envoy = s.envoy(host, layer)
        native = s.module(layer, s.model.anatomy.block(layer).hosts[host].module)
        t.holds(layer, envoy._module is native, f"{vocabulary.HOSTS[host].path} is a {type(envoy._module).__name__}, not the {type(native).__name__}")
        for name, trait in _PARTS.items() if host == "mlp" else ():
            path = s.traits(host, layer).get(trait)
            if path:
                t.holds(layer, getattr(envoy, name)._module is s.module(layer, path), f"mlp.{name} is not {path}")


def _frame(s: Subject, t: Tally) -> None:
    blocks = s.hf.get_submodule(s.model.anatomy.frame.blocks)
    t.holds("embed_tokens", s.model.embed_tokens._module is s.hf.get_input_embeddings(), "it is not the input embedding")
    t.holds("lm_head", s.model.lm_head._module is s.hf.get_output_embeddings(), "it is not the output embedding")
    t.holds("layers", [layer._module for layer in s.model.layers] == list(blocks), "they are not the model's blocks in order")
    t.same("num_layers", s.model.num_layers, len(blocks))
    t.same("vocab_size", s.model.vocab_size, s.hf.get_output_embeddings().weight.shape[0])
    t.same("hidden_size", s.model.hidden_size, s.hf.get_output_embeddings().weight.shape[1])


@law(
    "sizes",
    "Every axis of every value has a size of its name on the value's host, a positive number that cannot be set.",
    "model", "layers", "self_attn", "linear_attn", "mlp", "shared_experts", shapes=True,
)
def sizes_answer(s: Subject, host: str, t: Tally) -> None:
    rows = [row for row in s.rows if row.host == host and row.available]
    axes = {axis for row in rows for axis in row.value.axes if axis not in vocabulary.CALL_AXES}
    for layer in s.layers(host):
        envoy = s.envoy(host, layer)
        for axis in sorted(axes):
            if not any(axis in row.value.axes and (layer is None or layer in row.layers) for row in rows):
                continue
            size = getattr(envoy, axis, None)
            t.holds(layer, isinstance(size, int) and size > 0, f"{axis} is {size!r}")
            t.holds(layer, isinstance(attempt(lambda: setattr(envoy, axis, 1)), AttributeError) and getattr(envoy, axis) == size,
                    f"{axis} could be set")


@law(
    "printout",
    "print(model) shows each value it serves with its layout, on a host that has it.",
    "model", shapes=True,
)
def printout_lists(s: Subject, host: str, t: Tally) -> None:
    shown = repr(s.model)
    for row in s.rows:
        if row.available:
            line = f"({row.name}) -> {row.value.typed}"
            t.holds(f"{row.host}.{row.name}", line in shown, f"the printout has no {line}")


