package itest

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// lateAnswers keeps the answers of PostgreSQL to statements with a text from the client. PostgreSQL has run them.
type lateAnswers struct {
	text    []byte
	sent    chan struct{} // gets a value for each statement whose answer is kept back
	release chan struct{} // each value lets one answer through
}

// lateConn is a connection of [lateAnswers]. As any connection, it ends a read at its deadline.
type lateConn struct {
	net.Conn
	of       *lateAnswers
	late     atomic.Bool
	deadline chan struct{} // signalled when a deadline is set
}

func newLateAnswers(text string) *lateAnswers {
	return &lateAnswers{text: []byte(text), sent: make(chan struct{}, 100), release: make(chan struct{})}
}

func (l *lateAnswers) dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	return &lateConn{Conn: conn, of: l, deadline: make(chan struct{}, 1)}, err
}

func (c *lateConn) Write(b []byte) (int, error) {
	if bytes.Contains(b, c.of.text) {
		c.late.Store(true)
		c.of.sent <- struct{}{}
	}
	return c.Conn.Write(b)
}

func (c *lateConn) Read(b []byte) (int, error) {
	if c.late.Load() {
		select {
		case <-c.of.release:
		case <-c.deadline:
		}
		c.late.Store(false)
	}
	return c.Conn.Read(b)
}

func (c *lateConn) SetDeadline(at time.Time) error {
	if !at.IsZero() && c.late.Load() {
		select {
		case c.deadline <- struct{}{}:
		default:
		}
	}
	return c.Conn.SetDeadline(at)
}

// A stop leaves no delivery behind that the worker has claimed and not begun: neither if the answer of PostgreSQL to
// the claim comes during the stop, nor if the answer is lost. Such deliveries waited for their leases, and with a
// single attempt they were DEAD although no handler had been called.
func TestWorkerStopsLeaveNoClaims(t *testing.T) {
	t.Parallel()
	stops := 40
	if testenv.Quick(t) {
		stops = 6
	}
	const inserts, claims = "INSERT INTO {schema}.event_delivery", "claimed AS (\n    UPDATE {schema}.event_delivery"
	for name, tt := range map[string]struct {
		statement string
		due, lost bool
	}{
		"of new events, the answer is late":     {statement: inserts},
		"of new events, the answer is lost":     {statement: inserts, lost: true},
		"of due deliveries, the answer is late": {statement: claims, due: true},
		"of due deliveries, the answer is lost": {statement: claims, due: true, lost: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newWorkerFixture(t)
			log := new(workerLog)
			cfg := outbox.WorkerConfig{
				HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, StopTimeout: 2 * time.Second, Logger: log.logger()},
				Lease:         time.Minute,
			}
			cfg.Retry.MaxRetries = -1
			const events = 5
			for n := range stops {
				late := newLateAnswers(f.sql(tt.statement))
				db := testenv.Pool(t, func(c *pgxpool.Config) {
					c.ConnConfig.DefaultQueryExecMode, c.ConnConfig.DialFunc = pgx.QueryExecModeExec, late.dial
				})
				for i := range events {
					f.commit(step{fmt.Sprint("account ", n, " ", i), 1})
				}
				if tt.due {
					f.insertDue(cfg, (n+1)*events)
				}
				w := f.worker(db, "bank", cfg, f.effects("COUNTED", nil))
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() { ended <- w.Run(ctx) }()
				<-late.sent
				cancel()
				if !tt.lost {
					const answer = 20 * time.Millisecond
					time.Sleep(answer)
					close(late.release)
				}
				require.NoError(t, <-ended)
				db.Close()
				require.Zero(t, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'PROCESSING'`), "stop %d", n)
				require.Zero(t, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status <> 'DONE' AND attempt_count > 0`), "stop %d", n)
			}
			f.start(cfg, f.effects("COUNTED", nil))
			f.await(stops * events)
			f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND attempt_count = 1`, stops*events)
			require.Zero(t, log.count("the lease of a delivery has expired"))
			require.Zero(t, log.count("could not be released"))
			require.Zero(t, log.count("still claimed"))
		})
	}
}

// insertDue inserts the deliveries of all events, and leaves n of them due.
func (f *workerFixture) insertDue(cfg outbox.WorkerConfig, n int) {
	f.t.Helper()
	w := f.worker(f.db, "bank", cfg, f.effects("COUNTED", nil))
	require.NoError(f.t, w.Pause())
	stop := testenv.Run(f.t, w.Run)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'PENDING'`, n)
	stop()
}

// The deliveries of a process that is gone have used up no attempt, because most of them were waiting. They are tried
// one at a time, and such an attempt counts from its begin, so that an event cannot end processes for ever. Deliveries
// with a single attempt were DEAD although no handler had been called.
func TestWorkerGoneCostsNoAttempt(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 50 * time.Millisecond, Lease: time.Second}
	cfg.Retry.MaxRetries = -1
	const accounts = 5
	for n := range accounts {
		f.commit(step{fmt.Sprint("account ", n), 1}, step{fmt.Sprint("account ", n), 2})
	}
	f.insertDue(cfg, accounts)
	f.exec(`UPDATE {schema}.event_delivery SET status = 'PROCESSING', attempt_count = 1, locked_by = 'gone/1', locked_until = now() - interval '1 min',
		last_attempt_at = now(), updated_at = now()`)
	begun := 0
	f.start(cfg, f.effects("COUNTED", func(s step, _ outbox.Metadata) error {
		if s == (step{"account 1", 1}) {
			begun = f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE last_attempt_at > updated_at AND aggregate_id = 'account 1' AND payload->>'n' = '1'`)
		}
		return nil
	}))
	f.await(2 * accounts)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND attempt_count = 1`, 2*accounts)
	f.requireOrder()
	require.Equal(t, 1, begun, "it is noted before the handler is called")
}
