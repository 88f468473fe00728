"""Laws about what is around a model: a second one beside it, and itself afterwards."""

from __future__ import annotations

import torch

from explorer import vocabulary
from explorer.contract.comparisons import Comparisons
from explorer.contract.model_under_test import Key, ModelUnderTest
from explorer.contract.registry import invariant


@invariant(
    "two models apart",
    "Two models in one process do not disturb each other: one records its states and is edited while the other runs, each gives what it gives alone.",
    "model",
    pair=True,
    form=True,
)
def apart(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    other = s.other
    alone = other.record(s.ids)
    during: list = []
    with torch.no_grad():
        alone_plain = other.hf(s.ids).logits

    def meanwhile(done: int, total: int) -> None:
        if done == 1:
            with torch.no_grad():
                during.append((other.record(s.ids), other.hf(s.ids).logits))

    again = s.model.record(
        s.ids,
        [f"{r.host}.{r.name}" for r in s.rows if r.available and r.name != "state"],
        progress=meanwhile,
    )
    for (name, layer), found in again.values.items():
        t.of(s.named(name, layer))
        t.same((layer, f"{name} with the other running"), found, s.clean[name, layer])
    for recording, plain in during:
        t.of()
        t.same("the other's logits", plain, alone_plain)
        for (name, layer), found in recording.values.items():
            t.of(s.named(name, layer))
            t.same((layer, f"the other's {name}"), found, alone[name, layer])
    t.of(vocabulary.BY_HOST["layers"]["layer_input"])
    handle = s.module(0, "").register_forward_hook(lambda *_: meanwhile(1, 1))
    during.clear()
    try:
        with torch.no_grad(), s.model.trace(s.ids):
            s.model.layers[0].layer_input[:] = 0
            edited = s.model.logits.save()
    finally:
        handle.remove()
    with torch.no_grad(), s.model.trace(s.ids):
        s.model.layers[0].layer_input[:] = 0
        want = s.model.logits.save()
    t.same("a trace with the other running", edited, want)
    t.same("the other during that trace", during[0][1], alone_plain)


@invariant(
    "invokes apart",
    "Two texts traced together each see their own rows of every value, and an edit made for one leaves the other as it is.",
    "model",
    float32=1e-5,
    when=lambda s: s.rows_apart,
    form=True,
)
def invokes(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    keys = s.order(derived=True)
    first: dict[Key, object] = {}
    second: dict[Key, object] = {}
    with torch.no_grad(), s.model.trace() as tracer:
        with tracer.invoke(s.ids[:1]):
            for key in keys:
                first[key] = s.read(key)
        with tracer.invoke(s.ids[1:2]):
            for key in keys:
                second[key] = s.read(key)
    for row, found in enumerate((first, second)):
        for (value, layer), served in found.items():
            if "batch" not in value.axes or not isinstance(served, torch.Tensor):
                continue
            want = s.recorded((value, layer)).narrow(value.axes.index("batch"), row, 1)
            t.of(value)
            compare = t.near if want.is_floating_point() else t.same
            compare((layer, f"{value.name} of text {row}"), served, want)
    with torch.no_grad(), s.model.trace() as tracer:
        with tracer.invoke(s.ids[:1]):
            for layer in range(s.model.num_layers):
                s.model.layers[layer].layer_input[:] = 0
        with tracer.invoke(s.ids[1:2]):
            logits = s.model.logits.save()
    t.of(vocabulary.BY_HOST["layers"]["layer_input"], vocabulary.BY_HOST["model"]["logits"])
    # Not to the bit: which experts the other text's tokens go to decides how a product is blocked.
    t.near(
        "logits of the text not edited",
        logits,
        next(v for k, v in second.items() if k[0].name == "logits"),
    )


@invariant(
    "left as it was",
    "After all of this the transformers model called on its own gives the logits it gave before, to the bit, and no hook is left on it.",
    "model",
    last=True,
    bfloat16=0.0,
)
def left(s: ModelUnderTest, host: str, t: Comparisons) -> None:
    t.same("logits", s.forward(s.ids).logits, s.plain)
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in s.hf.modules())
    t.same("hooks", hooks, s.hooks)
    t.holds(
        "gradients",
        all(p.grad is None for p in s.hf.parameters()),
        "a parameter has been left a gradient",
    )
