// The pages work without this. It refreshes what is marked data-live, every so many
// seconds, while the page is visible and until it is switched off; and it keeps a form from
// being sent twice.
"use strict";

(() => {
  const region = document.querySelector("[data-live]");
  const button = document.querySelector("[data-live-switch]");
  if (region && button) live(region, button);

  document.addEventListener("submit", (event) => {
    if (event.target.method !== "post") return;
    // In the next task, or the form would not be sent at all.
    setTimeout(() => event.target.querySelectorAll("button").forEach((b) => { b.disabled = true; }));
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
          if (fresh && on && !busy()) region.replaceChildren(...fresh.childNodes);
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
