package browser

import (
	"context"
	"fmt"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/outboxgo/outbox/outboxadmin"
	"github.com/outboxgo/outbox/outboxadmin/internal/seed"
	"github.com/stretchr/testify/require"
)

// open shows a page in a new tab.
func (h *adminFixture) open(t *testing.T, path string) context.Context {
	t.Helper()
	tab := newTab(t)
	do(t, tab, chromedp.Navigate(h.url+path), chromedp.WaitReady(chromedp.CSS("#main")))
	return tab
}

// press clicks what is named so and waits for the page that it leads to.
func press(t *testing.T, tab context.Context, name string) {
	t.Helper()
	mark := `[...document.querySelectorAll("main a, main button")].find(e => e.checkVisibility() && e.textContent.trim() === ` + fmt.Sprintf("%q", name) + `)`
	require.True(t, js[bool](t, tab, mark+` !== undefined`), "there is no %q", name)
	do(t, tab, chromedp.Evaluate[chromedp.Void](mark+`.setAttribute("data-press", "")`))
	_, err := chromedp.RunResponse(tab, chromedp.Click(chromedp.CSS("[data-press]")))
	require.NoError(t, err, name)
}

// fill writes into the field with a label.
func fill(t *testing.T, tab context.Context, label, text string) {
	t.Helper()
	id := js[string](t, tab, `[...document.querySelectorAll("label")].find(l => l.checkVisibility() && l.textContent === `+fmt.Sprintf("%q", label)+`).htmlFor`)
	do(t, tab, chromedp.SendKeys(chromedp.ID(id), text))
}

// pick chooses a value of a drop-down.
func pick(t *testing.T, tab context.Context, id, value string) {
	t.Helper()
	field := fmt.Sprintf(`document.getElementById(%q)`, id)
	require.Equal(t, "SELECT", js[string](t, tab, field+`.tagName`), id)
	require.True(t, js[bool](t, tab, fmt.Sprintf(`[...%s.options].some(o => o.value === %q)`, field, value)), "%s does not offer %q", id, value)
	do(t, tab, chromedp.SetValue(chromedp.ID(id), value))
}

func text(t *testing.T, tab context.Context, selector string) string {
	t.Helper()
	return js[string](t, tab, fmt.Sprintf(`document.querySelector(%q)?.innerText ?? ""`, selector))
}

func rows(t *testing.T, tab context.Context) int {
	t.Helper()
	return js[int](t, tab, `document.querySelectorAll("tbody tr").length`)
}

// From the overview to the dead events of a type, and back to all.
func TestFilter(t *testing.T) {
	h := newAdminFixture(t, operator)
	tab := h.open(t, "")
	require.Contains(t, text(t, tab, ".notices"), "15 events are dead")
	press(t, tab, "Show")
	require.Equal(t, 15, rows(t, tab))
	pick(t, tab, "type", "loopers.order.packed.v1")
	press(t, tab, "Filter")
	require.Equal(t, 1, rows(t, tab))
	require.Contains(t, text(t, tab, "tbody tr"), "invalid record")
	require.Equal(t, "dead", js[string](t, tab, `document.querySelector("#status").value`), "the filter is kept")
	press(t, tab, "Clear")
	require.Equal(t, 50, rows(t, tab))
	require.Contains(t, text(t, tab, ".found"), "104 failures")
}

func TestPaging(t *testing.T) {
	h := newAdminFixture(t, operator)
	tab := h.open(t, "failed")
	seen := map[string]bool{}
	for _, want := range []int{50, 50, 4} {
		links := js[[]string](t, tab, `[...document.querySelectorAll("tbody th a")].map(a => a.href)`)
		require.Len(t, links, want)
		for _, link := range links {
			require.False(t, seen[link], link)
			seen[link] = true
		}
		if want == 50 {
			press(t, tab, "Older")
		}
	}
	press(t, tab, "Newest")
	require.Equal(t, 50, rows(t, tab))
}

