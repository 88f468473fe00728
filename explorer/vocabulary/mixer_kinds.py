"""The kinds of mixers, each in one record.

`site/guides/adding-a-mixer-kind` says how to add one.
"""

from __future__ import annotations

from explorer.vocabulary.mixers import KernelSignature, Mixer, StateView
from explorer.vocabulary.values import RecordWhen, Row, computed, values_of

_LINEAR = "model.layers[i].linear_attn"
_MIXER = "model.layers[i].mixer"

#: What most recurrences are run again from.
_QKV = ("attention_queries", "attention_keys", "attention_values")
_KERNEL = (*_QKV, "decays", "betas")

# fmt: off
_NAMED = {"recorded": RecordWhen.NAMED}
_SHARE = {"low": 0.0, "high": 1.0, "signed": False}
_STEP = {"low": 0.0, "signed": False}
_GATE = {"signed": False}
_OPTIONAL = {"optional": True}
_AGAIN = "by running the recurrence again from the kernel's arguments"

_STATE_INPUT = ("state_input", "State",
                "the recurrent state entering the call, None on a fresh prompt", _OPTIONAL)
_STATE_OUTPUT = ("state_output", "State", "the recurrent state leaving the call")
_ADDEND = ("attention_output", "Residual", "the addend: what the mixer adds to the stream",
           {"recorded": RecordWhen.NEEDED})


def _states(after_one: str, after_all: str) -> tuple[Row, ...]:
    """Rows of ``state`` and ``states``, with their layouts."""
    return (
        ("state", after_one, "the state after one token; iterate it with tracer.iter",
         computed("state_output", f"{_AGAIN}, to one token", **_NAMED)),
        ("states", after_all, "the state after every token of the call",
         computed("state_output", _AGAIN, **_NAMED)),
    )


def _implied(how: str, of: str = "the exact implied attention") -> Row:
    """The row of the matrix that mixes the values, of a recurrence with a state per head."""
    return ("state_attention", "StatePattern",
            f"{of}: the matrix M with head outputs = M · values on a fresh prompt",
            computed("state_output", how))


def _implied_by_channel(how: str, of: str = "the exact implied attention of each channel") -> Row:
    return ("state_attention", "ChannelPattern",
            f"{of}: head outputs = M · values, channel by channel, on a fresh prompt",
            computed("state_output", how, **_NAMED))


_STEP_VIEW = StateView(
    title="written: betas, the step", note="How much of each token is written into the state.")
_SOLVED = _implied("one triangular solve per head, from the kernel's arguments")
_DECAYED = "queries times keys, decayed and stepped, from the kernel's arguments"

LINEAR_ATTN = Mixer(
    host="linear_attn", path=_LINEAR,
    meaning="a recurrent mixer: gated DeltaNet and its relatives",
    title="Gated DeltaNet", trait="delta_rule",
    conv_feeds=_QKV,
    kernel=KernelSignature(("query", "key", "value", "g", "beta", "initial_state")),
    kernel_values="explorer.discovery.recurrent:find_delta_rule",
    replayed=(*_KERNEL, "state_input"),
    steps="explorer.recurrence.delta_rule:delta_rule_steps",
    implied_attention="explorer.recurrence.delta_rule:state_attention",
    rule=("delta rule", ("Sₜ = eᵍ Sₜ₋₁ + k uᵀ", "oₜ = Sₜᵀ q")),
    state_view=StateView(),
    values=values_of(
        "linear_attn", "recurrent",
        ("conv_input", "Channels",
         "what the short convolution reads: queries, keys and values side by side"),
        ("attention_queries", "LinearQK",
         "the kernel's queries: after convolution and activation, before its l2 norm and scale, "
         "one per value head"),
        ("attention_keys", "LinearQK",
         "the kernel's keys: after convolution and activation, before its l2 norm, one per value "
         "head"),
        ("attention_values", "LinearV", "the kernel's values"),
        ("decays", "Gates", "log decay of the state at each token, float32, at most 0"),
        ("betas", "Gates", "write strength of each token into the state", _SHARE),
        _STATE_INPUT,
        ("attention_head_outputs", "LinearV",
         "read-out of each head, before the gated norm and the projection"),
        _STATE_OUTPUT, *_states("State", "States"), _SOLVED, _ADDEND,
    ),
)

