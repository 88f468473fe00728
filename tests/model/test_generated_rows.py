"""Generation of several rows a prompt: each invoke has the rows of its own prompt."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close
from transformers import GenerationConfig

from tests.support.models import specimen

PROMPTS = [torch.tensor([[5, 77, 300, 41]]), torch.tensor([[9, 1200, 88, 3]])]
BEAMS = {"num_beams": 2, "do_sample": False}
GREEDY_BEAMS = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False}


def alone(model, prompt, **options):
    """The rows of one prompt in a generation of its own: the ids, the last block's stream."""
    with torch.no_grad(), model.generate(prompt, max_new_tokens=3, **options) as tracer:
        streams = model.layers[-1].layer_output.save()
        ids = tracer.result.save()
    return streams, ids


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
@pytest.mark.parametrize("options", [BEAMS, GREEDY_BEAMS])
def test_each_invoke_has_its_own_beams(family, options):
    model = specimen(family)
    with torch.no_grad(), model.generate(max_new_tokens=3, **options) as tracer:
        with tracer.invoke(PROMPTS[0]):
            first_streams = model.layers[-1].layer_output.save()
            first_ids = tracer.result.save()
        with tracer.invoke(PROMPTS[1]):
            second_streams = model.layers[-1].layer_output.save()
            second_ids = tracer.result.save()
    found = [(first_streams, first_ids), (second_streams, second_ids)]
    for prompt, (streams, ids) in zip(PROMPTS, found, strict=True):
        wanted_streams, wanted_ids = alone(model, prompt, **options)
        assert streams.shape[0] == options["num_beams"]
        assert_close(streams, wanted_streams, rtol=1e-4, atol=1e-4)
        assert torch.equal(ids, wanted_ids)


def test_several_answers_of_each_prompt_by_a_configuration():
    model = specimen("llama")
    config = GenerationConfig(max_new_tokens=2, do_sample=True, num_return_sequences=3)
    with torch.no_grad(), model.generate(generation_config=config) as tracer:
        for prompt in PROMPTS:
            with tracer.invoke(prompt):
                logits = model.logits.save()
    plain = model.record(PROMPTS[1], values=["logits"])["logits"]
    assert_close(logits[:, -1], plain[:, -1].expand(3, -1), rtol=1e-4, atol=1e-4)


def test_an_edit_in_one_invoke_leaves_the_others_rows():
    model = specimen("llama")
    with torch.no_grad(), model.generate(max_new_tokens=1, **BEAMS) as tracer:
        with tracer.invoke(PROMPTS[0]):
            model.layers[0].layer_output[:] = 0
        with tracer.invoke(PROMPTS[1]):
            second = model.layers[0].layer_output.save()
        with tracer.invoke():
            whole = model.layers[1].layer_input.save()
    assert_close(second, alone_first_block(model))
    assert torch.equal(whole[2:], second) and not whole[:2].any()


def alone_first_block(model):
    """The stream after block 0 of the second prompt, once for each of two beams."""
    return model.record(PROMPTS[1], ["layer_output"])["layer_output", 0].expand(2, -1, -1)
