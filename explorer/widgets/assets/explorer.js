// The explorer's page: sends small messages to the server, shows what comes back.
//
// One request is on its way at a time; while it is, only the newest change is remembered.
// When what was asked for is on the screen, <body> says so: data-drawn is the number
// of the last request that is drawn.

import {
  $, $$, drawAttention, drawCard, drawCompare, drawPart, drawRouter, drawStrip, drawSwitches,
  make, mergeRefusals, options, selectToken, setText, showReadout,
} from "./explorer-view.js";

const PATH = "path…";
const state = { run: null, tokens: [], selection: {}, tab: "router", interventions: [], shown: "before" };
let model = null;
let lastSeq = 0, inFlight = null, waiting = null;  // the changes requested, and those to request next

// -- talking to the server -----------------------------------------------------

function send(message) { model?.send_msg(message); }

// Ask for another selection; the page answers for what it can on its own at once.
function select(changes) {
  if (!state.run) return;
  waiting = { ...waiting, ...changes };
  state.selection = { ...state.selection, ...changes };
  if (!inFlight) request();
}

function request() {
  lastSeq += 1;
  [inFlight, waiting] = [waiting, null];
  send({ do: "select", ...inFlight, seq: lastSeq });
}

function answered(seq) {
  if (!inFlight && waiting) request();
  painted(() => { document.body.dataset.drawn = seq ?? document.body.dataset.drawn ?? 0; });
}

// Two frames on, the browser has painted what was just changed.
function painted(then) { requestAnimationFrame(() => requestAnimationFrame(then)); }

const HANDLERS = {
  hello(message) {
    options($("model"), [...message.models.map((one) => [one.source, one.name]), [PATH, PATH]]);
    setModel(message.source);
    $("prompt").value = message.prompt ?? "";
  },
  job(message) {
    $("job").hidden = !message;
    $("cancel").hidden = !message;
    state.busy = Boolean(message);
    if (!message) state.asked = null;
    showPicked();
    if (!message) return;
    $("job-title").textContent = message.title;
    const bar = $("progress");
    if (message.share === null) bar.removeAttribute("value"); else bar.value = message.share;
  },
  notice(text) { setText($("notice"), text); },
  run(message) {
    state.run = message;
    state.tokens = message.tokens;
    setModel(message.source);
    $("prompt").value = message.prompt;
    $("label").textContent = message.label;
    const chip = $("weights");
    setText(chip, `weights: ${message.weights}`);
    chip.classList.toggle("random", message.weights.startsWith("random"));
    drawStrip(message.tokens);
    $("empty").hidden = true;
    // Without a router there is no expert to ablate.
    const [expert] = $("kind").options;
    expert.disabled = message.experts.every((count) => !count);
    if (expert.disabled) $("kind").value = "head";
    options($("layer"), message.mixers.map((mixers, layer) => [layer, layer]));
    fillIndex();
    drawStatus();
    sizeDiagram();
  },
  diagram(message) {
    const at = $("diagram");
    if (!message.html) { at.replaceChildren(make("p", "empty", message.reason)); return; }
    if (at.dataset.key === message.key) return;
    at.dataset.key = message.key;
    at.innerHTML = message.html;  // written and escaped by the server's diagram, from facts
    sizeDiagram();
  },
  interventions(list) { state.interventions = list; drawSwitches(list); },
  shown(which) {
    state.shown = which;
    for (const one of $$("show")) one.setAttribute("aria-pressed", String(one.dataset.show === which));
  },
  tab(tab) { state.tab = tab; showTab(); },
  selection(message) {
    const moved = message.block !== state.block;
    // What was changed meanwhile stays; the answer to it is on its way.
    state.selection = { ...message, ...inFlight, ...waiting };
    state.block = message.block;
    selectToken(state.selection.token);
    syncDiagram();
    mark();
    for (const one of $$("head")) {
      const count = mostHeads(message.block);
      if (one.options.length !== count) options(one, [...Array(count).keys()].map((head) => [head, head]));
      one.value = message.head;
    }
    for (const one of $$("choice")) one.value = message[one.dataset.choice];
    if (moved) { $("layer").value = message.block; fillIndex(); }
    saveToAddress();
  },
  cards(message) { for (const [name, one] of Object.entries(message)) drawCard(name, one); mergeRefusals($$("panel")); },
  compare(message) {
    $("shown").hidden = !message.kl;
    drawCompare(message, state.selection, state.tokens);
  },
  router(message) { drawRouter(message, state.selection, state.tokens); },
  attention(message) { drawAttention(message, state.selection, state.tokens); },
  part(message) { drawPart(message); },
  marks(message) { state.marks = message; mark(); },
  // As many pages are open as may be.
  page_limit(text) {
    const notice = make("p", "notice", text), main = make("main");
    notice.setAttribute("role", "alert");
    notice.dataset.pageLimit = "";
    main.append(notice);
    document.querySelector(".page")?.replaceWith(main);
  },
  marked(seq) { painted(() => { document.body.dataset.marked = seq; }); },
  status(message) { state.status = message; drawStatus(); },
};
// Messages are handled in this order: what follows the selection is drawn after it.
const ORDER = ["page_limit", "hello", "job", "notice", "run", "diagram", "interventions", "shown", "tab", "selection", "cards", "compare", "router", "attention", "part", "marks", "marked", "status"];