KDA = Mixer(
    host="kda", path=_LINEAR,
    meaning="a recurrent mixer: the delta rule with a decay per channel (Kimi Delta Attention)",
    title="Kimi Delta Attention", trait="delta_rule_channel",
    conv_feeds=_QKV,
    kernel=KernelSignature(("query", "key", "value", "g", "beta", "initial_state"), dims=("g", 4)),
    kernel_values="explorer.discovery.recurrent:find_delta_rule",
    replayed=(*_KERNEL, "state_input"),
    steps="explorer.recurrence.delta_rule:delta_rule_steps",
    implied_attention="explorer.recurrence.delta_rule:state_attention",
    rule=("delta rule", ("Sₜ = diag(eᵍ) Sₜ₋₁ + k uᵀ", "oₜ = Sₜᵀ q")),
    state_view=StateView(),
    float32_decays=False,
    values=values_of(
        "kda", "recurrent",
        ("conv_input", "Channels",
         "what the short convolution reads: queries, keys and values side by side"),
        ("attention_queries", "LinearQK",
         "the kernel's queries: after convolution and activation, before its l2 norm and scale"),
        ("attention_keys", "LinearQK",
         "the kernel's keys: after convolution and activation, before its l2 norm"),
        ("attention_values", "LinearV", "the kernel's values"),
        ("decays", "ChannelGates", "log decay of each row of the state at each token, at most 0"),
        ("betas", "Gates", "write strength of each token into the state", _SHARE),
        _STATE_INPUT,
        ("attention_head_outputs", "LinearV",
         "read-out of each head, before the gated norm and the projection"),
        _STATE_OUTPUT, *_states("State", "States"), _SOLVED, _ADDEND,
    ),
)

RETENTION = Mixer(
    host="retention", path=_LINEAR,
    meaning="linear attention whose state fades by one fixed factor per head (lightning attention)",
    title="Lightning attention", trait="retention",
    kernel_values="explorer.discovery.fixed_decay:find_fixed_decay",
    replayed=(*_QKV, "decays", "state_input"),
    steps="explorer.recurrence.state_space:fixed_decay_steps",
    implied_attention="explorer.recurrence.state_space:fixed_decay_attention",
    rule=("linear attention", ("Sₜ = eᵍ Sₜ₋₁ + k vᵀ", "oₜ = Sₜᵀ q")),
    state_view=StateView(written=None),
    values=values_of(
        "retention", "recurrent",
        ("attention_queries", "LinearQK", "what reads the state, after the activation"),
        ("attention_keys", "LinearQK",
         "where in the state a token is written, after the activation"),
        ("attention_values", "LinearV", "what is written, after the activation"),
        ("decays", "Fades", "log decay of each head's state, the same at every token, at most 0",
         computed("attention_values", "from a parameter or buffer of the mixer", fixed=True)),
        _STATE_INPUT,
        ("attention_head_outputs", "LinearV",
         "read-out of each head, before the norm, the gate and the projection"),
        _STATE_OUTPUT, *_states("State", "States"),
        _implied("queries times keys, decayed, from what the state is made of"), _ADDEND,
    ),
)

