"""The explorer behind its page: jobs, caches, sessions, the command line."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from explorer import load
from explorer.__main__ import main
from explorer.app import MOST_SESSIONS, BusyPort, Desk, free_port, origins
from explorer.app_diagram import diagram
from explorer.app_figures import Ink, Zoom
from explorer.app_monitor import Lateness
from explorer.app_panels import Board
from explorer.app_runs import Plan, TooLong, Wanted, plan, wanted
from explorer.app_session import Services, Session
from explorer.app_store import Bounded, Store
from explorer.app_worker import Job, Worker
from explorer.recording import Cancelled as RecordingCancelled
from explorer.widgets.drawing import Heatmap
from explorer.widgets.reduction import Window
from explorer.widgets.selection import numbered_axis
from tests.explorer_server import explorer  # noqa: F401  a fixture

HYBRID = "specimen:qwen3_5_moe_text"
PATIENCE = 60


# -- jobs -------------------------------------------------------------------------


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    worker.close()


def finished(worker: Worker, work, **options) -> Job:
    done = threading.Event()
    job = Job("test", work, lambda job: done.set(), **options)
    worker.submit(job)
    assert done.wait(PATIENCE)
    return job


def test_jobs_run_one_after_the_other_in_one_thread(worker):
    threads, order = set(), []

    def work(number):
        threads.add(threading.get_ident())
        order.append(number)

    for number in range(5):
        worker.submit(Job("test", lambda job, number=number: work(number), lambda job: None))
    finished(worker, lambda job: None)
    assert order == list(range(5)) and len(threads) == 1 and threading.get_ident() not in threads


def test_a_job_that_fails_leaves_the_worker_working(worker):
    job = finished(worker, lambda job: 1 / 0)
    assert isinstance(job.error, ZeroDivisionError) and not job.cancelled
    assert finished(worker, lambda job: 7).result == 7


def test_a_waiting_job_can_be_cancelled_and_a_running_one_stops_where_it_asks(worker):
    started, go = threading.Event(), threading.Event()

    def slow(job):
        started.set()
        go.wait(PATIENCE)
        job.stage("next")

    ended = [threading.Event(), threading.Event()]
    first = worker.submit(Job("slow", slow, lambda job: ended[0].set()))
    second = worker.submit(Job("waiting", lambda job: "ran", lambda job: ended[1].set()))
    assert started.wait(PATIENCE)
    first.cancel(), second.cancel(), go.set()
    assert all(event.wait(PATIENCE) for event in ended)
    assert first.cancelled and second.cancelled and second.result is None


def test_a_run_in_the_middle_of_its_forward_is_cancelled():
    store, shares = Store(load), []
    model = store.model(HYBRID)
    job = Job("test", lambda job: None, lambda job: None)
    job.moved = lambda job: (shares.append(job.share), job.share == 0.5 and job.cancel())
    with pytest.raises(Exception) as caught:
        store.run(HYBRID, "In the beginning", (), job)
    assert type(caught.value).__name__ == "Cancelled" and 0.25 in shares and 1.0 not in shares
    assert not isinstance(caught.value, RecordingCancelled)
    assert model.record("still usable", values=["logits"])["logits"].shape[0] == 1


# -- caches and plans ---------------------------------------------------------------


def test_a_cache_forgets_the_least_recently_used_by_bytes():
    cache = Bounded(10, lambda value: value)
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
    rows = [Wanted("stream", 90, True), Wanted("small", 10), Wanted("logits", 100), Wanted("probabilities", 1000)]
    assert plan(rows, 1200) == Plan(("stream", "small", "logits", "probabilities"), (), 1200)
    assert plan(rows, 1199) == Plan(("stream", "small", "logits"), ("probabilities",), 200)
    assert plan(rows, 110) == Plan(("stream", "small"), ("logits", "probabilities"), 100)
    with pytest.raises(TooLong, match="90 B at the least, above the 89 B .* shorten the prompt"):
        plan(rows, 89)


def test_a_run_too_large_is_refused_on_the_page_and_the_page_goes_on(monkeypatch):
    page = Page().start()
    monkeypatch.setattr("explorer.app_runs.BUDGET", 1000)
    page.say(do="run", model=HYBRID, prompt="one two three")
    page.wait(lambda: "that one may hold: shorten the prompt." in (page.last("notice") or ""))
    monkeypatch.setattr("explorer.app_runs.BUDGET", 10**9)
    monkeypatch.setattr("explorer.app_store.LIVE_BYTES", page.session.run.bytes + 1000)
    page.say(do="run", model=HYBRID, prompt="one two three")
    page.wait(lambda: "close a page" in (page.last("notice") or ""))
    monkeypatch.setattr("explorer.app_store.LIVE_BYTES", 10**9)
    page.say(do="run", model=HYBRID, prompt="one two three")
    page.wait(lambda: page.last("run")["prompt"] == "one two three")
    page.session.close()


def lean(store: Store, prompt: str = "In the beginning") -> int:
    """A budget that only what no run can do without fits into."""
    model = store.model(HYBRID)
    rows = wanted(model, len(model.tokenizer(prompt)["input_ids"]))
    return sum(row.bytes for row in rows if row.needed)


def test_a_lean_run_gives_the_same_next_tokens_and_comparison(monkeypatch):
    page = Page(prompt="In the beginning").start()
    edit = [{"kind": "head", "layer": 3, "index": 2, "on": True}]
    page.say(do="intervene", list=edit)
    full = page.wait(lambda: (page.last("compare") or {}).get("kl") and page.last("compare"))
    page.session.close()
    lean_page = Page(prompt="In the beginning")
    monkeypatch.setattr("explorer.app_runs.BUDGET", lean(lean_page.session.services.store))
    lean_page.start()
    assert "logits" not in lean_page.session.run and lean_page.session.run.recording.bytes <= lean(lean_page.session.services.store)
    lean_page.say(do="intervene", list=edit)
    said = lean_page.wait(lambda: (lean_page.last("compare").get("kl") or {}).get("at_token") and lean_page.last("compare"))
    assert [row["token"] for row in said["rows"]] == [row["token"] for row in full["rows"]]
    assert [row["after"] for row in said["rows"]] == pytest.approx([row["after"] for row in full["rows"]], rel=1e-4)
    assert said["kl"] == full["kl"] | {"mean": None, "largest": None, "where": None}
    lean_page.say(do="select", tab="compare", seq=1)
    lean_page.answered(1)
    assert "would not fit" in lean_page.cards["compare_kl"]["refusal"]
    assert [head for head in lean_page.last("run")["heads"]] == list(lean_page.session.run.heads) == [10, 10, 10, 9]
    lean_page.session.close()


def test_what_is_asked_later_is_refused_where_it_would_not_fit():
    store, job = Store(load), Job("test", lambda job: None, lambda job: None)
    run = store.run(HYBRID, "In the beginning", (), job)
    store.extras.limit = 100
    store.part(run, [("states", 0)], job)
    looked = store.filled(run)
    assert ("states", 0) not in looked and not looked.askable("states", 0) and "above the 100 B kept" in looked.why("states", 0)


def test_the_estimate_of_a_run_is_what_it_takes():
    store, job = Store(load), Job("test", lambda job: None, lambda job: None)
    run = store.run(HYBRID, "In the beginning God created the heaven and the earth.", (), job)
    estimate = plan(wanted(store.model(HYBRID), len(run.tokens))).bytes
    assert 0.8 < estimate / run.recording.bytes < 1.3


def test_values_left_out_are_recorded_when_looked_at(monkeypatch):
    page = Page()
    monkeypatch.setattr("explorer.app_runs.BUDGET", lean(page.session.services.store))
    page.say(do="hello", wish={"block": 3, "tab": "attention", "prompt": "In the beginning"})
    title = page.wait(lambda: (page.cards.get("attention_one") or {}).get("title", None))
    assert page.session.run.later and page.cards["attention_one"]["refusal"] is None and "key/value head" in title
    for tab, card in (("router", "router_load"), ("stream", "stream_addends"), ("state", "state_matrix"), ("state", "state_one")):
        page.say(do="select", tab=tab, block=0)
        page.wait(lambda: (page.cards.get(card) or {}).get("title", None))
    page.session.close()


@pytest.fixture(scope="module")
def runs():
    """A run of every kind of model, by its source."""
    store, job = Store(load), Job("test", lambda job: None, lambda job: None)
    return {source: store.run(source, "In the beginning", (), job) for source in (HYBRID, "specimen:llama")}


@pytest.mark.parametrize("source, name, layer, asked, reason", [
    (HYBRID, "states", 0, True, None), (HYBRID, "states", 3, False, "softmax attention"),
    (HYBRID, "linear_attn.states", 3, False, "no linear_attn"), (HYBRID, "state", 0, False, "State panel"),
    (HYBRID, "expert_outputs", 3, True, None), (HYBRID, "lm_head_output", None, True, None), (HYBRID, "lm_head_output", 0, False, None),
    ("specimen:llama", "expert_outputs", 1, False, "dense"), ("specimen:llama", "states", 1, False, "no recurrent state"),
    ("specimen:llama", "layer_input", 1, False, None),
])
def test_only_what_the_model_has_there_may_be_asked_for_later(runs, source, name, layer, asked, reason):
    run = runs[source]
    assert run.askable(name, layer) == asked
    assert reason is None or reason in run.why(name, layer)


def test_a_run_never_changes_and_what_is_asked_later_is_kept_beside_it():
    store, job = Store(load), Job("test", lambda job: None, lambda job: None)
    run = store.run(HYBRID, "In the beginning", (), job)
    with pytest.raises(FrozenInstanceError):
        run.norms = {}
    store.part(run, [("states", 0)], job)
    looked = store.filled(run)
    assert ("states", 0) not in run and run.askable("states", 0)
    assert ("states", 0) in looked and ("linear_attn.states", 0) in looked and not looked.askable("states", 0)
    assert looked["states", 0].shape[1] == len(run.tokens) and looked.number == run.number
    store.extras.limit = looked["states", 0].nbytes
    store.part(run, [("expert_outputs", 0)], job)
    assert ("states", 0) not in store.filled(run) and ("states", 0) in looked, "what is being looked at stays whole"


def test_what_a_figure_has_in_view_is_a_fact_that_other_threads_may_have():
    zoom = Zoom((4, 6), 0.5, -0.5, 3.5, 3.5)
    seen = Heatmap("", numbered_axis("x", 6), numbered_axis("y", 4), np.zeros((4, 6), dtype=np.float32))
    assert zoom.window_for(seen) == Window(1.0, 0.0, 4.0, 4.0)
    assert replace(zoom, left=-0.5, right=5.5).window_for(seen) is None
    assert replace(zoom, shape=(4, 7)).window_for(seen) is None, "another matrix is shown whole"


def test_models_of_one_name_have_diagrams_of_their_own():
    first, second = (load(source) for source in ("specimen:llama", HYBRID))
    second.label = first.label
    drawn = [diagram(model) for model in (first, second, first)]
    assert drawn[0]["key"] != drawn[1]["key"] and drawn[0]["html"] != drawn[1]["html"] and drawn[0] is drawn[2]


# -- sessions -----------------------------------------------------------------------


class Page:
    """A session whose page is this object: what it was sent, and the loop it runs on."""

    def __init__(self, source: str = HYBRID, prompt: str | None = "In the beginning God", loads=load) -> None:
        self.sent, self.waiting, self.lock = [], [], threading.Lock()
        services = Services(Worker(), Store(loads), lambda model: {"key": model.label, "html": ""}, Lateness(), source, prompt)
        self.session = Session(services, Board(Ink()), self._sent, self._post, nullcontext)

    def _sent(self, message: dict) -> None:
        json.dumps(message)  # everything a page is sent is plain data
        self.sent.append(message)

    def _post(self, work) -> None:
        with self.lock:
            self.waiting.append(work)

    def say(self, **message) -> None:
        self.session.receive(message)

    def wait(self, until):
        """Run what is posted, as an event loop would, until ``until()`` is true."""
        end = time.monotonic() + PATIENCE
        while not (found := until()):
            assert time.monotonic() < end, self.sent[-3:]
            with self.lock:
                ready, self.waiting = self.waiting, []
            for work in ready:
                work()
            time.sleep(0.002)
        return found

    def last(self, key: str):
        return next((message[key] for message in reversed(self.sent) if key in message), None)

    @property
    def cards(self) -> dict:
        found: dict = {}
        for message in self.sent:
            found.update(message.get("cards") or {})
        return found

    def answered(self, seq: int):
        return self.wait(lambda: any(message.get("seq") == seq and "selection" in message for message in self.sent))

    def start(self, **wish) -> "Page":
        self.say(do="hello", wish=wish)
        self.wait(lambda: self.last("selection"))
        return self


@pytest.fixture(scope="module")
def opened():
    """One page for the tests that do not mind what was done on it before."""
    page = Page().start()
    yield page
    page.session.close()


def test_a_page_gets_its_model_tokens_and_panels(opened):
    run = next(message["run"] for message in opened.sent if "run" in message)
    assert run["weights"] == "random, seed 0" and "".join(run["tokens"]) == "In·the·beginning·God"
    assert run["kinds"] == ["linear_attn"] * 3 + ["self_attn"] and opened.last("selection")["token"] == len(run["tokens"]) - 1
    assert {"router_grid", "router_load", "router_margin"} <= set(opened.cards)
    assert opened.last("compare")["rows"][0]["before"] > 0


@pytest.mark.parametrize("named, opens", [
    (HYBRID, True), ("specimen:llama", True), ("/somewhere/model.gguf", False), ("someone/some-checkpoint", False),
    ("specimen:../llama", False), (["specimen:llama"], False),
])
def test_an_address_loads_nothing_that_is_not_shipped_or_open_already(named, opens):
    asked = []

    def loading(source):
        asked.append(source)
        return load(HYBRID)

    page = Page(loads=loading)
    page.say(do="hello", wish={"model": named, "block": 3, "prompt": "In the beginning"})
    if not opens:
        assert page.session.job is None and not asked and page.last("run") is None
        assert page.last("hello")["source"] == str(named) and page.last("hello")["prompt"] == "In the beginning"
        assert str(named) in page.last("notice") and "press Run" in page.last("notice")
        page.say(do="run", model=str(named), prompt="In the beginning")
    page.wait(lambda: page.last("selection"))
    assert asked == [str(named)] and page.last("selection")["block"] == 3 and page.last("notice") is None
    page.say(do="hello", wish={"model": named})
    assert page.session.job is not None, "a model that is loaded opens at once"
    page.session.close()


def test_selections_are_answered_and_kept_in_range(opened):
    opened.say(do="select", block=99, token=99, head=99, tab="attention", seq=101)
    opened.answered(101)
    assert opened.last("selection") | {"part": ""} == {
        "block": 3, "token": len(opened.session.run.tokens) - 1, "head": 8, "pattern": "probabilities", "router": "scores", "part": "",
    }
    opened.say(do="select", block="nonsense", pattern="<b>", tab="nowhere", seq=102)
    opened.answered(102)
    assert opened.last("selection")["block"] == 3 and opened.last("tab") == "attention"


def test_messages_that_make_no_sense_are_ignored(opened):
    for message in (None, "hello", {}, {"do": None}, {"do": "__init__"}, {"do": "select", "block": [1]}):
        opened.session.receive(message)


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
    assert dict(part["facts"])["shape"] == f"1 × {len(opened.session.run.tokens)} × 10" and 'rec["decays", 0]' in part["code"]
    opened.say(do="select", part="expert_outputs", seq=302)
    opened.wait(lambda: (opened.last("part") or {}).get("name") == "expert_outputs" and opened.last("part")["refusal"] is None)
    opened.say(do="select", part="lm_head_output", seq=305)
    opened.wait(lambda: (opened.last("part") or {}).get("name") == "lm_head_output" and opened.last("part")["refusal"] is None)
    opened.say(do="select", part="states", block=3, seq=306)
    opened.answered(306)
    assert "no recurrent state" in opened.last("part")["refusal"] and opened.session.job is None
    opened.say(do="select", block=0, part="head_gate", seq=303)
    opened.answered(303)
    assert "recurrent" in opened.last("part")["refusal"] or "softmax" in opened.last("part")["refusal"]
    opened.say(do="select", part="router_logit", seq=304)
    opened.answered(304)
    assert "router_logits" in opened.last("part")["refusal"], "nearest names are offered"


def test_an_intervention_changes_the_run_and_switching_it_off_takes_it_back():
    page = Page().start()
    rows = [{"kind": "expert", "layer": 0, "index": 1, "on": True}, {"kind": "head", "layer": 3, "index": 2, "on": True}]
    page.say(do="intervene", list=rows)
    kl = page.wait(lambda: (page.last("compare") or {}).get("kl"))
    assert float(kl["largest"]) > 0 and page.last("compare")["changed"] == ["ablate expert 1 of block 0", "zero head 2 of block 3"]
    assert abs(page.last("compare")["rows"][0]["difference"]) > 0
    page.say(do="shown", shown="after", seq=None)
    page.wait(lambda: page.last("shown") == "after")
    page.say(do="intervene", list=[row | {"on": False} for row in rows])
    page.wait(lambda: page.last("shown") == "before" and "kl" not in page.last("compare"))


@pytest.mark.parametrize("row, sentence", [
    ({"kind": "expert", "layer": 0, "index": 99}, "experts 0 to 11"), ({"kind": "head", "layer": 3, "index": 9}, "heads 0 to 8"),
    ({"kind": "head", "layer": 77, "index": 0}, "no block 77"), ({"kind": "bomb", "layer": 0, "index": 0}, "There is no"),
])
def test_an_impossible_intervention_is_refused_in_a_sentence(opened, row, sentence):
    opened.say(do="intervene", list=[row | {"on": True}])
    assert sentence in opened.last("notice")


@pytest.mark.parametrize("model, prompt, sentence", [
    (HYBRID, "", "The prompt is empty"), (HYBRID, " \n ", "The prompt is empty"), (HYBRID, "a " * 9000, "takes at most"),
    ("specimen:qwen", "a", "qwen3"), ("/no/such/folder", "a", "/no/such/folder"), ("", "a", "."),
])
def test_what_cannot_be_run_is_said_on_the_page(opened, model, prompt, sentence):
    before = len(opened.sent)
    opened.say(do="run", model=model, prompt=prompt)
    notice = opened.wait(lambda: next((m["notice"] for m in opened.sent[before:] if m.get("notice")), None))
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


def test_pages_are_counted():
    desk = Desk(2)
    assert desk.enter("a") and desk.enter("b") and not desk.enter("c")
    desk.leave("a")
    assert desk.enter("c")


def test_a_page_nobody_looks_at_any_more_keeps_nobody_out():
    desk, left = Desk(1), threading.Event()
    assert desk.enter("a", left.is_set) and not desk.enter("b")
    left.set()
    assert desk.enter("b", left.is_set)


# -- the server and the command line --------------------------------------------------


@contextmanager
def taken_port():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_origins_are_exact():
    assert origins("127.0.0.1", 5006) == ["127.0.0.1:5006", "localhost:5006"]
    assert origins("192.0.2.7", 80) == ["192.0.2.7:80"]
    assert all("*" not in origin for origin in origins("0.0.0.0", 5006))
    assert "[::1]:5006" in origins("::1", 5006)


def test_a_busy_port_is_said_before_a_model_is_loaded(capsys):
    with taken_port() as port:
        with pytest.raises(BusyPort):
            free_port("127.0.0.1", port)
        assert main([HYBRID, "--port", str(port), "--no-browser"]) == 2
    said = capsys.readouterr().err
    assert f"Port {port} of 127.0.0.1 is busy" in said and "Loading" not in said and "Traceback" not in said


@pytest.mark.parametrize("arguments, sentence", [
    ([HYBRID, "--prompt", ""], "The prompt is empty"),
    ([HYBRID, "--prompt", "a " * 9000], "takes at most"),
    (["specimen:quen3_next"], "qwen3_next"),
    (["/no/such/model.gguf"], "/no/such/model.gguf"),
    ([HYBRID, "--port", "70000"], "no port 70000"),
    ([HYBRID, "--host", "192.0.2.7"], "not an address of this machine"),
])
def test_what_cannot_be_served_is_one_sentence_and_2(arguments, sentence, capsys):
    port = [] if "--port" in arguments else ["--port", "0"]
    assert main([*arguments, *port, "--no-browser"]) == 2
    said = [line for line in capsys.readouterr().err.strip().splitlines() if not line.startswith("Loading")]
    assert len(said) == 1 and sentence in said[0]


def websocket_status(address: tuple[str, int], origin: str) -> int:
    """How the server answers a websocket from a page of ``origin``."""
    line = http.client.HTTPConnection(*address, timeout=30)
    line.request("GET", "/ws", headers={
        "Host": f"{address[0]}:{address[1]}", "Origin": origin, "Upgrade": "websocket", "Connection": "Upgrade",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Protocol": "bokeh, token",
    })
    status = line.getresponse().status
    line.close()
    return status


def test_a_page_of_another_origin_gets_no_websocket(explorer):
    address = explorer.host, explorer.port
    assert websocket_status(address, "http://evil.example") == 403
    assert websocket_status(address, f"http://127.0.0.1:{explorer.port + 1}") == 403


def page_of(explorer) -> str:
    with urllib.request.urlopen(explorer.at(), timeout=60) as answer:
        return answer.read().decode()


def test_a_page_too_many_says_so(explorer):
    with ThreadPoolExecutor(MOST_SESSIONS + 1) as visitors:
        texts = list(visitors.map(lambda _: page_of(explorer), range(MOST_SESSIONS + 1)))
    full = [text for text in texts if "data-full" in text]
    assert len(full) == 1 and f"{MOST_SESSIONS} pages open" in full[0] and "data-run-form" not in full[0]
    assert all("data-run-form" in text for text in texts if text is not full[0])