function receive(event) {
  const message = event.data ?? event;
  if ("selection" in message && message.seq === lastSeq) inFlight = null;
  for (const key of ORDER) if (key in message) HANDLERS[key](message[key]);
  if ("selection" in message && !message.selection.part) drawPart(null);
  if ("selection" in message) answered(message.seq);
}

// -- what the page decides on its own -------------------------------------------

function setModel(source) {
  const pick = $("model");
  const known = [...pick.options].some((one) => one.value === source);
  pick.value = known ? source : PATH;
  if (!known) $("path").value = source;
  $("path-label").hidden = known;
  showPicked();
}

// A picked model is not shown until it is loaded: tell the reader.
function showPicked() {
  const waits = Boolean(state.run) && source() !== (state.asked ?? state.run.source);
  setText($("picked"), waits ? (source() ? "Picked, not loaded yet: press Load and run." : "Give a path or an id, then press Load and run.") : "");
  $("run").textContent = state.busy ? "Run instead" : waits ? "Load and run" : "Run";
}

function source() { return $("model").value === PATH ? $("path").value.trim() : $("model").value; }

// Where a block has two mixers side by side, the second's heads and values go by its name.
function seconds(block) { return state.run?.mixers[block]?.slice(1) ?? []; }

function mostHeads(block) { return Math.max(0, ...Object.values(state.run.heads[block])); }

function partKey({ name, host }) {
  return host === "shared_experts" || seconds(state.selection.block).includes(host) ? `${host}.${name}` : name;
}

const diagram = () => $("diagram").querySelector("block-diagram");

// Where panels lie below the diagram, what a click there led to is out of view: go there, and back.
function reveal(node, block) {
  const { top, bottom } = node.getBoundingClientRect();
  if (bottom < innerHeight / 4 || top > innerHeight / 2) node.scrollIntoView({ block });
}

// Move the diagram to the selection; the events it then sends change nothing (see listen).
function syncDiagram() {
  const drawn = diagram(), { block, part } = state.selection;
  if (!drawn) return;
  if (drawn.layer !== block) drawn.layer = block;
  if ((drawn.pinned ? partKey(drawn.pinned) : "") === (part ?? "")) return;
  const [host, name] = part.includes(".") ? part.split(".") : [undefined, part];
  drawn.select(name || null, host);
}

// Types that are written for a call are written for this run's.
function sizeDiagram() {
  const drawn = diagram();
  if (drawn && state.tokens.length) drawn.call = { B: 1, S: state.tokens.length };
}

// Live marks belong to one block: they wait until the diagram shows it.
function mark() {
  const drawn = diagram();
  if (drawn && state.marks?.block === drawn.layer) drawn.setMarks(state.marks);
}

function showTab() {
  for (const one of $$("tab")) {
    const on = one.dataset.tab === state.tab;
    one.setAttribute("aria-selected", String(on));
    one.tabIndex = on ? 0 : -1;
  }
  for (const one of $$("panel")) one.hidden = one.dataset.panel !== state.tab;
}

