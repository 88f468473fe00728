"""Notes are executed, checked and rendered: what holds passes, what does not names file and
line.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from builder.notes import run as execution
from builder.notes.html import sections
from builder.notes.read import SnippetError, read_notes
from builder.notes.run import family_namespace, run_notes
from builder.pages import write
from builder.records.collect import execute_guide
from explorer.engine.nnsight_api import nnsight
from explorer.specimens import FAMILIES


@pytest.fixture(scope="module")
def namespace():
    """A plain two-block model under the engine: what the executor needs of a model, and no more."""
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = nnsight.NNsight(LlamaForCausalLM(config).eval())
    return {"model": model, "torch": torch, "ids": torch.arange(5)[None]}


@pytest.fixture
def run(tmp_path, namespace):
    """Write notes and run them."""

    def go(text):
        path = tmp_path / "notes.md"
        path.write_text(text, encoding="utf-8")
        return run_notes(path, namespace)

    return go


@pytest.fixture
def refused(run, tmp_path):
    """Write notes that must be refused; return what the error says after the path."""

    def go(text):
        with pytest.raises(SnippetError) as caught:
            run(text)
        path = str(tmp_path / "notes.md")
        assert str(caught.value).startswith(f"{path}:{caught.value.line}: ")
        return f"{caught.value.line}: {caught.value.message}"

    return go


def code(*lines, info="python", before=""):
    """A fenced block; without ``before`` its first line of code is line 2 of the file."""
    return before + "\n".join([f"```{info}", *lines, "```", ""])


TRACE = ("with model.trace(ids):", "    x = model.model.layers[0].output.save()")


def test_front_matter_and_blocks_are_read_with_their_lines(tmp_path):
    path = tmp_path / "notes.md"
    path.write_text(
        '---\ntitle: A family\nsummary: "one: two"\n---\n\n# Head\n\n```text\na\n```\ntail\n',
        encoding="utf-8",
    )
    notes = read_notes(path)
    assert notes.meta == {"title": "A family", "summary": "one: two"}
    assert [(b.kind, b.line, b.language) for b in notes.blocks] == [
        ("prose", 5, ""),
        ("shown", 9, "text"),
        ("prose", 11, ""),
    ]


def test_blocks_run_in_order_in_one_namespace_and_show_what_they_print(run):
    blocks = run(
        code(*TRACE)
        + "\nBetween.\n\n"
        + code("print(tuple(x.shape))", "y = 1")
        + code("assert y == 1")
    )
    assert [b.kind for b in blocks] == ["run", "prose", "run", "run"]
    assert [b.output for b in blocks] == ["", "", "(1, 5, 16)", ""]
    assert json.loads(json.dumps([asdict(b) for b in blocks]))[2]["output"] == "(1, 5, 16)"


def test_a_run_leaves_the_callers_namespace_and_generator_alone(run, namespace):
    before, keys = torch.random.get_rng_state(), set(namespace)
    first = run(code("z = torch.rand(3)", "print(z)"))[0].output
    assert torch.equal(torch.random.get_rng_state(), before) and set(namespace) == keys
    torch.rand(1)
    assert run(code("z = torch.rand(3)", "print(z)"))[0].output == first


def test_changed_notes_of_one_name_run_as_changed(run):
    assert run(code(*TRACE, "print(1)"))[0].output == "1"
    assert run(code("print(2)", *TRACE, "print(x.shape[1])"))[0].output == "2\n5"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("a = 1", "assert a == 2"), r"3: .*assert a == 2"),
        (("assert False, 'the reason'",), "2: .*the reason"),
        (("def f():", "    raise ValueError('deep')", "f()"), "3: ValueError: deep"),
        (("x = (",), r"2: .*Python: '\(' was"),
        (
            (
                "with model.trace(ids):",
                "    y = 1",
                "    z = (model.model.layers[0].output @ torch.ones(3)).save()",
            ),
            "4: RuntimeError: ",
        ),
        (
            ("with model.trace(ids):", "    y = model.model.layers[0].mlp.router_logitz.save()"),
            "3: AttributeError: ",
        ),
        (
            (
                "with model.trace(ids):",
                "    y = model.model.layers[1].output.save()",
                "    assert y.shape == (1,)",
            ),
            r"4: .*assert y\.shape == \(1,\)",
        ),
    ],
)
def test_a_block_that_does_not_hold_names_its_line(refused, lines, expected):
    assert re.match(expected, refused(code(*lines)))


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        (("x = 1", "while True:", "    pass"), "[34]"),
        (("def f():", "    while True:", "        try:", "            1 / 0",
          "        except ZeroDivisionError:", "            pass", "f()"), "[3-7]"),
        (("with model.trace(ids):", "    x = 1", "    while True:", "        x += 1"), "[45]"),
    ],
)  # fmt: skip
def test_code_that_does_not_end_is_ended_and_names_its_line(refused, lines, line, monkeypatch):
    monkeypatch.setattr(execution, "SECONDS", 0.3)
    assert re.match(f"{line}: .*0.3 seconds of processor time", refused(code(*lines)))


def test_a_syntax_error_far_down_is_found_before_anything_runs(refused, namespace):
    assert refused(code("ids.zero_()") + "\nProse.\n\n" + code("if:")).startswith(
        "8: this is not Python"
    )
    assert namespace["ids"].sum() == 10


def test_a_block_may_promise_an_error_and_must_keep_it(run, refused):
    late = (
        "with model.trace(ids):",
        "    a = model.model.layers[1].output.save()",
        "    b = model.model.layers[0].output.save()",
    )
    output = run(code(*late, info="python raises=OutOfOrderError"))[0].output
    assert output.startswith("OutOfOrderError: ") and "run 1" not in output
    silent = refused(code("pass", info="python raises=ValueError"))
    assert silent.startswith("2: ") and "ValueError" in silent
    assert refused(code("1 / 0", info="python raises=ValueError")).startswith(
        "2: ZeroDivisionError"
    )


def test_shown_blocks_are_not_run(run):
    assert [
        b.kind for b in run(code("1 / 0", info="python no-run") + code("not python", info="text"))
    ] == ["shown", "shown"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x\n\n```python\npass\n", "3: .*closed"),
        (code("pass", info="python later"), "1: .*'later'"),
        ("---\ntitle\n---\n", "2: .*mapping"),
        ("---\ntitle: x\n", "1: .*closed"),
    ],
)
def test_a_file_that_cannot_be_read_says_where(refused, text, expected):
    assert re.match(expected, refused(text))


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(SnippetError, match=r"gone\.md:1: "):
        read_notes(tmp_path / "gone.md")


@pytest.mark.parametrize(
    ("prose", "expected"),
    [
        ("Read\n{value:router_logit} there.", "2: .*'router_logit'.* router_logits"),
        ("Read {value:mlp.betas}.", "1: .*'mlp.betas'"),
        ("A\n\nsee `router_logit`.", "3: .*'router_logit'"),
        ("see `model.layers[1].mlp.router_logitz.save()`", "1: .*'router_logitz'"),
        ("see `layers[i].self_attn.betas`", "1: self_attn .*'betas'.* linear_attn"),
        ("see `layers[i].attention_output`", "1: layers .*'attention_output'"),
    ],
)
def test_prose_that_names_an_unknown_value_is_refused(refused, prose, expected):
    assert re.match(expected, refused(f"{prose}\n"))


def test_value_names_in_code_that_is_not_run_are_checked_too(refused, run):
    bad = code("x = 1", "w = model.layers[0].mlp.expert_weight.save()", info="python no-run")
    assert re.match("3: .*'expert_weight'.* expert_weights", refused(bad))
    other = code("q = moe.router_logitz", info="python no-run")
    assert re.match("2: .*'router_logitz'", refused(other))
    shown = run(
        code(
            "text = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True)",
            info="python no-run",
        )
    )
    assert [block.kind for block in shown] == ["shown"]


def test_names_that_something_has_pass(run):
    blocks = run(
        "---\nwords: enable_thinking\n---\n"
        "`router_logits`, `mlp.router_logits`, `self_attn.attention_queries[..., 64:]`, "
        "`q_proj.output`, `rms_norm_eps`, "
        "`layers[i].input`, `num_key_value_heads`, `torch.testing.assert_close`, "
        "`enable_thinking=False`, `my_tensor`, "
        "``h = x + self_attn(input_layernorm(x))``, `head_dim`, `rotate_half`, `repeat_kv`, "
        "{value:linear_attn.betas}\n\n" + code("my_tensor = 1")
    )
    assert [block.kind for block in blocks] == ["prose", "run"]


def test_rendered_notes_are_escaped_and_keep_their_order(run):
    blocks = run(
        "## The <b>head</b>\n\nA <script>alert(1)</script> and {value:mlp.router_logits}, "
        "`logits`, "
        "[x](javascript:alert(1)), [y](#z).\n\n"
        + code("print('<i>&')")
        + "\n| a | b |\n|---|---|\n| 1 | `h` |\n\n## The <b>head</b>\n\n"
        + code("a < b", info="text")
    )
    found = sections(blocks, link=lambda name: f"#value-{name}" if name == "logits" else None)
    assert [(one.anchor, one.title) for one in found] == [
        ("note-the-b-head-b", "The <b>head</b>"),
        ("note-the-b-head-b-2", "The <b>head</b>"),
    ]
    html = "".join(one.body for one in found)
    for tag in ("<script", "<b>", "<i>", "javascript"):
        assert tag not in html
    assert "&lt;i&gt;&amp;" in html and "a &lt; b" in html and '<a href="#z">y</a>' in html
    assert '<code class="value" data-value="mlp.router_logits">mlp.router_logits</code>' in html
    value = '<code class="value" data-value="logits">logits</code>'
    assert f'<a class="value-link" href="#value-logits">{value}</a>' in html
    assert html.index('class="output"') < html.index("<table>") < html.rindex('class="highlight')


def test_headings_cut_notes_into_sections_and_deeper_ones_stay_inside(run):
    blocks = run("first\n\n## A `router_logits` & *more*\n\nbody\n\n### b\n\nlast\n")
    before, section = sections(blocks)
    assert (before.anchor, before.title, before.body) == ("", "", "<p>first</p>\n")
    assert section.title == "A `router_logits` & *more*"
    assert (
        '<h4 id="note-b">b</h4>' in section.body and section.anchor == "note-a-router-logits-more"
    )


def test_a_table_keeps_escaped_bars_in_code(run):
    (section,) = sections(run("| a |\n|---|\n| `<\\|im_start\\|>user` |\n"))
    assert "<td><code>&lt;|im_start|&gt;user</code></td>" in section.body


NOTES = Path(__file__).parents[2] / "site" / "families"


@pytest.mark.slow
@pytest.mark.parametrize("name", write.guide_sources())
def test_the_code_of_every_guide_holds(name):
    blocks, meta = execute_guide(write.guide_sources()[name], fresh=True)
    assert meta["title"] and any(block.kind == "run" for block in blocks)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_notes_of_every_family_hold(family):
    blocks = run_notes(NOTES / family / "notes.md", family_namespace(family))
    ran = [block for block in blocks if block.kind == "run"]
    assert len(ran) > 10 and any(block.output for block in ran)
    assert not [
        block.line
        for block in ran
        if str(NOTES.parents[1]) in block.output or "site-packages" in block.output
    ]
    # Every executed block can fail: it asserts something, or must raise.
    assert not [block.line for block in ran if "assert" not in block.text and not block.raises]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_notes_of_every_family_have_a_title_and_one_sentence(family):
    meta = read_notes(NOTES / family / "notes.md").meta
    assert meta["title"] and meta["summary"].endswith(".") and meta["summary"].count(". ") == 0


def test_families_outside_the_specimens_are_refused():
    with pytest.raises(ValueError, match="There is no specimen of the family 'qwen3_nxt'"):
        family_namespace("qwen3_nxt")


@pytest.mark.parametrize(
    "block",
    [
        "    ```python\n    assert False\n    ```",
        "- ```python\n  assert False\n  ```",
        "> ```python\n> assert False\n> ```",
        "~~~python\nassert False\n~~~",
        "```Python\nassert False\n```",
        "```py\nassert False\n```",
        "```python3\nassert False\n```",
    ],
)
def test_a_fence_that_would_not_be_run_is_refused(tmp_path, block):
    path = tmp_path / "notes.md"
    path.write_text(f"Words.\n\n{block}\n")
    with pytest.raises(SnippetError, match=r"notes.md:3: .*run"):
        read_notes(path)


@pytest.mark.parametrize("code", ["import sys\nsys.exit(0)", "await thing"])
def test_notes_cannot_end_the_build_unnoticed(tmp_path, code):
    path = tmp_path / "notes.md"
    path.write_text(f"```python\n{code}\n```\n")
    with pytest.raises(SnippetError, match="notes.md:"):
        run_notes(path, {})
