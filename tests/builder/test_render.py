"""Pages from records: everything of the record is on the page, nothing is interpreted, nothing
is invented.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from markupsafe import Markup

from builder.notes.html import Section, value_anchor
from builder.pages import figures, render
from builder.pages.environment import config_value, yaml_string
from builder.pages.measured import measured_figures
from builder.pages.printout import printout_html
from builder.pages.values import host_sections, host_sizes
from explorer import vocabulary
from tests.support.facts_records import records
from tests.support.pages import Text

NOTES = [
    Section("", "", Markup("<p>first</p>")),
    Section("note-a", "The `router_logits` & more", Markup("<p>n</p>")),
]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_next"])
def test_a_page_carries_its_record(family: str) -> None:
    made = records(family)
    first = made[0]
    text = str(Text(render.family_page(made)))
    for row in first["values"]:
        assert row["name"] in text and row["meaning"] in text and row["read_at"] in text
        assert f"[{' '.join(row['dims'])}]" in text
        assert not row["condition"] or row["condition"] in text
    for trait in first["traits"]:
        assert trait["label"] in text and trait["meaning"] in text and trait["evidence"] in text
    for part in first["parameters"]["by_part"]:
        assert (
            part["part"] in text and figures.thousands(part["count"]).replace("\u202f", " ") in text
        )
    for key, value in first["config"].items():
        assert key in text and config_value(value) in text
    for row in first["caches"]:
        assert row["name"] in text and row["formula"] in text and row["numbers"] in text
    for name, version in first["versions"].items():
        assert f"{name} {version}" in text
    for source in first["provenance"]["sources"].values():
        assert source in text
    assert first["blocks"][0]["identity"] in text and first["architecture"] in text
    assert f"open live .venv/bin/python -m explorer specimen:{family}" in text


def test_a_command_to_copy_is_what_the_readme_has_one_type() -> None:
    root = Path(__file__).parents[2]
    readme = (root / "README.md").read_text(encoding="utf-8")
    for template in (root / "builder" / "templates").glob("*.jinja"):
        for start, module in re.findall(
            r"<copy-code.*?<code>(.*?python) -m (\w+)", template.read_text(encoding="utf-8")
        ):
            assert f"    {start} -m {module}" in readme, template.name


def test_sections_come_in_their_order() -> None:
    page = render.family_page(records("llama"), NOTES, title="Llama")
    assert re.findall(r"^##? (.*?)(?: \{|$)", page, re.MULTILINE) == [
        "Llama",
        "The block",
        "Values, by host",
        "Signature",
        "Printout and config",
        "Notes",
        "Evidence",
    ]


def test_headings_of_notes_become_sections_of_the_page() -> None:
    page = render.family_page(records("llama"), NOTES)
    assert "### The `router_logits` &amp; more { #note-a }" in page and "<p>n</p>" in page


def test_a_page_without_notes_says_how_to_write_them() -> None:
    page = render.family_page(records("llama"))
    assert (
        "## Notes" in page
        and "There are no notes" in page
        and "../../guides/adding-a-family.html" in page
    )
    assert "There are no notes" not in render.family_page(records("llama"), NOTES)


@pytest.mark.slow
def test_a_page_of_default_sizes_says_that_they_are_no_checkpoints() -> None:
    text = str(Text(render.family_page(records("apertus"))))
    assert "transformers' default sizes, no released checkpoint" in text
    assert (
        "it is no released checkpoint" in text
        and "https://huggingface.co" not in render.family_page(records("apertus"))
    )
    assert "32 blocks, each Attention, then MLP." in text


def test_the_search_is_left_to_what_somebody_wrote() -> None:
    """Every page of every family in it would be megabytes that each page loads."""
    written = render.family_page(records("llama"), NOTES)
    assert '<div class="host">' in written and '<details data-search-exclude="true">' in written
    assert '<div class="host">' not in render.family_page(
        records("llama")
    ) and '<div class="host" data-search-exclude="true">' in render.family_page(records("llama"))
    assert written.startswith("---\ntitle:")


@pytest.mark.slow
def test_a_host_says_what_kind_of_it_is_there() -> None:
    """Several kinds of mixer have one path."""
    tables = {table["path"]: table for table in host_sections(records("mamba", 1))}
    assert tables["model.layers[i].mixer"]["meaning"] == vocabulary.HOSTS["selective_scan"].meaning
    assert host_sizes(records("opt", 1)[0])[1][0] == "layers[0].mlp", (
        "its MLP is a part of the block's own forward"
    )


def test_what_is_kept_between_tokens_is_listed_or_a_reason_is_given() -> None:
    record = records("llama", 1)[0]
    record.update(caches=[], caches_unknown="what it keeps is not known")
    assert "left out: what it keeps is not known." in render.family_page([record])
    assert "are left out" not in render.family_page(records("llama", 1))


def test_values_of_a_part_without_a_module_have_their_roles_in_the_printout() -> None:
    html = str(printout_html(records("opt", 1)[0]["printout"]))
    assert '(<b class="role-mlp">mlp.mlp_output</b>)' in html


def test_each_host_has_a_section_and_each_value_a_row_to_link_to() -> None:
    record = records("qwen3_next", 1)[0]
    page = render.family_page([record])
    for path in dict.fromkeys(row["host"] for row in record["values"]):
        assert f"### `{path}`" in page
    for row in record["values"]:
        assert page.count(f'id="{value_anchor(row["host"], row["name"])}"') == 1


def test_conditions_and_checks_are_marked() -> None:
    record = records("llama", 1)[0]
    for row in record["values"]:
        row["condition"], row["verified"] = None, True
    record["values"][3].update(condition="needs another load", verified=False)
    page = render.family_page([record])
    assert page.count("needs another load") >= 2 and page.count('class="unseen"> not checked<') == 1
    # Once in the introduction, twice in the row that has one.
    assert page.count("⚠︎") == 3


def test_a_failed_check_is_shown_first_and_open() -> None:
    record = records("llama", 1)[0]
    record["contract"] = {
        "checks": [
            *record["contract"]["checks"],
            {
                "name": "patterns",
                "host": "model.layers[i].self_attn",
                "about": "attention_probabilities",
                "passed": False,
                "detail": "a row sums to 0.9",
                "worst": 0.1,
            },
        ],
        "passed": 2,
        "failed": 1,
    }
    page = render.family_page([record])
    assert (
        "1 failed" in page
        and re.search("<details[^>]* open><summary>The contract's", page)
        and "✗ no" in page
    )
    assert page.index("a row sums to 0.9") < page.index("input plus addends")


def test_a_record_without_a_contract_says_so() -> None:
    record = records("llama", 1)[0]
    record["contract"] = {"checks": [], "passed": 0, "failed": 0}
    record["provenance"]["specimen"] = {}
    page = render.family_page([record])
    assert "The contract has not been run" in page and "The contract's checks" not in page


MEASURED = {
    "parameters": 1_900_000,
    "text": {
        "held_out_tokens": 61440,
        "window_tokens": 192,
        "loss_nats_per_token": 4.031,
        "unigram_nats_per_token": 6.2,
        "uniform_nats_per_token": 7.6,
    },
    "router": {
        "tokens": 61440,
        "shuffles": 5,
        "mean_ratio": 3.4,
        "best_ratio": 4.0,
        "worst_ratio": 3.0,
        "untrained_mean_ratio": 1.8,
        "layers": [
            {
                "layer": 0,
                "mutual_information": 0.9,
                "shuffled": 0.25,
                "above_chance": 0.65,
                "ratio": 3.6,
                "load": [],
            }
        ],
    },
    "repetition": {
        "segment_tokens": 48,
        "segments": 64,
        "text": {"first_copy": 5.0, "second_copy": 2.5, "lower_by": 2.5},
        "random": {"first_copy": 8.0, "second_copy": 3.0, "lower_by": 5.0},
    },
    "heads": {
        "previous_token": {
            "linear_attn": {"layer": 0, "head": 3, "share": 0.62},
            "even_share": 0.03,
        },
        "induction_target": {
            "self_attn": {"layer": 3, "head": 1, "share": 0.81},
            "even_share": 0.014,
        },
        "linear_attn_read_as": "absolute implied attention",
    },
    "training": {
        "steps": 4000,
        "tokens": 12000000,
        "seed": 0,
        "seconds": 1080,
        "processor_seconds": 2000,
        "threads": 2,
    },
    "versions": {"torch": "2.13.0"},
}


def test_measurements_of_a_trained_specimen_are_on_the_page() -> None:
    record = records("llama", 1)[0]
    record["provenance"]["specimen"] = {"weights": "trained", "measured": MEASURED}
    text = str(Text(render.family_page([record])))
    for said in (
        "weights are trained",
        "4.03nats per token on held-out text",
        "unigram baseline 6.20",
        "3.40 ×how much a token predicts its first expert",
        "0.90 against 0.25",
        "before training 1.80 ×",
        "2.50 natslower loss on a segment",
        "first copy 8.00, second 3.00",
        "62 %strongest previous-token head, linear_attn",
        "block 3, head 1; uniform attention gives 1.4 %",
        "33 minprocessor time of training",
    ):
        assert said in text, said


def test_measurements_of_another_shape_are_shown_as_they_are() -> None:
    found = {
        item.name: item.value
        for item in measured_figures(
            {"text": 4.38716, "load": [[0.5, 0.25]], "rep": {"random": [7.79, 7.72]}}
        )
    }
    assert found == {"text": "4.387", "load": "[0.5, 0.25]", "rep.random": "7.79, 7.72"}


def test_text_from_records_is_never_interpreted() -> None:
    evil = "<script>alert(1)</script>"
    record = records("llama", 1)[0]
    record.update(
        checkpoint=evil,
        title=evil,
        architecture=evil,
        printout=f"{evil}(\n  (x): {evil}\n)",
        summary=evil,
    )
    record["values"][0].update(meaning=evil, read_at=evil, condition=evil, **{"class": evil})
    record["traits"] = [{"name": "x", "label": evil, "meaning": evil, "evidence": evil}]
    record["config"][evil] = evil
    record["contract"]["checks"][0].update(name=evil, about=evil, detail=evil)
    page = render.family_page([record], title=evil, summary=evil)
    # The title is also a Markdown heading, where it must come out escaped.
    assert evil not in page
    assert evil not in render.index_page([[record]])


def test_front_matter_stays_on_one_line() -> None:
    assert str(yaml_string('a "b"\n: c \\ d')) == '"a \\"b\\" : c \\\\ d"'