SSD = Mixer(
    host="ssd", path=_MIXER,
    meaning="a state-space mixer with one decay per head (Mamba-2)",
    title="Mamba-2 mixer", trait="ssd",
    layer_types=("linear_attention", "mamba"),
    conv_feeds=_QKV,
    kernel=KernelSignature(("hidden_states", "dt", "A", "B", "C")),
    kernel_values="explorer.discovery.recurrent:find_ssd",
    replayed=(*_KERNEL, "skip", "state_input"),
    steps="explorer.recurrence.state_space:ssd_steps",
    implied_attention="explorer.recurrence.state_space:ssd_attention",
    rule=("state-space dual", ("Sₜ = eᵍ Sₜ₋₁ + β k vᵀ", "yₜ = Sₜᵀ q + D v")),
    state_view=_STEP_VIEW,
    values=values_of(
        "ssd", "recurrent",
        ("conv_input", "Channels",
         "what the short convolution reads: values, keys and queries side by side"),
        ("attention_queries", "LinearQK", "C: what reads the state, one per head"),
        ("attention_keys", "LinearQK", "B: where in the state a token is written, one per head"),
        ("attention_values", "LinearV", "x: what is written"),
        ("betas", "Gates", "the step of each token: how much of it is written", _STEP),
        ("decays", "Gates", "log decay of the state at each token: the step times A, at most 0"),
        ("skip", "Skips",
         "D: what each head's values are multiplied with on their way past the state"),
        ("state_input", "State", "the state entering the call, None on a fresh prompt", _OPTIONAL),
        ("attention_head_outputs", "LinearV",
         "y: read-out of each head with what went past the state, before the gated norm and the "
         "projection"),
        ("state_output", "State", "the state leaving the call"), *_states("State", "States"),
        _implied(_DECAYED, "the exact implied attention, the skip on its diagonal"), _ADDEND,
    ),
)

SELECTIVE_SCAN = Mixer(
    host="selective_scan", path=_MIXER,
    meaning="a state-space mixer with a state per channel (Mamba)",
    title="Mamba mixer", trait="selective_scan",
    layer_types=("linear_attention", "mamba"),
    kernel=KernelSignature(("hidden_states", "dt", "A", "B", "C"), dims=("A", 2)),
    kernel_values="explorer.discovery.recurrent:find_selective_scan",
    replayed=(*_KERNEL, "skip", "state_input"),
    steps="explorer.recurrence.state_space:scan_steps",
    implied_attention="explorer.recurrence.state_space:scan_attention",
    rule=("selective scan", ("hₜ = eᵍ hₜ₋₁ + β k v", "yₜ = q·hₜ + D v")),
    state_view=_STEP_VIEW,
    values=values_of(
        "selective_scan", "recurrent",
        ("conv_input", "Channels", "what the short convolution reads"),
        ("attention_queries", "SharedQK", "C: what reads the states, shared by all channels"),
        ("attention_keys", "SharedQK",
         "B: where in its state a channel writes, shared by all channels"),
        ("attention_values", "Channels", "x: what each channel writes"),
        ("betas", "Channels",
         "the step of each token and channel: how much of it is written", _STEP),
        ("decays", "ChannelDecays",
         "log decay of each entry of each channel's state: the step times A, at most 0"),
        ("skip", "ChannelSkips",
         "D: what each channel's values are multiplied with on their way past the state"),
        ("state_input", "ChannelState",
         "the state entering the call, None on several tokens, whose kernel takes none",
         {"optional": True, "written": False}),
        ("attention_head_outputs", "Channels",
         "y: read-out of each channel with what went past the state, before any gate"),
        ("head_gate", "Channels", "the multiplicative gate on the channels", _GATE),
        ("state_output", "ChannelState", "the state leaving the call"),
        *_states("ChannelState", "ChannelStates"),
        _implied_by_channel(
            _DECAYED, "the exact implied attention of each channel, the skip on its diagonal"),
        _ADDEND,
    ),
)

