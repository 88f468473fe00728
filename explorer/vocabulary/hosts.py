"""Hosts, the parts of a model that values hang on, and the values of those that are no mixers."""

from __future__ import annotations

from dataclasses import dataclass

from explorer.vocabulary.values import RecordWhen, Value, computed, values_of


@dataclass(frozen=True)
class Host:
    """A part of a model that values hang on.

    Hosts with the same path are alternatives: a block has at most one of them under that name.

    Attributes:
        path: How pages write it.
        role: The colour role of its values.
        title: What diagrams call it, where its name does not do.
        mixer: Whether it mixes positions.
        recurrent: Whether it does so by passing a state along.
    """

    name: str
    path: str
    meaning: str
    role: str
    title: str = ""
    mixer: bool = False
    recurrent: bool = False

    @property
    def short(self) -> str:
        """The meaning up to a colon or a bracket."""
        return self.meaning.partition(":")[0].partition(" (")[0]

    @property
    def attribute(self) -> str:
        """The attribute of the block that leads to the host."""
        return self.path.rpartition(".")[2]


# fmt: off
WHOLE = (
    Host("model", "model", "the whole model", "stream"),
    Host("layers", "model.layers[i]", "one block of the stack", "stream"),
)
POSITIONWISE = (
    Host("mlp", "model.layers[i].mlp", "the MLP, dense or a mixture of experts", "mlp"),
    Host("extra", "model.layers[i].extra",
         "a further part of the block, beside its mixer and its MLP", "mlp", "Further part"),
    Host("shared_experts", "model.layers[i].mlp.shared_experts",
         "the expert every token runs through", "mlp"),
    Host("dense_mlp", "model.layers[i].dense_mlp",
         "the dense MLP beside a mixture of experts, where it is no module of the mixture", "mlp",
         "Dense MLP"),
)

_NORM = {"role": "norm", "own_width": True}
_NEEDED = {"recorded": RecordWhen.NEEDED}
_ROUTER = {"role": "router", "recorded": RecordWhen.NEEDED}
_POSITIVE = {"signed": False}
_SHARE = {"low": 0.0, "high": 1.0, "signed": False}

WHOLE_VALUES: tuple[Value, ...] = (
    *values_of(
        "model", "stream",
        ("logits", "Logits", "what the model returns, after any cap or scale past the head"),
        ("token_embeddings", "Residual",
         "the embedding module's output, before anything added or scaled after it",
         {"own_width": True}),
        ("final_norm_output", "Residual",
         "the stream after the final norm", {"role": "norm"} | _NEEDED),
        ("lm_head_output", "Logits", "the head's output, before any cap or scale",
         {"recorded": RecordWhen.VIEWED}),
        ("next_token_probs", "NextTokenProbs", "softmax of the last position's logits",
         computed("logits", "softmax of the last position of logits", **_SHARE)),
        ("input_ids", "Tokens",
         "the token ids the call got; the model runs on what is written here", _POSITIVE),
        ("attention_mask", "Tokens",
         "the mask the call got, zero on padding", {"optional": True} | _POSITIVE),
        ("input_size", "Size", "batch and sequence length of the call",
         computed("input_ids", "the shape of input_ids")),
    ),
    *values_of(
        "layers", "stream",
        ("layer_input", "Residual", "the stream entering the block", _NEEDED),
        ("attention_norm_output", "Residual",
         "output of the norm before the first sublayer", _NORM),
        ("layer_mid", "Residual", "the stream between the two sublayers"),
        ("mlp_norm_output", "Residual", "output of the norm before the second sublayer", _NORM),
        ("mlp_input", "Residual", "what the MLP is called with", {"own_width": True}),
        ("layer_output", "Residual",
         "the stream leaving the block, one tensor even where the block returns a tuple"),
    ),
)

POSITIONWISE_VALUES: tuple[Value, ...] = (
    *values_of(
        "mlp", "mlp",
        ("mlp_activation", "Neurons", "the activation function's output"),
        ("mlp_neurons", "Neurons", "what the down projection receives"),
        ("router_logits", "RouterLogits", "the router's raw projection, before scoring", _ROUTER),
        ("router_scores", "RouterLogits",
         "the scores the choice is made on, as the family computes them",
         _ROUTER | _POSITIVE),
        ("router_margin", "RouterMargin",
         "score of the last chosen expert minus that of the first rejected one",
         computed("router_scores", "from router_scores: the gap at the cut of the top-k",
                  **_ROUTER, **_POSITIVE)),
        ("expert_weights", "ExpertWeights",
         "the final multiplier of each routing slot, any routed scaling factor in it",
         _ROUTER | _POSITIVE),
        ("expert_indices", "ExpertIndices", "the expert of each routing slot", _ROUTER | _POSITIVE),
        ("expert_outputs", "ExpertOutputs",
         "each slot's weighted output; the slots sum to routed_output",
         {"own_width": True, "latent": "LatentOutputs", "recorded": RecordWhen.VIEWED}),
        ("routed_output", "Residual",
         "the sum of the routed experts, as it joins the shared expert's", {"own_width": True}),
        ("shared_expert_output", "Residual",
         "what the shared expert adds, its gate included", {"own_width": True}),
        ("mlp_output", "Residual", "the addend: what the MLP adds to the stream", _NEEDED),
    ),
    *values_of(
        "extra", "mlp",
        ("extra_output", "Residual", "the addend: what the part adds to the stream"),
    ),
    *values_of(
        "shared_experts", "mlp",
        ("mlp_activation", "Neurons", "the activation function's output in the shared expert"),
        ("mlp_neurons", "Neurons", "what the shared expert's down projection receives"),
        ("mlp_output", "Residual", "the shared expert's output, before the gate on it"),
    ),
    *values_of(
        "dense_mlp", "mlp",
        ("mlp_activation", "Neurons", "the activation function's output in the dense MLP"),
        ("mlp_neurons", "Neurons", "what the dense MLP's down projection receives"),
        ("mlp_output", "Residual",
         "the addend: what the dense MLP adds to the mixture's result"),
    ),
)
# fmt: on
