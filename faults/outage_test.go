package faults

import (
	"context"
	"log/slog"
	"net"
	"regexp"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// outage is how long one lasts, where nothing else says when it is over: longer
// than a relay of shortly waits for anything.
const outage = 4 * time.Second

// shortly is the configuration of a relay that waits as briefly as it may, and
// keeps the rows of what it sent at a retry. An outage is not a failure: nothing
// may be refused.
func shortly(t *testing.T, log *warnings) outbox.RelayConfig {
	t.Helper()
	blamed := func(e outbox.FailedEvent) { assert.Failf(t, "an event is blamed for an outage", "%+v", e) }
	return outbox.RelayConfig{
		PollInterval: 10 * time.Millisecond, RetryInterval: 100 * time.Millisecond, KeepSent: true,
		DeliveryTimeout: 1900 * time.Millisecond, Lease: lease,
		Breaker: outbox.BreakerConfig{OpenFor: 500 * time.Millisecond},
		Hooks:   outbox.RelayHooks{Rejected: blamed, Dead: blamed},
		Logger:  slog.New(log),
	}
}

// awaitFlow waits until events arrive again, and none of them by way of
// outbox_failed.
func (s *site) awaitFlow(t *testing.T) {
	t.Helper()
	for end := time.Now().Add(testenv.Patience); ; {
		before := s.countFailed(t, "true")
		s.awaitArrivals(t, 100)
		if s.countFailed(t, "true") == before {
			return
		}
		require.True(t, time.Now().Before(end), "all events go by way of outbox_failed")
	}
}

// requireRecovery requires that everything committed arrives, each key in its
// order, and that the outage has cost no event a retry.
func (s *site) requireRecovery(t *testing.T, confirmed map[string]struct{}) oracle.Result {
	t.Helper()
	v := s.requireRight(t, confirmed)
	s.requireHeldUpOnly(t)
	return v
}

// requireHeldUpOnly requires of all that ever stood in outbox_failed that it was
// sent in the end and has used up no retry.
func (s *site) requireHeldUpOnly(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool { return s.countFailed(t, `status <> 'resolved'`) == 0 }, testenv.Patience, 10*time.Millisecond)
	require.Zero(t, s.countFailed(t, `retry_count > 0 OR resolution <> 'sent'`), "events that were not only held up")
}

// countFailed counts rows of outbox_failed of which something is so.
func (s *site) countFailed(t *testing.T, so string) (n int) {
	t.Helper()
	require.NoError(t, s.db.QueryRow(context.Background(), `SELECT count(*) FROM outbox_failed WHERE `+so).Scan(&n))
	return n
}

var (
	failing = regexp.MustCompile(`^outbox: (.*) ` + logFails + `$`)
	ended   = regexp.MustCompile(`^outbox: (.*) (` + logWorks + `|` + logAbandoned + `: .*)$`)
)

// count returns how many warnings say this.
func (w *warnings) count(text string) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, line := range w.said {
		if line == text {
			n++
		}
	}
	return n
}

// awaitFailure waits until the log says for the n-th time that something fails.
func (w *warnings) awaitFailure(t *testing.T, what string, n int) {
	t.Helper()
	w.await(t, "outbox: "+what+" "+logFails, n)
}

// await waits until n warnings say this.
func (w *warnings) await(t *testing.T, text string, n int) {
	t.Helper()
	require.Eventually(t, func() bool { return w.count(text) >= n }, testenv.Patience, time.Millisecond, "not told: %s", w)
}

// requireOutages waits until the log says of all that failed that it works again, or is not tried any more,
// and requires that it was told n times of what, once in each outage, and at most
// so often of anything else.
func (w *warnings) requireOutages(t *testing.T, what string, n int) {
	t.Helper()
	changes := w.awaitEnd(t)
	require.Equal(t, n, changes[what].times, "%s", w)
	for other, c := range changes {
		require.LessOrEqual(t, c.times, n, "%s: %s", other, w)
	}
}

// awaitEnd waits until the log says of all that failed that it works again, or is not tried any more.
func (w *warnings) awaitEnd(t *testing.T) (changes map[string]change) {
	t.Helper()
	require.Eventually(t, func() bool {
		changes = w.changes(t)
		for _, c := range changes {
			if c.open {
				return false
			}
		}
		return true
	}, testenv.Patience, 10*time.Millisecond, "%s", w)
	return changes
}

// change is what the log has said of one thing.
type change struct {
	times int // that it began to fail
	open  bool
}

// changes goes through the log and requires that each thing fails and works in
// turns: it is told what changes, not what is tried.
func (w *warnings) changes(t *testing.T) map[string]change {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	changes := map[string]change{}
	for _, line := range w.said {
		if m := failing.FindStringSubmatch(line); m != nil {
			c := changes[m[1]]
			require.False(t, c.open, "told twice that %s fails: %q", m[1], w.said)
			changes[m[1]] = change{c.times + 1, true}
		}
		if m := ended.FindStringSubmatch(line); m != nil {
			c := changes[m[1]]
			require.True(t, c.open, "told twice that %s %s: %q", m[1], m[2], w.said)
			changes[m[1]] = change{c.times, false}
		}
	}
	return changes
}

// tries counts what a relay tries.
type tries struct{ n atomic.Int32 }

// during runs f and returns how many tries there were meanwhile.
func (c *tries) during(f func()) int {
	before := c.n.Load()
	f()
	return int(c.n.Load() - before)
}

// requireSome requires that tries go on during an outage, and not without a pause.
func requireSome(t *testing.T, tries int) {
	t.Helper()
	t.Logf("%d tries", tries)
	require.Positive(t, tries)
	require.Less(t, tries, 100)
}

// to is kafkaVia, counted.
func (c *tries) to(address string) kgo.Opt {
	dial := dialTo(address)
	return kgo.Dialer(func(ctx context.Context, network, broker string) (net.Conn, error) {
		c.n.Add(1)
		return dial(ctx, network, broker)
	})
}

// TraceBatchStart implements pgx.BatchTracer.
func (*tries) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}

// TraceBatchQuery implements pgx.BatchTracer.
func (*tries) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

// TraceBatchEnd implements pgx.BatchTracer.
func (c *tries) TraceBatchEnd(_ context.Context, _ *pgx.Conn, d pgx.TraceBatchEndData) {
	c.failed(d.Err)
}

// TraceQueryStart implements pgx.QueryTracer.
func (*tries) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

// TraceQueryEnd implements pgx.QueryTracer.
func (c *tries) TraceQueryEnd(_ context.Context, _ *pgx.Conn, d pgx.TraceQueryEndData) {
	c.failed(d.Err)
}

// failed counts a statement that has failed: those of parts that have no outage go on at their own intervals.
func (c *tries) failed(err error) {
	if err != nil {
		c.n.Add(1)
	}
}
