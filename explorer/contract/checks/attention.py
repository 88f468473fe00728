"""Laws of softmax attention: scores, pattern, values, gate."""

from __future__ import annotations

import torch

from explorer import vocabulary
from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import ModelUnderTest
from explorer.contract.registry import invariant
from explorer.contract.residual_steps import added, followed

HOST = "self_attn"


def _repeated(s: ModelUnderTest, name: str, layer: int) -> torch.Tensor:
    """Keys or values [batch num_heads seq width], each repeated for the heads that share it."""
    tensor = s.get(HOST, name, layer)
    return tensor.repeat_interleave(s.envoy(HOST, layer).num_heads // tensor.shape[1], dim=1)


def _sunk(s: ModelUnderTest, layer: int) -> bool:
    return layer in s.layers(HOST, "attention_sinks")


@invariant(
    "pattern rows",
    "Each row of attention_probabilities sums to one (to less where the family has sinks), has no negative entry and reads no later token.",
    HOST,
    needs=("attention_probabilities",),
    float32=1e-5,
    bfloat16=2e-2,
)
def rows(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for layer in s.layers(HOST, "attention_probabilities"):
        pattern = s.get(HOST, "attention_probabilities", layer)
        total = pattern.float().sum(-1)
        if _sunk(s, layer):
            t.holds(
                layer, (total <= 1 + t.allowed).all(), f"a row sums to {total.max().item():.3f}"
            )
        else:
            t.near(layer, total, torch.ones_like(total))
        t.holds(layer, (pattern >= 0).all(), "an entry is negative")
        t.same(layer, pattern, pattern.tril())


def _products(s: ModelUnderTest) -> list[int]:
    """The blocks whose scores are one product of queries and keys, not the sum of several."""
    return [
        layer
        for layer in s.layers(HOST, "attention_scores", "attention_queries", "attention_keys")
        if not s.details(HOST, layer).summed_scores
    ]


@invariant(
    "scores are scaled products",
    "Where a token may look, attention_scores is the product of its query and the key, times one number for the whole block (capped where the family "
    "caps it), plus what depends on the positions alone where the family adds a bias.",
    HOST,
    needs=("attention_scores", "attention_queries", "attention_keys"),
    float32=1e-5,
    bfloat16=3e-2,
    when=lambda s: bool(_products(s)),
)
def scores(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for layer in _products(s):
        products = (
            s.get(HOST, "attention_queries", layer).double()
            @ _repeated(s, "attention_keys", layer).double().mT
        )
        found = s.get(HOST, "attention_scores", layer).double()
        seen = (found > -1e4) & torch.ones(s.seq, s.seq, dtype=torch.bool).tril()
        t.holds(layer, seen.any(-1).all(), "a token may look nowhere")
        details = s.details(HOST, layer)
        if details.score_cap is not None:
            found = details.score_cap * torch.atanh(found / details.score_cap)
        x, y = products[seen], found[seen]
        if details.position_bias:  # by positions alone: the same in every row
            seen = seen.all(0)
            x, y = products[:, seen], found[:, seen]
            x, y = x - x.mean(0, keepdim=True), y - y.mean(0, keepdim=True)
        scale = (x * y).sum() / (x * x).sum()  # least squares
        t.near(layer, scale * x, y)


@invariant(
    "scores to probabilities",
    "attention_probabilities is the softmax of attention_scores over the keys (and the sink, where there is one).",
    HOST,
    needs=("attention_scores", "attention_probabilities"),
    float32=1e-5,
    bfloat16=2e-2,
)
def probabilities(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for layer in s.layers(HOST, "attention_scores", "attention_probabilities"):
        found = s.get(HOST, "attention_scores", layer).float()
        if _sunk(s, layer):
            sinks = (
                s.get(HOST, "attention_sinks", layer)
                .float()[None, :, None, None]
                .expand(*found.shape[:3], 1)
            )
            want = torch.cat([found, sinks], dim=-1).softmax(-1)[..., :-1]
        else:
            want = found.softmax(-1)
        t.near(layer, s.get(HOST, "attention_probabilities", layer), want)


@invariant(
    "probabilities mix values",
    "attention_head_outputs is attention_probabilities times attention_values, each repeated for the heads that share it.",
    HOST,
    needs=("attention_probabilities", "attention_values", "attention_head_outputs"),
    float32=1e-5,
    bfloat16=2e-2,
)
def mixes(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for layer in s.layers(
        HOST, "attention_probabilities", "attention_values", "attention_head_outputs"
    ):
        pattern = s.get(HOST, "attention_probabilities", layer)
        mixed = (pattern.float() @ _repeated(s, "attention_values", layer).float()).transpose(1, 2)
        t.near(layer, s.get(HOST, "attention_head_outputs", layer), mixed)


@invariant(
    "heads to premix",
    "attention_premix is attention_head_outputs, times head_gate or head_scale where the family has one and normed where it "
    "norms them, and the projection, with the norm and scale after it where the family has them, makes attention_output of "
    "it.",
    HOST,
    needs=("attention_head_outputs", "attention_premix"),
    float32=1e-5,
    bfloat16=2e-2,
)
def premix(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    for layer in s.layers(HOST, "attention_head_outputs", "attention_premix"):
        heads = s.get(HOST, "attention_head_outputs", layer)
        if layer in s.layers(HOST, "head_gate"):
            heads = heads * s.get(HOST, "head_gate", layer)
        if layer in s.layers(HOST, "head_scale"):
            heads = heads * s.get(HOST, "head_scale", layer)[..., None]
        found = s.get(HOST, "attention_premix", layer)
        for path in s.details(HOST, layer).output_norms:
            with torch.no_grad():
                heads = s.module(layer, path)(heads.flatten(2)).view_as(found)
        t.near(layer, found, heads)
        projection = s.details(HOST, layer).output_projection
        if projection:
            with torch.no_grad():
                made = s.module(layer, projection)(found.flatten(2))
            if followed(s, HOST, layer):
                t.near(layer, added(s, HOST, layer, made), s.get(HOST, "attention_output", layer))


@invariant(
    "zero a head",
    "zero_head makes exactly that head's attention_head_outputs zero, and the logits are those of the same edit in a trace.",
    *(
        host
        for host in ("self_attn", *vocabulary.RECURRENT)
        if "heads"
        in vocabulary.LAYOUTS[vocabulary.BY_HOST[host]["attention_head_outputs"].layout].axes
        or host == HOST
    ),
    needs=("attention_head_outputs",),
)
def zeroed(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    from explorer.model.edits import zero_head

    for layer in s.first(host, "attention_head_outputs"):
        clean = s.get(host, "attention_head_outputs", layer)
        head = clean.shape[2] - 1
        edited = s.model.record(
            s.ids,
            [f"{host}.attention_head_outputs", "logits"],
            edits=[zero_head(layer, head, host)],
        )
        with torch.no_grad(), s.model.trace(s.ids):
            s.envoy(host, layer).attention_head_outputs[:, :, head] = 0
            logits = s.model.logits.save()
        found = edited[f"{host}.attention_head_outputs", layer]
        t.holds(layer, not found[:, :, head].any(), f"head {head} is not zero")
        t.same(layer, found[:, :, :head], clean[:, :, :head])
        t.same(layer, edited["logits"], logits)
        t.holds(layer, not torch.equal(logits, s.plain), "the logits did not move")
