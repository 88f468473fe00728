"""Every trait as data: its key, label and meaning, and the group it is filtered by."""

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
    """One trait: ``name`` is its key, ``meaning`` one line that is true wherever it occurs."""

    group: str
    name: str
    label: str
    meaning: str


def _entries(group: str, **rows: str) -> tuple[Entry, ...]:
    """Make entries of ``"label: meaning"``, by name."""
    parts = ((name, row.partition(": ")) for name, row in rows.items())
    return tuple(Entry(group, name, label, meaning) for name, (label, _, meaning) in parts)


ENTRIES: tuple[Entry, ...] = (
    *_entries(
        "mixer",
        hybrid="Hybrid: several kinds of mixer in one model, such as softmax attention in some "
        "blocks and a recurrent state in others",
        side_by_side="Two mixers side by side: two mixers of different kinds read the same "
        "residual stream, and the block adds both results",
        delta_rule="Gated delta rule (Gated DeltaNet): a recurrent mixer whose state decays, and "
        "is updated with what it does not predict yet",
        delta_rule_channel="Delta rule per channel (KDA): a gated delta rule with a separate "
        "decay for each key channel of the state",
        retention="Linear attention with fixed decays: a recurrent mixer whose state accumulates "
        "keys times values, with a fixed decay per head",
        ssd="State-space dual (Mamba-2, SSD): a state-space mixer with one decay per head and "
        "token",
        selective_scan="Selective scan (Mamba-1, S6): a state-space mixer with a state and "
        "decays per channel",
        gated_recurrence="Gated linear recurrence (RG-LRU): a recurrent mixer whose state is one "
        "number per channel, which a gate decays",
        convolution_mixer="Convolution as mixer: blocks whose mixer is a short causal "
        "convolution and nothing else",
        short_convolution="Short convolution: a causal convolution over a few tokens precedes "
        "the recurrence",
        grouped_value="Grouped-value recurrence: several value heads of a recurrent mixer share "
        "one head of queries and keys",
        other_mixer="Other mixer: a mixer without standard values for its inside",
    ),
    *_entries(
        "attention",
        grouped_query="Grouped-query attention (GQA): several query heads share one key and "
        "value head",
        multi_query="Multi-query attention (MQA): all query heads share one key and value head",
        latent_attention="Latent attention (MLA): keys and values are projected from one "
        "low-dimensional latent per token",
        latent_queries="Low-rank queries: queries are projected from a low-dimensional latent "
        "per token",
        fused_qkv="Fused QKV projection: one projection makes queries, keys and values",
        qk_norm="QK-norm: queries and keys are normed before the scores are computed",
        qkv_bias="QKV bias: the projections of queries, keys or values have a bias",
        output_bias="Attention output bias: the attention's output projection has a bias",
        head_gate="Gated heads: a gate computed from the input multiplies the head outputs "
        "before the output projection",
        attention_sinks="Attention sinks: the softmax has a learned extra logit per head, so "
        "that attention weights may sum to less than one",
        attention_cap="Attention soft cap: a scaled tanh keeps the attention scores within a cap",
        sliding_window="Sliding-window attention: some or all blocks attend only to a fixed "
        "number of most recent tokens",
        mixed_window="Local and global attention: some blocks attend within a window or chunk, "
        "others to all earlier tokens",
        chunked_attention="Chunked attention: some or all blocks attend only within the current "
        "chunk of the text",
    ),
    *_entries(
        "position",
        rotary="Rotary (RoPE): queries and keys are rotated by their position, in all dimensions",
        partial_rotary="Partial rotary (RoPE): queries and keys are rotated by their position, "
        "in some dimensions only",
        rotary_some="Rotary (RoPE) on some blocks: attention in some blocks has a rotary "
        "embedding, in others none (NoPE)",
        rotary_bases="Several rotary bases: blocks rotate queries and keys with different "
        "frequencies",
        mrope="Multimodal rotary (M-RoPE): rotary frequencies are divided between time, height "
        "and width, which are equal on text",
        alibi="ALiBi: scores fall linearly with distance, with a slope per head",
        score_bias="Position bias in the scores: a bias that depends on position and head is "
        "added to the scores",
        learned_positions="Learned positions: a learned vector per position is added to the "
        "embedding",
        fixed_positions="Fixed positions: a computed vector per position, such as a sinusoidal "
        "one, is added to the embedding",
        no_position="No position embedding (NoPE): no position is encoded: order comes from the "
        "causal mask and from recurrent mixers, if any",
    ),
    *_entries(
        "norms",
        pre_norm="Pre-norm: each sublayer reads the residual stream through a norm, and adds its "
        "output without one",
        sandwich_norm="Sandwich norms: sublayers have one norm on their input and another on "
        "their output",
        post_norm="Post-norm only: sublayers have a norm on their output and none on their input",
        stream_norm="Norms on the residual stream: the residual stream itself is normed between "
        "the sublayers, as in the original transformer",
        rms_norm="RMSNorm: norms divide by the root mean square, without subtracting the mean",
        layer_norm="LayerNorm: norms subtract the mean, divide by the standard deviation and add "
        "a bias",
        layer_norm_no_bias="LayerNorm without bias: norms subtract the mean and divide by the "
        "standard deviation, without a bias",
        norm_no_weight="Norms without weights: norms of the residual stream have no parameters",
        one_plus_gain="1 + weight norm gain: norms multiply by one plus their weight, so that a "
        "weight of zero means a gain of one",
        embedding_norm="Norm on the embedding: the embedding is normed before the first block",
    ),
    *_entries(
        "block",
        parallel="Parallel block: attention and MLP read the same residual stream, and the block "
        "adds both results",
        one_sublayer="One sublayer per block: each block is a single mixer or a single MLP",
        shared_block="Shared weights between blocks: several blocks use the same weights",
        called_again="Module called several times: a module with weights runs more than once per "
        "token within its block",
    ),
    *_entries(
        "mlp",
        gated_mlp="Gated MLP: the activation of one projection multiplies another projection",
        plain_mlp="Plain MLP: an up projection, an activation and a down projection",
        mlp_bias="MLP biases: the projections of the MLP have biases",
        activation_silu="SiLU: the MLP's activation is x · sigmoid(x)",
        activation_gelu="GELU: the MLP's activation is x · Φ(x)",
        activation_gelu_tanh="GELU (tanh): the MLP's activation is x · Φ(x), Φ by its tanh "
        "approximation",
        activation_quick_gelu="GELU (sigmoid): the MLP's activation is x · sigmoid(1.702 x)",
        activation_relu="ReLU: the MLP's activation is max(x, 0)",
        activation_relu_squared="ReLU²: the MLP's activation is max(x, 0)²",
        activation_other="Other activation: the MLP's activation is none of the common functions",
    ),
    *_entries(
        "mixture",
        mixture="Mixture of experts (MoE): a router sends each token to a few of many expert MLPs",
        dense_first="Dense first blocks: the first blocks have a dense MLP, the others a mixture",
        some_mixtures="Mixture on some blocks: blocks with a mixture and blocks with a dense MLP "
        "alternate",
        router_softmax="Softmax over all experts: expert scores are the softmax of the router "
        "logits over all experts",
        router_softmax_chosen="Softmax over the chosen experts: expert weights are the softmax "
        "of the chosen experts' logits",
        router_sigmoid="Sigmoid routing: expert scores are the sigmoid of the router logits",
        router_sigmoid_chosen="Sigmoid of the chosen experts: expert weights are the sigmoid of "
        "the chosen experts' logits",
        selection_bias="Selection bias (auxiliary-loss-free): a bias per expert is added to the "
        "scores for the selection, and does not enter the weights",
        expert_groups="Expert groups: experts are divided into groups, and a token selects "
        "within its best groups only",
        renormalised="Renormalised weights: the weights of a token's experts are divided by "
        "their sum",
        routed_factor="Routed scaling factor: the experts' weights or their summed output are "
        "multiplied by a number",
        shared_expert="Shared expert: a further expert runs on every token",
        shared_expert_gated="Gated shared expert: a gate per token multiplies the shared "
        "expert's output",
        expert_bias="Biases in the experts: the projections of the experts have biases",
    ),
    *_entries(
        "scales",
        embedding_multiplier="Embedding multiplier: the embedding is multiplied by a number "
        "before the first block",
        residual_multiplier="Residual multiplier: a sublayer's output is multiplied by a number "
        "before it is added to the residual stream",
        attention_multiplier="Attention multiplier: attention scores are scaled by another "
        "number than one over the root of the head dimension",
        logits_multiplier="Logits multiplier: the logits, or the input of the head, are "
        "multiplied by a number",
        logit_cap="Logit soft cap: a scaled tanh keeps the logits within a cap",
        tied_head="Tied embeddings: the head and the embedding share one matrix",
        head_bias="Head bias: the head has a bias per vocabulary entry",
    ),
)

BY_NAME: dict[str, Entry] = {entry.name: entry for entry in ENTRIES}


def group_of(name: str) -> str:
    """Return the group of a trait; ``""`` for a name that is not in the catalogue."""
    return BY_NAME[name].group if name in BY_NAME else ""
