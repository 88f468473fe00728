// The pages' own elements: checkpoint selector, names or numbers in types, filters of the index, copyable commands.
// Custom elements, so that they work in HTML that arrives after the script ran.
(() => {
  "use strict";
  if (customElements.get("checkpoint-select")) return;

  // The groups of elements that arrow keys move through, the elements, and the moves.
  const STEP_GROUPS = ".members, ul.entries, table.cached, .plots svg";
  const STEPS = ".signature i, .point";
  const MOVES = {
    ArrowRight: (at) => at + 1, ArrowDown: (at) => at + 1, ArrowLeft: (at) => at - 1, ArrowUp: (at) => at - 1,
    Home: () => 0, End: (at, count) => count - 1,
  };

  const address = () => new URL(location.href);

  function remember(changes) {
    const to = address();
    for (const [key, value] of Object.entries(changes)) {
      if (value) to.searchParams.set(key, value);
      else to.searchParams.delete(key);
    }
    try {
      history.replaceState(history.state, "", to);
    } catch {
      // A page opened from a file may not change its address: the choice then lasts as long as the page.
    }
  }

  // <checkpoint-select>: shows the parts of the chosen checkpoint, keeps the choice in the address, notifies the diagram.
  customElements.define("checkpoint-select", class extends HTMLElement {
    connectedCallback() {
      this.select = this.querySelector("select");
      this.classList.toggle("single", this.select.options.length < 2);
      this.classList.add("alive");
      this.select.addEventListener("change", () => {
        this.apply(this.select.value);
        remember({ checkpoint: this.select.selectedIndex ? this.select.value : "" });
      });
      const wanted = address().searchParams.get("checkpoint");
      const known = [...this.select.options].some((option) => option.value === wanted);
      if (known) {
        this.select.value = wanted;
        // The diagram further down may not be defined yet.
        const go = () => this.apply(wanted);
        if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", go, { once: true });
        else go();
      }
    }

    apply(id) {
      for (const part of document.querySelectorAll("[data-checkpoint]")) {
        part.hidden = !part.dataset.checkpoint.split(" ").includes(id);
      }
      document.dispatchEvent(new CustomEvent("checkpoint-change", { detail: { id } }));
    }
  });

  // <typed-notation>: writes names or numbers in all types and formulas; hover and focus show the other.
  // The numbers come from the visible tables of generics, so they are the chosen checkpoint's.
  customElements.define("typed-notation", class extends HTMLElement {
    connectedCallback() {
      this.buttons = [...this.querySelectorAll("button")];
      this.classList.add("alive");
      this.buttons.forEach((button, at) => button.addEventListener("click", () => this.write(at === 1)));
      this.tooltip = document.createElement("span");
      this.tooltip.className = "tip-text axis-tooltip";
      this.tooltip.id = "axis-tooltip";
      this.tooltip.setAttribute("role", "tooltip");
      document.body.append(this.tooltip);
      const start = () => {
        this.typed();
        for (const group of document.querySelectorAll(STEP_GROUPS)) this.setTabStop(group.querySelector(STEPS), group);
      };
      if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start, { once: true });
      else start();
      this.listeners = new AbortController();
      const on = (name, act) => document.addEventListener(name, act, { signal: this.listeners.signal });
      const over = (event) => this.describe(event.target.closest?.(".signature i, .formula"));
      on("checkpoint-change", () => this.write(this.numbers));
      on("pointerover", over);
      on("focusin", over);
      on("focusout", () => this.describe(null));
      on("keydown", (event) => this.step(event));
    }

    disconnectedCallback() {
      this.listeners.abort();
      this.tooltip.remove();
    }

    // All axes and formulas, each with its names stored; a checkpoint may be chosen before the page is complete.
    typed() {
      if (!this.parts) {
        this.parts = [...document.querySelectorAll(".signature i, .formula")];
        for (const part of this.parts) part.dataset.name = part.textContent;
      }
      return this.parts;
    }

    numbersByName() {
      const found = new Map();
      for (const row of document.querySelectorAll(".generics tbody tr")) {
        const number = row.cells[1].textContent;
        if (number && !row.closest("[hidden]")) found.set(row.cells[0].textContent, number);
      }
      return found;
    }

    // A text with numbers in place of its names.
    filled(name, known) {
      return name.replace(/[A-Za-z]\w*/g, (word) => known.get(word) ?? word);
    }

    write(numbers = false) {
      const known = this.numbersByName();
      this.numbers = numbers;
      this.buttons.forEach((button, at) => button.setAttribute("aria-pressed", String((at === 1) === numbers)));
      for (const part of this.typed()) {
        const name = part.dataset.name;
        part.textContent = numbers ? known.get(name) ?? this.filled(name, known) : name;
      }
    }

    describe(part) {
      this.at?.removeAttribute("aria-describedby");
      this.at = part;
      this.tooltip.style.display = part ? "block" : "none";
      if (!part) return;
      this.tooltip.textContent = part.matches("i") ? this.describeAxis(part.dataset.name) : this.otherNotation(part.dataset.name);
      const box = part.getBoundingClientRect();
      this.tooltip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - this.tooltip.offsetWidth - 8))}px`;
      const below = box.bottom + 4;
      this.tooltip.style.top = `${below + this.tooltip.offsetHeight < innerHeight ? below : Math.max(4, box.top - 4 - this.tooltip.offsetHeight)}px`;
      if (part === document.activeElement) part.setAttribute("aria-describedby", this.tooltip.id);
    }

    // An axis's name, the same in numbers, and the result; its meaning where the checkpoint has no number for it.
    describeAxis(name) {
      const known = this.numbersByName();
      const steps = [...new Set([name, this.filled(name, known), known.get(name)])].filter(Boolean);
      if (steps.length > 1) return steps.join(" = ");
      const row = [...document.querySelectorAll(".generics tbody tr")].find((one) => one.cells[0].textContent === name);
      return `${name}: ${row?.cells[2]?.textContent ?? "a size of this class alone"}`;
    }

    // A formula in the notation that the page does not show.
    otherNotation(name) {
      return `= ${this.numbers ? name : this.filled(name, this.numbersByName())}`;
    }

    // Each group has one tab stop; arrow keys move from there.
    setTabStop(part, group) {
      for (const other of group.querySelectorAll(STEPS)) other.setAttribute("tabindex", other === part ? "0" : "-1");
    }

    step(event) {
      if (event.key === "Escape") this.describe(null);
      const group = event.target.closest?.(STEP_GROUPS);
      if (!group || !event.target.matches(STEPS) || !(event.key in MOVES)) return;
      event.preventDefault();
      const steps = [...group.querySelectorAll(STEPS)].filter((part) => part.checkVisibility());
      const to = steps[Math.max(0, Math.min(steps.length - 1, MOVES[event.key](steps.indexOf(event.target), steps.length)))];
      this.setTabStop(to, group);
      to.focus();
    }
  });

  // <family-index>: shows the cards that have every chosen trait and value, and a value whose name contains the text.
  customElements.define("family-index", class extends HTMLElement {
    connectedCallback() {
      this.form = this.querySelector("form");
      this.input = this.querySelector("input");
      this.chips = [...this.querySelectorAll("[data-trait], [data-name]")];
      this.groups = [...this.querySelectorAll("details.group")];
      this.cards = [...this.querySelectorAll(".card")].map((card) => ({
        card,
        traits: new Set(card.dataset.traits.split(" ")),
        values: card.dataset.values.trim().split(/\s+/),
        names: new Set(card.dataset.values.trim().split(/\s+/).map((full) => full.slice(full.lastIndexOf(".") + 1))),
      }));
      this.classList.add("alive");
      for (const chip of this.chips) {
        chip.addEventListener("click", () => {
          chip.setAttribute("aria-pressed", String(chip.getAttribute("aria-pressed") !== "true"));
          this.apply();
        });
      }
      for (const event of ["focusin", "pointerover"]) this.form.addEventListener(event, (happened) => this.describe(happened.target));
      this.input.addEventListener("input", () => this.apply());
      this.form.addEventListener("submit", (event) => event.preventDefault());
      this.form.addEventListener("reset", () => {
        for (const chip of this.chips) chip.setAttribute("aria-pressed", "false");
        this.input.value = "";
        this.apply();
      });
      // On narrow screens the filters are above the families: close them.
      if (matchMedia("(max-width: 60em)").matches) for (const group of this.groups) group.open = false;
      const asked = address().searchParams;
      this.input.value = asked.get("value") || "";
      const wanted = { trait: new Set((asked.get("traits") || "").split(" ")), name: new Set((asked.get("values") || "").split(" ")) };
      for (const chip of this.chips) {
        if (wanted.trait.has(chip.dataset.trait) || wanted.name.has(chip.dataset.name)) {
          chip.setAttribute("aria-pressed", "true");
          const group = chip.closest("details");
          if (group) group.open = true;
        }
      }
      if (this.input.value || this.chosen().length) this.apply();
    }

    chosen() {
      return this.chips.filter((chip) => chip.getAttribute("aria-pressed") === "true");
    }

    apply() {
      const chosen = this.chosen();
      const has = (entry, chip) => (chip.dataset.trait ? entry.traits.has(chip.dataset.trait) : entry.names.has(chip.dataset.name));
      const text = this.input.value.trim().toLowerCase();
      const names = new Set(chosen.map((chip) => chip.dataset.name));
      const traits = new Set(chosen.map((chip) => chip.dataset.trait));
      const left = this.cards.filter((entry) => {
        const texts = text ? entry.values.filter((name) => name.toLowerCase().includes(text)) : [];
        const fits = chosen.every((chip) => has(entry, chip)) && (!text || texts.length > 0);
        entry.card.hidden = !fits;
        const picked = entry.values.filter((full) => names.has(full.slice(full.lastIndexOf(".") + 1)));
        this.list(entry.card, fits ? [...new Set([...picked, ...texts])] : []);
        for (const trait of entry.card.querySelectorAll("[data-of]")) trait.classList.toggle("on", traits.has(trait.dataset.of));
        return fits;
      });
      // Each filter shows how many families it would leave.
      for (const chip of this.chips) {
        const count = left.filter((entry) => has(entry, chip)).length;
        const shown = chip.querySelector("small");
        if (shown) shown.textContent = count;
        chip.classList.toggle("empty", count === 0);
      }
      for (const group of this.groups) {
        const count = chosen.filter((chip) => group.contains(chip)).length;
        const shown = group.querySelector(".chosen");
        shown.hidden = count === 0;
        shown.textContent = `${count} chosen`;
      }
      this.querySelector(".tally").textContent = `${left.length} of ${this.cards.length} families`;
      this.querySelector(".none").hidden = left.length > 0;
      const listed = (kind) => chosen.map((chip) => chip.dataset[kind]).filter(Boolean).join(" ");
      remember({ traits: listed("trait"), values: listed("name"), value: text });
    }

    // Shows the meaning of the trait under the pointer or in focus, until another one is.
    describe(target) {
      const about = this.querySelector(".about");
      const chip = target.closest("[data-trait]");
      if (about && chip) about.textContent = `${chip.firstChild.textContent.trim()}: ${chip.title}.`;
    }

    // Lists the values that matched, each a link to its row where there is a page.
    list(card, found) {
      const line = card.querySelector(".found");
      line.hidden = found.length === 0;
      line.replaceChildren();
      for (const full of found.slice(0, 6)) {
        const cut = full.lastIndexOf(".");
        const code = document.createElement("code");
        code.textContent = full;
        if (!card.dataset.page) {
          line.append(code, " ");
          continue;
        }
        const link = document.createElement("a");
        link.href = `${card.dataset.page}#value-${full.slice(0, cut)}-${full.slice(cut + 1)}`;
        link.append(code);
        line.append(link, " ");
      }
      if (found.length > 6) line.append(`and ${found.length - 6} more`);
    }
  });

  // <copy-code>: a command with a button that copies it.
  customElements.define("copy-code", class extends HTMLElement {
    connectedCallback() {
      if (this.querySelector("button")) return;
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = "copy";
      button.addEventListener("click", async () => {
        const code = this.querySelector("code");
        try {
          await navigator.clipboard.writeText(code.textContent);
          button.textContent = "copied";
        } catch {
          // Without clipboard access the text is selected instead.
          getSelection().selectAllChildren(code);
          button.textContent = "selected";
        }
        setTimeout(() => { button.textContent = "copy"; }, 1500);
      });
      this.append(button);
    }
  });
})();
