"""The measurements: they run, they are what they say, and one that fails is named."""

from __future__ import annotations

import json
import time

from builder.__main__ import main
from builder.bench import build as build_section
from builder.bench import figures, timing
from builder.bench.figures import Figure, Settings
from builder.bench.weights import gguf_path
from builder.commands import bench
from builder.commands.bench import SECTIONS, measure


def figure(**changes):
    return Figure(
        **{"name": "facts of x", "value": 1.5, "unit": "x", "aim": 2.0, "detail": "why"} | changes
    )


def test_a_ratio_is_of_medians():
    ratio = timing.against(lambda: time.sleep(0.02), lambda: time.sleep(0.01), repeats=3)
    assert ratio.repeats == 3 and ratio.ours >= 0.02 and ratio.theirs >= 0.01
    assert ratio.value == ratio.ours / ratio.theirs


def test_peak_memory_sees_what_is_gone_again():
    size = 64 * 1024 * 1024
    assert timing.peak_above_start(lambda: len(bytearray(b"\1") * size)) > size * 0.8


def test_the_sampled_peak_agrees_with_the_kernels():
    import mmap

    size = 64 * 1024 * 1024

    def hold():
        with mmap.mmap(
            -1, size
        ) as fresh:  # pages of its own: what a process has let go of is not used again
            for page in range(0, size, mmap.PAGESIZE):
                fresh[page] = 1
            time.sleep(0.5)

    start = timing.resident_bytes()
    assert timing.sampled_peak(hold) - start > size * 0.8


def test_the_table_says_whether_an_aim_is_met():
    text = figures.table(
        [
            figure(),
            figure(name="slow", value=3.0),
            figure(name="free", aim=None, unit="MB", value=120),
        ]
    )
    assert [line.split()[-1] for line in text.splitlines() if "<=" in line] == ["met", "missed"]
    assert "120 MB" in text and text.count("why") == 3


def test_a_section_that_fails_is_named_and_leaves_the_others(monkeypatch):
    def broken(settings):
        yield figure()
        raise RuntimeError("no luck")

    monkeypatch.setattr(
        bench, "SECTIONS", {"broken": broken, "fine": lambda settings: iter([figure(name="other")])}
    )
    found, failed = measure(["broken", "fine"], Settings(), lambda text: None)
    assert [(section, one.name) for section, one in found] == [
        ("broken", "facts of x"),
        ("fine", "other"),
    ]
    assert failed == {"broken": "RuntimeError: no luck"}


def test_an_unknown_family_is_refused(capsys):
    assert main(["bench", "--family", "qwen9"]) == 2
    assert "qwen9" in capsys.readouterr().err


def test_the_real_weights_are_found():
    assert gguf_path() is not None and gguf_path().stat().st_size > 50_000_000


def test_every_section_measures(tmp_path, capsys):
    """One quick run of all of it; how fast this machine is decides nothing, what is sent and
    shipped does.
    """
    assert main(["bench", "--quick", "--json", "--family", "gpt2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["failed"] == {} and {f["section"] for f in told["figures"]} == set(SECTIONS)
    assert all(f["value"] > 0 for f in told["figures"])
    by_name = {f["name"]: f for f in told["figures"]}
    whole, again = by_name["build of 1 family"], by_name["build again, nothing changed"]
    assert "mkdocs" in whole["detail"] and again["value"] > 0
    assert by_name["page of gpt2"]["value"] > 0 and by_name["largest websocket message"]["met"]
    assert any(name.startswith("head switch at 5") for name in by_name)


def test_memory_is_told_of_each_family(tmp_path, monkeypatch):
    """A family that cannot be collected is no part of it; what was kept is made anew, the proof
    aside.
    """
    from builder.records import collect

    held = {"a": 30, "b": 50}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bestiary").mkdir()
    for name in ("contract-a-1.json", "records-a-1.json", "records-b-1.json", "notes-b-1.json"):
        (tmp_path / "bestiary" / name).write_text("{}")

    def taken(family):
        if family not in held:
            raise ValueError("it cannot be loaded.")
        (tmp_path / "bestiary" / f"records-{family}-1.json").write_text("{}")
        bytearray(held[family] * build_section.MEGABYTE).find(1)

    monkeypatch.setattr(collect, "collect", taken)
    peaks, _ = build_section.memory(tmp_path, ["a", "b", "c"])
    assert set(peaks) == {"a", "b"} and peaks["b"] > peaks["a"] > 20 * build_section.MEGABYTE
    assert {path.name for path in (tmp_path / "bestiary").iterdir()} == {
        "contract-a-1.json",
        "records-a-1.json",
        "records-b-1.json",
    }
