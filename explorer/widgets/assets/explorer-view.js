// Shows the server's messages on the page. Text is only ever set as text: a token of
// markup is shown, never read as markup.

export const $ = (name, root = document) => root.querySelector(`[data-${name}]`);
export const $$ = (name, root = document) => [...root.querySelectorAll(`[data-${name}]`)];

export function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

export function setText(node, text) {
  node.textContent = text ?? "";
  node.hidden = !text;
}

// -- tokens ------------------------------------------------------------------

export function drawStrip(tokens) {
  $("strip").replaceChildren(...tokens.map((token, place) => {
    const one = make("button", "", token);
    one.type = "button";
    one.setAttribute("role", "option");
    one.setAttribute("aria-label", `token ${place}: ${token}`);
    one.title = `token ${place}`;
    one.dataset.token = place;
    one.tabIndex = -1;
    return one;
  }));
}

export function selectToken(place) {
  const strip = $("strip");
  for (const one of strip.querySelectorAll('[aria-selected="true"]')) {
    one.removeAttribute("aria-selected");
    one.tabIndex = -1;
  }
  const now = strip.children[place];
  if (!now) return;
  now.setAttribute("aria-selected", "true");
  now.tabIndex = 0;
  const [above, below] = [now.offsetTop - strip.offsetTop, now.offsetTop - strip.offsetTop + now.offsetHeight];
  if (above < strip.scrollTop || below > strip.scrollTop + strip.clientHeight) strip.scrollTop = above - 8;
  const left = now.offsetLeft - strip.offsetLeft;
  if (left < strip.scrollLeft || left + now.offsetWidth > strip.scrollLeft + strip.clientWidth) strip.scrollLeft = left - 40;
}

// -- cards -------------------------------------------------------------------

const cards = new Map();  // name -> the last message about it

export function drawCard(name, message) {
  const card = document.querySelector(`[data-card="${name}"]`);
  cards.set(name, message);
  card.hidden = false;
  setText($("refusal", card), message.refusal);
  const refused = Boolean(message.refusal);
  card.querySelector(".plot").hidden = refused;
  $("legend", card).hidden = refused;
  $("code-button", card).hidden = refused || !message.code;
  $("expand", card).hidden = refused;
  setText($("note", card), refused ? "" : message.note);
  if (message.title) $("title", card).textContent = message.title;
  if (refused) { $("code", card).hidden = true; return; }
  $("code", card).firstChild.textContent = message.code ?? "";
  setText($("reduction", card), message.reduction);
  const scale = $("scale", card);
  scale.hidden = !message.scale;
  if (message.scale) {
    scale.classList.toggle("signed", message.scale.signed);
    $("low", scale).textContent = message.scale.texts[0];
    $("high", scale).textContent = message.scale.texts[2];
    scale.title = message.scale.signed ? "centred on zero" : `half way: ${message.scale.texts[1]}`;
  }
  if (message.mosaic) {
    // A mosaic has the shape of its grid, and small ones are not blown up.
    const [wide, high] = message.mosaic;
    Object.assign(card.querySelector(".plot").style, { height: "auto", aspectRatio: `${wide} / ${high}`, maxWidth: `${2 * wide}px` });
  }
}

// Where all cards of a panel are refused for one reason, it is shown once.
export function mergeRefusals(panels) {
  for (const panel of panels) {
    const at = panel.querySelector(":scope > [data-panel-refusal]");
    if (!at) continue;
    const shown = [...panel.querySelectorAll("[data-card]")].filter((card) => cards.has(card.dataset.card));
    const reasons = new Set(shown.map((card) => cards.get(card.dataset.card).refusal));
    const one = shown.length > 1 && reasons.size === 1 ? [...reasons][0] : null;
    setText(at, one);
    for (const card of shown) card.hidden = Boolean(one);
  }
}

// What the pointer is on, as text beside the card's scale.
export function showReadout({ figure, inside, x, y, index }, tokens) {
  const card = document.querySelector(`[data-card="${figure}"]`);
  const message = cards.get(figure);
  if (!card || !message) return;
  const readout = $("readout", card);
  const column = Math.round(x), row = Math.round(y);
  const pointed = new Set();
  const name = (axis, place) => {
    if (!axis) return null;
    if (axis.tokens) { pointed.add(place); return `${place} ${tokens[place] ?? ""}`; }
    return axis.labels ? axis.labels[place] : `${axis.title} ${place}`;
  };
  if (!inside || !message.axes) readout.textContent = "";
  else if (message.axes.y) {
    const value = cellValue(index, message.scale);
    readout.textContent = `${name(message.axes.y, row)} → ${name(message.axes.x, column)}: ${value}`;
  } else readout.textContent = name(message.axes.x, column) ?? "";
  const strip = $("strip");
  for (const one of strip.querySelectorAll(".pointed")) one.classList.remove("pointed");
  if (inside) for (const place of pointed) strip.children[place]?.classList.add("pointed");
}

// The number behind a palette index, to the precision one byte has.
function cellValue(index, scale) {
  if (!index || !scale) return "nothing here";
  const [first, last] = scale.signed ? [128, 254] : [1, 127];
  const value = scale.low + (index - first) / (last - first) * (scale.high - scale.low);
  const beyond = scale.clipped && (index === last ? "≥" : scale.signed && index === first ? "≤" : null);
  return `${beyond || "≈"} ${Number(value.toPrecision(2))}`.replace("-", "−");
}

