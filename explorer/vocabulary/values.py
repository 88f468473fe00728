"""The standard values, their layouts and their hosts, as data.

Everything that names a value (the adapters, the printout, the pages, the app)
reads this module; it imports nothing but the standard library.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The axes of a value, in order, by name.

    ``axes`` are the names the sizes of the host answer to; ``batch``, ``seq``,
    ``query`` and ``key`` come from the call.
    """

    name: str
    axes: tuple[str, ...]
    meaning: str

    def __str__(self) -> str:
        return f"{self.name} [{' '.join(self.axes)}]"


@dataclass(frozen=True)
class Value:
    """One standard value on one host.

    ``written`` is True where an assignment and an in-place edit reach the model.
    ``source`` names the value of the same host that a derived value is computed from, or with
    which what it is computed from arrives, and ``description`` how, in words; a derived value is read-only. ``fixed`` marks one that is a
    constant of the model, the same in every call.
    ``optional`` marks a tensor that may be None.
    """

    host: str
    name: str
    layout: str
    meaning: str
    written: bool = True
    optional: bool = False
    source: str | None = None
    description: str = ""
    fixed: bool = False

    @property
    def unwritten(self) -> str:
        """Why it cannot be written, where it cannot; ``{name}`` stands for what somebody called it."""
        if self.fixed:
            return "{name} is a constant of the model: change its parameter or buffer."
        if self.derived:
            return "{name} is computed from other values and cannot be written."
        return "{name} is only read: the kernel takes it on a decoding step alone."

    @property
    def derived(self) -> bool:
        return self.source is not None

    @property
    def axes(self) -> tuple[str, ...]:
        return LAYOUTS[self.layout].axes

    @property
    def key(self) -> str:
        """The name a recording knows the value by: with its host where another on the same block is called the same."""
        return f"{self.host}.{self.name}" if self.host == "shared_experts" else self.name

    @property
    def typed(self) -> str:
        """The layout as the printout shows it: name, optional mark, axes."""
        mark = " | None" if self.optional else ""
        return f"{self.layout}{mark} [{' '.join(self.axes)}]"


#: Axes whose length comes from the call, not from the model.
CALL_AXES = ("batch", "seq", "query", "key")


def _layouts(*rows: tuple[str, str, str]) -> dict[str, Layout]:
    return {name: Layout(name, tuple(axes.split()), meaning) for name, axes, meaning in rows}


LAYOUTS: dict[str, Layout] = _layouts(
    (
        "Residual",
        "batch seq hidden_size",
        "one vector per token, as wide as the stream, or as what a part works on where that is another width",
    ),
    ("Logits", "batch seq vocab_size", "one score per vocabulary entry and position"),
    ("NextTokenProbs", "batch vocab_size", "one distribution over the vocabulary per row"),
    ("Tokens", "batch seq", "one integer per position"),
    ("Size", "batch seq", "two integers, the shape of the call"),
    ("Queries", "batch num_heads seq qk_head_dim", "one query per head and token"),
    ("Keys", "batch num_kv_heads seq qk_head_dim", "one key per key/value head and token"),
    ("Values", "batch num_kv_heads seq head_dim", "one value per key/value head and token"),
    (
        "Pattern",
        "batch num_heads query key",
        "one number per head, reading position and read position",
    ),
    ("HeadOutputs", "batch seq num_heads head_dim", "one vector per token and head"),
    ("HeadGates", "batch seq num_heads", "one number per token and head"),
    ("Sinks", "num_heads", "one learned logit per head"),
    ("LinearQK", "batch seq heads key_dim", "one key-sized vector per token and recurrent head"),
    ("LinearV", "batch seq heads value_dim", "one value-sized vector per token and recurrent head"),
    ("Gates", "batch seq heads", "one number per token and recurrent head"),
    ("State", "batch heads key_dim value_dim", "one matrix per recurrent head"),
    ("States", "batch seq heads key_dim value_dim", "one matrix per token and recurrent head"),
    (
        "StatePattern",
        "batch heads query key",
        "one number per recurrent head, reading position and read position",
    ),
    (
        "ChannelGates",
        "batch seq heads key_dim",
        "one number per token, recurrent head and key channel",
    ),
    ("Skips", "heads", "one learned number per recurrent head"),
    ("Fades", "heads", "one fixed number per recurrent head"),
    ("Channels", "batch seq channels", "one number per token and channel"),
    ("SharedQK", "batch seq key_dim", "one key-sized vector per token, the same for every channel"),
    (
        "ChannelDecays",
        "batch seq channels key_dim",
        "one number per token, channel and entry of its state",
    ),
    ("ChannelState", "batch channels key_dim", "one vector per channel"),
    ("ChannelStates", "batch seq channels key_dim", "one vector per token and channel"),
    (
        "ChannelPattern",
        "batch channels query key",
        "one number per channel, reading position and read position",
    ),
    ("ChannelSkips", "channels", "one learned number per channel"),
    ("UnitState", "batch channels", "one number per channel"),
    ("Neurons", "batch seq intermediate_size", "one number per hidden unit of the MLP"),
    ("RouterLogits", "batch seq num_experts", "one number per token and expert"),
    ("ExpertWeights", "batch seq top_k", "one multiplier per token and routing slot"),
    ("ExpertIndices", "batch seq top_k", "one expert number per token and routing slot"),
    (
        "ExpertOutputs",
        "batch seq top_k hidden_size",
        "one vector per token and routing slot, as wide as routed_output",
    ),
    ("RouterMargin", "batch seq", "one number per token"),
)


