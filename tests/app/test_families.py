"""Every kind of mixer in the explorer's panels: recurrences of three kinds, convolutions, two
mixers in a block, none.
"""

from __future__ import annotations

import functools

import pytest

from explorer.app import runs as app_runs
from explorer.app.cards import CARDS, render_card
from explorer.app.messages import (
    attention_summary,
    comparison_summary,
    diagram_marks,
    first_tab,
    router_summary,
    run_summary,
    tensor_summary,
)
from explorer.app.requests import clamp_selection, intervention_problem, values_shown
from explorer.app.runs import recordable_values
from explorer.app.store import Store
from explorer.app.worker import Job
from explorer.checkpoints import load as loading
from explorer.vocabulary import HOSTS
from explorer.widgets.views import next_token as views_next
from explorer.widgets.views.code import Intervention
from explorer.widgets.views.picture import Refusal
from explorer.widgets.views.selection import Selection
from tests.support.copied_code import agree, numbers_of, run_cell

#: A gated recurrence, a scan by channel, its kin by head beside attention, blocks without a mixer,
#: convolutions, the delta rule by channel, and logits that the model caps after its head.
FAMILIES = ("recurrent_gemma", "mamba", "falcon_h1", "nemotron_h", "lfm2", "kimi_linear", "gemma2")
PROMPT = "In the beginning God made"


@pytest.fixture(scope="module", autouse=True)
def loaded_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load", functools.cache(loading.load))
        yield


@pytest.fixture(scope="module")
def store() -> Store:
    return Store(loading.load)


@pytest.fixture(params=FAMILIES, scope="module")
def run(store, request):
    return store.run(f"specimen:{request.param}", PROMPT, (), a_job())


def a_job() -> Job:
    return Job("test", lambda job: None, lambda job: None)


def seen(store, run, selection, tab):
    """The cards of a tab, with what they show recorded."""
    if missing := [
        place for place in values_shown(run, selection, tab) if run.can_be_recorded(*place)
    ]:
        store.record_more(run, missing, a_job())
    with_recorded_since = store.with_recorded_since(run)
    return with_recorded_since, [
        render_card(card, with_recorded_since, selection, None) for card in CARDS if card.tab == tab
    ]


@pytest.mark.parametrize("tab", ["router", "attention", "state", "stream"])
def test_every_card_draws_or_says_why_and_its_code_makes_its_numbers(store, run, tab):
    drawn = 0
    for block in range(run.num_layers):
        for one in seen(
            store, run, clamp_selection(run, Selection(block=block, token=2, head=1)), tab
        )[1]:
            if isinstance(one.view, Refusal):
                assert (
                    "could not be drawn" not in one.view.reason
                    and one.view.reason.endswith(".")
                    and one.view.reason[0].isupper()
                )
                continue
            drawn += 1
            agree(
                run_cell(
                    one.card.code(
                        one.run, clamp_selection(run, Selection(block=block, token=2, head=1))
                    )
                ),
                numbers_of(one.view),
            )
    has = {
        "router": any(("expert_indices", layer) in run for layer in range(run.num_layers)),
        "stream": True,
        "attention": any("self_attn" in mixers for mixers in run.mixers),
        "state": any(HOSTS[mixer].recurrent for mixers in run.mixers for mixer in mixers),
    }
    assert bool(drawn) == has[tab]


def test_every_value_can_be_clicked(store, run):
    model = store.model(run.origin.source)
    assert run_summary(model, run)["mixers"] == [
        [HOSTS[mixer].attribute for mixer in mixers] for mixers in run.mixers
    ]
    for block in range(run.num_layers):
        for row in model.support(block):
            second = row.host in run.mixers[block][1:] or row.host == "shared_experts"
            key = f"{HOSTS[row.host].attribute}.{row.name}" if second else row.name
            if not row.available:
                continue
            layer, selection = (
                None if row.host == "model" else block,
                clamp_selection(run, Selection(block=block, part=key, token=2)),
            )
            if run.can_be_recorded(key, layer):
                store.record_more(run, [(key, layer)], a_job())
            said = tensor_summary(store.with_recorded_since(run), selection)
            assert said["expression"] == f"{HOSTS[row.host].path}.{row.name}".replace(
                "[i]", f"[{block}]"
            )
            assert (
                said["refusal"] is None
                or "is None here" in said["refusal"]
                or row.name == "input_size"
            ), said
            assert said["code"] and (said["refusal"] or dict(said["facts"])["axes"])


def test_the_words_beside_the_panels_and_the_interventions(store, run):
    for block in range(run.num_layers):
        selection = clamp_selection(run, Selection(block=block, token=2))
        router_summary(run, selection), attention_summary(run, selection)
        assert set(diagram_marks(run, selection)["addends"]) == set(run.addends(block))
        for host in ("", *list(run.heads[block])[1:]):
            one = Intervention("head", block, 0, host)
            if (reason := intervention_problem(run, one)) is not None:
                assert not run.heads[block] and "no head to zero" in reason
                continue
            moved = store.run(run.origin.source, PROMPT, (one,), a_job())
            assert (views_next.divergence(run, moved) > 0).any() and (
                host in comparison_summary(run, moved, selection, str)["changed"][0]
            )
    assert "nonsense" in intervention_problem(run, Intervention("head", 0, 0, "nonsense"))


def test_logits_that_were_left_out_are_those_of_the_model(store, run, monkeypatch):
    model = store.model(run.origin.source)
    monkeypatch.setattr(
        app_runs,
        "BUDGET",
        sum(row.bytes for row in recordable_values(model, len(run.tokens)) if row.needed),
    )
    other = Store(loading.load)
    lean = other.run(run.origin.source, PROMPT, (), a_job())
    assert "logits" not in lean and lean.needs_logits(2)
    other.logits(lean, 2, a_job())
    found = other.with_recorded_since(lean)
    assert not found.needs_logits(2)
    assert found[views_next.LOGITS_OF_TOKEN, 2].sub(run["logits"][0, 2]).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("family", "tab"),
    [("mamba2", "state"), ("llama", "attention"), ("mixtral", "router"), ("qwen3_next", "router")],
)
def test_a_page_opens_on_a_tab_that_has_something(store, family, tab):
    assert first_tab(store.run(f"specimen:{family}", PROMPT, (), a_job())) == tab