// -- tables ------------------------------------------------------------------

const COLUMNS = [["before_text", "before"], ["after_text", "after"], ["difference_text", "change, points"], ["logit", "logit before"], ["logit_after", "logit after"]];

function drawNext(table, compare, few) {
  const changed = compare.rows.some((row) => row.after !== undefined);
  const keys = few
    ? COLUMNS.slice(0, changed ? 3 : 1)
    : COLUMNS.filter(([key]) => changed || ["before_text", "logit"].includes(key));
  const short = { before_text: "before", after_text: "after", difference_text: "Δ pts" };
  const head = make("tr");
  head.append(make("th", "", "token"), ...keys.map(([key, label]) =>
    make("th", "", few ? (changed ? short[key] : "") : changed ? label : label.replace(" before", "").replace("before", "probability"))));
  const rows = compare.rows.slice(0, few ? 6 : undefined).map((row) => {
    const line = make("tr");
    line.append(make("td", "", row.token));
    for (const [key] of keys) {
      const cell = make("td", "", row[key]);
      if (key === "before_text" || key === "after_text") {
        cell.classList.add("bar");
        cell.style.setProperty("--share", `${100 * row[key.replace("_text", "")]}%`);
      }
      if (key === "difference_text" && row.difference_text !== "0") cell.classList.add(row.difference > 0 ? "up" : "down");
      line.append(cell);
    }
    return line;
  });
  const [thead, tbody] = [make("thead"), make("tbody")];
  thead.append(head);
  tbody.append(...rows);
  table.replaceChildren(thead, tbody);
}

function klWords(kl) {
  if (kl.at_token === null) return "The logits of this token are being computed …";
  const all = kl.mean === null ? "" : `; mean over the prompt ${kl.mean}, largest ${kl.largest} after token ${kl.where}`;
  return `KL(before ‖ after) here ${kl.at_token} nats${all}.`;
}

export function drawCompare(compare, selection, tokens) {
  const after = `after token ${selection.token}`;
  $("next-where").textContent = `${after}  ${tokens[selection.token] ?? ""}`;
  drawNext($("next"), compare, true);
  drawNext($("compare"), compare, false);
  $("compare-title").textContent = compare.kl
    ? `Next token ${after}: before and after ${compare.changed.join(", ")}` : `Next token ${after}`;
  $("compare-note").textContent = compare.kl
    ? klWords(compare.kl)
    : "Add an intervention at the left: this table then shows before, after and the difference.";
}

// -- lines of facts ------------------------------------------------------------

export function drawRouter(message, selection, tokens) {
  const at = $("router-words");
  at.replaceChildren();
  if (!message) return;
  const slots = make("p");
  slots.append(`token ${selection.token} `, make("code", "", tokens[selection.token] ?? ""), " went to ");
  for (const { expert, weight } of message.slots) {
    slots.append(make("b", "", `expert ${expert}`), ` × ${weight} `);
    const off = make("button", "quiet", "ablate");
    off.type = "button";
    off.dataset.ablate = expert;
    off.setAttribute("aria-label", `ablate expert ${expert} of block ${selection.block}`);
    slots.append(off);
  }
  const unused = message.unused_count
    ? `${message.unused_count} of ${message.count} experts unused on this prompt: ${message.unused}`
    : `all ${message.count} experts used on this prompt`;
  at.append(slots, make("p", "quiet-text", unused));
}

export function drawAttention(message, selection, tokens) {
  const at = $("attention-words");
  at.replaceChildren();
  if (!message) return;
  const line = make("p");
  line.append(`token ${selection.token} `, make("code", "", tokens[selection.token] ?? ""), " reads most: ");
  message.strongest.forEach(({ token, number }, place) => {
    line.append(place ? ", " : "", make("code", "", `${token} ${tokens[token] ?? ""}`), ` ${number}`);
  });
  at.append(line);
}

export function drawPart(message) {
  const section = $("part");
  section.hidden = !message;
  $("part-empty").hidden = Boolean(message);
  if (!message) return;
  $("part-name").textContent = message.expression ?? message.name;
  setText($("part-meaning"), message.meaning ? `${message.meaning}. ${message.layout}` : "");
  setText($("part-refusal"), message.refusal);
  const facts = (message.facts ?? []).map(([term, text]) => {
    const one = make("div");
    one.append(make("dt", "", term), make("dd", "", text));
    return one;
  });
  $("part-facts").replaceChildren(...facts);
  $("part-code").firstChild.textContent = message.code ?? "";
  $("part-code").hidden = $("part-copy").hidden = !message.code;
  const card = document.querySelector('[data-card="part"]');
  if (message.refusal) card.hidden = true;
}

export function drawSwitches(list) {
  $("switches").replaceChildren(...list.map((row, place) => {
    const item = make("li"), label = make("label"), box = make("input"), drop = make("button", "quiet", "×");
    box.type = "checkbox";
    box.checked = row.on;
    box.dataset.switch = place;
    label.append(box, row.words);
    drop.type = "button";
    drop.dataset.drop = place;
    drop.setAttribute("aria-label", `remove: ${row.words}`);
    item.append(label, drop);
    return item;
  }));
}

export function options(select, rows, chosen) {
  select.replaceChildren(...rows.map(([value, label]) => {
    const one = make("option", "", label);
    one.value = value;
    return one;
  }));
  if (chosen !== undefined) select.value = chosen;
}
