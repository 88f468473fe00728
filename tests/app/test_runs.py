"""What the explorer keeps of models and runs: caches, budgets, what is asked for later."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from explorer import load
from explorer.app.diagram import diagram
from explorer.app.figures import Zoom
from explorer.app.runs import (
    RecordableValue,
    RecordingPlan,
    TooLong,
    plan_recording,
    recordable_values,
)
from explorer.app.store import BoundedCache, Store
from explorer.app.worker import Cancelled, Job
from explorer.model.errors import Cancelled as RecordingCancelled
from explorer.widgets.views.downsample import Window
from explorer.widgets.views.picture import Heatmap
from explorer.widgets.views.selection import numbered_axis
from tests.support.app_page import HYBRID, Page


def test_a_run_in_the_middle_of_its_forward_is_cancelled():
    store, shares = Store(load), []
    model = store.model(HYBRID)
    job = Job("test", lambda job: None, lambda job: None)
    job.moved = lambda job: (shares.append(job.share), job.share == 0.5 and job.cancel())
    with pytest.raises(Cancelled) as caught:
        store.run(HYBRID, "In the beginning", (), job)
    assert 0.25 in shares and 1.0 not in shares
    assert not isinstance(caught.value, RecordingCancelled)
    assert model.record("still usable", values=["logits"])["logits"].shape[0] == 1


def test_a_cache_forgets_the_least_recently_used_by_bytes():
    cache = BoundedCache(10, lambda value: value)
    for key, size in (("a", 4), ("b", 4)):
        cache.put(key, size)
    assert cache.get("a") == 4
    cache.put("c", 5)
    assert cache.get("b") is None and cache.get("a") == 4 and cache.bytes == 9
    cache.put("huge", 100)
    assert cache.get("huge") == 100 and cache.get("a") is None


def test_runs_are_made_once():
    store, job = Store(load), Job("test", lambda job: None, lambda job: None)
    assert store.run(HYBRID, "a b", (), job) is store.run(HYBRID, "a b", (), job)


def test_the_largest_that_would_not_fit_are_left_for_later():
    rows = [
        RecordableValue("stream", 90, True),
        RecordableValue("small", 10),
        RecordableValue("logits", 100),
        RecordableValue("probabilities", 1000),
    ]
    assert plan_recording(rows, 1200) == RecordingPlan(
        ("stream", "small", "logits", "probabilities"), (), 1200
    )
    assert plan_recording(rows, 1199) == RecordingPlan(
        ("stream", "small", "logits"), ("probabilities",), 200
    )
    assert plan_recording(rows, 110) == RecordingPlan(
        ("stream", "small"), ("logits", "probabilities"), 100
    )
    with pytest.raises(TooLong, match="90 B.* 89 B"):
        plan_recording(rows, 89)


def test_a_run_too_large_is_refused_on_the_page_and_the_page_goes_on(monkeypatch):
    page = Page().start()
    monkeypatch.setattr("explorer.app.runs.BUDGET", 1000)
    page.say(do="run", model=HYBRID, prompt="one two three")
    page.wait(lambda: "limit of 1 kB" in (page.last("notice") or ""))
    monkeypatch.setattr("explorer.app.runs.BUDGET", 10**9)
    monkeypatch.setattr("explorer.app.store.LIVE_BYTES", page.session.run.bytes + 1000)
    page.say(do="run", model=HYBRID, prompt="one two three")
    page.wait(lambda: "close a page" in (page.last("notice") or ""))
    monkeypatch.setattr("explorer.app.store.LIVE_BYTES", 10**9)
    page.say(do="run", model=HYBRID, prompt="one two three")
    page.wait(lambda: page.last("run")["prompt"] == "one two three")
    page.session.close()


def lean(store: Store, prompt: str = "In the beginning") -> int:
    """A budget that only what no run can do without fits into."""
    model = store.model(HYBRID)
    rows = recordable_values(model, len(model.tokenizer(prompt)["input_ids"]))
    return sum(row.bytes for row in rows if row.needed)


def test_a_lean_run_gives_the_same_next_tokens_and_comparison(monkeypatch):
    page = Page(prompt="In the beginning").start()
    edit = [{"kind": "head", "layer": 3, "index": 2, "on": True}]
    page.say(do="intervene", list=edit)
    full = page.wait(lambda: (page.last("compare") or {}).get("kl") and page.last("compare"))
    page.session.close()
    lean_page = Page(prompt="In the beginning")
    monkeypatch.setattr("explorer.app.runs.BUDGET", lean(lean_page.session.services.store))
    lean_page.start()
    assert "logits" not in lean_page.session.run and lean_page.session.run.recording.bytes <= lean(
        lean_page.session.services.store
    )
    lean_page.say(do="intervene", list=edit)
    said = lean_page.wait(
        lambda: (
            (lean_page.last("compare").get("kl") or {}).get("at_token")
            and lean_page.last("compare")
        )
    )
    assert [row["token"] for row in said["rows"]] == [row["token"] for row in full["rows"]]
    assert [row["after"] for row in said["rows"]] == pytest.approx(
        [row["after"] for row in full["rows"]], rel=1e-4
    )
    assert said["kl"] == full["kl"] | {"mean": None, "largest": None, "where": None}
    lean_page.say(do="select", tab="compare", seq=1)
    lean_page.answered(1)
    assert "would not fit" in lean_page.cards["compare_kl"]["refusal"]
    assert (
        lean_page.last("run")["heads"]
        == list(lean_page.session.run.heads)
        == [{"linear_attn": 10}] * 3 + [{"self_attn": 9}]
    )
    lean_page.session.close()


def test_what_is_asked_later_is_refused_where_it_would_not_fit():
    store, job = Store(load), Job("test", lambda job: None, lambda job: None)
    run = store.run(HYBRID, "In the beginning", (), job)
    store.extras.limit = 100
    store.record_more(run, [("states", 0)], job)
    looked = store.with_recorded_since(run)
    assert (
        ("states", 0) not in looked
        and not looked.can_be_recorded("states", 0)
        and "100 B" in looked.why("states", 0)
    )


def test_the_estimate_of_a_run_is_what_it_takes():
    store, job = Store(load), Job("test", lambda job: None, lambda job: None)
    run = store.run(HYBRID, "In the beginning God created the heaven and the earth.", (), job)
    estimate = plan_recording(recordable_values(store.model(HYBRID), len(run.tokens))).bytes
    assert 0.8 < estimate / run.recording.bytes < 1.3


@pytest.mark.slow
def test_values_left_out_are_recorded_when_looked_at(monkeypatch):
    page = Page()
    monkeypatch.setattr("explorer.app.runs.BUDGET", lean(page.session.services.store))
    page.say(do="hello", view={"block": 3, "tab": "attention", "prompt": "In the beginning"})
    title = page.wait(lambda: (page.cards.get("attention_one") or {}).get("title", None))
    assert (
        page.session.run.deferred
        and page.cards["attention_one"]["refusal"] is None
        and "key/value head" in title
    )
    for tab, card in (
        ("router", "router_load"),
        ("stream", "stream_addends"),
        ("state", "state_matrix"),
        ("state", "state_one"),
    ):
        page.say(do="select", tab=tab, block=0)
        page.wait(lambda card=card: (page.cards.get(card) or {}).get("title"))
    page.session.close()


@pytest.fixture(scope="module")
def runs():
    """A run of every kind of model, by its source."""
    store, job = Store(load), Job("test", lambda job: None, lambda job: None)
    return {
        source: store.run(source, "In the beginning", (), job)
        for source in (HYBRID, "specimen:llama")
    }


@pytest.mark.parametrize(
    ("source", "name", "layer", "asked", "reason"),
    [
        (HYBRID, "states", 0, True, None),
        (HYBRID, "states", 3, False, "softmax attention"),
        (HYBRID, "linear_attn.states", 3, False, "no linear_attn"),
        (HYBRID, "state", 0, False, None),
        (HYBRID, "expert_outputs", 3, True, None),
        (HYBRID, "lm_head_output", None, True, None),
        (HYBRID, "lm_head_output", 0, False, None),
        ("specimen:llama", "expert_outputs", 1, False, "dense"),
        ("specimen:llama", "states", 1, False, "softmax attention"),
        ("specimen:llama", "layer_input", 1, False, None),
    ],
)
def test_only_what_the_model_has_there_may_be_asked_for_later(
    runs, source, name, layer, asked, reason
):
    run = runs[source]
    assert run.can_be_recorded(name, layer) == asked
    assert reason is None or reason in run.why(name, layer)


def test_a_run_never_changes_and_what_is_asked_later_is_kept_beside_it():
    store, job = Store(load), Job("test", lambda job: None, lambda job: None)
    run = store.run(HYBRID, "In the beginning", (), job)
    with pytest.raises(FrozenInstanceError):
        run.norms = {}
    store.record_more(run, [("states", 0)], job)
    looked = store.with_recorded_since(run)
    assert ("states", 0) not in run and run.can_be_recorded("states", 0)
    assert (
        ("states", 0) in looked
        and ("linear_attn.states", 0) in looked
        and not looked.can_be_recorded("states", 0)
    )
    assert looked["states", 0].shape[1] == len(run.tokens) and looked.number == run.number
    store.extras.limit = looked["states", 0].nbytes
    store.record_more(run, [("expert_outputs", 0)], job)
    assert ("states", 0) not in store.with_recorded_since(run) and ("states", 0) in looked, (
        "what is being looked at stays whole"
    )


def test_what_a_figure_has_in_view_is_a_fact_that_other_threads_may_have():
    zoom = Zoom((4, 6), 0.5, -0.5, 3.5, 3.5)
    seen = Heatmap(
        "", numbered_axis("x", 6), numbered_axis("y", 4), np.zeros((4, 6), dtype=np.float32)
    )
    assert zoom.window_for(seen) == Window(1.0, 0.0, 4.0, 4.0)
    assert replace(zoom, left=-0.5, right=5.5).window_for(seen) is None
    assert replace(zoom, shape=(4, 7)).window_for(seen) is None, "another matrix is shown whole"


def test_models_of_one_name_have_diagrams_of_their_own():
    first, second = (load(source) for source in ("specimen:llama", HYBRID))
    second.label = first.label
    drawn = [diagram(model) for model in (first, second, first)]
    assert (
        drawn[0]["key"] != drawn[1]["key"]
        and drawn[0]["html"] != drawn[1]["html"]
        and drawn[0] is drawn[2]
    )