// The number is shown first; without a reason the browser does not let it go.
func TestRetryAllWithDryRun(t *testing.T) {
	h := newAdminFixture(t, operator)
	tab := h.open(t, "failed?status=dead")
	press(t, tab, "Retry all…")
	require.Equal(t, "Retry 15 failures?", text(t, tab, "h1"))
	require.Contains(t, text(t, tab, "main"), "dry run")
	require.Equal(t, 15, query[int](t, h, `SELECT count(*) FROM {s}.outbox_failed WHERE status = 'dead'`))
	require.False(t, js[bool](t, tab, `document.querySelector("form").checkValidity()`), "a reason is needed")
	fill(t, tab, "Reason", "max.message.bytes was raised")
	press(t, tab, "Retry 15 failures")
	require.Contains(t, text(t, tab, "[role=status]"), "15 failures are retried")
	require.Zero(t, query[int](t, h, `SELECT count(*) FROM {s}.outbox_failed WHERE status = 'dead'`))
	require.Equal(t, 15, query[int](t, h, `SELECT count(*) FROM {s}.outbox_audit WHERE operator = 'sora.lim' AND reason = 'max.message.bytes was raised'`))
}

func TestResolveWithNote(t *testing.T) {
	h := newAdminFixture(t, operator)
	tab := h.open(t, fmt.Sprintf("failed/event-%d", seed.Dead))
	do(t, tab, chromedp.Click("//summary[text()='Resolve with a note']"))
	fill(t, tab, "Note", "The courier was told by telephone.")
	press(t, tab, "Resolve without sending")
	require.Contains(t, text(t, tab, "[role=status]"), "It is resolved.")
	login := regexp.QuoteMeta(query[string](t, h, `SELECT session_user`))
	require.Regexp(t, `^sora\.lim \(`+login+`\) resolved (now|\d s ago)\s+The courier was told by telephone\.`, text(t, tab, ".history"))
	require.Equal(t, "The courier was told by telephone.", query[string](t, h, `SELECT resolution FROM {s}.outbox_failed WHERE id = 1 AND status = 'resolved'`))
	require.NotContains(t, text(t, tab, ".acts"), "Retry")
}

// What was wrong is said, and what was written is still there.
func TestEdit(t *testing.T) {
	h := newAdminFixture(t, operator)
	tab := h.open(t, fmt.Sprintf("failed/event-%d", seed.Dead))
	do(t, tab, chromedp.Click("//summary[text()='Edit the payload and retry']"))
	fill(t, tab, "Reason", "gift is a boolean")
	do(t, tab, chromedp.SetValue(chromedp.ID("payload"), `{"gift": tru`))
	press(t, tab, "Save and retry")
	require.Contains(t, text(t, tab, "[role=alert]"), "payload")
	require.Equal(t, []string{`{"gift": tru`, "gift is a boolean"}, js[[]string](t, tab, `["payload", "reason-edit"].map(id => document.getElementById(id).value)`))
	do(t, tab, chromedp.SetValue(chromedp.ID("payload"), `{"gift": true}`))
	press(t, tab, "Save and retry")
	require.Contains(t, text(t, tab, "[role=status]"), "The payload is changed")
	require.JSONEq(t, `{"gift": true}`, text(t, tab, "pre.code"))
}

