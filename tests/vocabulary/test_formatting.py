"""Numbers in words: sizes, runs, counts."""

from __future__ import annotations

import pytest

from explorer.vocabulary.formatting import numbered, ranges, size_in_bytes


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 B"),
        (812, "812 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (4_120_000, "4.12 MB"),
        (999_400, "999 kB"),
        (999_700, "1 MB"),
        (123_456_789, "123 MB"),
        (6.5e9, "6.5 GB"),
        (2e15, "2000 TB"),
    ],
)
def test_sizes_in_powers_of_1000(count, said):
    assert size_in_bytes(count) == said


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (1000, "1000 B"),
        (24576, "24 KiB"),
        (2_359_296, "2.25 MiB"),
        (1000 * 1024, "1000 KiB"),
        (1023.7 * 1024, "1 MiB"),
        (5 * 1024**4, "5 TiB"),
    ],
)
def test_sizes_in_powers_of_1024(count, said):
    assert size_in_bytes(count, binary=True) == said


def test_numbers_come_in_runs():
    assert ranges([]) == "" and ranges([4]) == "4" and ranges((0, 1, 2, 5)) == "0–2, 5"
    assert ranges([0, 1, 3], dash="-") == "0-1, 3"
    assert ranges(range(0, 40, 2), most=3) == "0, 2, 4, …" and ranges(range(40), most=1) == "0–39"


def test_what_there_is_is_counted_from_nought():
    assert [numbered("block", count) for count in (0, 1, 2, 30)] == [
        "no blocks",
        "block 0 alone",
        "blocks 0 to 1",
        "blocks 0 to 29",
    ]
