"""Discovery follows the data: it finds the values in modeling code that is written otherwise."""

from __future__ import annotations

import linecache
import textwrap
from itertools import count

import pytest
import torch
from torch.testing import assert_close
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from explorer import load, vocabulary
from explorer.model.errors import Unavailable
from explorer.vocabulary.availability import ReasonKind
from tests.support.messages import refused
from tests.support.models import PROMPT, specimen
from tests.support.not_there import NOT_THERE

_numbers = count()


def written(source: str, home) -> dict:
    """Functions from ``source``, as if they stood in the modeling module ``home``."""
    name = f"<rewritten {next(_numbers)}>"
    source = textwrap.dedent(source)
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space = {**vars(home), "__name__": home.__name__}
    before = set(space)
    exec(compile(source, name, "exec"), space)
    return {
        key: space[key]
        for key in space
        if key not in before or space[key] is not vars(home).get(key)
    }


ATTENTIONS = {
    "more operations before the softmax": """
        def eager_attention_forward(
            module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs
        ):
            softmax_inputs = torch.softmax(query.detach(), dim=-1)  # of something else
            key_states = repeat_kv(key, module.num_key_value_groups)
            key_states = key_states.clone()
            value_states = repeat_kv(value, module.num_key_value_groups)
            attn_weights = torch.matmul(query, key_states.transpose(2, 3)) * scaling
            attn_weights = torch.zeros_like(softmax_inputs).sum() + attn_weights
            attn_weights = attn_weights.clone()
            if attention_mask is not None:
                attn_weights = attn_weights + attention_mask
            attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32)
            attn_weights = attn_weights.to(query.dtype)
            attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)
            attn_output = torch.matmul(attn_weights, value_states)
            attn_output = attn_output.transpose(1, 2).contiguous()
            return attn_output, attn_weights
    """,
    "other names and another order": """
        def weigh(scores):
            return nn.functional.softmax(scores, dim=-1)

        def eager_attention_forward(
            module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs
        ):
            v = repeat_kv(value, module.num_key_value_groups)
            k = repeat_kv(key, module.num_key_value_groups)
            s = torch.matmul(query * scaling, k.transpose(2, 3))
            if attention_mask is not None:
                s = torch.add(s, attention_mask)
            p = weigh(s)
            mixed = torch.matmul(p, v)
            return mixed.transpose(1, 2).contiguous(), p
    """,
    "no dropout and a softmax of the tensor's own": """
        def eager_attention_forward(
            module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs
        ):
            groups = module.num_key_value_groups
            k, v = repeat_kv(key, groups), repeat_kv(value, groups)
            attn_weights = torch.matmul(query, k.transpose(2, 3)).mul(scaling)
            if attention_mask is not None:
                attn_weights = attn_weights.add(attention_mask)
            attn_weights = torch.softmax(attn_weights, -1)
            return torch.matmul(attn_weights, v).transpose(1, 2), attn_weights
    """,
}


@pytest.mark.parametrize("source", ATTENTIONS.values(), ids=ATTENTIONS)
def test_a_rewritten_attention_function_is_followed_all_the_same(source, monkeypatch):
    for name, new in written(source, modeling_llama).items():
        monkeypatch.setattr(modeling_llama, name, new, raising=False)
    model = load("specimen:llama")
    names = [
        v.name
        for v in vocabulary.BY_HOST["self_attn"].values()
        if v.name not in NOT_THERE["llama"]["self_attn"]
    ]
    rec, native = model.record(PROMPT, names), specimen("llama").record(PROMPT, names)
    for key, tensor in native.values.items():
        assert_close(rec[key], tensor, rtol=1e-5, atol=1e-5)
    with model.trace(PROMPT):
        model.layers[0].self_attn.attention_scores[:, 2, 5, :5] = -torch.inf
        pattern = model.layers[0].self_attn.attention_probabilities.save()
    assert pattern[0, 2, 5, 5] == 1 and pattern[0, 2, 5].sum() == 1
    with model.trace(PROMPT):
        model.layers[0].self_attn.attention_probabilities[:, 2] = 0
        heads = model.layers[0].self_attn.attention_head_outputs.save()
    assert heads[:, :, 2].abs().max() == 0 and heads[:, :, 1].abs().max() > 0


IN_PARTS = """
    def eager_attention_forward(
        module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs
    ):
        groups = module.num_key_value_groups
        k, v = repeat_kv(key, groups), repeat_kv(value, groups)
        halves = []
        for q_, k_, v_ in zip(query.chunk(2, 1), k.chunk(2, 1), v.chunk(2, 1)):
            scores = torch.matmul(q_, k_.transpose(2, 3)) * scaling
            scores = scores if attention_mask is None else scores + attention_mask
            halves.append(torch.matmul(nn.functional.softmax(scores, dim=-1), v_))
        return torch.cat(halves, 1).transpose(1, 2).contiguous(), None
"""


