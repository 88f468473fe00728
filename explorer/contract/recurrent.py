"""Laws of a recurrent mixer: its state, by every way it can be had."""

from __future__ import annotations

import torch

from explorer import recurrence
from explorer.contract.laws import law
from explorer.contract.subject import Subject, attempt
from explorer.contract.tally import Tally
from explorer.hosts import Unavailable
from explorer.vocabulary import KERNEL_ARGUMENTS, REPLAYED

HOST = "linear_attn"

#: Relative errors allowed between the kernel, which works in blocks, and the recurrence, token by token.
_FLOAT32, _BFLOAT16 = 2e-5, 2e-2


@law(
    "replay",
    "The recurrence, run again from the kernel's arguments, gives the kernel's attention_head_outputs and state_output, and one head alone the same.",
    HOST, needs=("attention_head_outputs", "state_output", *REPLAYED), float32=_FLOAT32, bfloat16=_BFLOAT16,
)
def replay(s: Subject, host: str, t: Tally) -> None:
    s.looks(HOST, *REPLAYED)
    for layer in s.layers(HOST, "attention_head_outputs", "state_output", *REPLAYED):
        again = s.clean.replay(layer)
        outputs, state = recurrence.delta_rule(*again.arguments, state=again.state_input)
        t.near(layer, outputs, s.get(HOST, "attention_head_outputs", layer).float())
        t.near(layer, state, s.get(HOST, "state_output", layer).float())
        head = outputs.shape[2] - 1
        t.near(layer, s.clean.state(layer, head, s.seq - 1), state[:, head])


@law(
    "states",
    "states ends in state_output, and a head's states by replay, or state read with tracer.iter, are the same to the bit.",
    HOST, needs=("states", "state", "state_output"), float32=_FLOAT32, bfloat16=_BFLOAT16,
)
def states(s: Subject, host: str, t: Tally) -> None:
    for layer in s.layers(HOST, "states", "state_output"):
        found = s.get(HOST, "states", layer)
        t.near(layer, found[:, -1], s.get(HOST, "state_output", layer).float())
        head = found.shape[2] // 2
        t.near(layer, torch.stack(list(s.clean.states(layer, head)), dim=1), found[:, :, head])
    for layer in s.first(HOST, "state"):
        stepped = []
        with torch.no_grad(), s.model.trace(s.ids) as tracer:
            for _ in tracer.iter[: s.seq]:
                stepped.append(s.model.layers[layer].linear_attn.state)
        s.looks(HOST, "state")
        t.same(layer, torch.stack(stepped, dim=1), s.get(HOST, "states", layer))


@law(
    "states follow edits",
    "After edits of the kernel's arguments, states still ends in the kernel's own state_output and state_attention still mixes the values into its outputs.",
    HOST, needs=("states", "state_attention", "attention_head_outputs", "state_output", *REPLAYED), float32=_FLOAT32,
)
def edited(s: Subject, host: str, t: Tally) -> None:
    s.looks(HOST, "states", "state_attention", "attention_head_outputs", "state_output", *REPLAYED)
    for layer in s.first(HOST, "states", "state_attention", "attention_head_outputs", "state_output", *REPLAYED):
        mix = s.envoy(HOST, layer)
        with torch.no_grad(), s.model.trace(s.ids):
            for name in KERNEL_ARGUMENTS:
                getattr(mix, name)[:, 1:3] *= 0.5
            values = mix.attention_values.save()
            outputs, state = mix.attention_head_outputs.save(), mix.state_output.save()
            found, pattern = mix.states.save(), mix.state_attention.save()
        t.near(layer, found[:, -1], state)
        t.near(layer, torch.einsum("bhqk,bkhd->bqhd", pattern, values), outputs)
        t.holds(layer, not torch.equal(state, s.get(HOST, "state_output", layer)), "the edits did not reach the kernel")