@dataclass(frozen=True)
class Host:
    """A place values hang on: how pages write it and what it is.

    Hosts of one path are kinds of one thing: which of them a block has is the block's own.
    ``mixer`` is True where it mixes positions, ``recurrent`` where it does so by handing on a state.
    """

    name: str
    path: str
    meaning: str
    mixer: bool = False
    recurrent: bool = False

    @property
    def short(self) -> str:
        """The meaning without what follows a colon or stands in brackets."""
        return self.meaning.partition(":")[0].partition(" (")[0]

    @property
    def attribute(self) -> str:
        """What the host is called on the block that has it."""
        return self.path.rpartition(".")[2]


HOSTS: dict[str, Host] = {
    host.name: host
    for host in (
        Host("model", "model", "the whole model"),
        Host("layers", "model.layers[i]", "one block of the stack"),
        Host(
            "linear_attn",
            "model.layers[i].linear_attn",
            "a recurrent mixer: gated DeltaNet and its kin",
            True,
            True,
        ),
        Host(
            "kda",
            "model.layers[i].linear_attn",
            "a recurrent mixer: the delta rule with a decay per channel (Kimi Delta Attention)",
            True,
            True,
        ),
        Host(
            "retention",
            "model.layers[i].linear_attn",
            "linear attention whose state fades by one fixed factor per head (lightning attention)",
            True,
            True,
        ),
        Host(
            "ssd",
            "model.layers[i].mixer",
            "a state-space mixer with one decay per head (Mamba-2)",
            True,
            True,
        ),
        Host(
            "selective_scan",
            "model.layers[i].mixer",
            "a state-space mixer with a state per channel (Mamba)",
            True,
            True,
        ),
        Host(
            "gated_recurrence",
            "model.layers[i].mixer",
            "a gated linear recurrence with one number per channel (RG-LRU)",
            True,
            True,
        ),
        Host("short_conv", "model.layers[i].mixer", "a gated short convolution", True),
        Host("mixer", "model.layers[i].mixer", "a mixer whose inside is not followed", True),
        Host("self_attn", "model.layers[i].self_attn", "softmax attention", True),
        Host("mlp", "model.layers[i].mlp", "the MLP, dense or a mixture of experts"),
        Host(
            "extra",
            "model.layers[i].extra",
            "a further part of the block, beside its mixer and its MLP",
        ),
        Host(
            "shared_experts",
            "model.layers[i].mlp.shared_experts",
            "the expert every token runs through",
        ),
    )
}


