"""Layouts: the named axes of the values."""

from __future__ import annotations

from dataclasses import dataclass

#: Axes whose length comes from the call, not from the model.
CALL_AXES = ("batch", "seq", "query", "key")


@dataclass(frozen=True)
class Layout:
    """The axes of a value, in order, by name.

    An axis is called like the size of the host that gives its length (``num_heads``), or is one of
    `CALL_AXES`.
    """

    name: str
    axes: tuple[str, ...]
    meaning: str

    def __str__(self) -> str:
        return f"{self.name} [{' '.join(self.axes)}]"


# fmt: off
_ROWS = (
    ("Residual", "batch seq hidden_size",
     "one vector per token, as wide as the stream, or as what a part works on where that is "
     "another width"),
    ("Logits", "batch seq vocab_size", "one score per vocabulary entry and position"),
    ("NextTokenProbs", "batch vocab_size", "one distribution over the vocabulary per row"),
    ("Tokens", "batch seq", "one integer per position"),
    ("Size", "batch seq", "two integers, the shape of the call"),
    ("Queries", "batch num_heads seq qk_head_dim", "one query per head and token"),
    ("Keys", "batch num_kv_heads seq qk_head_dim", "one key per key/value head and token"),
    ("Values", "batch num_kv_heads seq head_dim", "one value per key/value head and token"),
    ("Pattern", "batch num_heads query key",
     "one number per head, reading position and read position"),
    ("HeadOutputs", "batch seq num_heads head_dim", "one vector per token and head"),
    ("HeadGates", "batch seq num_heads", "one number per token and head"),
    ("Sinks", "num_heads", "one learned logit per head"),
    ("LinearQK", "batch seq heads key_dim", "one key-sized vector per token and recurrent head"),
    ("LinearV", "batch seq heads value_dim", "one value-sized vector per token and recurrent head"),
    ("Gates", "batch seq heads", "one number per token and recurrent head"),
    ("State", "batch heads key_dim value_dim", "one matrix per recurrent head"),
    ("States", "batch seq heads key_dim value_dim", "one matrix per token and recurrent head"),
    ("StatePattern", "batch heads query key",
     "one number per recurrent head, reading position and read position"),
    ("ChannelGates", "batch seq heads key_dim",
     "one number per token, recurrent head and key channel"),
    ("Skips", "heads", "one learned number per recurrent head"),
    ("Fades", "heads", "one fixed number per recurrent head"),
    ("Channels", "batch seq channels", "one number per token and channel"),
    ("SharedQK", "batch seq key_dim", "one key-sized vector per token, the same for every channel"),
    ("ChannelDecays", "batch seq channels key_dim",
     "one number per token, channel and entry of its state"),
    ("ChannelState", "batch channels key_dim", "one vector per channel"),
    ("ChannelStates", "batch seq channels key_dim", "one vector per token and channel"),
    ("ChannelPattern", "batch channels query key",
     "one number per channel, reading position and read position"),
    ("ChannelSkips", "channels", "one learned number per channel"),
    ("UnitState", "batch channels", "one number per channel"),
    ("Neurons", "batch seq intermediate_size", "one number per hidden unit of the MLP"),
    ("RouterLogits", "batch seq num_experts", "one number per token and expert"),
    ("ExpertWeights", "batch seq top_k", "one multiplier per token and routing slot"),
    ("ExpertIndices", "batch seq top_k", "one expert number per token and routing slot"),
    ("ExpertOutputs", "batch seq top_k hidden_size",
     "one vector per token and routing slot, as wide as routed_output"),
    ("LatentOutputs", "batch seq top_k latent_size",
     "one vector per token and routing slot, of the width that the experts work on"),
    ("RouterMargin", "batch seq", "one number per token"),
)
# fmt: on

LAYOUTS: dict[str, Layout] = {
    name: Layout(name, tuple(axes.split()), meaning) for name, axes, meaning in _ROWS
}
