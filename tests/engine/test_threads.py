"""Models used from several threads: one model's runs take turns, two models do not meet."""

from __future__ import annotations

import threading

import pytest
import torch

from explorer import load
from tests.support.models import PROMPT, ids, specimen


@pytest.fixture
def model():
    return specimen("qwen3_5_moe_text")


def batched(*jobs) -> list:
    """Run the jobs in a thread each, starting at once; their results, or the first error."""
    results, errors, start = [None] * len(jobs), [], threading.Barrier(len(jobs))

    def run(index, job):
        try:
            start.wait()
            results[index] = job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i, job)) for i, job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return results


TEXTS = (
    "In the beginning",
    "And God said, Let there be light",
    "the earth was without form",
    "darkness was upon the face",
)


def traced(model, text: str, times: int = 6) -> list[torch.Tensor]:
    seen = []
    for _ in range(times):
        with torch.no_grad():
            with model.trace(text):
                logits = model.layers[1].mlp.router_logits.save()
                pattern = model.layers[3].self_attn.attention_probabilities.save()
        seen.append((logits, pattern))
    return seen


def recorded(model, text: str, times: int = 6) -> list[torch.Tensor]:
    names = ["router_logits", "attention_probabilities"]
    recs = [model.record(text, names) for _ in range(times)]
    return [(rec["router_logits", 1], rec["attention_probabilities", 3]) for rec in recs]


@pytest.mark.slow
def test_threads_on_one_model_take_turns_and_get_their_own(model):
    expected = {text: recorded(model, text, 1)[0] for text in TEXTS}
    jobs = [
        lambda text=text, run=run: (text, run(model, text))
        for text in TEXTS
        for run in (traced, recorded)
    ]
    for text, seen in batched(*jobs):
        assert len(seen) == 6
        for logits, pattern in seen:
            assert torch.equal(logits, expected[text][0]) and torch.equal(
                pattern, expected[text][1]
            )
    assert not model.taps.open


def test_generations_and_traces_in_threads_take_turns(model):
    def generate():
        with model.generate(TEXTS[0], max_new_tokens=4, do_sample=False, eos_token_id=-1) as tracer:
            widths = [].save()
            for _ in tracer.iter[:4]:
                widths.append(model.layers[1].mlp.expert_indices.shape[1])
        return widths

    (first, second, seen) = batched(generate, generate, lambda: traced(model, TEXTS[1]))
    start = ids(model, TEXTS[0]).shape[1]
    assert first == second == [start, 1, 1, 1] and len(seen) == 6


def test_a_lens_in_another_thread_takes_no_part_in_a_run(model):
    """The app projects one block's stream while another prompt is being recorded."""
    stream = model.record(TEXTS[0], ["layer_output"])["layer_output", 1]
    expected = model.record(TEXTS[1], ["final_norm_output", "logits"])

    def lens():
        with torch.no_grad():
            return [model.project_on_vocab(stream) for _ in range(30)]

    def record():
        return [model.record(TEXTS[1], ["final_norm_output", "logits"]) for _ in range(15)]

    projected, recs = batched(lens, record)
    assert all(torch.equal(logits, projected[0]) for logits in projected)
    for rec in recs:
        assert torch.equal(rec["final_norm_output"], expected["final_norm_output"]) and torch.equal(
            rec["logits"], expected["logits"]
        )


def test_a_native_forward_in_another_thread_takes_no_part_in_a_recording(model):
    tokens, expected = ids(model, TEXTS[0]), model.record(TEXTS[1])

    def native():
        with torch.no_grad():
            return [model.hf(tokens).logits for _ in range(10)]

    logits, recs = batched(native, lambda: [model.record(TEXTS[1]) for _ in range(10)])
    assert all(torch.equal(one, logits[0]) for one in logits)
    for rec in recs:
        for key, value in rec.values.items():
            assert (
                value is None
                or not isinstance(value, torch.Tensor)
                or torch.equal(value, expected[key])
            ), key


@pytest.mark.slow
def test_two_models_in_two_threads_do_not_disturb_each_other():
    """One replays states, the other does not; one is edited, the other is not."""
    one, other = specimen("qwen3_next"), load("specimen:qwen3_next")

    def with_states():
        with one.trace(PROMPT):
            states = one.layers[0].linear_attn.states.save()
        return states  # noqa: RET504  the block ends first

    def edited():
        with other.trace(PROMPT):
            other.layers[0].linear_attn.betas[:] = 0
            out = other.layers[0].linear_attn.attention_head_outputs.save()
        return out  # noqa: RET504  the block ends first

    expected = with_states()
    for states, heads in (batched(with_states, edited) for _ in range(4)):
        assert torch.equal(states, expected) and heads.abs().max() == 0


def test_an_error_in_one_thread_does_not_block_the_others(model):
    def failing():
        with pytest.raises(ZeroDivisionError):
            with model.trace(TEXTS[0]):
                model.layers[1].layer_output.save()
                1 / 0
        return "failed"

    results = batched(
        failing, lambda: traced(model, TEXTS[1]), failing, lambda: recorded(model, TEXTS[2])
    )
    assert results[0] == results[2] == "failed" and len(results[1]) == len(results[3]) == 6


@pytest.mark.slow
def test_models_loaded_at_once_are_those_loaded_one_by_one():
    """transformers builds under a default dtype of its own, which must not reach another load."""
    from concurrent.futures import ThreadPoolExecutor

    families = ["llama", "qwen3_moe"] * 4
    alone = {
        family: load(f"specimen:{family}").record(PROMPT, ["logits"])["logits"]
        for family in families[:2]
    }
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(lambda family: load(f"specimen:{family}"), families))
    assert torch.get_default_dtype() == torch.float32
    for family, model in zip(families, models, strict=True):
        assert torch.equal(model.record(PROMPT, ["logits"])["logits"], alone[family])