def _values(host: str, *rows: tuple) -> tuple[Value, ...]:
    return tuple(
        Value(host, name, layout, meaning, **(flags[0] if flags else {}))
        for name, layout, meaning, *flags in rows
    )


def _from(source: str, description: str) -> dict[str, object]:
    return {"written": False, "source": source, "description": description}


_STATES = (
    (
        "state",
        "State",
        "the state after one token; iterate it with tracer.iter",
        _from(
            "state_output",
            "by running the recurrence again from the kernel's arguments, to one token",
        ),
    ),
    (
        "states",
        "States",
        "the state after every token of the call",
        _from("state_output", "by running the recurrence again from the kernel's arguments"),
    ),
)

VALUES: tuple[Value, ...] = (
    *_values(
        "model",
        ("logits", "Logits", "what the model returns, after any cap or scale past the head"),
        (
            "token_embeddings",
            "Residual",
            "the embedding module's output, before anything added or scaled after it",
        ),
        ("final_norm_output", "Residual", "the stream after the final norm"),
        ("lm_head_output", "Logits", "the head's output, before any cap or scale"),
        (
            "next_token_probs",
            "NextTokenProbs",
            "softmax of the last position's logits",
            _from("logits", "softmax of the last position of logits"),
        ),
        (
            "input_ids",
            "Tokens",
            "the token ids the call got; the model runs on what is written here",
        ),
        ("attention_mask", "Tokens", "the mask the call got, zero on padding", {"optional": True}),
        (
            "input_size",
            "Size",
            "batch and sequence length of the call",
            _from("input_ids", "the shape of input_ids"),
        ),
    ),
    *_values(
        "layers",
        ("layer_input", "Residual", "the stream entering the block"),
        ("attention_norm_output", "Residual", "what the first sublayer's norm hands on"),
        ("layer_mid", "Residual", "the stream between the two sublayers"),
        ("mlp_norm_output", "Residual", "what the second sublayer's norm hands on"),
        ("mlp_input", "Residual", "what the MLP is called with"),
        (
            "layer_output",
            "Residual",
            "the stream leaving the block, one tensor even where the block returns a tuple",
        ),
    ),
    *_values(
        "linear_attn",
        (
            "conv_input",
            "Channels",
            "what the short convolution reads: queries, keys and values side by side",
        ),
        (
            "attention_queries",
            "LinearQK",
            "the kernel's queries: after convolution and activation, before its l2 norm and scale, one per value head",
        ),
        (
            "attention_keys",
            "LinearQK",
            "the kernel's keys: after convolution and activation, before its l2 norm, one per value head",
        ),
        ("attention_values", "LinearV", "the kernel's values"),
        ("decays", "Gates", "log decay of the state at each token, float32, at most 0"),
        ("betas", "Gates", "write strength of each token into the state"),
        (
            "state_input",
            "State",
            "the recurrent state entering the call, None on a fresh prompt",
            {"optional": True},
        ),
        (
            "attention_head_outputs",
            "LinearV",
            "read-out of each head, before the gated norm and the projection",
        ),
        ("state_output", "State", "the recurrent state leaving the call"),
        *_STATES,
        (
            "state_attention",
            "StatePattern",
            "the exact implied attention: the matrix M with head outputs = M · values on a fresh prompt",
            _from("state_output", "one triangular solve per head, from the kernel's arguments"),
        ),
        ("attention_output", "Residual", "the addend: what the mixer adds to the stream"),
    ),
    *_values(
        "kda",
        (
            "conv_input",
            "Channels",
            "what the short convolution reads: queries, keys and values side by side",
        ),
        (
            "attention_queries",
            "LinearQK",
            "the kernel's queries: after convolution and activation, before its l2 norm and scale",
        ),
        (
            "attention_keys",
            "LinearQK",
            "the kernel's keys: after convolution and activation, before its l2 norm",
        ),
        ("attention_values", "LinearV", "the kernel's values"),
        ("decays", "ChannelGates", "log decay of each row of the state at each token, at most 0"),
        ("betas", "Gates", "write strength of each token into the state"),
        (
            "state_input",
            "State",
            "the recurrent state entering the call, None on a fresh prompt",
            {"optional": True},
        ),
        (
            "attention_head_outputs",
            "LinearV",
            "read-out of each head, before the gated norm and the projection",
        ),
        ("state_output", "State", "the recurrent state leaving the call"),
        *_STATES,
        (
            "state_attention",
            "StatePattern",
            "the exact implied attention: the matrix M with head outputs = M · values on a fresh prompt",
            _from("state_output", "one triangular solve per head, from the kernel's arguments"),
        ),
        ("attention_output", "Residual", "the addend: what the mixer adds to the stream"),
    ),
    *_values(
        "retention",
        ("attention_queries", "LinearQK", "what reads the state, after the activation"),
        (
            "attention_keys",
            "LinearQK",
            "where in the state a token is written, after the activation",
        ),
        ("attention_values", "LinearV", "what is written, after the activation"),
        (
            "decays",
            "Fades",
            "log decay of each head's state, the same at every token, at most 0",
            _from("attention_values", "from a parameter or buffer of the mixer") | {"fixed": True},
        ),
        (
            "state_input",
            "State",
            "the recurrent state entering the call, None on a fresh prompt",
            {"optional": True},
        ),
        (
            "attention_head_outputs",
            "LinearV",
            "read-out of each head, before the norm, the gate and the projection",
        ),
        ("state_output", "State", "the recurrent state leaving the call"),
        *_STATES,
        (
            "state_attention",
            "StatePattern",
            "the exact implied attention: the matrix M with head outputs = M · values on a fresh prompt",
            _from("state_output", "queries times keys, decayed, from what the state is made of"),
        ),
        ("attention_output", "Residual", "the addend: what the mixer adds to the stream"),
    ),
    *_values(
        "ssd",
        (
            "conv_input",
            "Channels",
            "what the short convolution reads: values, keys and queries side by side",
        ),
        ("attention_queries", "LinearQK", "C: what reads the state, one per head"),
        ("attention_keys", "LinearQK", "B: where in the state a token is written, one per head"),
        ("attention_values", "LinearV", "x: what is written"),
        ("betas", "Gates", "the step of each token: how much of it is written"),
        ("decays", "Gates", "log decay of the state at each token: the step times A, at most 0"),
        (
            "skip",
            "Skips",
            "D: what each head's values are multiplied with on their way past the state",
        ),
        (
            "state_input",
            "State",
            "the state entering the call, None on a fresh prompt",
            {"optional": True},
        ),
        (
            "attention_head_outputs",
            "LinearV",
            "y: read-out of each head with what went past the state, before the gated norm and the projection",
        ),
        ("state_output", "State", "the state leaving the call"),
        *_STATES,
        (
            "state_attention",
            "StatePattern",
            "the exact implied attention, the skip on its diagonal: the matrix M with head outputs = M · values on a fresh prompt",
            _from(
                "state_output",
                "queries times keys, decayed and stepped, from the kernel's arguments",
            ),
        ),
        ("attention_output", "Residual", "the addend: what the mixer adds to the stream"),
    ),
    *_values(
        "selective_scan",
        ("conv_input", "Channels", "what the short convolution reads"),
        ("attention_queries", "SharedQK", "C: what reads the states, shared by all channels"),
        (
            "attention_keys",
            "SharedQK",
            "B: where in its state a channel writes, shared by all channels",
        ),
        ("attention_values", "Channels", "x: what each channel writes"),
        ("betas", "Channels", "the step of each token and channel: how much of it is written"),
        (
            "decays",
            "ChannelDecays",
            "log decay of each entry of each channel's state: the step times A, at most 0",
        ),
        (
            "skip",
            "ChannelSkips",
            "D: what each channel's values are multiplied with on their way past the state",
        ),
        (
            "state_input",
            "ChannelState",
            "the state entering the call, None on several tokens, whose kernel takes none",
            {"optional": True, "written": False},
        ),
        (
            "attention_head_outputs",
            "Channels",
            "y: read-out of each channel with what went past the state, before any gate",
        ),
        ("head_gate", "Channels", "the multiplicative gate on the channels"),
        ("state_output", "ChannelState", "the state leaving the call"),
        (
            "state",
            "ChannelState",
            "the state after one token; iterate it with tracer.iter",
            _from(
                "state_output",
                "by running the recurrence again from the kernel's arguments, to one token",
            ),
        ),
        (
            "states",
            "ChannelStates",
            "the state after every token of the call",
            _from("state_output", "by running the recurrence again from the kernel's arguments"),
        ),
        (
            "state_attention",
            "ChannelPattern",
            "the exact implied attention of each channel, the skip on its diagonal: head outputs = M · values, channel by channel, on a fresh prompt",
            _from(
                "state_output",
                "queries times keys, decayed and stepped, from the kernel's arguments",
            ),
        ),
        ("attention_output", "Residual", "the addend: what the mixer adds to the stream"),
    ),
    *_values(
        "gated_recurrence",
        ("conv_input", "Channels", "what the short convolution reads"),
        (
            "attention_values",
            "Channels",
            "what is added to the state: the gated input, scaled to keep the state's size",
        ),
        (
            "recurrent_gate",
            "Channels",
            "what the state is multiplied with at each token, between nought and one: nought where a text begins",
        ),
        ("state_input", "UnitState", "the state entering the call", {"optional": True}),
        (
            "attention_head_outputs",
            "Channels",
            "the state after every token, which is what the recurrence returns",
        ),
        ("state_output", "UnitState", "the state leaving the call"),
        (
            "state_attention",
            "ChannelPattern",
            "the exact implied attention of each channel: head outputs = M · values, channel by channel, on a fresh prompt",
            _from("state_output", "products of the gates between two tokens"),
        ),
        ("attention_output", "Residual", "the addend: what the mixer adds to the stream"),
    ),
    *_values(
        "mixer", ("attention_output", "Residual", "the addend: what the mixer adds to the stream")
    ),
    *_values(
        "short_conv",
        (
            "conv_input",
            "Channels",
            "what the convolution reads: the projection, times its input gate where it has one",
        ),
        ("conv_output", "Channels", "what the convolution hands on"),
        ("conv_gate", "Channels", "what the convolution's output is multiplied with"),
        ("attention_output", "Residual", "the addend: what the mixer adds to the stream"),
    ),
    *_values(
        "self_attn",
        (
            "attention_queries",
            "Queries",
            "queries as the scores use them, after any norm, rotary and scale",
        ),
        ("attention_keys", "Keys", "keys before they are repeated for grouped queries"),
        ("attention_values", "Values", "values before they are repeated for grouped queries"),
        ("attention_scores", "Pattern", "masked scores entering the softmax"),
        ("attention_probabilities", "Pattern", "the weights really multiplied with the values"),
        (
            "attention_head_outputs",
            "HeadOutputs",
            "one mixed vector per head, before any gate and the output projection",
        ),
        ("head_gate", "HeadOutputs", "the multiplicative gate on the heads' outputs"),
        ("head_scale", "HeadGates", "the multiplicative gate on each head as a whole"),
        ("attention_sinks", "Sinks", "learned sink logits of the heads"),
        ("attention_premix", "HeadOutputs", "what the output projection takes, split into heads"),
        ("attention_output", "Residual", "the addend: what the attention adds to the stream"),
    ),
    *_values(
        "mlp",
        ("mlp_activation", "Neurons", "the activation function's output"),
        ("mlp_neurons", "Neurons", "what the down projection receives"),
        ("router_logits", "RouterLogits", "the router's raw projection, before scoring"),
        (
            "router_scores",
            "RouterLogits",
            "the scores the choice is made on, as the family computes them",
        ),
        (
            "router_margin",
            "RouterMargin",
            "score of the last chosen expert minus that of the first rejected one",
            _from("router_scores", "from router_scores: the gap at the cut of the top-k"),
        ),
        ("expert_weights", "ExpertWeights", "the final multiplier of each routing slot"),
        ("expert_indices", "ExpertIndices", "the expert of each routing slot"),
        (
            "expert_outputs",
            "ExpertOutputs",
            "each slot's weighted output; the slots sum to routed_output",
        ),
        ("routed_output", "Residual", "the sum of the routed experts"),
        ("shared_expert_output", "Residual", "what the shared expert adds, its gate included"),
        ("mlp_output", "Residual", "the addend: what the MLP adds to the stream"),
    ),
    *_values("extra", ("extra_output", "Residual", "the addend: what the part adds to the stream")),
    *_values(
        "shared_experts",
        ("mlp_activation", "Neurons", "the activation function's output in the shared expert"),
        ("mlp_neurons", "Neurons", "what the shared expert's down projection receives"),
        ("mlp_output", "Residual", "the shared expert's output, before the gate on it"),
    ),
)