function fillIndex() {
  if (!state.run) return;
  const layer = Number($("layer").value || 0), kind = $("kind").value;
  const count = kind === "expert" ? state.run.experts[layer] : Object.values(state.run.heads[layer])[0] ?? 0;
  $("index-word").textContent = kind;
  options($("index"), [...Array(count).keys()].map((one) => [one, one]));
  $("index").disabled = !count;
}

function intervene(list) { send({ do: "intervene", list }); }
function addIntervention(kind, layer, index, host = "") {
  const same = (row) => row.kind === kind && row.layer === layer && row.index === index && row.host === host;
  intervene([...state.interventions.filter((row) => !same(row)), { kind, layer, index, host, on: true }]);
}

function drawStatus() {
  const parts = [...(state.run ? [`weights: ${state.run.weights}`] : []), ...(state.run?.status ?? []), ...(state.status ?? [])];
  $("status").replaceChildren(...parts.map((text) => make("span", "", text)));
}

// The whole view in the address, so that a link shows the same. A long prompt goes behind the #, which no server sees or limits.
function saveToAddress() {
  const { block, token, head, part } = state.selection, { source: from, prompt } = state.run;
  const view = { model: from, prompt, block, token, head, tab: state.tab, ...(part ? { part } : {}) };
  const long = prompt.length > 1500;
  if (long) delete view.prompt;
  history.replaceState(null, "", `?${new URLSearchParams(view)}${long ? `#${new URLSearchParams({ prompt })}` : ""}`);
}

function viewInAddress() {
  return { ...Object.fromEntries(new URLSearchParams(location.search)), ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };
}

// -- events ---------------------------------------------------------------------

function theme(to) {
  document.documentElement.dataset.theme = to;
  const button = $("theme-button");
  button.textContent = to === "dark" ? "light" : "dark";
  button.setAttribute("aria-pressed", String(to === "dark"));
  send({ do: "theme", theme: to });
}

function listen() {
  document.addEventListener("bestiary-point", (event) => showReadout(event.detail, state.tokens));
  $("run-form").addEventListener("submit", (event) => {
    event.preventDefault();
    state.asked = source();
    showPicked();
    send({ do: "run", model: state.asked, prompt: $("prompt").value });
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("run-form").requestSubmit();
  });
  $("model").addEventListener("change", () => {
    $("path-label").hidden = $("model").value !== PATH;
    showPicked();
  });
  $("path").addEventListener("input", showPicked);
  $("cancel").addEventListener("click", () => send({ do: "cancel" }));
  $("theme-button").addEventListener("click", () => {
    const to = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("bestiary-theme", to); } catch { /* storage may be off */ }
    theme(to);
  });
  $("keys-button").addEventListener("click", () => $("keys").showModal());
  $("strip").addEventListener("click", (event) => {
    const at = event.target.closest("[data-token]");
    if (at) select({ token: Number(at.dataset.token) });
  });
  for (const one of $$("tab")) one.addEventListener("click", () => changeTab(one.dataset.tab));
  for (const one of $$("choice")) one.addEventListener("change", () => select({ [one.dataset.choice]: one.value }));
  for (const one of $$("head")) one.addEventListener("change", () => select({ head: Number(one.value) }));
  for (const one of $$("zero-head")) one.addEventListener("click", () => {
    const { block, head } = state.selection, inState = one.closest("[data-panel]").dataset.panel === "state";
    addIntervention("head", block, head, inState ? seconds(block)[0] : "");
  });
  for (const one of $$("show")) one.addEventListener("click", () => send({ do: "shown", shown: one.dataset.show, seq: null }));
  $("kind").addEventListener("change", fillIndex);
  $("layer").addEventListener("change", fillIndex);
  $("add-form").addEventListener("submit", (event) => {
    event.preventDefault();
    addIntervention($("kind").value, Number($("layer").value), Number($("index").value));
  });
  document.addEventListener("block-change", ({ detail }) => { if (detail.layer !== state.selection.block) select({ block: detail.layer }); });
  document.addEventListener("part-select", ({ detail }) => {
    const part = detail.pinned ? partKey(detail) : "";
    if (part === (state.selection.part ?? "")) return;
    if (part && state.tab !== "tensor") state.tabBefore = state.tab;
    changeTab(part ? "tensor" : state.tab === "tensor" ? state.tabBefore ?? "router" : state.tab, { part });
    if (part) return reveal($("panels"), "start");
    const places = diagram().querySelectorAll(`[data-value="${detail.name}"][data-host="${detail.host}"]`);
    for (const one of places) if (one.getClientRects().length) reveal(one, "center");
  });
  document.addEventListener("click", clicked);
  document.addEventListener("change", (event) => {
    const at = event.target.dataset?.switch;
    if (at !== undefined) intervene(state.interventions.map((row, place) => place === Number(at) ? { ...row, on: event.target.checked } : row));
  });
  document.addEventListener("keydown", pressed);
}

