"""Standard values in traces: the order they are read in, and the steps of a generation."""

from __future__ import annotations

import traceback

import pytest
import torch

from explorer.engine.nnsight_api import OutOfOrderError
from explorer.model.errors import AlreadyPassed, OutsideTrace, Unavailable
from tests.support.messages import refused, sentence
from tests.support.models import PROMPT, attention_of, specimen

#: An open loop over the steps ends by outrunning the generation, which the engine mentions.
pytestmark = pytest.mark.filterwarnings("ignore:.*was never reached")


def test_values_of_one_moment_are_read_in_any_order(hybrid):
    mix = hybrid.layers[0].linear_attn
    names = [
        "betas",
        "state_input",
        "attention_values",
        "decays",
        "attention_keys",
        "attention_queries",
    ]
    seen = []
    for order in (names, names[::-1], names[3:] + names[:3]):
        with hybrid.trace(PROMPT):
            found = {}.save()
            for name in order:
                found[name] = getattr(mix, name)
        seen.append(found)
    for name in names:
        for other in seen[1:]:
            assert (
                other[name] is None
                if seen[0][name] is None
                else torch.equal(seen[0][name], other[name])
            )


def test_weights_and_indices_of_a_router_are_one_moment():
    model = specimen("qwen3_moe")
    moe = model.layers[1].mlp
    with model.trace(PROMPT):
        indices, weights = moe.expert_indices.save(), moe.expert_weights.save()
    with model.trace(PROMPT):
        again, first = moe.expert_weights.save(), moe.expert_indices.save()
    assert torch.equal(indices, first) and torch.equal(weights, again)


def test_every_value_of_a_block_is_read_in_the_order_the_model_gives(any_model):
    layer = any_model.num_layers - 1
    block = any_model.layers[layer]
    order = any_model.reading_order(layer)
    with any_model.trace(PROMPT):
        found = {}.save()
        for name in order:
            host, _, value = name.rpartition(".")
            envoy = {"": block, "shared_experts": getattr(block.mlp, "shared_experts", None)}.get(
                host
            )
            envoy = getattr(block, host) if envoy is None else envoy
            found[name] = getattr(envoy, value)
    rec = any_model.record(PROMPT, layers=[layer])
    assert len(order) > 15
    for name in order:
        if found[name] is not None:
            assert torch.equal(found[name], rec[name, layer]), name


def last_line(error: BaseException) -> tuple[str, str]:
    """File and text of the line an error's traceback ends at."""
    end = traceback.extract_tb(error.__traceback__)[-1]
    return end.filename, end.line


@pytest.mark.parametrize(
    ("late", "reached", "description"),
    [
        ("mlp.router_logits", "mlp.mlp_output", "mlp.router_logits → mlp.mlp_output"),
        (
            "attention_norm_output",
            "linear_attn.attention_output",
            "attention_norm_output → linear_attn.attention_output",
        ),
        (
            "linear_attn.betas",
            "linear_attn.attention_head_outputs",
            "linear_attn.betas → linear_attn.attention_head_outputs",
        ),
        ("linear_attn.attention_queries", "linear_attn.states", "linear_attn.attention_queries"),
    ],
)
def test_a_read_that_comes_too_late_says_so_at_the_users_line(model, late, reached, description):
    block = model.layers[1]

    def value(name):
        host, _, bare = name.rpartition(".")
        return getattr(getattr(block, host) if host else block, bare)

    with pytest.raises(AlreadyPassed) as caught:
        with model.trace(PROMPT):
            value(reached).save()
            value(late).save()
    message = str(caught.value)
    expression = f"model.layers[1].{late}"
    wanted = sentence("passed", expression=expression, reached=f"model.layers[1].{reached}")
    assert wanted.fullmatch(message), message
    assert description in message and message.count("→") <= 1
    file, line = last_line(caught.value)
    assert file == __file__ and "getattr" in line
    assert caught.value.__cause__ is None


def test_the_error_ends_at_the_very_line(model):
    with pytest.raises(
        OutOfOrderError,
        match=r"layers\[1\]\.layer_output.*layers\[2\]\.layer_output.*before block 2",
    ) as caught:
        with model.trace(PROMPT):
            model.layers[2].layer_output.save()
            model.layers[1].layer_output.save()
    assert last_line(caught.value) == (__file__, "model.layers[1].layer_output.save()")
    with pytest.raises(
        AlreadyPassed, match=sentence("passed", expression="model.token_embeddings")
    ) as caught:
        with model.trace(PROMPT):
            model.layers[0].layer_input.save()
            model.token_embeddings.save()
    assert last_line(caught.value) == (__file__, "model.token_embeddings.save()")


def test_a_write_that_comes_too_late_is_the_same_error(model):
    with pytest.raises(AlreadyPassed, match=r"mlp\.expert_weights") as caught:
        with model.trace(PROMPT):
            model.layers[1].mlp.routed_output.save()
            model.layers[1].mlp.expert_weights = torch.zeros(1)
    assert last_line(caught.value)[0] == __file__


def test_another_invoke_may_read_what_this_one_has_passed(model):
    moe = model.layers[1].mlp
    with model.trace() as tracer:
        with tracer.invoke(PROMPT):
            after = moe.mlp_output.save()
        with tracer.invoke():
            before = moe.router_logits.save()
    assert after.shape[:2] == before.shape[:2]


def test_a_value_outside_a_trace_is_refused_with_both_ways_to_get_it(model):
    ask = lambda: model.layers[1].mlp.router_logits  # noqa: E731
    refused("outside_trace", ask, expression="model.layers[1].mlp.router_logits")
    with pytest.raises(OutsideTrace):
        model.layers[1].mlp.router_logits = torch.zeros(1)


def test_a_value_in_the_trace_of_a_part_is_refused(model):
    with pytest.raises(OutsideTrace, match=sentence("part_of_model")):
        with model.layers[1].mlp.trace(torch.zeros(1, 3, model.hidden_size)):
            model.layers[1].mlp.router_logits.save()


def test_a_value_a_host_has_not_is_unavailable_with_the_reason(model):
    with pytest.raises(AttributeError, match="self_attn.*linear_attn"):
        model.layers[0].self_attn
    said = sentence("unavailable", expression="model.layers[3].self_attn.attention_sinks")
    with pytest.raises(Unavailable, match=said):
        with model.trace(PROMPT):
            attention_of(model).attention_sinks.save()
    with pytest.raises(Unavailable, match=r"layers\[0\]\.mlp\.mlp_neurons .*every expert"):
        with model.trace(PROMPT):
            model.layers[0].mlp.mlp_neurons.save()
    with pytest.raises(Unavailable, match="no shared expert"):
        with specimen("qwen3_moe").trace(PROMPT):
            specimen("qwen3_moe").layers[0].mlp.shared_expert_output.save()


def test_a_misspelt_value_is_answered_with_the_nearest(model):
    with pytest.raises(AttributeError, match="router_logits"):
        model.layers[1].mlp.router_logit
    with pytest.raises(AttributeError, match=r"value of model\.layers\[i\]\.mlp"):
        model.layers[1].router_logits