BY_HOST: dict[str, dict[str, Value]] = {host: {} for host in HOSTS}
for _value in VALUES:
    BY_HOST[_value.host][_value.name] = _value

#: What the gated delta rule's kernel is given for each token, in its order.
KERNEL_ARGUMENTS = ("attention_queries", "attention_keys", "attention_values", "decays", "betas")

#: What each recurrence is run again from, by host, and with it the state it starts from.
REPLAYS = {
    "linear_attn": (*KERNEL_ARGUMENTS, "state_input"),
    "kda": (*KERNEL_ARGUMENTS, "state_input"),
    "retention": (
        "attention_queries",
        "attention_keys",
        "attention_values",
        "decays",
        "state_input",
    ),
    "ssd": (*KERNEL_ARGUMENTS, "skip", "state_input"),
    "selective_scan": (*KERNEL_ARGUMENTS, "skip", "state_input"),
    "gated_recurrence": ("attention_values", "recurrent_gate", "state_input"),
}

#: Values that are not on the stream, and so may have another width than it: what its parts are called with and what is inside them.
OFF_STREAM = (
    "token_embeddings",
    "attention_norm_output",
    "mlp_norm_output",
    "mlp_input",
    "expert_outputs",
    "routed_output",
    "shared_expert_output",
)

MIXERS = tuple(host.name for host in HOSTS.values() if host.mixer)
RECURRENT = tuple(host.name for host in HOSTS.values() if host.recurrent)


