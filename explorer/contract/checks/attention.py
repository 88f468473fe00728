"""Invariants of softmax attention: scores, probabilities, head outputs and their gate."""

from __future__ import annotations

import torch

from explorer import vocabulary
from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import ModelUnderTest
from explorer.contract.registry import invariant
from explorer.contract.residual_steps import addend_of, tail_known
from explorer.model.edits import zero_head

HOST = "self_attn"

#: Hosts with outputs per head, one of which can be zeroed.
_WITH_HEADS = tuple(
    host
    for host in (HOST, *vocabulary.RECURRENT)
    if host == HOST or "heads" in vocabulary.BY_HOST[host]["attention_head_outputs"].axes
)


def _per_query_head(subject: ModelUnderTest, name: str, layer: int) -> torch.Tensor:
    """Return keys or values [batch num_heads seq width], one for each query head."""
    tensor = subject.get(HOST, name, layer)
    return tensor.repeat_interleave(subject.envoy(HOST, layer).num_heads // tensor.shape[1], dim=1)


def _has_sinks(subject: ModelUnderTest, layer: int) -> bool:
    """Return whether sinks join a block's softmax."""
    return (
        layer in subject.layers(HOST, "attention_sinks")
        and not subject.details(HOST, layer).scaling_sinks
    )


def _scaled_by_sinks(subject: ModelUnderTest) -> list[int]:
    """Return the blocks whose sinks scale the heads' outputs."""
    names = ("attention_scores", "attention_sinks", "head_scale")
    return [
        layer
        for layer in subject.layers(HOST, *names)
        if subject.details(HOST, layer).scaling_sinks
    ]


@invariant(
    "pattern rows",
    "Each row of attention_probabilities sums to one (to at most one where there are sinks), has "
    "no negative entry and gives later tokens no weight.",
    HOST,
    needs=("attention_probabilities",),
    float32=1e-5,
    bfloat16=2e-2,
)
def rows(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for layer in subject.layers(HOST, "attention_probabilities"):
        pattern = subject.get(HOST, "attention_probabilities", layer)
        sums = pattern.float().sum(-1)
        if _has_sinks(subject, layer):
            at_most_one = (sums <= 1 + compare.tolerance).all()
            compare.holds(layer, at_most_one, f"a row sums to {sums.max().item():.3f}")
        else:
            compare.close(layer, sums, torch.ones_like(sums))
        compare.holds(layer, (pattern >= 0).all(), "an entry is negative")
        compare.equal(layer, pattern, pattern.tril())


def _single_products(subject: ModelUnderTest) -> list[int]:
    """Return the blocks whose scores are one product of queries and keys, not a sum of several."""
    names = ("attention_scores", "attention_queries", "attention_keys")
    return [
        layer
        for layer in subject.layers(HOST, *names)
        if not subject.details(HOST, layer).summed_scores
    ]


@invariant(
    "scores are scaled products",
    "Where the mask lets a token attend, attention_scores is the product of its query and the key "
    "times one number for the whole block (within the soft cap where there is one), plus a bias by "
    "position where the family adds one.",
    HOST,
    needs=("attention_scores", "attention_queries", "attention_keys"),
    float32=1e-5,
    bfloat16=3e-2,
    when=lambda subject: bool(_single_products(subject)),
    otherwise="its scores are sums of several products",
)
def scores(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for layer in _single_products(subject):
        queries = subject.get(HOST, "attention_queries", layer).double()
        products = queries @ _per_query_head(subject, "attention_keys", layer).double().mT
        found = subject.get(HOST, "attention_scores", layer).double()
        visible = (found > -1e4) & torch.ones(subject.seq, subject.seq, dtype=torch.bool).tril()
        compare.holds(layer, visible.any(-1).all(), "a token may attend to nothing")
        details = subject.details(HOST, layer)
        if details.score_cap is not None:
            found = details.score_cap * torch.atanh(found / details.score_cap)
        x, y = products[visible], found[visible]
        if details.position_bias:
            # The bias depends on the positions only: it is the same in every row of the batch.
            visible = visible.all(0)
            x, y = products[:, visible], found[:, visible]
            x, y = x - x.mean(0, keepdim=True), y - y.mean(0, keepdim=True)
        scale = (x * y).sum() / (x * x).sum()  # least squares
        compare.close(layer, scale * x, y)


@invariant(
    "scores to probabilities",
    "attention_probabilities is the softmax of attention_scores over the keys, and over the sink "
    "where one joins the softmax.",
    HOST,
    needs=("attention_scores", "attention_probabilities"),
    float32=1e-5,
    bfloat16=2e-2,
)
def probabilities(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for layer in subject.layers(HOST, "attention_scores", "attention_probabilities"):
        found = subject.get(HOST, "attention_scores", layer).float()
        if _has_sinks(subject, layer):
            sinks = subject.get(HOST, "attention_sinks", layer).float()
            column = sinks[None, :, None, None].expand(*found.shape[:3], 1)
            expected = torch.cat([found, column], dim=-1).softmax(-1)[..., :-1]
        else:
            expected = found.softmax(-1)
        compare.close(layer, subject.get(HOST, "attention_probabilities", layer), expected)


@invariant(
    "sinks to head scale",
    "Where the sinks do not join the softmax, head_scale is the share of the weight that a softmax "
    "of attention_scores and the sink would leave to the keys.",
    HOST,
    needs=("attention_scores", "attention_sinks", "head_scale"),
    float32=1e-5,
    bfloat16=2e-2,
    when=lambda subject: bool(_scaled_by_sinks(subject)),
    otherwise="its sinks, where it has any, join the softmax",
)
def sink_scale(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for layer in _scaled_by_sinks(subject):
        found = subject.get(HOST, "attention_scores", layer).float()
        sinks = subject.get(HOST, "attention_sinks", layer).float()
        column = sinks[None, :, None, None].expand(*found.shape[:3], 1)
        kept = torch.cat([found, column], dim=-1).softmax(-1)[..., :-1].sum(-1)
        compare.close(layer, subject.get(HOST, "head_scale", layer), kept.transpose(1, 2))


@invariant(
    "probabilities mix values",
    "attention_head_outputs is attention_probabilities times attention_values, each repeated for "
    "the query heads that share it.",
    HOST,
    needs=("attention_probabilities", "attention_values", "attention_head_outputs"),
    float32=1e-5,
    bfloat16=2e-2,
)
def mixes(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    names = ("attention_probabilities", "attention_values", "attention_head_outputs")
    for layer in subject.layers(HOST, *names):
        pattern = subject.get(HOST, "attention_probabilities", layer).float()
        mixed = pattern @ _per_query_head(subject, "attention_values", layer).float()
        outputs = subject.get(HOST, "attention_head_outputs", layer)
        compare.close(layer, outputs, mixed.transpose(1, 2))


@invariant(
    "heads to premix",
    "attention_premix is attention_head_outputs, times head_gate or head_scale and normed where "
    "the family does so, and the output projection, with the norm and scale after it where there "
    "are any, turns it into attention_output.",
    HOST,
    needs=("attention_head_outputs", "attention_premix"),
    float32=1e-5,
    bfloat16=2e-2,
)
def premix(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    for layer in subject.layers(HOST, "attention_head_outputs", "attention_premix"):
        heads = subject.get(HOST, "attention_head_outputs", layer)
        if layer in subject.layers(HOST, "head_gate"):
            heads = heads * subject.get(HOST, "head_gate", layer)
        if layer in subject.layers(HOST, "head_scale"):
            heads = heads * subject.get(HOST, "head_scale", layer)[..., None]
        found = subject.get(HOST, "attention_premix", layer)
        details = subject.details(HOST, layer)
        with torch.no_grad():
            for path in details.output_norms:
                heads = subject.module(layer, path)(heads.flatten(2)).view_as(found)
            compare.close(layer, found, heads)
            if details.output_projection and tail_known(subject, HOST, layer):
                projected = subject.module(layer, details.output_projection)(found.flatten(2))
                addend = addend_of(subject, HOST, layer, projected)
                compare.close(layer, addend, subject.get(HOST, "attention_output", layer))


@invariant(
    "zero a head",
    "zero_head sets that head's attention_head_outputs to zero and no other's, and the logits are "
    "those of the same edit in a trace.",
    *_WITH_HEADS,
    needs=("attention_head_outputs",),
)
def zeroed(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    name = f"{host}.attention_head_outputs"
    for layer in subject.one_per_kind(host, "attention_head_outputs"):
        clean = subject.get(host, "attention_head_outputs", layer)
        head = clean.shape[2] - 1
        recording = subject.model.record(
            subject.ids, [name, "logits"], edits=[zero_head(layer, head, host)]
        )
        with torch.no_grad(), subject.model.trace(subject.ids):
            subject.envoy(host, layer).attention_head_outputs[:, :, head] = 0
            logits = subject.model.logits.save()
        found = recording[name, layer]
        compare.holds(layer, not found[:, :, head].any(), f"head {head} is not zero")
        compare.equal(layer, found[:, :, :head], clean[:, :, :head])
        compare.equal(layer, recording["logits"], logits)
        unchanged = torch.equal(logits, subject.native.logits)
        compare.holds(layer, not unchanged, "the logits did not change")


INVARIANTS = (rows, scores, probabilities, sink_scale, mixes, premix, zeroed)
