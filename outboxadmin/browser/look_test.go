package browser

import (
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/outboxgo/outbox/outboxadmin/internal/seed"
	"github.com/stretchr/testify/require"
)

// tooWide are the elements that stick out of the page, but for those inside something
// that scrolls or cuts by itself.
const tooWide = `(() => {
	const cut = e => { for (let p = e.parentElement; p; p = p.parentElement) if (getComputedStyle(p).overflowX !== "visible") return true; return false; };
	const wide = [...document.body.querySelectorAll("*")].filter(e => !cut(e) && e.getBoundingClientRect().right > innerWidth + 0.5 && !e.closest("svg"));
	if (document.documentElement.scrollWidth > innerWidth) wide.push(document.documentElement);
	return wide.map(e => e.tagName + "." + e.className);
})()`

// faint are the texts with less contrast than WCAG AA wants, each with what it has.
const faint = `(() => {
	const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
	const over = (colour, ground) => {
		canvas.fillStyle = ground; canvas.fillRect(0, 0, 1, 1);
		canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
		const [r, g, b] = canvas.getImageData(0, 0, 1, 1).data;
		return "rgb(" + r + "," + g + "," + b + ")";
	};
	const ground = e => e ? over(getComputedStyle(e).backgroundColor, ground(e.parentElement)) : "white";
	const light = c => c.match(/\d+/g).map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
		.reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
	const bad = [];
	for (const e of document.body.querySelectorAll("*")) {
		if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) || !e.checkVisibility() || e.closest("svg, .skip, .hide")) continue;
		const under = ground(e), text = over(getComputedStyle(e).color, under);
		const [a, b] = [light(under), light(text)].sort((x, y) => y - x);
		const contrast = (a + 0.05) / (b + 0.05);
		if (contrast < 4.5) bad.push(e.tagName + "." + e.className + " " + e.textContent.trim().slice(0, 30) + " " + contrast.toFixed(2));
	}
	return bad;
})()`

// unlabelled are the fields and buttons that a screen reader could not name.
const unlabelled = `[...document.querySelectorAll("input:not([type=hidden]), select, textarea, button, a")]
	.filter(e => !(e.labels && e.labels.length) && !e.textContent.trim() && !e.getAttribute("aria-label")).map(e => e.outerHTML)`

// Each page, in each look: no wider than the screen, its texts strong enough, its parts
// named.
func TestLooks(t *testing.T) {
	h := newAdminFixture(t, operator)
	require.NoError(t, seed.Deliver(t.Context(), h.db, h.schema))
	require.NoError(t, seed.Work(t.Context(), h.db, h.schema))
	for _, l := range looks {
		t.Run(l.name, func(t *testing.T) {
			for _, v := range views {
				h.prepare(t, v)
				tab := newTab(t)
				look(t, tab, l.scheme, l.width, l.height, 1)
				do(t, tab, chromedp.Navigate(h.url+v.path), chromedp.WaitReady(chromedp.CSS("#main")),
					chromedp.Evaluate[chromedp.Void](`document.querySelectorAll("details").forEach(d => { d.removeAttribute("name"); d.open = true; })`))
				require.Empty(t, js[[]string](t, tab, tooWide), v.name)
				require.Empty(t, js[[]string](t, tab, faint), v.name)
				require.Empty(t, js[[]string](t, tab, unlabelled), v.name)
				require.Equal(t, l.scheme == "dark", js[bool](t, tab, `getComputedStyle(document.body).backgroundColor.match(/\d+/)[0] < 60`), v.name)
				require.Equal(t, []int{1, 1, 1}, js[[]int](t, tab, `["main", "h1", "header nav"].map(s => document.querySelectorAll(s).length)`), v.name)
				require.Zero(t, js[int](t, tab, `document.querySelectorAll("th:not([scope])").length`), v.name)
			}
		})
	}
}

// Without JavaScript nothing is missing but the refreshing.
func TestWithoutJavaScript(t *testing.T) {
	h := newAdminFixture(t, operator)
	tab := h.open(t, "failed/event-1")
	require.True(t, js[bool](t, tab, `[...document.querySelectorAll("form[method=post]")].every(f => f.action && f.querySelector("button"))`))
	tab = h.open(t, "failed")
	require.False(t, js[bool](t, tab, `document.querySelector("[data-live-switch]").hidden`))
	require.Contains(t, js[string](t, tab, `fetch(location.href).then(r => r.text())`, chromedp.EvalAwaitPromise), `data-live-switch hidden`, "who has none sees no switch")
}
