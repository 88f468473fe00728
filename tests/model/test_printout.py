"""The printout: native modules, standard names, values with their layouts, equal blocks once."""

from __future__ import annotations

import re

import pytest

from explorer import load
from explorer.checkpoints import cards
from tests.support.models import FAMILIES, HYBRIDS, MIXTURES, shapes, specimen

ENTRY = re.compile(r"^( *)\(([^)]+)\): (?:(\d+) x )?(\w+)")
VALUE = re.compile(r"^( *)\((\w+)\) -> (.+?): (.+)$")


def parsed(text: str) -> tuple[list, list]:
    """Modules as (path, count, class) and values as (path, name, layout), by indentation."""
    modules, values, path = [], [], []
    for line in text.splitlines():
        if found := VALUE.match(line):
            values.append((".".join(path[: len(found[1]) // 2 - 1]), found[2], found[3]))
        elif found := ENTRY.match(line):
            path = [*path[: len(found[1]) // 2 - 1], found[2].split("/")[0]]
            modules.append((".".join(path), int(found[3] or 1), found[4]))
    return modules, values


@pytest.fixture(params=FAMILIES)
def model(request):
    return specimen(request.param)


def reached(model, path: str):
    """The envoy at a printed path; a run of blocks by its first."""
    envoy = model
    for part in path.split("."):
        first = re.match(r"\d+", part)
        envoy = envoy[int(first[0])] if first else getattr(envoy, part)
    return envoy


def test_every_printed_name_is_an_attribute_that_is_that_module(model):
    modules, _ = parsed(str(model))
    assert len(modules) > 15
    for path, _, name in modules:
        if not path.startswith("generator"):
            assert reached(model, path)._module._get_name() == name, path


def test_every_value_available_is_printed_where_it_is_read_and_no_other(model):
    _, printed = parsed(str(model))
    seen = {(path, name) for path, name, _ in printed}
    assert len(seen) == len(printed)
    firsts = [
        re.search(r"(\d+)", path)[1]
        for path, count, kind in parsed(str(model))[0]
        if "DecoderLayer" in kind
    ]
    for row in model.support():
        for layer in map(int, firsts):
            block = next(
                path
                for path, _, kind in parsed(str(model))[0]
                if re.match(rf"layers\.{layer}\b", path) and "Decoder" in kind
            )
            path = {"layers": block, "shared_experts": f"{block}.mlp.shared_experts"}.get(
                row.host, f"{block}.{row.host}"
            )
            if row.host != "model":
                assert ((path, row.name) in seen) == (layer in row.layers), (path, row.name)
        if row.host == "model":
            assert ("", row.name) in seen


def test_a_value_is_printed_with_its_layout_and_meaning(model):
    lines = {line.strip() for line in str(model).splitlines()}
    there = {row.host for row in model.support() if row.available}
    for row in (row for row in model.support() if row.host in there):
        line = f"({row.name}) -> {row.value.typed}: {row.value.meaning}"
        assert (line in lines) == row.available


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_blocks_are_printed_once(family):
    model = shapes(cards.family_checkpoints(family)[0])
    runs = [(path, count) for path, count, kind in parsed(str(model))[0] if "DecoderLayer" in kind]
    assert sum(count for _, count in runs) == model.num_layers
    if family in HYBRIDS:
        assert [count for _, count in runs] == [3, 1] * (model.num_layers // 4)
        assert [path for path, _ in runs[:2]] == ["layers.0-2", "layers.3"]
    else:
        assert [path for path, _ in runs] == [f"layers.0-{model.num_layers - 1}"]


@pytest.mark.parametrize("family", MIXTURES)
def test_a_module_with_two_names_shows_both(family):
    text = str(specimen(family))
    assert "(router/gate): " in text and ("(shared_experts/shared_expert): " in text) == (
        family in HYBRIDS
    )


def test_what_another_implementation_takes_away_is_not_printed():
    text = str(load("specimen:llama", attn_implementation="sdpa"))
    assert "(attention_scores)" not in text and "(attention_queries)" in text


def test_a_part_prints_itself_alone(model):
    block = str(model.layers[0])
    assert "(layer_output) -> Residual [batch seq hidden_size]" in block and block.startswith(
        type(model.layers[0]._module).__name__
    )
    assert "(token_embeddings)" not in block


def test_sizes_of_the_native_tree_are_the_models(model):
    text = str(model)
    assert f"(embed_tokens): Embedding({model.vocab_size}, {model.hidden_size}" in text
    assert (
        f"(lm_head): Linear(in_features={model.hidden_size}, out_features={model.vocab_size}"
        in text
    )
