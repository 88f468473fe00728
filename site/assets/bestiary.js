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

  // <family-index>: cards that have every chosen trait and a value whose name holds the text.
  customElements.define("family-index", class extends HTMLElement {
    connectedCallback() {
      this.form = this.querySelector("form");
      this.input = this.querySelector("input");
      this.traits = [...this.querySelectorAll("[data-trait]")];
      this.cards = [...this.querySelectorAll(".card")];
      this.classList.add("alive");
      for (const chip of this.traits) {
        chip.addEventListener("click", () => {
          chip.setAttribute("aria-pressed", String(chip.getAttribute("aria-pressed") !== "true"));
          this.apply();
        });
      }
      this.input.addEventListener("input", () => this.apply());
      this.form.addEventListener("submit", (event) => event.preventDefault());
      this.form.addEventListener("reset", () => {
        for (const chip of this.traits) chip.setAttribute("aria-pressed", "false");
        this.input.value = "";
        this.apply();
      });
      const asked = address().searchParams;
      this.input.value = asked.get("value") || "";
      const wanted = (asked.get("traits") || "").split(" ");
      for (const chip of this.traits) if (wanted.includes(chip.dataset.trait)) chip.setAttribute("aria-pressed", "true");
      if (this.input.value || wanted[0]) this.apply();
    }

    apply() {
      const wanted = this.traits.filter((chip) => chip.getAttribute("aria-pressed") === "true").map((chip) => chip.dataset.trait);
      const text = this.input.value.trim().toLowerCase();
      let left = 0;
      for (const card of this.cards) {
        const has = card.dataset.traits.split(" ");
        const found = text ? card.dataset.values.trim().split(/\s+/).filter((name) => name.toLowerCase().includes(text)) : [];
        const fits = wanted.every((trait) => has.includes(trait)) && (!text || found.length > 0);
        card.hidden = !fits;
        left += fits;
        this.say(card, fits ? found : []);
      }
      this.querySelector(".tally").textContent = `${left} of ${this.cards.length} families`;
      this.querySelector(".none").hidden = left > 0;
      remember({ traits: wanted.join(" "), value: text });
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