def of_attribute(attribute: str) -> tuple[str, ...]:
    """The hosts that a block calls ``attribute``: ``"mixer"`` is several, of which it has one at most."""
    return tuple(host.name for host in HOSTS.values() if host.attribute == attribute)


#: Every value name, whichever host it is on.
NAMES: tuple[str, ...] = tuple(dict.fromkeys(value.name for value in VALUES))


class UnknownValue(ValueError):
    """A value name the vocabulary does not have."""


def lookup(name: str) -> tuple[Value, ...]:
    """The values ``name`` means: ``"router_logits"`` or, for one host, ``"mlp.router_logits"``.

    A bare name never means the shared expert's: ask for ``"shared_experts.mlp_output"``.

    Raises UnknownValue, offering the nearest names, when there is none.
    """
    host, _, bare = name.rpartition(".")
    found = tuple(
        v
        for v in VALUES
        if v.name == bare
        and (host in (v.host, HOSTS[v.host].attribute) if host else v.key == v.name)
    )
    if found:
        return found
    if host and host not in HOSTS and not of_attribute(host):
        names = dict.fromkeys(
            h.attribute for h in HOSTS.values() if h.name not in ("model", "layers")
        )
        raise UnknownValue(
            f"There is no host {host!r}; the hosts are model, layers, {', '.join(names)}."
        )
    near = difflib.get_close_matches(bare, NAMES, n=3, cutoff=0.5)
    hint = f"the nearest are {', '.join(near)}" if near else "the values page lists every name"
    raise UnknownValue(f"There is no value {name!r}; {hint}.")