GATED_RECURRENCE = Mixer(
    host="gated_recurrence", path=_MIXER,
    meaning="a gated linear recurrence with one number per channel (RG-LRU)",
    title="RG-LRU", trait="gated_recurrence",
    kernel=KernelSignature(("hidden_states", "recurrent_gate", "recurrent_states")),
    kernel_values="explorer.discovery.recurrent:find_gated_recurrence",
    replayed=("attention_values", "recurrent_gate", "state_input"),
    steps="explorer.recurrence.state_space:gated_steps",
    implied_attention="explorer.recurrence.state_space:gated_attention",
    rule=("gated recurrence", ("hₜ = a hₜ₋₁ + v", "yₜ = hₜ")),
    state_view=StateView(retained="recurrent_gate", logarithm=False, written=None),
    reset_gate="recurrent_gate",
    values=values_of(
        "gated_recurrence", "recurrent",
        ("conv_input", "Channels", "what the short convolution reads"),
        ("attention_values", "Channels",
         "what is added to the state: the gated input, scaled to keep the state's size"),
        ("recurrent_gate", "Channels",
         "what the state is multiplied with at each token, between zero and one: zero where a "
         "text begins", _SHARE),
        ("state_input", "UnitState", "the state entering the call", _OPTIONAL),
        ("attention_head_outputs", "Channels",
         "the state after every token, which is what the recurrence returns"),
        ("state_output", "UnitState", "the state leaving the call"),
        _implied_by_channel("products of the gates between two tokens"),
        _ADDEND,
    ),
)

SHORT_CONV = Mixer(
    host="short_conv", path=_MIXER, meaning="a gated short convolution",
    sublayer="convolution", title="Gated short convolution", trait="convolution_mixer",
    layer_types=("conv",),
    finder="explorer.discovery.short_convolution:find_gated_convolution",
    conv_feeds=("conv_output",),
    values=values_of(
        "short_conv", "recurrent",
        ("conv_input", "Channels",
         "what the convolution reads: the projection, times its input gate where it has one"),
        ("conv_output", "Channels", "the convolution's output"),
        ("conv_gate", "Channels", "what the convolution's output is multiplied with"),
        _ADDEND,
    ),
)

#: A mixer of a kind that is none of the others.
UNTRACED = Mixer(
    host="mixer", path=_MIXER, meaning="a mixer whose inside is not traced",
    sublayer="mixer", title="Mixer", trait="other_mixer",
    layer_types=(), finder=None, conv_feeds=(),
    values=values_of("mixer", "recurrent", _ADDEND),
)

SELF_ATTN = Mixer(
    host="self_attn", path="model.layers[i].self_attn", meaning="softmax attention",
    role="attention", sublayer="attention",
    layer_types=("full_attention", "sliding_attention", "chunked_attention"),
    finder="explorer.discovery.attention:find_attention",
    conv_feeds=(),
    values=values_of(
        "self_attn", "attention",
        ("attention_queries", "Queries",
         "queries as the scores use them, after any norm, rotary and scale"),
        ("attention_keys", "Keys", "keys before they are repeated for grouped queries"),
        ("attention_values", "Values", "values before they are repeated for grouped queries"),
        ("attention_scores", "Pattern",
         "scores entering the softmax; at masked positions minus infinity or the lowest number of "
         "the dtype, as the family writes it"),
        ("attention_probabilities", "Pattern",
         "the weights that multiply the values", _SHARE),
        ("attention_head_outputs", "HeadOutputs",
         "one mixed vector per head, before any gate and the output projection"),
        ("head_gate", "HeadOutputs", "the multiplicative gate on the heads' outputs", _GATE),
        ("head_scale", "HeadGates", "the multiplicative gate on each head as a whole"),
        ("attention_sinks", "Sinks", "learned sink logits of the heads"),
        ("attention_premix", "HeadOutputs", "what the output projection takes, split into heads"),
        (*_ADDEND[:2], "the addend: what the attention adds to the stream", _ADDEND[3]),
    ),
)
# fmt: on

KINDS = (
    LINEAR_ATTN,
    KDA,
    RETENTION,
    SSD,
    SELECTIVE_SCAN,
    GATED_RECURRENCE,
    SHORT_CONV,
    UNTRACED,
    SELF_ATTN,
)
