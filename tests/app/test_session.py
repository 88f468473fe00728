"""The explorer behind its page: jobs, sessions, the server, the command line."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from explorer import load
from explorer.app.store import Store
from explorer.widgets import palette
from tests.support.app_page import HYBRID, Page
from tests.support.explorer_server import explorer  # noqa: F401  a fixture

# -- jobs -------------------------------------------------------------------------


# -- sessions -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def opened():
    """One page for the tests that do not mind what was done on it before."""
    page = Page().start()
    yield page
    page.session.close()


def test_a_page_gets_its_model_tokens_and_panels(opened):
    run = next(message["run"] for message in opened.sent if "run" in message)
    assert run["weights"] == "random, seed 0" and "".join(run["tokens"]) == "In·the·beginning·God"
    assert (
        run["mixers"] == [["linear_attn"]] * 3 + [["self_attn"]]
        and opened.last("selection")["token"] == len(run["tokens"]) - 1
    )
    assert {"router_grid", "router_load", "router_margin"} <= set(opened.cards)
    assert opened.last("compare")["rows"][0]["before"] > 0


@pytest.mark.parametrize(
    ("named", "opens"),
    [
        (HYBRID, True),
        ("specimen:llama", True),
        ("/somewhere/model.gguf", False),
        ("someone/some-checkpoint", False),
        ("specimen:../llama", False),
        (["specimen:llama"], False),
    ],
)
def test_an_address_loads_nothing_that_is_not_shipped_or_open_already(named, opens):
    asked = []

    def loading(source):
        asked.append(source)
        return load(HYBRID)

    page = Page(loads=loading)
    page.say(do="hello", view={"model": named, "block": 3, "prompt": "In the beginning"})
    if not opens:
        assert page.session.job is None and not asked and page.last("run") is None
        assert (
            page.last("hello")["source"] == str(named)
            and page.last("hello")["prompt"] == "In the beginning"
        )
        assert str(named) in page.last("notice") and "press Run" in page.last("notice")
        page.say(do="run", model=str(named), prompt="In the beginning")
    page.wait(lambda: page.last("selection"))
    assert (
        asked == [str(named)]
        and page.last("selection")["block"] == 3
        and page.last("notice") is None
    )
    page.say(do="hello", view={"model": named})
    assert page.session.job is not None, "a model that is loaded opens at once"
    page.session.close()


def test_selections_are_answered_and_kept_in_range(opened):
    opened.say(do="select", block=99, token=99, head=99, tab="attention", seq=101)
    opened.answered(101)
    assert opened.last("selection") | {"part": ""} == {
        "block": 3,
        "token": len(opened.session.run.tokens) - 1,
        "head": 8,
        "pattern": "probabilities",
        "router": "scores",
        "part": "",
    }
    opened.say(do="select", block="nonsense", pattern="<b>", tab="nowhere", seq=102)
    opened.answered(102)
    assert opened.last("selection")["block"] == 3 and opened.last("tab") == "attention"


def test_messages_that_make_no_sense_are_ignored(opened):
    before = opened.last("selection")
    for message in (
        None,
        "hello",
        {},
        {"do": None},
        {"do": "__init__"},
        {"do": "select", "block": [1]},
    ):
        opened.session.receive(message)
    opened.say(do="select", seq=103)
    opened.answered(103)
    assert opened.last("selection") == before


def test_only_cards_that_changed_are_drawn_again(opened):
    opened.say(do="select", tab="attention", block=3, head=0, token=0, seq=201)
    opened.answered(201)
    opened.say(do="select", head=1, seq=202)
    opened.answered(202)
    assert set(opened.last("cards")) == {"attention_one"}
    opened.say(do="select", token=1, seq=203)
    opened.answered(203)
    assert opened.last("cards") == {}


def test_a_part_shows_facts_and_code(opened):
    opened.say(do="select", tab="tensor", part="decays", block=0, seq=301)
    opened.answered(301)
    part = opened.last("part")
    assert part["expression"] == "model.layers[0].linear_attn.decays" and part["refusal"] is None
    assert (
        dict(part["facts"])["shape"] == f"1 × {len(opened.session.run.tokens)} × 10"
        and 'rec["decays", 0]' in part["code"]
    )
    opened.say(do="select", part="expert_outputs", seq=302)
    opened.wait(
        lambda: (
            (opened.last("part") or {}).get("name") == "expert_outputs"
            and opened.last("part")["refusal"] is None
        )
    )
    opened.say(do="select", part="lm_head_output", seq=305)
    opened.wait(
        lambda: (
            (opened.last("part") or {}).get("name") == "lm_head_output"
            and opened.last("part")["refusal"] is None
        )
    )
    opened.say(do="select", part="states", block=3, seq=306)
    opened.answered(306)
    assert "softmax attention" in opened.last("part")["refusal"] and opened.session.job is None
    opened.say(do="select", block=0, part="head_gate", seq=303)
    opened.answered(303)
    assert (
        "recurrent" in opened.last("part")["refusal"] or "softmax" in opened.last("part")["refusal"]
    )
    opened.say(do="select", part="router_logit", seq=304)
    opened.answered(304)
    assert "router_logits" in opened.last("part")["refusal"], "nearest names are offered"


@pytest.mark.slow
def test_the_state_is_shown_after_the_chosen_token(opened):
    rec = load(HYBRID).record(
        opened.session.run.origin.prompt, values=["linear_attn.states"], layers=[1]
    )
    for seq, token in ((401, 1), (402, 3)):
        opened.say(do="select", tab="tensor", part="state", block=1, head=2, token=token, seq=seq)
        opened.answered(seq)
        part, facts = opened.last("part"), dict(opened.last("part")["facts"])
        state = rec["states", 1][0, token, 2]
        assert part["refusal"] is None and facts["shape"] == " × ".join(
            map(str, (1, 1, *state.shape))
        )
        assert float(facts["maximum"].replace("−", "-")) == pytest.approx(
            float(state.max()), rel=1e-2
        )
        assert f"rec.state(1, 2, {token})" in part["code"]
        assert (
            opened.cards["part"]["refusal"] is None
            and f"state of head 2 after token {token}" in opened.cards["part"]["title"]
        )
    opened.say(do="select", block=3, seq=403)
    opened.answered(403)
    assert "softmax attention" in opened.last("part")["refusal"] and opened.session.job is None


@pytest.mark.slow
def test_figures_are_made_when_there_is_first_something_to_draw_on_them():
    page = Page()
    board = page.session.board
    assert not board.figures and not any(place.children for place in board.slots.values())
    page.start(tab="router", block=3)
    made = dict(board.figures)
    assert set(made) == {"router_grid", "router_load", "router_margin"}
    page.say(do="select", tab="state", seq=1)
    page.answered(1)
    assert board.figures == made, "a block without a state needs no figure for one"
    page.say(do="theme", theme="dark")
    page.say(do="select", tab="attention", seq=2)
    page.answered(2)
    page.say(do="select", tab="router", block=0, seq=3)
    page.answered(3)
    assert (
        set(board.figures) == {*made, "attention_all", "attention_one"}
        and made.items() <= board.figures.items()
    )
    for name, figure in board.figures.items():
        assert board.slots[name].children == [figure.figure]
        assert figure.figure.outline_line_color == (
            None if name == "attention_all" else palette.ROLES["muted"].dark
        )
    page.session.close()


def test_an_intervention_changes_the_run_and_switching_it_off_takes_it_back():
    page = Page().start()
    rows = [
        {"kind": "expert", "layer": 0, "index": 1, "on": True},
        {"kind": "head", "layer": 3, "index": 2, "on": True},
    ]
    page.say(do="intervene", list=rows)
    kl = page.wait(lambda: (page.last("compare") or {}).get("kl"))
    assert float(kl["largest"]) > 0 and page.last("compare")["changed"] == [
        "ablate expert 1 of block 0",
        "zero head 2 of block 3",
    ]
    assert abs(page.last("compare")["rows"][0]["difference"]) > 0
    page.say(do="shown", shown="after", seq=None)
    page.wait(lambda: page.last("shown") == "after")
    page.say(do="intervene", list=[row | {"on": False} for row in rows])
    page.wait(lambda: page.last("shown") == "before" and "kl" not in page.last("compare"))


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"kind": "expert", "layer": 0, "index": 99}, "experts 0 to 11"),
        ({"kind": "head", "layer": 3, "index": 9}, "heads 0 to 8"),
        ({"kind": "head", "layer": 77, "index": 0}, "no block 77"),
        ({"kind": "bomb", "layer": 0, "index": 0}, "There is no"),
    ],
)
def test_an_impossible_intervention_is_refused_in_a_sentence(opened, row, sentence):
    opened.say(do="intervene", list=[row | {"on": True}])
    assert sentence in opened.last("notice")


@pytest.mark.parametrize(
    ("model", "prompt", "sentence"),
    [
        (HYBRID, "", "The prompt is empty"),
        (HYBRID, " \n ", "The prompt is empty"),
        ("specimen:gpt2", "a " * 9000, "takes at most"),
        ("specimen:qwen", "a", "qwen3"),
        ("/no/such/folder", "a", "/no/such/folder"),
        ("", "a", "."),
    ],
)
def test_a_failed_run_is_reported_on_the_page(opened, model, prompt, sentence):
    before = len(opened.sent)
    opened.say(do="run", model=model, prompt=prompt)
    notice = opened.wait(
        lambda: next((m["notice"] for m in opened.sent[before:] if m.get("notice")), None)
    )
    assert sentence in notice and "\n" not in notice.strip()


def test_a_newer_run_replaces_an_older_one():
    page = Page().start()
    page.say(do="run", model=HYBRID, prompt="one two three")
    page.say(do="run", model=HYBRID, prompt="four five")
    page.wait(lambda: page.last("run") and page.last("run")["prompt"] == "four five")
    assert not any(m.get("run", {}).get("prompt") == "one two three" for m in page.sent)
    page.say(do="run", model=HYBRID, prompt="six")
    page.say(do="cancel")
    page.wait(lambda: (page.last("notice") or "").startswith("Cancelled"))
    assert page.last("run")["prompt"] == "four five"


def test_a_closed_session_hears_nothing_more():
    page = Page().start()
    page.say(do="select", block=1, seq=9)
    page.session.close()
    sent = len(page.sent)
    page.say(do="select", block=2, seq=10)
    time.sleep(0.2)
    for work in page.waiting:
        work()
    assert len(page.sent) == sent


# -- the server and the command line --------------------------------------------------


def test_interventions_belong_to_the_model_shown():
    """A switch moved while another model loads neither drops the load nor reaches the other
    model.
    """
    page = Page().start()
    row = {"kind": "expert", "layer": 3, "index": 7, "on": True}
    page.say(do="intervene", list=[row])
    page.wait(lambda: (page.last("compare") or {}).get("kl"))
    page.say(do="run", model="specimen:llama", prompt="one two")
    page.say(do="intervene", list=[row | {"on": False}])
    page.wait(lambda: page.last("run")["prompt"] == "one two")
    assert page.session.interventions == [] and page.last("interventions") == []


def test_panels_that_show_the_interventions_go_on_showing_them():
    page = Page().start()
    rows = [{"kind": "expert", "layer": 0, "index": 1, "on": True}]
    page.say(do="intervene", list=rows)
    page.wait(lambda: (page.last("compare") or {}).get("kl"))
    page.say(do="shown", shown="after", seq=None)
    page.wait(lambda: page.last("shown") == "after")
    rows.append({"kind": "head", "layer": 3, "index": 2, "on": True})
    page.say(do="intervene", list=rows)
    page.wait(lambda: len(page.last("compare")["changed"]) == 2)
    assert page.last("shown") == "after" and page.session.run is page.session.other


@pytest.mark.parametrize(
    "message",
    [
        {"do": "run", "model": "m" * 1_000_000, "prompt": "a"},
        {"do": "run", "model": HYBRID, "prompt": "a " * 8_000_000},
        {"do": "hello", "view": {"model": "m" * 1_000_000}},
        {"do": "intervene", "list": [{"kind": "head", "layer": 3, "index": 0}] * 100_000},
    ],
)
def test_more_than_a_page_may_ask_for_is_refused_before_any_work(opened, message):
    sent, job = len(opened.sent), opened.session.job
    opened.say(**message)
    answer = opened.sent[sent:]
    assert len(answer) == 1 and "the most is" in answer[0]["notice"]
    assert len(str(answer)) < 1000 and opened.session.job is job


@pytest.mark.parametrize("change", ["rewritten", "added", "removed"])
def test_files_that_change_under_an_open_model_are_read_again(tmp_path, change):
    source, loaded = str(tmp_path), []
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("1")
    store = Store(lambda source: loaded.append(source) or torch.nn.Module())
    store.models.size = lambda model: 1
    first = store.model(source)
    assert store.model(source) is first
    match change:
        case "rewritten":
            (tmp_path / "config.json").write_text('{"a": 1}')
        case "added":
            (tmp_path / "tokenizer.json").write_text("{}")
        case "removed":
            (tmp_path / "model.safetensors").unlink()
    store.runs.put((source, "a", ()), SimpleNamespace(bytes=1))
    assert store.model(source) is not first and len(loaded) == 2
    assert not store.runs.items()


@pytest.mark.parametrize("listed", [5, [5], "no", None])
def test_a_list_of_switches_that_is_none_changes_nothing(opened, listed):
    before = list(opened.session.interventions)
    opened.say(do="intervene", list=listed)
    assert opened.session.interventions == before
