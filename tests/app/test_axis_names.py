"""The app's diagram names axes as the site's does, without probing the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from explorer.app.axis_names import named_types

FAMILIES = Path(__file__).resolve().parents[2] / "site" / "families"
#: Sizes that no configuration states; only probing finds their formula.
DERIVED = {"Conv", "Inner / 2", "RoundedInner", "4 * Hidden"}


@pytest.mark.parametrize(
    "family", ["llama", "qwen3_next", "deepseek_v3", "kimi_linear", "falcon_h1", "gemma2", "jamba"]
)
def test_axes_are_named_as_in_the_committed_signature(family: str) -> None:
    record = json.loads((FAMILIES / family / "facts.json").read_text(encoding="utf-8"))[0]
    signature = record["signature"]
    sizes = {one["name"]: one["number"] for one in signature["generics"]}
    named = {
        (row["host"], row["name"], layer): row["type"]["dims"]
        for row in named_types(record["values"], sizes)
        for layer in row["layers"] or [None]
    }
    compared = 0
    for row in signature["values"]:
        if row["type"]["numbers"]:
            dims = named[row["host"], row["name"], (row["layers"] or [None])[0]]
            for ours, theirs in zip(dims, row["type"]["dims"], strict=True):
                assert ours == theirs or theirs in DERIVED, (row["name"], dims)
                compared += 1
    assert compared > 30


def test_a_size_the_configuration_lacks_keeps_the_vocabularys_name() -> None:
    row = {
        "host": "model.layers[i].mixer",
        "name": "decays",
        "layers": [0, 1],
        "dtype": "float32",
        "shape": {"symbols": ["batch", "seq", "heads"], "numbers": ["B", "S", 7]},
    }
    (typed,) = named_types([row], {"Heads": 8})
    assert typed["type"]["dims"] == ["B", "S", "Heads"] and typed["layers"] == [0, 1]
