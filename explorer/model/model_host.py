"""The model's own host: the values and sizes of the whole model."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from explorer import vocabulary
from explorer.discovery.anatomy import Anatomy, HostAnatomy
from explorer.discovery.details import HostDetails
from explorer.discovery.hook_point import HookPoint
from explorer.vocabulary import reasons
from explorer.vocabulary.availability import Unavailability


def model_host(anatomy: Anatomy, config: PretrainedConfig, embedding_width: int) -> HostAnatomy:
    """Return the host of the model's own values, which are its modules' inputs and outputs."""
    backbone = anatomy.backbone
    hook_points = dict(
        (
            _hook_point("logits", "", "output", "logits", "the output of the model"),
            _module_output("token_embeddings", backbone.embedding),
            _module_output("lm_head_output", backbone.head),
            *(
                _hook_point(name, "", "input", name, f"the model's argument {name}")
                for name in ("input_ids", "attention_mask")
            ),
        )
    )
    missing: dict[str, Unavailability] = {}
    if anatomy.norm is None:
        missing["final_norm_output"] = anatomy.why_no_norm or reasons.NOT_FOUND
    else:
        name, (output,) = _module_output("final_norm_output", anatomy.norm)
        turn = anatomy.norm_call
        if turn is not None:
            output = replace(
                output,
                call_index=turn,
                description=f"{output.description}, of its call {turn + 1} in a forward, "
                "the last before the head",
            )
        hook_points[name] = (output,)
    widths = {} if anatomy.embedding_fits else {"token_embeddings": embedding_width}
    return HostAnatomy(
        "model",
        "",
        {"hidden_size": anatomy.width, "vocab_size": config.vocab_size},
        hook_points,
        missing,
        HostDetails(own_widths=widths),
    )


def _module_output(value: str, module: str) -> tuple[str, tuple[HookPoint, ...]]:
    return _hook_point(value, module, "output", None, f"the output of the module {module}")


def _hook_point(
    value: str, module: str, side: str, element: str | None, description: str
) -> tuple[str, tuple[HookPoint, ...]]:
    arrangement = tuple((axis,) for axis in vocabulary.BY_HOST["model"][value].axes)
    return value, (HookPoint(module, side, element, arrangement, description),)


def model_sizes(anatomy: Anatomy, config: PretrainedConfig) -> dict[str, int]:
    """Return the sizes of the model, of its first attention and of its first MLP."""
    sizes = {
        "num_layers": anatomy.backbone.num_layers,
        "hidden_size": anatomy.width,
        "vocab_size": config.vocab_size,
    }
    for block in anatomy.blocks:
        for name in ("num_heads", "num_kv_heads", "head_dim", "qk_head_dim"):
            if name in block.hosts["self_attn"].sizes:
                sizes.setdefault(name, block.hosts["self_attn"].sizes[name])
    mlps = [block.hosts["mlp"] for block in anatomy.blocks if block.hosts["mlp"].hook_points]
    widths = [mlp.sizes["intermediate_size"] for mlp in mlps if "mlp_neurons" in mlp.hook_points]
    # Where every MLP is a mixture, the configuration may name a dense width all the same.
    named = getattr(config, "intermediate_size", None) if mlps else None
    width = widths[0] if widths else named
    if isinstance(width, int):
        sizes["intermediate_size"] = width
    return sizes


def size_notes(anatomy: Anatomy, sizes: dict[str, int]) -> dict[str, str]:
    """Return what to know of a size: that the configuration names it and no block has it."""
    width = sizes.get("intermediate_size")
    widths = {block.hosts["mlp"].sizes.get("intermediate_size") for block in anatomy.blocks}
    if width is None or width in widths:
        return {}
    return {
        "intermediate_size": "the configuration names this width of an MLP, but no block has one"
    }


def mixers_of(anatomy: Anatomy) -> list[tuple[str, ...]]:
    """Return the hosts that mix positions, for each block.

    Softmax attention comes first where a block has another mixer beside it.
    """
    return [
        tuple(
            sorted(
                (
                    name
                    for name, host in anatomy.block(layer).hosts.items()
                    if host.hook_points and vocabulary.HOSTS[name].mixer
                ),
                key=lambda name: name != "self_attn",
            )
        )
        for layer in range(anatomy.backbone.num_layers)
    ]