function clicked(event) {
  const at = event.target.closest?.("button");
  if (!at) return;
  if (at.dataset.ablate !== undefined) addIntervention("expert", state.selection.block, Number(at.dataset.ablate));
  else if (at.dataset.drop !== undefined) intervene(state.interventions.filter((row, place) => place !== Number(at.dataset.drop)));
  else if (at.dataset.codeButton !== undefined) showCode(at);
  else if (at.dataset.unpin !== undefined) diagram()?.select(null);
  else if (at.dataset.partCopy !== undefined) copy($("part-code").textContent, at);
  else if (at.dataset.expand !== undefined) expand(at.closest(".card"));
}

function showCode(button) {
  const pre = $("code", button.closest(".card"));
  pre.hidden = !pre.hidden;
  if (!pre.hidden) copy(pre.textContent, button);
}

function copy(text, button) {
  const was = button.textContent;
  navigator.clipboard?.writeText(text).then(
    () => { button.textContent = "copied"; setTimeout(() => { button.textContent = was === "copied" ? "code" : was; }, 1200); },
    () => {},  // the code is on the page; it can be selected by hand
  );
}

function expand(card) {
  const full = card.classList.toggle("full");
  $("expand", card).setAttribute("aria-pressed", String(full));
  $("expand", card).textContent = full ? "close" : "expand";
}

function changeTab(tab, more = {}) {
  state.tab = tab;
  showTab();
  select({ tab, ...more });
}

const MOVES = {
  ArrowLeft: () => ({ token: state.selection.token - 1 }), ArrowRight: () => ({ token: state.selection.token + 1 }),
  ArrowUp: () => ({ block: state.selection.block - 1 }), ArrowDown: () => ({ block: state.selection.block + 1 }),
  "[": () => ({ head: state.selection.head - 1 }), "]": () => ({ head: state.selection.head + 1 }),
};
const LIMITS = { token: () => state.tokens.length, block: () => state.run.mixers.length, head: () => mostHeads(state.selection.block) };

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open) return;
  if (event.key === "Escape") {
    const full = document.querySelector(".card.full");
    if (full) expand(full);
    else if (state.selection.part && !event.target.closest?.("input, textarea, select")) diagram()?.select(null);
    return;
  }
  if (event.target.closest?.("input, textarea, select")) return;
  const tabs = $$("tab").map((one) => one.dataset.tab);
  if (event.target.matches?.('[role="tab"]') && event.key.startsWith("Arrow")) {
    const step = ["ArrowLeft", "ArrowUp"].includes(event.key) ? -1 : 1;
    const next = tabs[(tabs.indexOf(state.tab) + step + tabs.length) % tabs.length];
    changeTab(next);
    document.querySelector(`[data-tab="${next}"]`).focus();
  } else if (event.key in MOVES && state.run) {
    const [[name, place]] = Object.entries(MOVES[event.key]());
    if (place < 0 || place >= LIMITS[name]()) return;
    select({ [name]: place });
    if (name === "block") syncDiagram();
    if (name === "token") {
      const inStrip = $("strip").contains(document.activeElement);
      selectToken(place);
      if (inStrip) $("strip").children[place].focus();
    }
  } else if (event.key === "?") $("keys").showModal();
  else if (tabs[Number(event.key) - 1]) changeTab(tabs[Number(event.key) - 1]);
  else return;
  event.preventDefault();
}

// -- start ------------------------------------------------------------------------

function start(bridge) {
  model = bridge;
  model.on("msg:custom", receive);
  listen();
  send({ do: "hello", theme: document.documentElement.dataset.theme, view: viewInAddress() });
  theme(document.documentElement.dataset.theme);
}

if (window.bestiaryBridge) start(window.bestiaryBridge);
else document.addEventListener("bestiary-bridge", () => start(window.bestiaryBridge), { once: true });
