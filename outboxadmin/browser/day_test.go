package browser

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxadmin/internal/seed"
	"github.com/outboxgo/outbox/outboxops"
	"github.com/stretchr/testify/require"
)

// alertLog is an Alerter that keeps what it gets.
type alertLog struct{ testenv.Kept[outbox.Alert] }

func (l *alertLog) Alert(_ context.Context, a outbox.Alert) error {
	l.Add(a)
	return nil
}

// first returns the first alert of a kind, once there is one.
func (l *alertLog) first(t testing.TB, kind outbox.AlertKind) outbox.Alert {
	t.Helper()
	return l.Await(t, func(a outbox.Alert) bool { return a.Kind == kind }, string(kind))
}

// An operator's day: he is alerted, finds the same numbers on the page, looks at what died, mends a
// payload, retries all of a class after a dry run, resolves the rest with a note, sees what became of
// it, and the audit says that it was he.
func TestOperatorsDay(t *testing.T) {
	h := newAdminFixture(t, operator)
	require.NoError(t, seed.Deliver(t.Context(), h.db, h.schema))
	alerts := &alertLog{}
	monitor, err := outboxops.NewMonitor(h.db, outboxops.MonitorConfig{Schema: h.schema, Alerts: outbox.AlertConfig{Alerter: alerts, Interval: 20 * time.Millisecond}})
	require.NoError(t, err)
	testenv.Run(t, monitor.Run)
	dead := 0
	for _, c := range alerts.first(t, outbox.AlertManyDead).Counts {
		dead += c.Events
	}
	const deadEvents = 15
	require.Equal(t, deadEvents+seed.DeadInAll, dead)

	tab := h.open(t, "")
	notices := text(t, tab, ".notices")
	require.Contains(t, notices, fmt.Sprintf("Relay default: %d events are dead", deadEvents))
	require.Contains(t, notices, fmt.Sprintf("Consumer group stats: %d deliveries are dead", seed.DeadInAll))
	require.Contains(t, text(t, tab, ".asof"), "As of ")

	h.mendOne(t, tab)
	h.retryTimeouts(t, tab)
	h.resolveRest(t, tab)

	tab = h.open(t, "audit?operator=sora.lim&since=2026-01-01")
	audit := text(t, tab, "tbody")
	for _, words := range []string{"edited event-1", "gift is a boolean, see OPS-1190", "retried delivery-1", "the database answers again", "resolved delivery-5", "sold out, see OPS-1201"} {
		require.Contains(t, audit, words)
	}
	require.NotContains(t, audit, "jiwoo.han")
	require.Equal(t, []int{1, seed.DeadTimeouts, deadEvents - 1 + seed.DeadBadData}, []int{h.audited(t, "edit", "gift is a boolean, see OPS-1190"),
		h.audited(t, "retry", "the database answers again"), h.audited(t, "resolve", "sold out, see OPS-1201")})
	require.NotContains(t, text(t, h.open(t, ""), ".notices"), "dead")
}

// audited counts what the operator did with a reason.
func (h *adminFixture) audited(t *testing.T, action, reason string) int {
	t.Helper()
	return query[int](t, h, fmt.Sprintf(`SELECT count(*) FROM {s}.outbox_audit WHERE operator = 'sora.lim' AND action = '%s' AND reason = '%s'`, action, reason))
}

// mendOne goes from the notice to the list of the dead of a class, to one with its payload, and
// edits that.
func (h *adminFixture) mendOne(t *testing.T, tab context.Context) {
	t.Helper()
	press(t, tab, "Show")
	require.Equal(t, 15, rows(t, tab))
	pick(t, tab, "class", "invalid_record")
	press(t, tab, "Filter")
	require.Equal(t, 1, rows(t, tab))
	press(t, tab, "loopers.order.packed.v1")
	require.Contains(t, text(t, tab, "pre.code"), "Leave it with the neighbour")
	do(t, tab, chromedp.Click("//summary[text()='Edit the payload and retry']"))
	do(t, tab, chromedp.SetValue(chromedp.ID("payload"), `{"orderId": 20418, "gift": true}`))
	fill(t, tab, "Reason", "gift is a boolean, see OPS-1190")
	press(t, tab, "Save and retry")
	require.Contains(t, text(t, tab, "[role=status]"), "The payload is changed")
	require.Contains(t, text(t, tab, ".history"), "sora.lim")

	// The relay sends it, and its row goes: the page says what became of it.
	query[int](t, h, fmt.Sprintf(`WITH sent AS (DELETE FROM {s}.outbox_failed WHERE id = %d RETURNING id) SELECT count(*) FROM sent`, seed.Dead))
	do(t, tab, chromedp.Reload())
	require.Contains(t, text(t, tab, "main"), "Relay default has sent it: it is in Kafka.")
}