@law(
    "states are causal",
    "The state after a token does not depend on later ones: it is the same with another ending, and is the state_output of the text up to there.",
    HOST, needs=("states", "state_output"), float32=_FLOAT32,
)
def causal(s: Subject, host: str, t: Tally) -> None:
    cut = s.seq // 2
    ids = s.ids.clone()
    ids[:, cut:] = torch.flip(s.ids, dims=[0, 1])[:, cut:]
    changed = s.model.record(ids, ["linear_attn.states"])
    short = s.model.record(s.ids[:, :cut], ["linear_attn.state_output"])
    for layer in s.layers(HOST, "states", "state_output"):
        found = s.get(HOST, "states", layer)
        t.near(layer, changed["states", layer][:, :cut], found[:, :cut])
        t.near(layer, short["state_output", layer].float(), found[:, cut - 1])
        t.holds(layer, not torch.equal(changed["states", layer][:, cut:], found[:, cut:]), "another ending leaves the states after it the same")


@law(
    "implied attention",
    "state_attention times attention_values is attention_head_outputs, and it reads no later token; it is refused where a state entered the call.",
    HOST, needs=("state_attention", "attention_values", "attention_head_outputs"), float32=_FLOAT32, bfloat16=_BFLOAT16,
)
def implied(s: Subject, host: str, t: Tally) -> None:
    layers = s.layers(HOST, "state_attention", "attention_values", "attention_head_outputs")
    for layer in layers:
        pattern = s.get(HOST, "state_attention", layer)
        mixed = torch.einsum("bhqk,bkhd->bqhd", pattern, s.get(HOST, "attention_values", layer).float())
        t.near(layer, s.get(HOST, "attention_head_outputs", layer).float(), mixed)
        t.same(layer, pattern, pattern.tril())
    told: list[BaseException | None] = []
    with torch.no_grad(), s.model.trace(s.continued(s.seq - 1), cache=s.prefilled(s.seq - 1), use_cache=True):
        for layer in layers:
            told.append(attempt(lambda: s.model.layers[layer].linear_attn.state_attention))
    for layer, error in zip(layers, told, strict=True):
        t.holds(layer, isinstance(error, Unavailable) and "fresh prompt" in str(error), f"on a decoding step it gives {error!r}")


@law(
    "decays forget",
    "decays are float32 logarithms, at most nought; a fresh prompt has no state_input.",
    HOST, needs=("decays", "state_input"), bfloat16=0.0,
)
def decays(s: Subject, host: str, t: Tally) -> None:
    for layer in s.layers(HOST, "decays", "state_input"):
        found = s.get(HOST, "decays", layer)
        t.same(layer, found.dtype, torch.float32)
        t.holds(layer, (found <= 0).all(), f"a decay is {found.max().item():.2g}")
        t.holds(layer, (found < 0).any(), "every decay is zero")
        t.same(layer, s.get(HOST, "state_input", layer), None)


@law(
    "convolution's reach",
    "conv_input at one token shows in the queries, keys and values of that token and of the next few, as far as the convolution is wide, and in no others.",
    HOST, needs=("conv_input", "attention_queries", "attention_keys", "attention_values"),
)
def reach(s: Subject, host: str, t: Tally) -> None:
    names = ("attention_queries", "attention_keys", "attention_values")
    s.looks(HOST, "conv_input")
    for layer in s.first(HOST, "conv_input", *names):
        mix = s.envoy(HOST, layer)
        position = 2
        with torch.no_grad(), s.model.trace(s.ids):
            mix.conv_input[:, position] *= -1
            edited = [mix.attention_queries, mix.attention_keys, mix.attention_values].save()
        for name, found in zip(names, edited, strict=True):
            moved = (found != s.get(HOST, name, layer)).flatten(2).any(-1).any(0)
            want = torch.zeros(s.seq, dtype=torch.bool)
            want[position : position + mix.conv_width] = True
            t.same(layer, moved, want)