// A reader sees everything but the means to act, and is refused where he tries.
func TestReaderIsRefused(t *testing.T) {
	h := newAdminFixture(t, outboxadmin.Access{Operator: "a.reader", Role: outboxadmin.Reader})
	for _, v := range views {
		if strings.HasPrefix(v.name, "bulk") || v.name == "pause" {
			continue
		}
		tab := h.open(t, v.path)
		require.Zero(t, js[int](t, tab, `document.querySelectorAll("form[method=post]").length`), v.name)
		require.NotContains(t, text(t, tab, "main"), "Retry all", v.name)
	}
	tab := h.open(t, "failed/retry?status=dead")
	require.Equal(t, "Only for operators", text(t, tab, "h1"))
	tab = h.open(t, "failed/event-1")
	require.Contains(t, text(t, tab, ".acts"), "takes the role of an operator")
	_, err := chromedp.RunResponse(tab, chromedp.Evaluate[chromedp.Void](`(() => {
		const form = document.createElement("form");
		form.method = "post";
		form.action = "1/resolve";
		form.innerHTML = "<input name=reason value=because>";
		document.body.append(form);
		form.submit();
	})()`))
	require.NoError(t, err)
	require.Equal(t, "Only for operators", text(t, tab, "h1"))
	require.Equal(t, "dead", query[string](t, h, `SELECT status FROM {s}.outbox_failed WHERE id = 1`))
}

// Another site cannot make an operator's browser act.
func TestOtherSiteIsRefused(t *testing.T) {
	h := newAdminFixture(t, operator)
	tab := newTab(t)
	elsewhere := strings.Replace(h.url, "127.0.0.1", "localhost", 1)
	require.NotEqual(t, h.url, elsewhere)
	page := `<form id=f method=post action="` + h.url + `failed/event-1/resolve"><input name=reason value=because></form>`
	do(t, tab, chromedp.Navigate("data:text/html,"+url.PathEscape(page)))
	_, err := chromedp.RunResponse(tab, chromedp.Evaluate[chromedp.Void](`document.getElementById("f").submit()`))
	require.NoError(t, err)
	require.Contains(t, text(t, tab, "body"), "another site")
	require.Equal(t, "dead", query[string](t, h, `SELECT status FROM {s}.outbox_failed WHERE id = 1`))
}

// What the keyboard reaches comes in the order of reading, can be seen, and works.
func TestKeyboard(t *testing.T) {
	h := newAdminFixture(t, operator)
	tab := h.open(t, "failed?status=dead")
	focused := func() string {
		return js[string](t, tab, `(e => /^(SELECT|INPUT|TEXTAREA)$/.test(e.tagName) ? e.id : e.innerText.trim())(document.activeElement)`)
	}
	tabTo := func(name string) {
		t.Helper()
		for range 40 {
			do(t, tab, chromedp.KeyEvent(kb.Tab))
			require.True(t, js[bool](t, tab, `(() => {
				const s = getComputedStyle(document.activeElement);
				return s.outlineStyle !== "none" && parseFloat(s.outlineWidth) >= 2;
			})()`), "%q has the focus, and nobody sees it", focused())
			if focused() == name {
				return
			}
		}
		t.Fatalf("the keyboard does not reach %q", name)
	}
	tabTo("Skip to content")
	require.GreaterOrEqual(t, js[float64](t, tab, `document.activeElement.getBoundingClientRect().top`), 0.0, "it can be seen")
	do(t, tab, chromedp.KeyEvent(kb.Enter))
	require.Equal(t, "main", js[string](t, tab, `document.activeElement.id || location.hash.slice(1)`))
	tabTo("status")
	tabTo("Filter")
	tabTo("Retry all…")
	_, err := chromedp.RunResponse(tab, chromedp.KeyEvent(kb.Enter))
	require.NoError(t, err)
	tabTo("reason")
	do(t, tab, chromedp.KeyEvent("from the keyboard"))
	tabTo("Retry 15 failures")
	_, err = chromedp.RunResponse(tab, chromedp.KeyEvent(kb.Enter))
	require.NoError(t, err)
	require.Contains(t, text(t, tab, "[role=status]"), "15 failures")
}

