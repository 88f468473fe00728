"""Expressions over sizes and the fit that finds them: plain arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest

from explorer.signature.expressions import Expr, product, total
from explorer.signature.fitting import Fitter

A, B, C = Expr.name("A"), Expr.name("B"), Expr.name("C")
TWO = Expr.number(2)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (product([TWO, A, B]) + product([TWO, C]), "2 * A * B + 2 * C"),
        (A + Expr.number(-1), "-1 + A"),
        (Expr.number(0), "0"),
        (A * Expr.number(Fraction(1, 4)), "A / 4"),
        (A * Expr.number(Fraction(3, 2)), "3 * A / 2"),
        (Expr.of({(("A", 1), ("B", -1)): 1}), "A / B"),
        (Expr(A.terms, B + Expr.number(-1)), "min(A, -1 + B)"),
        (A + Expr.number(-1) * B, "A - B"),
        (A * A, "A * A"),
    ],
)
def test_text(expression, text):
    assert str(expression) == text
    sizes = {"A": 12, "B": 4, "C": 5}
    assert eval(text, {"min": min}, sizes) == expression.value(sizes)


def test_names_are_sorted_as_they_are_told_to_be():
    assert (A * B + C).text({"C": 0, "B": 1, "A": 2}) == "C + B * A"


def test_like_terms_are_one_and_none_cancels_away():
    assert total([A, B, A]) == Expr.of({(("A", 1),): 2, (("B", 1),): 1})
    assert (A + Expr.number(-1) * A).terms == () and (A * Expr.of({(("A", -1),): 3})).constant == 3


def test_names_are_written_out():
    by = {"A": B * C, "C": TWO}
    assert A.replaced(by) == Expr.of({(("B", 1),): 2})
    assert Expr.of({(("B", 1), ("A", -1)): 1}).replaced(by).constant is None
    assert Expr.of({(("B", 1), ("A", -1)): 1}).replaced(by) == Expr.number(Fraction(1, 2))
    assert (A * B).replaced({"A": B + C}) == B * B + B * C
    assert (A + B).at({"A": 3}) == Expr.number(3) + B
    assert Expr(A.terms, B).at({"B": 7}).text() == "min(A, 7)"


RUNS = [
    {"A": 12, "B": 4, "C": 10},
    {"A": 20, "B": 4, "C": 10},
    {"A": 12, "B": 12, "C": 10},
    {"A": 12, "B": 4, "C": 30},
    {"A": 35, "B": 28, "C": 112},
    {"A": 42, "B": 20, "C": 70},
]
SINGLES = {"A": [1], "B": [2], "C": [3]}


def observed(expression: Expr) -> list[int]:
    return [int(expression.value(run)) for run in RUNS]


@pytest.mark.parametrize(
    "expression",
    [
        A,
        product([TWO, A, B]),
        Expr.number(3),
        product([TWO, A, B]) + product([TWO, C]),
        A + Expr.number(-1),
        B * Expr.number(Fraction(1, 2)),
        A + B + C,
        product([A, B, C]),
        product([A, A]) + product([TWO, A]),
        Expr.of({(("C", 1), ("A", 1), ("B", -1)): 4}),
        A * B + A * C,
    ],
    ids=str,
)
def test_what_numbers_come_from_is_found(expression):
    assert Fitter(RUNS, SINGLES).fit(observed(expression)) == expression


def test_what_fits_in_all_probes_but_one_is_no_fit():
    numbers = observed(A * B)
    assert Fitter(RUNS, SINGLES).fit([*numbers[:-1], numbers[-1] + 1]) is None


def test_what_nothing_alone_changes_and_all_together_do_is_no_bare_number():
    assert Fitter(RUNS, SINGLES).fit([5, 5, 5, 5, 6, 7]) is None


def test_rounding_up_is_not_taken_for_a_product():
    assert Fitter(RUNS, SINGLES).fit([-(-run["A"] // 4) * 4 for run in RUNS]) is None


def test_two_expressions_as_simple_that_fit_are_none():
    """B is always C less six, in too few probes to tell their sum from a product."""
    runs = [{"A": 1, "B": 4, "C": 10}, {"A": 3, "B": 4, "C": 10}, {"A": 1, "B": 8, "C": 14}]
    assert Fitter(runs, {"A": [1], "B": [2], "C": [2]}).fit([14, 14, 22]) is None


def test_a_size_that_follows_is_used_where_it_says_less():
    runs = [{**run, "D": run["A"] * run["B"]} for run in RUNS]
    fitter = Fitter(runs, SINGLES, {"D": A * B})
    assert fitter.fit([run["D"] + run["C"] for run in runs]) in (Expr.name("D") + C, A * B + C)
    assert fitter.fit([run["D"] for run in runs]) == Expr.name("D")


def test_a_share_rounded_up_is_a_size_of_its_own():
    fitter = Fitter(RUNS, SINGLES)
    assert fitter.fit(
        [-(-(run["A"] * 2 // 3) // run["B"]) * run["B"] for run in RUNS]
    ) == Expr.name("RoundedA")
    assert str(fitter.rounded["RoundedA"]) == "2 * A / 3 rounded up to a multiple of B"
    assert fitter.rounded["RoundedA"].value({"A": 100, "B": 7}) == 70
