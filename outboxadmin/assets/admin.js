// The pages work without this. It refreshes what is marked data-live, every so many
// seconds, while the page is visible and until it is switched off; it says how old what
// is shown is; and it keeps a form from being sent twice.
"use strict";

(() => {
  const region = document.querySelector("[data-live]");
  const button = document.querySelector("[data-live-switch]");
  if (region && button) live(region, button);
  age();
  setInterval(age, 1000);
  document.querySelectorAll("[data-pick]").forEach(pick);
  addEventListener("pageshow", () => document.querySelectorAll("[data-pick]").forEach(picked));

  // A form in which rows are selected: one by one, a range with the shift key, or all rows of the page.
  function pick(form) {
    form.querySelector("[data-pick-all]").hidden = false;
    let last = null;
    form.addEventListener("click", (event) => {
      const boxes = [...form.querySelectorAll("tbody input")];
      const [from, to] = [boxes.indexOf(last), boxes.indexOf(event.target)].sort((a, b) => a - b);
      if (event.shiftKey && from >= 0) boxes.slice(from, to + 1).forEach((box) => { box.checked = event.target.checked; });
      if (boxes.includes(event.target)) last = event.target;
    });
    form.addEventListener("change", (event) => {
      if (event.target.closest("[data-pick-all]")) {
        form.querySelectorAll("tbody input").forEach((box) => { box.checked = event.target.checked; });
      }
      picked(form);
    });
    picked(form);
  }

  function picked(form) {
    const boxes = [...form.querySelectorAll("tbody input")];
    const n = boxes.filter((box) => box.checked).length;
    form.querySelector("[data-picked]").textContent = n ? n + (n > 1 ? " rows" : " row") + " selected" : "Select rows to act on them";
    form.querySelectorAll(".selection button").forEach((button) => { button.disabled = n === 0; });
    const all = form.querySelector("[data-pick-all] input");
    all.checked = n > 0 && n === boxes.length;
    all.indeterminate = n > 0 && n < boxes.length;
  }

  // How old what is shown is, also where it is not refreshed any more.
  function age() {
    document.querySelectorAll("[data-age]").forEach((time) => {
      // From when it came here: the clocks of browser and server may differ.
      time.cameAt ??= performance.now();
      const seconds = Math.floor((performance.now() - time.cameAt) / 1000);
      time.dataset.age = seconds < 2 ? "now" : seconds < 120 ? seconds + " s ago" : Math.floor(seconds / 60) + " min ago";
    });
  }

  document.addEventListener("submit", (event) => {
    if (event.target.method !== "post") return;
    // In the next task, or the form would not be sent at all.
    setTimeout(() => event.target.querySelectorAll("button").forEach((b) => { b.disabled = true; }));
  });
  // Empty fields of a filter stay out of the address.
  document.addEventListener("formdata", (event) => {
    if (event.target.method !== "get") return;
    [...event.formData].forEach(([name, value]) => { if (value === "") event.formData.delete(name); });
  });
  // Back from another page, a form can be sent again.
  addEventListener("pageshow", () => document.querySelectorAll("form[method=post] button").forEach((b) => { b.disabled = false; }));

  function live(region, button) {
    const pause = Number(region.dataset.live) * 1000;
    let on = sessionStorage.getItem("live") !== "off";
    let timer = 0;

    const show = (words) => {
      button.setAttribute("aria-pressed", String(on));
      button.textContent = words || (on ? "Live" : "Paused");
    };
    const plan = () => {
      clearTimeout(timer);
      if (on) timer = setTimeout(refresh, pause);
    };
    const busy = () => {
      // What has the focus, or is marked, must stay as it is.
      const marked = String(getSelection());
      return document.hidden || region.contains(document.activeElement) || (marked && region.contains(getSelection().anchorNode));
    };
    async function refresh() {
      if (!busy()) {
        try {
          const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
          if (!answer.ok) throw new Error(String(answer.status));
          const page = new DOMParser().parseFromString(await answer.text(), "text/html");
          const fresh = page.querySelector("[data-live]");
          if (fresh && on && !busy()) {
            const open = [...region.querySelectorAll("details[id][open]")].map((d) => d.id);
            const checked = [...region.querySelectorAll("[data-pick] tbody :checked")].map((box) => box.value);
            region.replaceChildren(...fresh.childNodes);
            region.querySelectorAll("[data-pick] tbody input").forEach((box) => { box.checked = checked.includes(box.value); });
            region.querySelectorAll("[data-pick]").forEach(pick);
            region.querySelectorAll("details[id]").forEach((d) => { if (open.includes(d.id)) d.open = true; });
          }
          const shown = page.querySelector(".foot time");
          if (shown) document.querySelector(".foot time").replaceWith(shown);
          show();
        } catch {
          show("No answer");
        }
      }
      plan();
    }
    button.addEventListener("click", () => {
      on = !on;
      sessionStorage.setItem("live", on ? "on" : "off");
      show();
      if (on) refresh(); else plan();
    });
    button.hidden = false;
    show();
    plan();
  }
})();