// The page follows what happens, until it is told not to.
func TestLive(t *testing.T) {
	h := newAdminFixture(t, operator)
	tab := h.open(t, "failed?status=dead")
	require.Equal(t, "Live", text(t, tab, "[data-live-switch]"))
	query[int](t, h, `WITH gone AS (DELETE FROM {s}.outbox_failed WHERE id > 1 RETURNING id) SELECT count(*) FROM gone`)
	_, err := chromedp.Run(tab, chromedp.Poll[bool](`document.querySelectorAll("tbody tr").length === 1`, chromedp.WithPollingInterval(100*time.Millisecond)))
	require.NoError(t, err)
	do(t, tab, chromedp.Click(chromedp.CSS("[data-live-switch]")))
	require.Equal(t, "Paused", text(t, tab, "[data-live-switch]"))
	require.Equal(t, "false", js[string](t, tab, `document.querySelector("[data-live-switch]").getAttribute("aria-pressed")`))
}

// Rows are selected with the keyboard or all at once. The selection outlives a refresh, and the way back keeps the
// filter.
func TestSelectRows(t *testing.T) {
	h := newAdminFixture(t, operator)
	tab := h.open(t, "failed?status=dead&kind=event")
	const disabled = `document.querySelector(".selection button").disabled`
	require.True(t, js[bool](t, tab, disabled), "nothing is selected")
	do(t, tab, chromedp.Focus(chromedp.CSS("tbody input[value=event-1]")), chromedp.KeyEvent(" "))
	require.Equal(t, "1 row selected", text(t, tab, "[data-picked]"))
	do(t, tab, chromedp.Evaluate[chromedp.Void](`document.activeElement.blur(); document.querySelector("tbody td:nth-child(3)").remove()`))
	_, err := chromedp.Run(tab, chromedp.Poll[bool](`document.querySelectorAll("tbody td:nth-child(3)").length === 15`, chromedp.WithPollingInterval(100*time.Millisecond)))
	require.NoError(t, err, "it is refreshed")
	require.True(t, js[bool](t, tab, `document.querySelector("tbody input[value=event-1]").checked`))
	do(t, tab, chromedp.Click(chromedp.CSS("[data-pick-all]")))
	require.Equal(t, "15 rows selected", text(t, tab, "[data-picked]"))
	do(t, tab, chromedp.Click(chromedp.CSS("[data-pick-all]")))
	require.True(t, js[bool](t, tab, disabled))
	do(t, tab, chromedp.Evaluate[chromedp.Void](`[2, 5].forEach(n => document.querySelectorAll("tbody input")[n].dispatchEvent(new MouseEvent("click", {shiftKey: n > 2, bubbles: true})))`))
	require.Equal(t, "4 rows selected", text(t, tab, "[data-picked]"), "a range with the shift key")
	do(t, tab, chromedp.Click(chromedp.CSS("[data-pick-all]")), chromedp.Click(chromedp.CSS("[data-pick-all]")), chromedp.Click(chromedp.CSS("tbody input[value=event-1]")))
	press(t, tab, "Edit…")
	require.Equal(t, "Edit 1 selected failure?", text(t, tab, "h1"))
	fill(t, tab, "Change (JSON merge patch: null removes a member)", `{"gift": false}`)
	press(t, tab, "Dry run")
	require.Contains(t, text(t, tab, "main"), "This was a dry run")
	fill(t, tab, "Reason", "gift is a boolean")
	press(t, tab, "Save and retry 1 failure")
	require.Contains(t, text(t, tab, "[role=status]"), "1 failure is changed")
	require.Equal(t, 14, rows(t, tab))
	require.Contains(t, js[string](t, tab, `location.search`), "kind=event")
	require.Equal(t, "false", query[string](t, h, `SELECT payload->>'gift' FROM {s}.outbox_failed WHERE id = 1`))
}

// The address has the fields that were filled in, and no empty ones.
func TestShortAddress(t *testing.T) {
	h := newAdminFixture(t, operator)
	tab := h.open(t, "failed")
	pick(t, tab, "status", "dead")
	press(t, tab, "Filter")
	require.Equal(t, "?status=dead", js[string](t, tab, `location.search`))
	press(t, tab, "loopers.order.packed.v1")
	press(t, tab, "Failures")
	require.Equal(t, "?status=dead", js[string](t, tab, `location.search`), "the way back keeps the filter")
}
