"""A toy kind of mixer, put together as site/guides/adding-a-mixer-kind says: a leaky sum per
channel.

``h_t = leak h_{t-1} + v_t`` with one fixed leak per channel, and ``y_t = h_t``. The module stands
in for the attention of a small Llama. Run as a script, it registers the kind, runs the contract on
the
model and prints the outcomes as JSON: a kind is registered before the other rooms are imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from explorer import vocabulary
from explorer.vocabulary.mixers import KernelSignature, Mixer, StateView
from explorer.vocabulary.values import RecordWhen, computed, values_of

_MODULE = "tests.support.leaky_mixer"

KIND = Mixer(
    host="leaky_sum",
    path="model.layers[i].mixer",
    meaning="a leaky sum with one number per channel",
    title="Leaky sum",
    trait="gated_recurrence",
    layer_types=(),
    kernel=KernelSignature(("inputs", "leak", "memory")),
    kernel_values=f"{_MODULE}:find_leaky_sum",
    replayed=("attention_values", "decays", "state_input"),
    steps=f"{_MODULE}:leaky_steps",
    implied_attention=f"{_MODULE}:leaky_attention",
    rule=("leaky sum", ("hₜ = eᵍ hₜ₋₁ + v", "yₜ = hₜ")),
    state_view=StateView(written=None),
    values=values_of(
        "leaky_sum",
        "recurrent",
        ("attention_values", "Channels", "what is added to the state"),
        ("decays", "Channels", "log of the share of the state that is retained, at most 0"),
        ("state_input", "UnitState", "the state entering the call", {"optional": True}),
        ("attention_head_outputs", "Channels", "the state after every token"),
        ("state_output", "UnitState", "the state leaving the call"),
        (
            "state_attention",
            "ChannelPattern",
            "the exact implied attention of each channel",
            computed("state_output", "products of the leaks", recorded=RecordWhen.NAMED),
        ),
        (
            "attention_output",
            "Residual",
            "the addend: what the mixer adds to the stream",
            {"recorded": RecordWhen.NEEDED},
        ),
    ),
)


def leaky_sum(inputs: Tensor, leak: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The kernel: outputs [batch seq channels] and the last state [batch channels]."""
    state = torch.zeros_like(inputs[:, 0]) if memory is None else memory
    outputs = []
    for token in range(inputs.shape[1]):
        state = leak[:, token].exp() * state + inputs[:, token]
        outputs.append(state)
    return torch.stack(outputs, dim=1), state


def leaky_steps(
    values: Tensor, decays: Tensor, state: Tensor | None = None, heads: Any = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Output and state [batch channels] after each token, of some channels."""
    if heads is not None:
        values, decays = values[..., heads], decays[..., heads]
        state = None if state is None else state[..., heads]
    for token in range(values.shape[1]):
        _, state = leaky_sum(values[:, token : token + 1], decays[:, token : token + 1], state)
        yield state, state


def leaky_attention(decays: Tensor) -> Tensor:
    """The implied attention [batch channels query key]: the product of the leaks after the key."""
    total = decays.cumsum(1).transpose(1, 2)
    return (total.unsqueeze(-1) - total.unsqueeze(-2)).exp().tril()


def find_leaky_sum(findings: Any, graph: Any, module: Any, call: Any) -> None:
    """The values at the kernel's call."""
    from explorer.discovery.candidates import TensorCandidate, named_argument

    values = named_argument(call, "inputs")
    findings.sizes = {"channels": values.tensor.shape[-1]}
    found = {
        "attention_values": values,
        "decays": named_argument(call, "leak"),
        "state_input": named_argument(call, "memory"),
        "attention_head_outputs": TensorCandidate(call.output[0], call, "output", 0),
        "state_output": TensorCandidate(call.output[1], call, "output", 1),
    }
    findings.candidates |= {name: one for name, one in found.items() if one is not None}


class LeakyMixer(nn.Module):
    """The mixer: a projection in, a leak from the input, the sum, a projection out."""

    def __init__(self, width: int, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.v_proj, self.g_proj, self.o_proj = (
            nn.Linear(width, width, bias=False) for _ in range(3)
        )

    def forward(self, hidden_states: Tensor, cache: Any = None, **_: Any) -> tuple[Tensor, None]:
        states = {} if cache is None else vars(cache).setdefault("leaky_states", {})
        values = self.v_proj(hidden_states)
        leak = nn.functional.logsigmoid(self.g_proj(hidden_states))
        outputs, state = leaky_sum(values, leak, states.get(self.layer))
        states[self.layer] = state
        return self.o_proj(outputs), None


# Discovery follows the modules and functions of transformers alone.
for _part in (leaky_sum, LeakyMixer):
    _part.__module__ = "transformers.models.leaky.modeling_leaky"


def main() -> None:
    vocabulary.register(KIND)
    from explorer import specimens
    from explorer.contract import check
    from explorer.discovery.discover import discover
    from explorer.model.language_model import LanguageModel

    specimen = specimens.build("llama")
    torch.manual_seed(0)
    for index, layer in enumerate(specimen.model.model.layers):
        layer.self_attn = LeakyMixer(specimen.model.config.hidden_size, index)
    module = specimen.model.eval()
    model = LanguageModel(module, specimen.tokenizer, discover(module), "leaky", "random")
    rec = model.record("The quick brown fox")
    report = check(model)
    result = {
        "mixers": model.mixers,
        "checked": [one.name for one in report.checks if one.host == KIND.path],
        "failed": [(one.name, one.host, one.detail) for one in report.failures],
        "norms": list(rec.state_norms(0).shape),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    from tests.support.leaky_mixer import main as run  # entry points import this module by its name

    run()
