// The pages' own elements: checkpoint selector, filters of the index, copyable commands.
// Custom elements, so that they come alive wherever and whenever their HTML arrives.
(() => {
  "use strict";
  if (customElements.get("checkpoint-select")) return;

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
      // A page from a file may not be allowed to: the choice then lasts as long as the page.
    }
  }

  // <checkpoint-select>: shows the parts of the chosen checkpoint, keeps the choice in the address, tells the diagram.
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
        // The diagram further down may not be alive yet.
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

  // <family-index>: cards that have every chosen trait, every chosen value, and a value whose name holds the text.
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
      for (const event of ["focusin", "pointerover"]) this.form.addEventListener(event, (happened) => this.tell(happened.target));
      this.input.addEventListener("input", () => this.apply());
      this.form.addEventListener("submit", (event) => event.preventDefault());
      this.form.addEventListener("reset", () => {
        for (const chip of this.chips) chip.setAttribute("aria-pressed", "false");
        this.input.value = "";
        this.apply();
      });
      // Where filters stand above the families, they leave room for them.
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
        this.say(entry.card, fits ? [...new Set([...picked, ...texts])] : []);
        for (const trait of entry.card.querySelectorAll("[data-of]")) trait.classList.toggle("on", traits.has(trait.dataset.of));
        return fits;
      });
      // How many would be left: a filter that leaves none is still there, and says so.
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

    // What a trait means, for whoever has no pointer to rest on it; it stays until another is reached.
    tell(target) {
      const about = this.querySelector(".about");
      const chip = target.closest("[data-trait]");
      if (about && chip) about.textContent = `${chip.firstChild.textContent.trim()}: ${chip.title}.`;
    }

    // The values that were found, each a link to its row where there is a page.
    say(card, found) {
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
          // No clipboard here: leave the text selected instead.
          getSelection().selectAllChildren(code);
          button.textContent = "selected";
        }
        setTimeout(() => { button.textContent = "copy"; }, 1500);
      });
      this.append(button);
    }
  });
})();
