"""Blocks in which an attention feeds another mixer and adds nothing itself."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from explorer.vocabulary.availability import ReasonKind
from tests.support.models import PROMPT, specimen


@pytest.mark.parametrize(("family", "host"), [("zamba", "mixer"), ("zamba2", "ssd")])
def test_the_mixer_that_is_fed_is_the_host_of_the_addend(family, host):
    """Its output is the addend; the attention that feeds it is no host."""
    model = specimen(family)
    layer = 1
    (sublayer,) = model.anatomy.block(layer).sublayers
    assert sublayer.host == host and model.mixers[layer] == (host,)
    path = f"{model.anatomy.backbone.blocks}.{layer}.mamba_decoder.mamba"
    seen = []
    handle = model.hf.get_submodule(path).register_forward_hook(
        lambda module, args, out: seen.append(out.detach().clone())
    )
    rec = model.record(PROMPT, ["layer_input", "attention_output", "layer_output"])
    handle.remove()
    assert torch.equal(rec["attention_output", layer], seen[0])
    assert_close(
        rec["layer_input", layer] + rec["attention_output", layer],
        rec["layer_output", layer],
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("family", ["zamba", "zamba2"])
def test_what_feeds_a_mixer_is_named_in_the_reasons(family):
    """No reason says that the block has no attention, MLP or norm: they are in what feeds it."""
    model = specimen(family)
    shared = "shared_transf" if family == "zamba" else "shared_transformer"
    support = model.support(1)
    names = ("self_attn.attention_queries", "mlp.mlp_output", "mlp_input", "mlp_norm_output")
    for name in names:
        reason = support[name].reasons[1]
        assert shared in reason.text and reason.kind is ReasonKind.NOT_TRACED
    assert support["attention_norm_output"].available
    # A block without it says so as before.
    assert model.support(0)["mlp.mlp_output"].reasons[0].kind is ReasonKind.NOT_IN_BLOCK
