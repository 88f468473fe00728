"""Laws of a recurrent mixer: its state, by every way it can be had."""

from __future__ import annotations

import torch

from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import ModelUnderTest, attempt
from explorer.contract.registry import invariant
from explorer.contract.residual_steps import added, followed
from explorer.model.envoys import Unavailable
from explorer.vocabulary import BY_HOST, RECURRENT, REPLAYS

#: Relative errors allowed between the kernel, which works in blocks, and the recurrence, token by token.
_FLOAT32, _BFLOAT16 = 2e-5, 2e-2


def _given(s: ModelUnderTest, host: str) -> tuple[str, ...]:
    """What a host's recurrence is run again from, as far as the model has it."""
    return tuple(name for name in REPLAYS[host] if s.layers(host, name))


@invariant(
    "replay",
    "The recurrence, run again from the kernel's arguments, gives the kernel's attention_head_outputs and state_output, and one head alone the same.",
    *RECURRENT,
    needs=("attention_head_outputs", "state_output"),
    float32=_FLOAT32,
    bfloat16=_BFLOAT16,
)
def replay(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    s.looks(host, *_given(s, host))
    for layer in s.layers(host, "attention_head_outputs", "state_output", *_given(s, host)):
        again = s.clean.replay(layer)
        outputs, state = again.run()
        t.near(layer, outputs, s.get(host, "attention_head_outputs", layer).float())
        t.near(layer, state, s.get(host, "state_output", layer).float())
        head = outputs.shape[2] - 1
        t.near(layer, s.clean.state(layer, head, s.seq - 1), state[:, head])


@invariant(
    "states",
    "states ends in state_output, and a head's states by replay, or state read with tracer.iter, are the same to the bit.",
    *RECURRENT,
    needs=("states", "state", "state_output"),
    float32=_FLOAT32,
    bfloat16=_BFLOAT16,
)
def states(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for layer in s.layers(host, "states", "state_output"):
        found = s.get(host, "states", layer)
        t.near(layer, found[:, -1], s.get(host, "state_output", layer).float())
        head = found.shape[2] // 2
        t.near(layer, torch.stack(list(s.clean.states(layer, head)), dim=1), found[:, :, head])
    for layer in s.first(host, "state"):
        stepped = []
        with torch.no_grad(), s.model.trace(s.ids) as tracer:
            for _ in tracer.iter[: s.seq]:
                stepped.append(s.envoy(host, layer).state)
        s.looks(host, "state")
        t.same(layer, torch.stack(stepped, dim=1), s.get(host, "states", layer))


def _mixed(pattern: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """An implied attention [batch heads query key] times values [batch key heads value_dim] or, by channels, [batch key channels]."""
    return (
        torch.einsum("bhqk,bkhd->bqhd", pattern, values)
        if values.dim() == 4
        else torch.einsum("bcqk,bkc->bqc", pattern, values)
    )


@invariant(
    "replays follow edits",
    "After edits of the kernel's arguments, the recurrence run again ends in the kernel's own state_output and state_attention still mixes the values "
    "into its outputs.",
    *RECURRENT,
    needs=("state_attention", "attention_head_outputs", "state_output"),
    float32=_FLOAT32,
)
def edited(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    given = [name for name in _given(s, host) if name != "state_input"]
    s.looks(host, "state_attention", "attention_head_outputs", "state_output", *given)
    for layer in s.first(host, "state_attention", "attention_head_outputs", "state_output", *given):
        mix = s.envoy(host, layer)
        names = [
            name for name in s.model.reading_order(layer) if name.removeprefix(f"{host}.") in given
        ]
        with torch.no_grad(), s.model.trace(s.ids):
            for name in names:
                value = getattr(mix, name.removeprefix(f"{host}."))
                if value.dim() > 1:
                    value[:, 1:3] *= 0.5
                else:
                    value *= 0.5
                if name.endswith("attention_values"):
                    values = value.save()
            outputs, state = mix.attention_head_outputs.save(), mix.state_output.save()
            found = (mix.states[:, -1] if layer in s.layers(host, "states") else state).save()
            pattern = mix.state_attention.save()
        t.near(layer, found, state)
        t.near(layer, _mixed(pattern, values), outputs)
        t.holds(
            layer,
            not torch.equal(state, s.get(host, "state_output", layer)),
            "the edits did not reach the kernel",
        )


@invariant(
    "states are causal",
    "The state after a token does not depend on later ones: it is the same with another ending, and is the state_output of the text up to there.",
    *RECURRENT,
    needs=("states", "state_output"),
    float32=_FLOAT32,
)
def causal(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    cut = s.seq // 2
    ids = s.ids.clone()
    ids[:, cut:] = torch.flip(s.ids, dims=[0, 1])[:, cut:]
    changed = s.model.record(ids, [f"{host}.states"])
    short = s.model.record(s.ids[:, :cut], [f"{host}.state_output"])
    for layer in s.layers(host, "states", "state_output"):
        found, other = s.get(host, "states", layer), changed[f"{host}.states", layer]
        t.near(layer, other[:, :cut], found[:, :cut])
        t.near(layer, short[f"{host}.state_output", layer].float(), found[:, cut - 1])
        t.holds(
            layer,
            not torch.equal(other[:, cut:], found[:, cut:]),
            "another ending leaves the states after it the same",
        )


@invariant(
    "implied attention",
    "state_attention times attention_values is attention_head_outputs, and it reads no later token; it is refused where a state entered the call.",
    *RECURRENT,
    needs=("state_attention", "attention_values", "attention_head_outputs"),
    float32=_FLOAT32,
    bfloat16=_BFLOAT16,
)
def implied(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    layers = s.layers(host, "state_attention", "attention_values", "attention_head_outputs")
    for layer in layers:
        pattern = s.get(host, "state_attention", layer)
        t.near(
            layer,
            s.get(host, "attention_head_outputs", layer).float(),
            _mixed(pattern, s.get(host, "attention_values", layer).float()),
        )
        t.same(layer, pattern, pattern.tril())
    if not s.continues:
        return
    told: list[BaseException | None] = []
    with (
        torch.no_grad(),
        s.model.trace(s.continued(s.seq - 1), cache=s.prefilled(s.seq - 1), use_cache=True),
    ):
        for layer in layers:
            told.append(attempt(lambda: s.envoy(host, layer).state_attention))
    for layer, error in zip(layers, told, strict=True):
        t.holds(
            layer,
            isinstance(error, Unavailable)
            and ("fresh prompt" in str(error) or "whole sequence" in str(error)),
            f"on a decoding step it gives {error!r}",
        )


@invariant(
    "decays forget",
    "decays are logarithms, at most nought, and float32 where they are one per head; a fresh prompt has no state_input.",
    *(host for host in RECURRENT if "decays" in BY_HOST[host]),
    needs=("decays",),
    bfloat16=0.0,
)
def decays(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for layer in s.layers(host, "decays"):
        found = s.get(host, "decays", layer)
        t.holds(layer, host == "kda" or found.dtype == torch.float32, f"they are {found.dtype}")
        t.holds(layer, (found <= 0).all(), f"a decay is {found.max().item():.2g}")
        t.holds(layer, (found < 0).any(), "every decay is zero")
    for layer in s.layers(host, "state_input") if "state_input" in BY_HOST[host] else ():
        t.same(layer, s.get(host, "state_input", layer), None)


@invariant(
    "a gate keeps or forgets",
    "recurrent_gate lies between nought and one, and is nought at the first token of a text, where nothing is kept.",
    "gated_recurrence",
    needs=("recurrent_gate",),
    bfloat16=0.0,
)
def gates(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for layer in s.layers(host, "recurrent_gate"):
        found = s.get(host, "recurrent_gate", layer)
        t.holds(layer, ((found >= 0) & (found <= 1)).all(), "a gate is outside nought and one")
        t.holds(layer, not found[:, 0].any(), "the first token keeps something")
        t.holds(layer, found[:, 1:].any(), "no token keeps anything")


def _fed(host: str) -> tuple[str, ...]:
    """What a host's convolution feeds with nothing but an activation between; which no norm per token or decay comes before."""
    three = ("attention_queries", "attention_keys", "attention_values")
    return {"ssd": three, "linear_attn": three, "kda": three, "short_conv": ("conv_output",)}.get(
        host, three[2:]
    )


@invariant(
    "convolution's reach",
    "conv_input at one token shows in what the convolution feeds at that token and at the next few, as far as the convolution is wide, and nowhere else.",
    *RECURRENT,
    "short_conv",
    needs=("conv_input",),
    when=lambda s: any(
        s.first(host, "conv_input", *_fed(host)) for host in (*RECURRENT, "short_conv")
    ),
)
def reach(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    names = _fed(host)
    s.looks(host, "conv_input")
    for layer in s.first(host, "conv_input", *names):
        mix = s.envoy(host, layer)
        position = 2
        with torch.no_grad(), s.model.trace(s.ids):
            mix.conv_input[:, position] *= -1
            edited = {name: getattr(mix, name) for name in _in_order(s, host, layer, names)}.save()
        moved = [
            (found != s.get(host, name, layer)).flatten(2).any(-1).any(0)
            for name, found in edited.items()
        ]
        want = torch.zeros(s.seq, dtype=torch.bool)
        want[position : position + mix.conv_width] = True
        for each in moved:
            t.same(layer, each, want)


def _in_order(s: ModelUnderTest, host: str, layer: int, names: tuple[str, ...]) -> list[str]:
    order = s.model.reading_order(layer)
    return sorted(names, key=lambda name: order.index(f"{host}.{name}"))


@invariant(
    "a gated convolution",
    "The projection makes attention_output of conv_output, times conv_gate where the mixer gates it.",
    "short_conv",
    needs=("conv_output",),
    float32=1e-5,
    bfloat16=2e-2,
)
def gated_convolution(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for layer in s.layers(host, "conv_output"):
        found = s.get(host, "conv_output", layer)
        if layer in s.layers(host, "conv_gate"):
            found = found * s.get(host, "conv_gate", layer)
        with torch.no_grad():
            made = s.module(layer, s.details(host, layer).output_projection)(found)
        if followed(s, host, layer):
            t.near(layer, added(s, host, layer, made), s.get(host, "attention_output", layer))


@invariant(
    "channels to output",
    "The projection makes attention_output of attention_head_outputs, times head_gate where the kernel gates its channels.",
    "selective_scan",
    needs=("attention_head_outputs",),
    float32=1e-5,
    bfloat16=2e-2,
)
def gated_channels(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for layer in s.layers(host, "attention_head_outputs"):
        found = s.get(host, "attention_head_outputs", layer)
        if layer in s.layers(host, "head_gate"):
            found = found * s.get(host, "head_gate", layer)
        with torch.no_grad():
            made = s.module(layer, s.details(host, layer).output_projection)(found.to(s.dtype))
        if followed(s, host, layer):
            t.near(layer, added(s, host, layer, made), s.get(host, "attention_output", layer))
