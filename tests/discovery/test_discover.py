"""Finding values by following the data: on released sizes, under other implementations, and in rewritten modeling code."""

from __future__ import annotations

import linecache
import textwrap
from itertools import count

import pytest
import torch
import transformers
from torch.testing import assert_close
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from explorer import load, vocabulary
from explorer.checkpoints import cards
from explorer.discovery.backbone import NotADecoder, find_backbone
from explorer.discovery.discover import discover
from explorer.discovery.trace_recorder import record_graph
from explorer.meta_device import build_meta, probe_lengths
from explorer.model.errors import Unavailable
from explorer.model.language_model import LanguageModel
from explorer.specimens import bpe, config_of
from explorer.vocabulary.availability import ReasonKind
from tests.support.models import FAMILIES, HYBRIDS, MIXTURES, PROMPT, shapes, specimen

#: What a family has not, by host; everything else of the vocabulary must be found.
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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", ["specimen", "released"])
def test_every_value_a_family_has_is_found_and_no_other(family, size):
    model = specimen(family) if size == "specimen" else shapes(cards.family_checkpoints(family)[0])
    for row in model.support():
        others = (
            set()
            if row.host in ("model", "layers", "linear_attn", "self_attn", "mlp", "shared_experts")
            else "all"
        )
        absent = NOT_THERE[family].get(row.host, others)
        assert row.available == (absent != "all" and row.name not in absent), (row.host, row.name)
    linear = sum(kind == "linear_attn" for kind in model.kinds)
    assert linear == (0 if family not in HYBRIDS else 3 * model.num_layers // 4)
    for row in model.support():
        mixers = {"linear_attn": linear, "self_attn": model.num_layers - linear}
        if row.available and row.host != "model":
            assert len(row.layers) == mixers.get(row.host, model.num_layers), (row.host, row.name)


@pytest.mark.parametrize("family", FAMILIES)
def test_places_do_not_depend_on_the_size_of_the_model(family):
    small, large = specimen(family), shapes(cards.family_checkpoints(family)[0])
    for layer in (0, 3) if family in HYBRIDS else (0,):
        for name, host in large.anatomy.block(layer).hosts.items():
            found = small.anatomy.block(layer).hosts[name]
            assert found.module == host.module and set(found.missing) == set(host.missing)
            for value, hook_points in host.hook_points.items():
                assert [
                    (p.module, p.operation, p.side, p.element, p.arrangement) for p in hook_points
                ] == [
                    (p.module, p.operation, p.side, p.element, p.arrangement)
                    for p in found.hook_points[value]
                ], value


@pytest.mark.parametrize("family", FAMILIES)
def test_a_place_is_said_in_the_words_of_the_modeling_code(family):
    for row in specimen(family).support():
        if row.available:
            assert row.read_at and "None" not in row.read_at and "_0" not in row.read_at
        else:
            assert row.reasons and all(
                len(str(reason)) > 15 and not str(reason).endswith(".")
                for reason in row.reasons.values()
            )


# -- other implementations ---------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_5_moe_text"])
def test_a_fused_attention_takes_away_the_pattern_and_nothing_else(family):
    eager, fused = specimen(family), load(f"specimen:{family}", attn_implementation="sdpa")
    taken = {"attention_scores", "attention_probabilities"}
    for row, same in zip(fused.support(), eager.support()):
        assert row.available == (same.available and row.name not in taken)
    row = fused.support()["attention_scores"]
    assert "eager" in row.condition and all(
        "eager" in r.text and r.kind is ReasonKind.NEEDS_SETTING
        for l, r in row.reasons.items()
        if fused.kinds[l] == "self_attn"
    )
    names = [row.name for row in fused.support() if row.host == "self_attn" and row.available]
    a, b = fused.record(PROMPT, names), eager.record(PROMPT, names)
    for key, tensor in a.values.items():
        assert_close(tensor, b[key], rtol=1e-4, atol=1e-5)
    layer = fused.kinds.index("self_attn")
    with pytest.raises(Unavailable, match="eager"):
        fused.record(PROMPT, ["attention_probabilities"])
    with pytest.raises(Unavailable, match=rf"layers\[{layer}\].*attention_scores.*eager"):
        with fused.trace(PROMPT):
            fused.layers[layer].self_attn.attention_scores.save()


def test_on_a_fused_attention_the_values_are_written_too():
    model = load("specimen:llama", attn_implementation="sdpa")
    with model.trace(PROMPT):
        clean = model.logits.save()
    with model.trace(PROMPT):
        model.layers[1].self_attn.attention_queries[:, 3] = 0
        heads = model.layers[1].self_attn.attention_head_outputs.save()
        edited = model.logits.save()
    values = model.record(PROMPT, ["attention_values"])["attention_values", 1]
    # With its query at zero a head looks at all it may with equal weight.
    assert_close(heads[0, -1, 3], values[0, 3 // (model.num_heads // model.num_kv_heads)].mean(0))
    assert not torch.equal(clean, edited)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_other_experts_implementations_read_the_same_or_say_what_they_lack(implementation):
    default, other = (
        specimen("qwen3_moe"),
        load("specimen:qwen3_moe", experts_implementation=implementation),
    )
    lacking = {
        row.name
        for row, same in zip(other.support(), default.support())
        if row.available != same.available
    }
    assert lacking == ({"expert_outputs"} if implementation == "eager" else set())
    names = [row.name for row in other.support() if row.host == "mlp" and row.available]
    a, b = other.record(PROMPT, names), default.record(PROMPT, names)
    for key, tensor in a.values.items():
        assert_close(tensor, b[key], rtol=1e-4, atol=1e-5)
    if implementation == "eager":
        reason = other.support()["expert_outputs"].reasons[0]
        assert "experts_implementation" in reason.text and reason.kind is ReasonKind.NEEDS_SETTING
        with pytest.raises(Unavailable, match="grouped_mm"):
            other.record(PROMPT, ["expert_outputs"])


# -- rewritten modeling code ---------------------------------------------------

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
        def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
            softmax_inputs = torch.softmax(query.detach(), dim=-1)   # another softmax, of something else
            key_states = repeat_kv(key, module.num_key_value_groups)
            key_states = key_states.clone()
            value_states = repeat_kv(value, module.num_key_value_groups)
            attn_weights = torch.zeros_like(softmax_inputs).sum() + torch.matmul(query, key_states.transpose(2, 3)) * scaling
            attn_weights = attn_weights.clone()
            if attention_mask is not None:
                attn_weights = attn_weights + attention_mask
            attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)
            attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)
            attn_output = torch.matmul(attn_weights, value_states)
            attn_output = attn_output.transpose(1, 2).contiguous()
            return attn_output, attn_weights
    """,
    "other names and another order": """
        def weigh(scores):
            return nn.functional.softmax(scores, dim=-1)

        def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
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
        def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
            k, v = repeat_kv(key, module.num_key_value_groups), repeat_kv(value, module.num_key_value_groups)
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
    def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        k, v = repeat_kv(key, module.num_key_value_groups), repeat_kv(value, module.num_key_value_groups)
        halves = []
        for q_, k_, v_ in zip(query.chunk(2, 1), k.chunk(2, 1), v.chunk(2, 1)):
            scores = torch.matmul(q_, k_.transpose(2, 3)) * scaling
            scores = scores if attention_mask is None else scores + attention_mask
            halves.append(torch.matmul(nn.functional.softmax(scores, dim=-1), v_))
        return torch.cat(halves, 1).transpose(1, 2).contiguous(), None
"""


def test_a_pattern_made_in_parts_is_unavailable_and_never_a_part(monkeypatch):
    """One label then means several moments; half the heads must not be handed out as all of them."""
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
    def forward(self, hidden_states, position_embeddings, attention_mask=None, position_ids=None, cache=None, **kwargs):
        kept = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        if self.block_type == "linear_attention":
            hidden_states = self.linear_attn(hidden_states=hidden_states, cache=cache, attention_mask=attention_mask, **kwargs)
        else:
            hidden_states, _ = self.self_attn(hidden_states=hidden_states, attention_mask=attention_mask,
                position_ids=position_ids, cache=cache, position_embeddings=position_embeddings, **kwargs)
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
    with pytest.raises(ValueError, match="not its input plus a sum"):
        load("specimen:qwen3_next")


# -- sizes that coincide -------------------------------------------------------


def random_model(model_type: str, **sizes) -> torch.nn.Module:
    """A small random model of any family transformers has."""
    config = transformers.AutoConfig.for_model(
        model_type, vocab_size=2048, pad_token_id=0, eos_token_id=0, bos_token_id=0, **sizes
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        ).eval()


def tiny(model_type: str, **sizes) -> LanguageModel:
    """The same under standard names."""
    module = random_model(model_type, **sizes)
    return LanguageModel(
        module,
        bpe.load_tokenizer(512),
        discover(build_meta(module.config)),
        model_type,
        "random, seed 3",
    )


def test_equal_sizes_do_not_mix_up_the_axes():
    """Four heads of width four on a stream of sixteen: every axis could be another."""
    model = tiny(
        "llama",
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=4,
        max_position_embeddings=64,
    )
    attention = model.hf.model.layers[0].self_attn
    prompt = torch.tensor([[5, 6, 7, 8]])
    rec = model.record(
        prompt,
        [
            "attention_norm_output",
            "attention_queries",
            "attention_values",
            "attention_premix",
            "attention_head_outputs",
            "attention_output",
        ],
    )
    normed = rec["attention_norm_output", 0]
    queries = attention.q_proj(normed).view(1, 4, 4, 4)
    assert_close(
        rec["attention_queries", 0][0, :, 0], queries[0, 0]
    )  # the first position is not rotated
    values = attention.v_proj(normed).view(1, 4, 4, 4)
    assert_close(rec["attention_values", 0], values.transpose(1, 2))
    assert_close(
        rec["attention_head_outputs", 0][0, 0], values[0, 0]
    )  # the first token sees only itself
    assert_close(
        rec["attention_output", 0], attention.o_proj(rec["attention_premix", 0].flatten(2))
    )


def test_a_router_that_chooses_every_expert_has_no_margin():
    model = tiny(
        "qwen3_moe",
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        max_position_embeddings=64,
    )
    reason = model.support()["router_margin"].reasons[0]
    assert "every expert is chosen" in reason.text and reason.by_nature
    assert ("router_margin", 0) not in model.record(PROMPT)
    with pytest.raises(Unavailable, match="every expert is chosen"):
        with model.trace(PROMPT):
            model.layers[0].mlp.router_margin.save()


def test_a_router_that_chooses_one_expert_is_laid_out():
    model = tiny(
        "qwen3_moe",
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=24,
        num_experts=3,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        max_position_embeddings=64,
    )
    rec = model.record(torch.tensor([[5, 6, 7], [8, 9, 10]]))
    assert rec["expert_indices", 0].shape == (2, 3, 1) and rec["expert_outputs", 0].shape == (
        2,
        3,
        1,
        24,
    )
    assert_close(rec["expert_outputs", 0].sum(2), rec["routed_output", 0])
    assert rec["attention_probabilities", 0].shape == (2, 1, 3, 3)


@pytest.mark.parametrize("family", MIXTURES)
def test_the_probe_has_lengths_of_its_own(family):
    twin = build_meta(config_of(family))
    batch, seq = probe_lengths(twin)
    taken = {extent for parameter in twin.parameters() for extent in parameter.shape}
    assert batch != seq and not {batch, seq, batch * seq} & taken


def test_a_model_without_blocks_between_embedding_and_head_is_refused():
    module = torch.nn.Module()
    module.get_input_embeddings = lambda: None
    module.get_output_embeddings = lambda: None
    with pytest.raises(NotADecoder, match="no list of blocks"):
        find_backbone(module)


# -- the recording of a run ----------------------------------------------------


def test_following_a_forward_leaves_the_model_as_it_was():
    twin = build_meta(config_of("qwen3_next"))
    before = [
        (
            name,
            type(module),
            dict(module._forward_hooks),
            dict(module._forward_pre_hooks),
            sorted(module.__dict__),
        )
        for name, module in twin.named_modules()
    ]
    with torch.no_grad(), record_graph(twin, ["model.layers.0"]) as flow:
        twin(torch.zeros(3, 5, dtype=torch.long, device="meta"))
    assert flow.ops and flow.calls
    with pytest.raises(ZeroDivisionError), record_graph(twin, ["model.layers.0", "model.layers.3"]):
        1 / 0
    after = [
        (
            name,
            type(module),
            dict(module._forward_hooks),
            dict(module._forward_pre_hooks),
            sorted(module.__dict__),
        )
        for name, module in twin.named_modules()
    ]
    assert before == after


def test_an_operation_is_kept_with_what_it_read_and_made():
    twin = build_meta(config_of("llama"))
    with torch.no_grad(), record_graph(twin, ["model.layers.0.mlp"]) as flow:
        twin(torch.zeros(3, 5, dtype=torch.long, device="meta"))
    call = flow.module("model.layers.0.mlp")
    down = flow.module("model.layers.0.mlp.down_proj")
    assert call.start <= down.start < down.stop <= call.stop and down in flow.inside(call)
    assert id(call.output) in flow.back(id(call.output)) and set(flow.back(id(call.output))) & set(
        flow.onward(id(down.output))
    )
    products = [
        i for i in range(call.start, call.stop) if flow.ops[i].name in ("mm", "addmm", "bmm")
    ]
    assert (
        len(products) == 3
        and [flow.maker(id(flow.tensors[flow.ops[i].makes[0]])) for i in products] == products
    )
