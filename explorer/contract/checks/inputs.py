"""Laws about what the model is called with: token ids, mask and lengths."""

from __future__ import annotations

import torch

from explorer import vocabulary
from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import ModelUnderTest
from explorer.contract.registry import invariant


@invariant(
    "inputs are the tokenizer's",
    "input_ids, attention_mask and input_size are what the tokenizer makes of a text, and of two texts of different lengths traced together.",
    "model",
)
def tokenizer(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    short = s.model.tokenizer.decode(s.ids[0, :4].tolist())
    with torch.no_grad(), s.model.trace(s.text):
        found = [s.model.input_ids, s.model.attention_mask, s.model.input_size].save()
    ids, mask, size = found
    made = s.model.tokenizer(s.text, return_tensors="pt")
    s.looks("model", "input_ids", "attention_mask", "input_size")
    t.same("input_ids", ids, made["input_ids"])
    t.same("attention_mask", mask, made["attention_mask"])
    t.same("input_size", size, tuple(made["input_ids"].shape))
    t.same(
        "recorded tokens",
        s.model.record(s.text, ["input_ids"]).tokens,
        [s.model.tokenizer.decode([i]) for i in made["input_ids"][0].tolist()],
    )
    with torch.no_grad(), s.model.trace() as tracer:
        with tracer.invoke(s.text):
            pass
        with tracer.invoke(short):
            pass
        with tracer.invoke():
            padded = [s.model.input_ids, s.model.attention_mask].save()
    both, masks = padded
    lengths = [made["input_ids"].shape[1], len(s.model.tokenizer(short)["input_ids"])]
    t.same("mask of two texts", masks.sum(-1).tolist(), lengths)
    for row, text in enumerate((s.text, short)):
        t.same(
            f"text {row} of two",
            both[row][masks[row] == 1].tolist(),
            s.model.tokenizer(text)["input_ids"],
        )


@invariant(
    "inputs can be written",
    "The model runs on the ids and the mask written in a trace, as it does when it is called with them.",
    "model",
)
def written(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    ids = torch.flip(s.ids, dims=[1])
    mask = torch.ones_like(s.ids)
    mask[0, :2] = 0
    with torch.no_grad(), s.model.trace(s.ids):
        s.model.input_ids = ids
        assigned = s.model.logits.save()
    with torch.no_grad(), s.model.trace(s.ids):
        s.model.input_ids[:] = ids
        in_place = s.model.logits.save()
    want = s.forward(ids).logits
    s.looks("model", "input_ids")
    t.same("ids assigned", assigned, want)
    t.same("ids edited in place", in_place, want)
    with torch.no_grad(), s.model.trace(s.ids):
        s.model.attention_mask = mask
        assigned = s.model.logits.save()
    with torch.no_grad(), s.model.trace(s.ids):
        s.model.attention_mask[:] = mask
        in_place = s.model.logits.save()
    want = s.forward(s.ids, attention_mask=mask).logits
    t.of(vocabulary.BY_HOST["model"]["attention_mask"])
    t.same("mask assigned", assigned, want)
    t.same("mask edited in place", in_place, want)
    t.holds(
        "mask",
        torch.equal(want, s.plain) is not s.masks,
        "masking two tokens does not move the logits",
    )
