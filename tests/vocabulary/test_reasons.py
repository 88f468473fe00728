"""The table of reasons: whole, used, and the only place where one is worded."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from explorer.vocabulary import availability, reasons
from explorer.vocabulary.availability import Unavailability

PACKAGE = Path(availability.__file__).parents[1]
MAKERS = ("not_traced", "needs_setting", "not_present", "not_in_block", "Unavailability")
TABLE = {name: one for name, one in vars(reasons).items() if isinstance(one, Unavailability)}
WITH_NAMES = [
    reasons.other_mixer(["ssd", "self_attn"], ["state space", "softmax attention"]),
    reasons.no_norm_before("mlp"),
    reasons.norm_then_scaled("mlp"),
    reasons.no_probabilities("sdpa"),
    reasons.several_attentions("attn", "calls"),
    reasons.gates_each("head"),
    reasons.selects_modules("mlp", "index_add"),
]


def names_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            yield node.attr
        if isinstance(node, ast.Name):
            yield node.id


@pytest.mark.parametrize("one", [*TABLE.values(), *WITH_NAMES], ids=str)
def test_a_reason_is_a_sentence_without_its_end(one):
    assert one.text[0].islower() and one.text[-1] not in ".;," and "{" not in one.text


def test_no_sentence_stands_twice():
    assert len({one.text for one in TABLE.values()}) == len(TABLE)


def test_every_reason_is_given_somewhere_and_none_is_worded_elsewhere():
    used: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "vocabulary":
            names = set(names_in(path))
            used |= names
            made = [
                call
                for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(call, ast.Call)
                and isinstance(call.func, ast.Name)
                and call.func.id in MAKERS
            ]
            assert not made, f"{path.name} words a reason itself"
    assert not set(TABLE) - used
