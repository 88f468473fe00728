"""The trained specimen with attention sinks: training is reproducible, and its heads' shares for
their sinks.
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb, repeat_kv

from explorer import specimens
from explorer.specimens import building, weights
from explorer.specimens.recipes import recipe
from explorer.specimens.training import corpus, initial_weights, metrics, sink_metrics, train

FAMILY = "gpt_oss"
MOST_BYTES = 4_000_000


@pytest.fixture(scope="module")
def specimen():
    torch.set_num_threads(1)
    return specimens.build(FAMILY)


@pytest.fixture(scope="module")
def segments(specimen):
    return metrics.random_segments(specimen.config.vocab_size, recipe(FAMILY).seed)


def test_it_is_trained_and_small(specimen):
    assert specimen.weights == "trained"
    assert recipe(FAMILY).weights.stat().st_size <= MOST_BYTES
    assert specimen.config.num_hidden_layers <= 4
    assert set(specimen.config.layer_types) == {"sliding_attention", "full_attention"}
    assert sum(p.numel() for p in specimen.model.parameters()) == specimen.measured["parameters"]


def test_the_committed_figures_are_of_the_committed_weights(specimen, segments):
    with torch.no_grad():
        found = metrics.repetition_metrics(specimen.model, segments)
    assert found == pytest.approx(specimen.measured["repetition"]["random"], abs=0.02)


def test_the_committed_sinks_are_those_of_the_committed_weights(specimen, segments):
    rows = segments[: metrics.PATTERN_SEQUENCES]
    found = sink_metrics.sink_metrics(specimen.model, building.untrained(FAMILY), rows, rows)
    for now, stated in zip(found["layers"], specimen.measured["sinks"]["layers"], strict=True):
        for name in ("sinks", "sinks_before_training"):
            assert now[name] == pytest.approx(stated[name], abs=1e-4)
        for copy in ("first_copy", "second_copy"):
            assert now[copy]["share"] == pytest.approx(stated[copy]["share"], abs=2e-3)
            assert now[copy]["even_share"] == stated[copy]["even_share"]
    assert found["most_freed"] == pytest.approx(specimen.measured["sinks"]["most_freed"], abs=2e-3)


def test_it_has_learned_text_copying_and_routing_by_token(specimen):
    measured = specimen.measured
    assert measured["text"]["loss_nats_per_token"] < measured["text"]["unigram_nats_per_token"] - 1
    assert measured["router"]["worst_ratio"] >= 3
    assert measured["router"]["mean_ratio"] > 2 * measured["router"]["untrained_mean_ratio"]
    assert measured["repetition"]["text"]["lower_by"] >= 1
    assert measured["repetition"]["random"]["lower_by"] >= 1
    for kind in ("previous_token", "induction_target"):
        best = measured["heads"][kind]
        assert set(best) == {"self_attn", "even_share"}
        assert best["self_attn"]["share"] > 10 * best["even_share"]


def test_its_sinks_take_far_more_than_a_uniform_share_and_less_where_there_is_a_copy(specimen):
    sinks = specimen.measured["sinks"]
    assert sinks["strongest"]["share"] > 5 * sinks["strongest"]["even_share"]
    assert sinks["most_freed"]["first_copy"] > sinks["most_freed"]["second_copy"] + 0.2
    moved = [
        abs(a - b)
        for layer in sinks["layers"]
        for a, b in zip(layer["sinks"], layer["sinks_before_training"], strict=True)
    ]
    assert max(moved) > 0.5


@pytest.mark.parametrize("layer", [0, 1])
def test_what_a_row_lacks_is_the_sinks_column_of_the_softmax(specimen, segments, layer):
    model, seen = specimen.model, {}
    attention = model.model.layers[layer].self_attn
    handle = attention.register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    with torch.no_grad():
        rows = model(segments[:2], use_cache=False, output_attentions=True).attentions[layer]
        handle.remove()
        queries, keys = (
            part(seen["hidden_states"]).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for part in (attention.q_proj, attention.k_proj)
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *seen["position_embeddings"])
        scores = queries @ repeat_kv(keys, attention.num_key_value_groups).mT * attention.scaling
        length = segments.shape[1]
        behind = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (behind < 0) | (behind >= (attention.sliding_window or length))
        column = attention.sinks.view(1, -1, 1, 1).expand(2, -1, length, 1)
        probabilities = (
            torch.cat([scores.masked_fill(hidden, -torch.inf), column], -1).double().softmax(-1)
        )
    torch.testing.assert_close(
        sink_metrics.sink_shares(rows), probabilities[..., -1], atol=1e-6, rtol=0
    )
    torch.testing.assert_close(rows.double(), probabilities[..., :-1], atol=1e-6, rtol=0)


def test_a_uniform_share_counts_the_visible_keys_and_the_sink():
    assert sink_metrics.uniform_shares(3, None).tolist() == pytest.approx([1 / 2, 1 / 3, 1 / 4])
    assert sink_metrics.uniform_shares(4, 2).tolist() == pytest.approx([1 / 2, 1 / 3, 1 / 3, 1 / 3])


def test_equal_scores_give_the_sink_its_uniform_share(segments):
    model = building.untrained(FAMILY).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
            layer.self_attn.sinks.zero_()
    found = sink_metrics.sink_metrics(model, model, segments[:2], segments[:2])
    for layer in found["layers"]:
        for kind in (
            "all_tokens",
            "first_token",
            "later_tokens",
            "to_first_token",
            "first_copy",
            "second_copy",
        ):
            assert layer[kind]["share"] == pytest.approx(
                [layer[kind]["even_share"]] * 6, abs=2e-4
            ), kind
        assert layer["first_token"]["even_share"] == 0.5


def test_a_family_without_sinks_has_no_figures_of_them(segments):
    model = building.untrained("llama").eval()
    assert sink_metrics.sink_metrics(model, model, segments[:2], segments[:2]) is None
    assert "sinks" not in specimens.build("qwen3_next").measured


def test_sinks_start_as_the_class_draws_them_in_any_random_state():
    drawn = []
    for state in (1, 2):
        torch.manual_seed(state)
        drawn.append(dict(building.untrained(FAMILY).named_parameters()))
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])
    sinks = torch.cat([parameter for name, parameter in drawn[0].items() if name.endswith("sinks")])
    spread = building.config_of(FAMILY).initializer_range
    assert spread / 2 < sinks.std().item() < 2 * spread


def test_some_heads_initially_attend_one_token_back():
    model = building.untrained(FAMILY)
    initial_weights.prepare(model, recipe(FAMILY).std)
    attention, width = model.model.layers[0].self_attn, model.config.head_dim
    positions = torch.arange(20)[None]
    turned = model.model.rotary_emb(torch.zeros(1, 20, width), positions)
    queries, keys = (
        part.bias.view(1, -1, 1, width).expand(-1, -1, 20, -1)
        for part in (attention.q_proj, attention.k_proj)
    )
    queries, keys = apply_rotary_pos_emb(queries, keys, *turned)
    scores = (queries @ repeat_kv(keys, attention.num_key_value_groups).mT)[0, :, -1].flip(
        -1
    )  # [heads, tokens back]
    assert scores[:2].argmax(-1).tolist() == [1, 1]
    assert not scores[2:].any()
    assert not any(layer.self_attn.q_proj.bias.any() for layer in model.model.layers[1:])


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next"])
def test_routers_and_biases_are_not_made_orthogonal(family):
    model = building.untrained(family)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices, others = (
        [names[id(p)] for group in one.param_groups for p in group["params"]]
        for one in train.make_optimizers(model)
    )
    assert sorted(matrices + others) == sorted(names.values())
    apart = ("bias", "sinks", "router.weight", "mlp.gate.weight", "conv1d.weight")
    assert not [name for name in matrices if name.endswith(apart)]
    assert any(name.endswith("experts.gate_up_proj") for name in matrices)


@pytest.mark.slow
def test_two_short_trainings_write_the_same_bytes_and_move_the_sinks(monkeypatch, tmp_path):
    monkeypatch.setattr(train, "BATCH_SIZE", 2)
    stream = torch.arange(1, 40).repeat(20)
    written, before = [], building.untrained(FAMILY).state_dict()
    for run in "ab":
        model = building.untrained(FAMILY)
        notes = train.train_from_scratch(model, recipe(FAMILY), stream, steps=3, threads=1)
        weights.save(model, tmp_path / run)
        written.append((tmp_path / run).read_bytes())
    assert notes["tokens"] == 2 * (train.COPY_PHASE.length + 2 * train.TEXT_PHASE.length)
    assert written[0] == written[1]
    after = model.state_dict()
    for name in ("self_attn.sinks", "mlp.router.weight", "mlp.experts.gate_up_proj_bias"):
        name = f"model.layers.1.{name}"
        assert not torch.equal(after[name], before[name]), name


@pytest.mark.parametrize(
    ("family", "message"), [("gptoss", "did you mean 'gpt_oss'"), ("llama", "llama")]
)
def test_what_cannot_be_trained_is_one_sentence_and_status_2(capsys, family, message):
    assert train.main([family]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("option", ["--steps", "--threads"])
def test_counts_below_one_are_refused(capsys, option):
    with pytest.raises(SystemExit) as caught:
        train.main([FAMILY, option, "0"])
    assert caught.value.code == 2
    assert f"{option}: " in (said := capsys.readouterr().err) and "'0'" in said


def test_measuring_without_weights_is_one_sentence_and_status_2(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(corpus, "read_verses", lambda: ["Ge1:1 In the beginning."] * 20)
    assert train.main([FAMILY, "--measure-only", "--out", str(tmp_path)]) == 2
    assert (
        "gpt_oss.safetensors is missing; train it with python -m "
        "explorer.specimens.training gpt_oss"
    ) in capsys.readouterr().err
