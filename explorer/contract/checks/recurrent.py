"""Invariants of recurrent mixers and short convolutions: states, decays, gates, projections."""

from __future__ import annotations

import torch

from explorer.contract.comparisons import Comparisons, difference
from explorer.contract.model_under_test import ModelUnderTest, attempt
from explorer.contract.registry import invariant
from explorer.contract.residual_steps import addend_of, tail_known
from explorer.model.errors import Unavailable
from explorer.vocabulary import BY_HOST, MIXERS, RECURRENT

#: Tolerances between the kernel, which works in chunks, and the recurrence, token by token.
_FLOAT32, _BFLOAT16 = 2e-5, 2e-2


def _replay_inputs(subject: ModelUnderTest, host: str) -> tuple[str, ...]:
    """Return the values a host's recurrence is replayed from, as far as the model serves them."""
    return tuple(name for name in MIXERS[host].replayed if subject.layers(host, name))


@invariant(
    "replay",
    "The recurrence, replayed from the kernel's arguments, gives the kernel's "
    "attention_head_outputs and state_output, and one head alone gives the same.",
    *RECURRENT,
    needs=("attention_head_outputs", "state_output"),
    float32=_FLOAT32,
    bfloat16=_BFLOAT16,
)
def replay(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    inputs = _replay_inputs(subject, host)
    subject.note_read(host, *inputs)
    for layer in subject.layers(host, "attention_head_outputs", "state_output", *inputs):
        outputs, state = subject.clean.replay(layer).run()
        kernel_outputs = subject.get(host, "attention_head_outputs", layer).float()
        compare.close(layer, outputs, kernel_outputs)
        compare.close(layer, state, subject.get(host, "state_output", layer).float())
        head = outputs.shape[2] - 1
        compare.close(layer, subject.clean.state(layer, head, subject.seq - 1), state[:, head])


@invariant(
    "states",
    "The last of states is state_output; the replayed states of a head are those in states, and "
    "state read with tracer.iter is identical to them.",
    *RECURRENT,
    needs=("states", "state", "state_output"),
    float32=_FLOAT32,
    bfloat16=_BFLOAT16,
)
def states(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for layer in subject.layers(host, "states", "state_output"):
        found = subject.get(host, "states", layer)
        compare.close(layer, found[:, -1], subject.get(host, "state_output", layer).float())
        head = found.shape[2] // 2
        replayed = torch.stack(list(subject.clean.states(layer, head)), dim=1)
        compare.close(layer, replayed, found[:, :, head])
    for layer in subject.one_per_kind(host, "state"):
        stepped = []
        with torch.no_grad(), subject.model.trace(subject.ids) as tracer:
            for _ in tracer.iter[: subject.seq]:
                stepped.append(subject.envoy(host, layer).state)
        subject.note_read(host, "state")
        compare.equal(layer, torch.stack(stepped, dim=1), subject.get(host, "states", layer))


def _mix(pattern: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Apply an implied attention to values.

    pattern: [batch heads query key], with values [batch key heads value_dim]; by channel
    [batch channels query key], with values [batch key channels].
    """
    if values.dim() == 4:
        return torch.einsum("bhqk,bkhd->bqhd", pattern, values)
    return torch.einsum("bcqk,bkc->bqc", pattern, values)


@invariant(
    "replays follow edits",
    "After edits of the kernel's arguments the replayed recurrence ends in the kernel's own "
    "state_output, and state_attention times the values gives its outputs.",
    *RECURRENT,
    needs=("state_attention", "attention_head_outputs", "state_output"),
    float32=_FLOAT32,
)
def replay_after_edits(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    inputs = [name for name in _replay_inputs(subject, host) if name != "state_input"]
    names = ("state_attention", "attention_head_outputs", "state_output", *inputs)
    subject.note_read(host, *names)
    for layer in subject.one_per_kind(host, *names):
        mixer = subject.envoy(host, layer)
        edited = _in_order(subject, host, layer, inputs)
        with torch.no_grad(), subject.model.trace(subject.ids):
            for name in edited:
                value = getattr(mixer, name)
                if value.dim() > 1:
                    value[:, 1:3] *= 0.5
                else:
                    value *= 0.5
                if name == "attention_values":
                    values = value.save()
            outputs, state = mixer.attention_head_outputs.save(), mixer.state_output.save()
            last = (
                mixer.states[:, -1] if layer in subject.layers(host, "states") else state
            ).save()
            pattern = mixer.state_attention.save()
        compare.close(layer, last, state)
        compare.close(layer, _mix(pattern, values), outputs)
        compare.holds(
            layer,
            not torch.equal(state, subject.get(host, "state_output", layer)),
            "the edits did not reach the kernel",
        )


def _in_order(subject: ModelUnderTest, host: str, layer: int, names: list[str]) -> list[str]:
    """Return names of a host's values in the order in which the forward reaches them."""
    order = (name.removeprefix(f"{host}.") for name in subject.model.reading_order(layer))
    return [name for name in order if name in names]


@invariant(
    "states are causal",
    "The state after a token does not depend on later tokens: it is the same with another ending, "
    "and is the state_output of the text up to that token.",
    *RECURRENT,
    needs=("states", "state_output"),
    float32=_FLOAT32,
)
def causal(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    cut = subject.seq // 2
    ids = subject.ids.clone()
    ids[:, cut:] = torch.flip(subject.ids, dims=[0, 1])[:, cut:]
    with_other_ending = subject.model.record(ids, [f"{host}.states"])
    shortened = subject.model.record(subject.ids[:, :cut], [f"{host}.state_output"])
    for layer in subject.layers(host, "states", "state_output"):
        found = subject.get(host, "states", layer)
        other = with_other_ending[f"{host}.states", layer]
        compare.close(layer, other[:, :cut], found[:, :cut])
        last = shortened[f"{host}.state_output", layer].float()
        compare.close(layer, last, found[:, cut - 1])
        unchanged = torch.equal(other[:, cut:], found[:, cut:])
        compare.holds(layer, not unchanged, "another ending leaves the states after it the same")


@invariant(
    "implied attention",
    "state_attention times attention_values is attention_head_outputs, and gives later tokens no "
    "weight; it is refused where a state entered the call.",
    *RECURRENT,
    needs=("state_attention", "attention_values", "attention_head_outputs"),
    float32=_FLOAT32,
    bfloat16=_BFLOAT16,
)
def implied_attention(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    layers = subject.layers(host, "state_attention", "attention_values", "attention_head_outputs")
    for layer in layers:
        pattern = subject.get(host, "state_attention", layer)
        outputs = subject.get(host, "attention_head_outputs", layer).float()
        values = subject.get(host, "attention_values", layer).float()
        compare.close(layer, outputs, _mix(pattern, values))
        compare.equal(layer, pattern, pattern.tril())
    native, last = subject.native, subject.seq - 1
    if not native.returns_cache:
        return
    inputs, cache = native.continuation(last), native.cache_after(last)
    errors: list[Exception | None] = []
    with torch.no_grad(), subject.model.trace(inputs, **cache, use_cache=True):
        for layer in layers:
            errors.append(attempt(lambda layer=layer: subject.envoy(host, layer).state_attention))
    for layer, error in zip(layers, errors, strict=True):
        reasons = ("fresh prompt", "whole sequence")
        refused = isinstance(error, Unavailable) and any(text in str(error) for text in reasons)
        compare.holds(layer, refused, f"on a decoding step it gives {error!r}")


@invariant(
    "decays",
    "decays are logarithms, at most zero, and float32 where there is one per head; a fresh prompt "
    "has no state_input.",
    *(host for host in RECURRENT if "decays" in BY_HOST[host]),
    needs=("decays",),
    bfloat16=0.0,
)
def decays(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for layer in subject.layers(host, "decays"):
        found = subject.get(host, "decays", layer)
        in_float32 = not MIXERS[host].float32_decays or found.dtype == torch.float32
        compare.holds(layer, in_float32, f"they are {found.dtype}")
        compare.holds(layer, (found <= 0).all(), f"a decay is {found.max().item():.2g}")
        compare.holds(layer, (found < 0).any(), "every decay is zero")
    for layer in subject.layers(host, "state_input") if "state_input" in BY_HOST[host] else ():
        compare.equal(layer, subject.get(host, "state_input", layer), None)


@invariant(
    "recurrent gate",
    "recurrent_gate lies between zero and one, and is zero at the first token of a text, before "
    "which there is nothing to keep.",
    *(host for host in RECURRENT if MIXERS[host].reset_gate == "recurrent_gate"),
    needs=("recurrent_gate",),
    bfloat16=0.0,
)
def gates(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for layer in subject.layers(host, "recurrent_gate"):
        found = subject.get(host, "recurrent_gate", layer)
        in_range = ((found >= 0) & (found <= 1)).all()
        compare.holds(layer, in_range, "a gate is not between zero and one")
        compare.holds(layer, not found[:, 0].any(), "the gate at the first token is not zero")
        compare.holds(layer, found[:, 1:].any(), "every gate is zero")


# -- convolutions ---------------------------------------------------------------------


#: The mixers that may have a short convolution.
_CONVOLVING = tuple(host for host, kind in MIXERS.items() if kind.conv_feeds)


@invariant(
    "convolution width",
    "A change of conv_input at one token changes what the convolution feeds at that token and the "
    "next ones, as many as the convolution is wide, and nowhere else.",
    *_CONVOLVING,
    needs=("conv_input",),
    when=lambda subject: any(
        subject.one_per_kind(host, "conv_input", *MIXERS[host].conv_feeds) for host in _CONVOLVING
    ),
    otherwise="what the convolution feeds is unavailable",
)
def convolution_width(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    names = list(MIXERS[host].conv_feeds)
    subject.note_read(host, "conv_input")
    position = 2
    for layer in subject.one_per_kind(host, "conv_input", *names):
        mixer = subject.envoy(host, layer)
        in_order = _in_order(subject, host, layer, names)
        with torch.no_grad(), subject.model.trace(subject.ids):
            mixer.conv_input[:, position] *= -1
            edited = {name: getattr(mixer, name) for name in in_order}.save()  # pyright: ignore[reportAttributeAccessIssue]  # nnsight adds it
        changed = [
            (found != subject.get(host, name, layer)).flatten(2).any(-1).any(0)
            for name, found in edited.items()
        ]
        expected = torch.zeros(subject.seq, dtype=torch.bool)
        expected[position : position + mixer.conv_width] = True
        for tokens in changed:
            compare.equal(layer, tokens, expected)


#: Those that feed the recurrence channels of it as they are; a reset gate goes with a gated input.
_FEEDING_CHANNELS = tuple(host for host in _CONVOLVING if MIXERS[host].reset_gate is None)


def _convolutions(subject: ModelUnderTest, host: str, layer: int) -> list[torch.nn.Conv1d]:
    """Return a mixer's depthwise convolutions, where they take all channels of conv_input."""
    path = subject.host(host, layer).module
    if not path:
        return []
    modules = subject.module(layer, path).modules()
    found = [one for one in modules if isinstance(one, torch.nn.Conv1d)]
    channels = subject.get(host, "conv_input", layer).shape[-1]
    depthwise = all(one.groups == one.in_channels == one.out_channels for one in found)
    return found if depthwise and sum(one.in_channels for one in found) == channels else []


def _convolved(subject: ModelUnderTest) -> list[tuple[str, int]]:
    """Return the mixers, with their blocks, whose convolutions are modules of their own."""
    return [
        (host, layer)
        for host in _FEEDING_CHANNELS
        for layer in subject.layers(host, "conv_input", MIXERS[host].conv_feeds[-1])
        if _convolutions(subject, host, layer)
    ]


@invariant(
    "convolution",
    "The mixer's own convolution of conv_input, with at most a SiLU after it, is what it feeds: "
    "conv_output, or values, and on most mixers keys and queries, among its channels.",
    *_FEEDING_CHANNELS,
    needs=("conv_input",),
    float32=1e-5,
    when=lambda subject: bool(_convolved(subject)),
    otherwise="its convolution is no module",
)
def convolution(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for layer in (layer for found, layer in _convolved(subject) if found == host):
        modules = _convolutions(subject, host, layer)
        taken = subject.get(host, "conv_input", layer).mT
        with torch.no_grad():
            parts = taken.split([one.in_channels for one in modules], dim=1)
            made = [_causal(one, part) for one, part in zip(modules, parts, strict=True)]
        whole = torch.cat(made, dim=1).mT
        for name in MIXERS[host].conv_feeds:
            if layer in subject.layers(host, name):
                fed = _one_per_group(subject.get(host, name, layer)).flatten(2)
                compare.close(layer, fed, _nearest_channels(fed, whole))


def _one_per_group(fed: torch.Tensor) -> torch.Tensor:
    """Return what a convolution feeds without the heads that repeat the one before."""
    heads = fed.shape[2] if fed.dim() == 4 else 1
    for times in range(heads, 1, -1):
        if heads % times == 0:
            single = fed[:, :, ::times]
            if torch.equal(single.repeat_interleave(times, dim=2), fed):
                return single
    return fed


def _nearest_channels(fed: torch.Tensor, convolved: torch.Tensor) -> torch.Tensor:
    """Return neighbouring channels of [batch seq channels], before or after a SiLU, that are
    closest to what was fed.
    """
    width = fed.shape[-1]
    slices = [
        either[..., start : start + width]
        for either in (convolved, torch.nn.functional.silu(convolved))
        for start in range(convolved.shape[-1] - width + 1)
    ]
    return min(slices, key=lambda one: difference(fed, one))


def _causal(conv: torch.nn.Conv1d, x: torch.Tensor) -> torch.Tensor:
    """Convolve x [batch channels seq] so that no token sees a later one."""
    padded = torch.nn.functional.pad(x.to(conv.weight.dtype), (conv.kernel_size[0] - 1, 0))
    return torch.nn.functional.conv1d(padded, conv.weight, conv.bias, groups=conv.groups)


def _compare_projection(
    subject: ModelUnderTest, host: str, compare: Comparisons, name: str, gate: str
) -> None:
    """Compare attention_output with the output projection of a value and its gate, if any."""
    for layer in subject.layers(host, name):
        found = subject.get(host, name, layer)
        if layer in subject.layers(host, gate):
            found = found * subject.get(host, gate, layer)
        if tail_known(subject, host, layer):
            projection = subject.module(layer, subject.details(host, layer).output_projection)
            with torch.no_grad():
                addend = addend_of(subject, host, layer, projection(found.to(subject.dtype)))
            compare.close(layer, addend, subject.get(host, "attention_output", layer))


@invariant(
    "a gated convolution",
    "The output projection turns conv_output, times conv_gate where the mixer has a gate, into "
    "attention_output.",
    "short_conv",
    needs=("conv_output",),
    float32=1e-5,
    bfloat16=2e-2,
)
def gated_convolution(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    _compare_projection(subject, host, compare, "conv_output", "conv_gate")


@invariant(
    "channels to output",
    "The output projection turns attention_head_outputs, times head_gate where the kernel has a "
    "gate, into attention_output.",
    "selective_scan",
    needs=("attention_head_outputs",),
    float32=1e-5,
    bfloat16=2e-2,
)
def gated_channels(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    _compare_projection(subject, host, compare, "attention_head_outputs", "head_gate")


INVARIANTS = (
    replay,
    states,
    replay_after_edits,
    causal,
    implied_attention,
    decays,
    gates,
    convolution_width,
    convolution,
    gated_convolution,
    gated_channels,
)
