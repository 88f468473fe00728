"""Invariants of what the model is called with: token ids, mask and lengths."""

from __future__ import annotations

import torch

from explorer import vocabulary
from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import ModelUnderTest
from explorer.contract.registry import invariant
from explorer.model.errors import PromptError


@invariant(
    "inputs are the tokenizer's",
    "input_ids, attention_mask and input_size are what the tokenizer makes of a text, and of two "
    "texts traced together, of different lengths where the family bears padding.",
    "model",
)
def from_the_tokenizer(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    model, tokenizer = subject.model, subject.model.tokenizer
    compare.equal("recorded ids", subject.get("model", "input_ids"), subject.ids)
    ones = torch.ones_like(subject.ids)
    compare.equal("recorded mask", subject.get("model", "attention_mask"), ones)
    short = str(tokenizer.decode(subject.ids[0, :4].tolist()))
    with torch.no_grad(), model.trace(subject.text):
        served = [model.input_ids, model.attention_mask, model.input_size].save()  # pyright: ignore[reportAttributeAccessIssue]  # nnsight adds it
    ids, mask, size = served
    expected = tokenizer(subject.text, return_tensors="pt")
    subject.note_read("model", "input_ids", "attention_mask", "input_size")
    compare.equal("input_ids", ids, expected["input_ids"])
    compare.equal("attention_mask", mask, expected["attention_mask"])
    compare.equal("input_size", size, tuple(expected["input_ids"].shape))
    tokens = model.record(subject.text, ["input_ids"]).tokens
    whole = tokenizer.decode(expected["input_ids"][0].tolist())
    compare.equal("recorded tokens", "".join(tokens).strip(), str(whole).strip())
    compare.equal("number of tokens", len(tokens), expected["input_ids"].shape[1])
    try:
        both, masks = _inputs_of_two(subject, short)
    except PromptError:  # padding would change the texts: they are run one at a time
        short = subject.text
        both, masks = _inputs_of_two(subject, short)
    lengths = [len(tokenizer(text)["input_ids"]) for text in (subject.text, short)]
    compare.equal("mask of two texts", masks.sum(-1).tolist(), lengths)
    for row, text in enumerate((subject.text, short)):
        unpadded = both[row][masks[row] == 1].tolist()
        compare.equal(f"text {row} of two", unpadded, tokenizer(text)["input_ids"])


def _inputs_of_two(subject: ModelUnderTest, other: str) -> list[torch.Tensor]:
    """Return the ids and the mask, both [batch seq], of two texts traced together."""
    model = subject.model
    with torch.no_grad(), model.trace() as tracer:
        with tracer.invoke(subject.text):
            pass
        with tracer.invoke(other):
            pass
        with tracer.invoke():
            served = [model.input_ids, model.attention_mask].save()  # pyright: ignore[reportAttributeAccessIssue]  # nnsight adds it
    return served


@invariant(
    "inputs can be written",
    "The model runs on ids and a mask written in a trace as it does when it is called with them.",
    "model",
)
def written(subject: ModelUnderTest, host: str, compare: Comparisons) -> None:
    model = subject.model
    ids = torch.flip(subject.ids, dims=[1])
    mask = torch.ones_like(subject.ids)
    mask[0, :2] = 0
    with torch.no_grad(), model.trace(subject.ids):
        model.input_ids = ids
        assigned = model.logits.save()
    with torch.no_grad(), model.trace(subject.ids):
        model.input_ids[:] = ids
        in_place = model.logits.save()
    expected = subject.native.forward(ids).logits
    subject.note_read("model", "input_ids")
    compare.equal("ids assigned", assigned, expected)
    compare.equal("ids edited in place", in_place, expected)
    with torch.no_grad(), model.trace(subject.ids):
        model.attention_mask = mask
        assigned = model.logits.save()
    with torch.no_grad(), model.trace(subject.ids):
        model.attention_mask[:] = mask
        in_place = model.logits.save()
    expected = subject.native.forward(subject.ids, attention_mask=mask).logits
    compare.about(vocabulary.BY_HOST["model"]["attention_mask"])
    compare.equal("mask assigned", assigned, expected)
    compare.equal("mask edited in place", in_place, expected)
    unchanged = torch.equal(expected, subject.native.logits)
    compare.holds(
        "mask",
        unchanged is not subject.native.uses_mask,
        "masking two tokens does not change the logits",
    )


INVARIANTS = (from_the_tokenizer, written)
