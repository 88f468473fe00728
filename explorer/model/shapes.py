"""What one forward at a model's own size shows: a tensor for each value, on the first two blocks of each kind."""

from __future__ import annotations

import torch

from explorer.meta_device import probe_lengths, with_first_blocks
from explorer.model.language_model import LanguageModel


def shapes(model: LanguageModel) -> dict[tuple[str, str, int | None], torch.Tensor]:
    """Tensors by host, name and block (None on the model), through no more blocks than it takes; derived values are left out.

    On the meta device they have shapes and dtypes alone. Of each kind of block the first two are looked at: what a model
    that starts in one dtype goes on in shows on the second.
    """
    batch, seq = probe_lengths(model.hf)
    ids = torch.zeros(batch, seq, dtype=torch.long, device=model.hf.device)
    layers = sorted({layer for block in model.anatomy.blocks for layer in block.layers[:2]})
    # By its host too: two mixers of a block may share a name.
    rows = [
        (row, row.name if row.host == "model" else f"{row.host}.{row.name}")
        for row in model.support()
        if row.available and not row.value.derived
    ]
    # Every kind of block is among the first so many; the others add nothing but time.
    with model.lock, with_first_blocks(model.hf, model.anatomy.backbone.blocks, layers[-1] + 1):
        recording = model.record(ids, [name for _, name in rows], layers=layers)
    found = {}
    for row, name in rows:
        for layer in (None,) if row.host == "model" else [at for at in layers if at in row.layers]:
            if (name, layer) in recording and isinstance(recording[name, layer], torch.Tensor):
                found[row.host, row.name, layer] = recording[name, layer]
    return found