// retryTimeouts retries all deliveries of a class, once a dry run has said how many they are, and
// sees one be handled.
func (h *adminFixture) retryTimeouts(t *testing.T, tab context.Context) {
	t.Helper()
	do(t, tab, chromedp.Navigate(h.url+"failed"), chromedp.WaitReady(chromedp.CSS("#main")))
	pick(t, tab, "kind", "delivery")
	pick(t, tab, "group", "stats")
	pick(t, tab, "action", "COUNT_SALES")
	pick(t, tab, "class", "timeout")
	pick(t, tab, "status", "dead")
	press(t, tab, "Filter")
	require.Equal(t, seed.DeadTimeouts, rows(t, tab))
	press(t, tab, "Retry all…")
	require.Equal(t, fmt.Sprintf("Retry %d failures?", seed.DeadTimeouts), text(t, tab, "h1"))
	require.Contains(t, text(t, tab, "main"), "This was a dry run")
	require.Equal(t, seed.DeadInAll, query[int](t, h, `SELECT count(*) FROM {s}.event_delivery WHERE status = 'DEAD'`))
	fill(t, tab, "Reason", "the database answers again")
	press(t, tab, fmt.Sprintf("Retry %d failures", seed.DeadTimeouts))
	require.Contains(t, text(t, tab, "[role=status]"), fmt.Sprintf("%d failures are retried", seed.DeadTimeouts))
	require.Zero(t, rows(t, tab))

	query[int](t, h, `WITH handled AS (UPDATE {s}.event_delivery SET status = 'DONE', attempt_count = 1, processed_at = now(), updated_at = now() WHERE id = 1 RETURNING id)
		SELECT count(*) FROM handled`)
	require.Contains(t, text(t, h.open(t, "failed/delivery-1"), "main"), "Handled")
}

// resolveRest resolves with a note all that is dead still, of both kinds.
func (h *adminFixture) resolveRest(t *testing.T, tab context.Context) {
	t.Helper()
	const rest = 14 + seed.DeadBadData
	do(t, tab, chromedp.Navigate(h.url+"failed?status=dead"), chromedp.WaitReady(chromedp.CSS("#main")))
	press(t, tab, "Resolve all…")
	require.Equal(t, fmt.Sprintf("Resolve %d failures?", rest), text(t, tab, "h1"))
	fill(t, tab, "Note", "sold out, see OPS-1201")
	press(t, tab, fmt.Sprintf("Resolve %d failures", rest))
	require.Contains(t, text(t, tab, "[role=status]"), fmt.Sprintf("%d failures are resolved", rest))
	pick(t, tab, "status", "resolved")
	pick(t, tab, "kind", "delivery")
	press(t, tab, "Filter")
	require.Equal(t, seed.DeadBadData, rows(t, tab))
}

// On a phone, the overview begins with the problems that need an operator. The table of partitions
// is closed until a user opens it; then it stays open although the page is refreshed.
func TestPhone(t *testing.T) {
	h := newAdminFixture(t, operator)
	tab := newTab(t)
	look(t, tab, "light", 390, 844, 1)
	do(t, tab, chromedp.Navigate(h.url), chromedp.WaitReady(chromedp.CSS("#main")))
	const top = `(s => document.querySelector(s).getBoundingClientRect().top)`
	require.Less(t, js[float64](t, tab, top+`(".notices")`), 300.0)
	require.Less(t, js[float64](t, tab, top+`("#kinds")`), js[float64](t, tab, top+`("#relay-0")`))
	visible := `document.querySelector("#more-partitions table").checkVisibility()`
	require.False(t, js[bool](t, tab, visible))
	require.Contains(t, text(t, tab, "#more-partitions summary"), "13 partitions")
	do(t, tab, chromedp.Click(chromedp.CSS("#more-partitions summary")))
	require.True(t, js[bool](t, tab, visible))
	do(t, tab, chromedp.Evaluate[chromedp.Void](`document.activeElement.blur(); document.querySelector(".notices").remove()`))
	_, err := chromedp.Run(tab, chromedp.Poll[bool](`document.querySelector(".notices") !== null`, chromedp.WithPollingInterval(100*time.Millisecond)))
	require.NoError(t, err, "it is refreshed")
	require.True(t, js[bool](t, tab, visible), "what was opened stays open")
}

// What is not refreshed any more says how old it is.
func TestAge(t *testing.T) {
	h := newAdminFixture(t, operator)
	tab := h.open(t, "")
	do(t, tab, chromedp.Click(chromedp.CSS("[data-live-switch]")))
	_, err := chromedp.Run(tab, chromedp.Poll[bool](`/^\d+ s ago$/.test(document.querySelector("[data-age]").dataset.age)`, chromedp.WithPollingInterval(100*time.Millisecond)))
	require.NoError(t, err)
}
