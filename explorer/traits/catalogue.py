"""Every trait there is, as data: its key, label and meaning, the same for every family, and the group it is filtered in."""

from __future__ import annotations

from dataclasses import dataclass

#: The groups, in the order they are shown.
GROUPS: dict[str, str] = {
    "mixer": "mixers",
    "attention": "attention",
    "position": "position",
    "norms": "norms",
    "block": "blocks",
    "mlp": "MLP",
    "mixture": "mixture of experts",
    "scales": "scales and caps",
}


@dataclass(frozen=True)
class Entry:
    """One trait: ``name`` is its key, ``meaning`` one line that holds for every family that has it."""

    group: str
    name: str
    label: str
    meaning: str


def _entries(group: str, *rows: tuple[str, str, str]) -> tuple[Entry, ...]:
    return tuple(Entry(group, *row) for row in rows)


ENTRIES: tuple[Entry, ...] = (
    *_entries(
        "mixer",
        (
            "hybrid",
            "Hybrid",
            "several kinds of mixer in one model, such as softmax attention in some blocks and a recurrent state in others",
        ),
        (
            "side_by_side",
            "Two mixers side by side",
            "two mixers of different kinds read the same stream in one block, and each adds its own result",
        ),
        (
            "delta_rule",
            "Gated delta rule",
            "a recurrent mixer whose state forgets by a decay and writes only what it does not predict yet",
        ),
        (
            "delta_rule_channel",
            "Delta rule per channel",
            "a delta rule whose state forgets each of its rows by a decay of its own",
        ),
        (
            "retention",
            "Linear attention with fixed decays",
            "a mixer whose state takes up keys times values and fades by one factor for each head, the same at every token",
        ),
        ("ssd", "State-space dual", "a state-space mixer with one decay for each head (Mamba-2)"),
        (
            "selective_scan",
            "Selective scan",
            "a state-space mixer with a state and decays for each channel (Mamba)",
        ),
        (
            "gated_recurrence",
            "Gated linear recurrence",
            "a mixer whose state is one number a channel, which a gate lets fade",
        ),
        (
            "convolution_mixer",
            "Convolution as mixer",
            "blocks whose mixer is a short causal convolution and nothing else",
        ),
        (
            "short_convolution",
            "Short convolution",
            "what a recurrent mixer reads passes a causal convolution over a few tokens first",
        ),
        (
            "grouped_value",
            "Grouped-value recurrence",
            "several heads of a recurrent mixer share what reads and addresses their states",
        ),
        ("other_mixer", "Another mixer", "a mixer that is none of the kinds with standard values"),
    ),
    *_entries(
        "attention",
        (
            "grouped_query",
            "Grouped-query attention",
            "several query heads share one key and value head",
        ),
        ("multi_query", "Multi-query attention", "all query heads share one key and value head"),
        (
            "latent_attention",
            "Latent attention",
            "keys and values are made from one narrow vector a token",
        ),
        ("latent_queries", "Latent queries", "queries are made from a narrow vector a token"),
        (
            "fused_qkv",
            "Fused query-key-value",
            "one projection makes queries, keys and values together",
        ),
        ("qk_norm", "Query/key norms", "queries and keys are normed before their scores are taken"),
        (
            "qkv_bias",
            "Query/key/value bias",
            "the projections that make queries, keys or values have a bias",
        ),
        ("output_bias", "Attention output bias", "the attention's output projection has a bias"),
        (
            "head_gate",
            "Gated heads",
            "a gate computed from the input multiplies the heads' outputs before the projection",
        ),
        (
            "attention_sinks",
            "Attention sinks",
            "the softmax has one more learned logit a head, so that a row of weights may sum to less than one",
        ),
        (
            "attention_cap",
            "Attention soft cap",
            "scores are squashed by a tanh, so that they stay within a cap",
        ),
        (
            "sliding_window",
            "Sliding window",
            "attention of some or all blocks sees the last few tokens alone",
        ),
        (
            "mixed_window",
            "Windows on some blocks",
            "some blocks attend within a window and others to everything",
        ),
        (
            "chunked_attention",
            "Chunked attention",
            "attention of some or all blocks sees nothing before the chunk of the text it is in",
        ),
    ),
    *_entries(
        "position",
        ("rotary", "Rotary", "each query and key is turned by its position, in all its dimensions"),
        (
            "partial_rotary",
            "Partial rotary",
            "the rotary embedding turns only some dimensions of each query and key",
        ),
        (
            "rotary_some",
            "Rotary on some blocks",
            "attention of some blocks turns its queries and keys by position, that of others does not",
        ),
        (
            "rotary_bases",
            "Several rotary bases",
            "blocks turn their queries and keys at different frequencies",
        ),
        (
            "mrope",
            "Multimodal rotary",
            "rotary frequencies are shared out to time, height and width; on text the three agree",
        ),
        ("alibi", "ALiBi", "each head's scores fall with the distance, at a slope of its own"),
        (
            "score_bias",
            "Position bias in the scores",
            "something that depends on the position and the head is added to the scores",
        ),
        (
            "learned_positions",
            "Learned positions",
            "a learned vector for each position is added to the embedding",
        ),
        (
            "fixed_positions",
            "Fixed positions",
            "a computed vector for each position is added to the embedding",
        ),
        (
            "no_position",
            "No position embedding",
            "nothing encodes a position: order comes from the causal mask, and from recurrent mixers where there are any",
        ),
    ),
    *_entries(
        "norms",
        (
            "pre_norm",
            "Pre-norm",
            "each sublayer reads the stream through a norm, and adds what it makes as it is",
        ),
        (
            "sandwich_norm",
            "Sandwich norms",
            "sublayers have a norm before and another on what they add",
        ),
        (
            "post_norm",
            "Post-norm only",
            "sublayers read the stream as it is and norm what they add",
        ),
        (
            "stream_norm",
            "Norms on the stream",
            "the stream itself passes a norm, so that what a block was given does not leave it as it came",
        ),
        ("rms_norm", "RMS norm", "norms divide by the root mean square and leave the mean alone"),
        (
            "layer_norm",
            "Layer norm",
            "norms take the mean off, divide by the deviation, and add a bias",
        ),
        (
            "layer_norm_no_bias",
            "Layer norm without bias",
            "norms take the mean off and divide by the deviation, with no bias",
        ),
        ("norm_no_weight", "Norms without weights", "norms of the stream have nothing learned"),
        (
            "one_plus_gain",
            "1 + weight norm gain",
            "norms multiply by one plus their weight, so a weight of zero passes the normed stream through",
        ),
        (
            "embedding_norm",
            "Norm on the embedding",
            "the embedding passes a norm before the first block",
        ),
    ),
    *_entries(
        "block",
        (
            "parallel",
            "Parallel block",
            "attention and MLP read the same stream, and both are added to it",
        ),
        ("one_sublayer", "One sublayer a block", "a block is one mixer or one MLP alone"),
        (
            "shared_block",
            "Shared weights between blocks",
            "blocks use one and the same module, with the same weights",
        ),
        (
            "called_again",
            "Module called several times",
            "a module with weights runs on every token more than once in one pass through its block",
        ),
    ),
    *_entries(
        "mlp",
        ("gated_mlp", "Gated MLP", "one projection, through the activation, multiplies another"),
        ("plain_mlp", "Plain MLP", "one projection, the activation, and a projection back"),
        ("mlp_bias", "MLP biases", "the projections of the MLP have biases"),
        ("activation_silu", "SiLU", "the MLP's activation is x · sigmoid(x)"),
        ("activation_gelu", "GELU", "the MLP's activation is x · Φ(x)"),
        (
            "activation_gelu_tanh",
            "GELU (tanh)",
            "the MLP's activation is x · Φ(x), Φ by its tanh approximation",
        ),
        ("activation_quick_gelu", "GELU (sigmoid)", "the MLP's activation is x · sigmoid(1.702 x)"),
        ("activation_relu", "ReLU", "the MLP's activation is the larger of x and 0"),
        (
            "activation_relu_squared",
            "ReLU²",
            "the MLP's activation is the square of the larger of x and 0",
        ),
        (
            "activation_other",
            "Another activation",
            "the MLP's activation is none of the usual functions",
        ),
    ),
    *_entries(
        "mixture",
        ("mixture", "Mixture of experts", "a router sends each token to a few of many expert MLPs"),
        (
            "dense_first",
            "Dense first blocks",
            "the first blocks have a dense MLP, later ones a mixture",
        ),
        (
            "some_mixtures",
            "Mixture on some blocks",
            "blocks with a mixture and blocks with a dense MLP take turns",
        ),
        (
            "router_softmax",
            "Softmax over all experts",
            "the router's logits pass a softmax before experts are chosen",
        ),
        (
            "router_softmax_chosen",
            "Softmax over the chosen",
            "the logits of the chosen experts pass a softmax after the choice",
        ),
        (
            "router_sigmoid",
            "Sigmoid routing",
            "the router scores each expert by a sigmoid of its own, before the choice",
        ),
        (
            "router_sigmoid_chosen",
            "Sigmoid over the chosen",
            "each chosen expert's logit passes a sigmoid after the choice",
        ),
        (
            "selection_bias",
            "Selection bias",
            "a number for each expert is added to the scores for the choice alone",
        ),
        (
            "expert_groups",
            "Expert groups",
            "experts stand in groups, and a token chooses within its best groups alone",
        ),
        (
            "renormalised",
            "Renormalised routing",
            "a token's expert weights are divided by their sum",
        ),
        (
            "routed_factor",
            "Routed factor",
            "a token's expert weights are multiplied with a number at last",
        ),
        ("shared_expert", "Shared expert", "one more expert runs for every token"),
        (
            "shared_expert_gated",
            "Gated shared expert",
            "what the shared expert makes is multiplied with a gate for each token",
        ),
        ("expert_bias", "Biases in the experts", "the projections of each expert have biases"),
    ),
    *_entries(
        "scales",
        (
            "embedding_multiplier",
            "Embedding multiplier",
            "the embedding is multiplied with a number before the first block",
        ),
        (
            "residual_multiplier",
            "Residual multiplier",
            "what a sublayer makes is multiplied before it is added to the stream",
        ),
        (
            "attention_multiplier",
            "Attention multiplier",
            "scores are scaled by another number than one over the root of the head's width",
        ),
        (
            "logits_multiplier",
            "Logits multiplier",
            "the logits, or what the head reads, are multiplied with a number",
        ),
        (
            "logit_cap",
            "Logit soft cap",
            "logits are squashed by a tanh, so that they stay within a cap",
        ),
        ("tied_head", "Tied head", "the head's matrix is the embedding's"),
        ("head_bias", "Head bias", "the head adds a number to each logit"),
    ),
)

BY_NAME: dict[str, Entry] = {entry.name: entry for entry in ENTRIES}


def group_of(name: str) -> str:
    """The group a trait is in; ``""`` for a name that is not in the catalogue."""
    return BY_NAME[name].group if name in BY_NAME else ""
