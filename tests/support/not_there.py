"""Which values the families of the tests do not have."""

#: The values a family does not have, by host. All others of the vocabulary must be found.
NOT_THERE = {
    "llama": {
        "linear_attn": "all",
        "shared_experts": "all",
        "self_attn": {"head_gate", "head_scale", "attention_sinks"},
        "mlp": {
            "router_logits",
            "router_scores",
            "router_margin",
            "expert_weights",
            "expert_indices",
            "expert_outputs",
            "routed_output",
            "shared_expert_output",
        },
    },
    "qwen3_moe": {
        "linear_attn": "all",
        "shared_experts": "all",
        "self_attn": {"head_gate", "head_scale", "attention_sinks"},
        "mlp": {"mlp_activation", "mlp_neurons", "shared_expert_output"},
    },
    "qwen3_next": {
        "self_attn": {"attention_sinks", "head_scale"},
        "mlp": {"mlp_activation", "mlp_neurons"},
    },
    "qwen3_5_moe_text": {
        "self_attn": {"attention_sinks", "head_scale"},
        "mlp": {"mlp_activation", "mlp_neurons"},
    },
}
