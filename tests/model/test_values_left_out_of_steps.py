"""Values that a decoding step does not make: reading one raises where it is read, and the loop goes
on.
"""

from __future__ import annotations

import pytest
import torch

from explorer import vocabulary
from explorer.model.errors import AlreadyPassed, Unavailable
from tests.support.models import specimen

IDS = torch.tensor([[5, 77, 300, 41]])
STEPS = {"max_new_tokens": 4, "min_new_tokens": 4}


def prompt_only(model) -> tuple[str, str]:
    """A host and a value of block 0 that its decoding step does not make."""
    for host in model.anatomy.block(0).hosts.values():
        for name in sorted(host.prompt_only):
            if not name.startswith("state"):
                return vocabulary.HOSTS[host.name].path.rpartition(".")[2], name
    raise AssertionError("there is none")


@pytest.mark.parametrize("family", ["mamba2", "bamba", "falcon_h1", "granitemoehybrid"])
def test_the_loop_goes_on_after_a_read_of_what_its_step_does_not_make(family):
    model = specimen(family)
    host, name = prompt_only(model)
    seen = []
    with torch.no_grad(), model.generate(IDS, **STEPS) as tracer:
        for step in tracer.iter[:4]:
            try:
                seen.append((step, getattr(getattr(model.layers[0], host), name).shape[1]))
            except ValueError as error:
                seen.append((step, type(error)))
            seen.append((step, model.layers[1].layer_output.shape[1]))
    reads = [(0, 4)] + [(step, Unavailable) for step in (1, 2, 3)]
    streams = [(0, 4), (1, 1), (2, 1), (3, 1)]
    assert seen == [one for pair in zip(reads, streams, strict=True) for one in pair]


def test_an_error_that_the_loop_does_not_catch_ends_the_generation():
    model = specimen("mamba2")
    with pytest.raises(Unavailable, match="trace the whole sequence at once"):
        with torch.no_grad(), model.generate(IDS, **STEPS) as tracer:
            for _ in tracer.iter[:4]:
                getattr(model.layers[0].mixer, prompt_only(model)[1]).save()


def test_a_block_skipped_in_each_step_is_told_of_once_a_step():
    model = specimen("llama")
    seen = []
    with torch.no_grad(), model.generate(IDS, **STEPS) as tracer:
        for step in tracer.iter[:4]:
            model.skip_layers(1, 1)
            try:
                seen.append(model.layers[1].self_attn.attention_output.shape[1])
            except AlreadyPassed:
                seen.append(step)
    assert seen == [0, 1, 2, 3]