def test_a_pattern_made_in_parts_is_unavailable_and_never_a_part(monkeypatch):
    """One label then means several calls; half the heads must not be served as all of them."""
    for name, new in written(IN_PARTS, modeling_llama).items():
        monkeypatch.setattr(modeling_llama, name, new)
    model = load("specimen:llama")
    for name in ("attention_scores", "attention_probabilities"):
        row = model.support()[name]
        assert not row.available and row.reasons[0].kind is ReasonKind.NOT_TRACED
        with pytest.raises(Unavailable):
            model.record(PROMPT, [name])
    names = ["attention_queries", "attention_values", "attention_head_outputs", "attention_output"]
    rec, native = model.record(PROMPT, names), specimen("llama").record(PROMPT, names)
    for key, tensor in native.values.items():
        assert_close(rec[key], tensor, rtol=1e-5, atol=1e-5)


ROUTER = """
    def forward(self, hidden_states):
        flat = hidden_states.reshape(-1, self.hidden_dim)
        spread = torch.topk(flat, 2, dim=-1)[0].sum()           # another top-k, of something else
        router_logits = F.linear(flat, self.weight.clone()) + 0 * spread
        router_logits = router_logits.clone()
        probabilities = torch.softmax(router_logits, dim=-1, dtype=torch.float)
        chosen = torch.topk(probabilities, self.top_k, dim=-1)
        weights, indices = chosen.values, chosen.indices
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return router_logits, weights.to(router_logits.dtype), indices
"""


def test_a_rewritten_router_is_followed_all_the_same(monkeypatch):
    new = written(ROUTER, modeling_qwen3_moe)["forward"]
    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeTopKRouter, "forward", new)
    model = load("specimen:qwen3_moe")
    names = [
        v.name
        for v in vocabulary.BY_HOST["mlp"].values()
        if v.name not in NOT_THERE["qwen3_moe"]["mlp"]
    ]
    rec, native = model.record(PROMPT, names), specimen("qwen3_moe").record(PROMPT, names)
    for key, tensor in native.values.items():
        assert_close(rec[key], tensor, rtol=1e-5, atol=1e-6)
    with model.trace(PROMPT):
        model.layers[0].mlp.router_logits[:, 3, 7] = 1e4
        indices = model.layers[0].mlp.expert_indices.save()
        weights = model.layers[0].mlp.expert_weights.save()
    assert indices[0, 3, 0] == 7 and weights[0, 3, 0] == 1


BLOCKS = {
    "operands the other way round": ("hidden_states + kept", "torch.add(moved, hidden_states)"),
    "added in place": ("kept.clone().add_(hidden_states)", "hidden_states.add_(moved)"),
}
BLOCK = """
    def forward(
        self,
        hidden_states,
        position_embeddings,
        attention_mask=None,
        position_ids=None,
        cache=None,
        **kwargs,
    ):
        kept = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        if self.block_type == "linear_attention":
            hidden_states = self.linear_attn(
                hidden_states=hidden_states, cache=cache, attention_mask=attention_mask, **kwargs
            )
        else:
            hidden_states, _ = self.self_attn(
                hidden_states=hidden_states,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
                position_embeddings=position_embeddings,
                **kwargs,
            )
        moved = FIRST
        hidden_states = self.mlp(self.post_attention_layernorm(moved))
        return SECOND
"""


@pytest.mark.parametrize(("first", "second"), BLOCKS.values(), ids=BLOCKS)
def test_a_rewritten_block_is_followed_all_the_same(first, second, monkeypatch):
    new = written(BLOCK.replace("FIRST", first).replace("SECOND", second), modeling_qwen3_next)[
        "forward"
    ]
    monkeypatch.setattr(modeling_qwen3_next.Qwen3NextDecoderLayer, "forward", new)
    model = load("specimen:qwen3_next")
    names = ["layer_input", "attention_output", "layer_mid", "mlp_output", "layer_output"]
    rec, native = model.record(PROMPT, names), specimen("qwen3_next").record(PROMPT, names)
    for key, tensor in native.values.items():
        assert_close(rec[key], tensor, rtol=1e-5, atol=1e-5)
    for layer in range(model.num_layers):
        total = (
            rec["layer_input", layer] + rec["attention_output", layer] + rec["mlp_output", layer]
        )
        assert torch.equal(total, rec["layer_output", layer])


def test_a_block_that_is_no_sum_is_refused(monkeypatch):
    """Better no model than a value that is called the addend and is not."""
    source = BLOCK.replace("FIRST", "kept + hidden_states").replace(
        "SECOND", "torch.maximum(moved, hidden_states)"
    )
    monkeypatch.setattr(
        modeling_qwen3_next.Qwen3NextDecoderLayer,
        "forward",
        written(source, modeling_qwen3_next)["forward"],
    )
    error = refused("not_traceable", lambda: load("specimen:qwen3_next"))
    assert "plus a sum" in error.reason
