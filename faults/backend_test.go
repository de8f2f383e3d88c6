package faults

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

// When one backend is killed, PostgreSQL ends all others and recovers as after a crash,
// while the start time of the server stays. It forgets the newest row of outbox_cursor if
// that was not flushed. Another relay that takes over gets the same number for its row and
// the same transaction id. The old leader stands in front of a statement that reads the
// window of the lost row. It must find out from the answer that its row is gone, although
// a row with this number is there, on a server with this start time.
func TestKilledBackendGivesNumbersToSuccessor(t *testing.T) {
	testenv.Long(t)
	// Not parallel: the backend must be killed before the server flushes its WAL by itself, after 10 s.
	for n, statement := range []string{"page", "fetch", "prefetch"} {
		t.Run(statement, func(t *testing.T) {
			o := forgottenLeader(t, n+1)
			s := o.site
			const freeLease = `UPDATE outbox_lease SET expires_at = '-infinity'` // as if the old leader's machine had been suspended
			_, err := s.db.Exec(t.Context(), freeLease)
			require.NoError(t, err)
			end := run(t, s.pool(t), testenv.KafkaOpts(s.brokers), o.config())
			o.add(t, 20)
			s.requireArrival(t, o.events)
			again := s.cursorRow(t, o.known.ID)
			require.Greater(t, again.Epoch, o.known.Epoch, "the number of the row was meant to be given out again")
			require.Greater(t, s.nextID(t), o.known.Xid, "the transaction id was meant to be given out again")

			sent := o.sent.Load()
			o.gate.release()
			require.Equal(t, proof{o.known.ID, o.known.Epoch, 0}, o.gate.firstAnswer(t), "the old leader read a window that is not its own")
			o.awaitLeading(t, false)
			require.Equal(t, sent, o.sent.Load(), "the old leader sent events that its successor sends")

			end()
			o.awaitLeading(t, true)
			o.add(t, 20)
			s.requireRight(t, o.confirmed())
			s.requireEpochsInOrder(t)
		})
	}
}

// A leader believes that it holds the lease until its last renewal expires. If PostgreSQL forgot
// that renewal, a standby could take the lease earlier and send at the same time as the leader.
func TestKilledBackendForgetsNoRenewal(t *testing.T) {
	testenv.Long(t)
	// Not parallel: the backend must be killed before the server flushes its WAL by itself, after 10 s.
	s := newSite(t)
	_, err := s.db.Exec(t.Context(), `ALTER ROLE CURRENT_USER SET synchronous_commit = off`)
	require.NoError(t, err)
	run(t, s.relayPool(t), testenv.KafkaOpts(s.brokers), outbox.RelayConfig{
		DeliveryTimeout: time.Second, Lease: lease, Logger: slog.New(slog.DiscardHandler),
	})
	taken := s.leasedUntil(t)
	s.flush(t)
	renewed := taken
	require.Eventually(t, func() bool {
		renewed = s.leasedUntil(t)
		return renewed.After(taken)
	}, testenv.Patience, time.Millisecond)
	s.keepApart(t) // or it would renew the lease again
	s.killBackend(t)
	require.False(t, s.leasedUntil(t).Before(renewed), "PostgreSQL has forgotten a renewal")
}

// leasedUntil waits until a relay has the lease and returns when it expires.
func (s *site) leasedUntil(t *testing.T) (until time.Time) {
	t.Helper()
	require.Eventually(t, func() bool {
		return s.db.QueryRow(t.Context(), `SELECT expires_at FROM outbox_lease`).Scan(&until) == nil
	}, testenv.Patience, time.Millisecond)
	return until
}

// oldLeader is a relay that stands still in front of a statement, and whose newest row of
// outbox_cursor a crash has taken.
type oldLeader struct {
	*site
	gate    *gate
	known   cursorRow // the newest row before the crash
	events  []oracle.Event
	leading chan bool // from its hook
	sent    atomic.Int64
}

// forgottenLeader returns a relay that stands in front of the nth statement that reads a
// window. PostgreSQL has forgotten the row that the relay knows: a backend was killed.
func forgottenLeader(t *testing.T, n int) *oldLeader {
	t.Helper()
	for range 5 { // the server may flush its WAL just then
		o := newOldLeader(t)
		o.stopAt(t, n)
		o.known = o.newest(t)
		o.killBackend(t)
		if o.newest(t).ID < o.known.ID && o.nextID(t) <= o.known.Xid {
			return o
		}
		o.gate.release()
	}
	require.Fail(t, "PostgreSQL has flushed its WAL each time")
	return nil
}

func newOldLeader(t *testing.T) *oldLeader {
	t.Helper()
	o := &oldLeader{site: newSite(t), gate: newGate(), leading: make(chan bool, 10)}
	db := o.poolConfig(t)
	db.ConnConfig.Tracer = o.gate
	// Without a session it has no lock to lose, which would have it renew its lease.
	db.BeforeConnect = func(_ context.Context, cfg *pgx.ConnConfig) error {
		if cfg.Tracer == nil {
			return errors.New("only the pool connects")
		}
		return nil
	}
	cfg := o.config()
	cfg.Hooks.Leading = func(leading bool) { o.leading <- leading }
	cfg.Hooks.Sent = func(b outbox.SentBatch) {
		for range b.All() {
			o.sent.Add(1)
		}
	}
	run(t, openPool(t, db), testenv.KafkaOpts(o.brokers), cfg)
	t.Cleanup(o.gate.release)
	t.Cleanup(o.gate.renews)
	o.awaitLeading(t, true)
	return o
}

// config has a lease that lasts longer than the test: no renewal flushes the WAL, or tells
// the old leader that there is another one.
func (o *oldLeader) config() outbox.RelayConfig {
	return outbox.RelayConfig{
		BatchSize: 10, PollInterval: 5 * time.Millisecond, Lease: 10 * time.Minute, Logger: slog.New(slog.DiscardHandler),
	}
}

// stopAt lets the relay open a window, whose row is not flushed, and stops it in front of
// the nth statement that reads it.
func (o *oldLeader) stopAt(t *testing.T, n int) {
	t.Helper()
	o.add(t, 3)
	o.requireArrival(t, o.events)
	require.Eventually(t, func() bool { return !o.newest(t).Open }, testenv.Patience, time.Millisecond)
	o.flush(t)
	o.gate.stopAt(n)
	o.add(t, 50)
	select {
	case <-o.gate.reached:
	case <-time.After(testenv.Patience):
		require.Fail(t, "the window is not read")
	}
	if n > 2 { // it prefetches while it sends, and moves behind what it has sent
		require.Eventually(t, func() bool { return o.newest(t).Last > 0 }, testenv.Patience, time.Millisecond)
	}
}

// add commits n events of a few keys, in the order of their versions.
func (o *oldLeader) add(t *testing.T, n int) {
	t.Helper()
	events := make([]oracle.Event, n)
	for i := range events {
		version := len(o.events) + i
		events[i] = oracle.Event{ID: uuid.NewString(), Key: fmt.Sprint("key-", version%3), Version: int64(version)}
	}
	o.site.add(t, events...)
	o.events = append(o.events, events...)
}

func (o *oldLeader) confirmed() map[string]struct{} {
	ids := map[string]struct{}{}
	for _, e := range o.events {
		ids[e.ID] = struct{}{}
	}
	return ids
}

func (o *oldLeader) awaitLeading(t *testing.T, want bool) {
	t.Helper()
	select {
	case leading := <-o.leading:
		require.Equal(t, want, leading)
	case <-time.After(testenv.Patience):
		require.Fail(t, "the relay neither takes nor gives up the lease")
	}
}

// cursorRow is a row of outbox_cursor.
type cursorRow struct {
	ID, Epoch, Last int64
	Open            bool
	Xid             int64 // of the transaction that wrote it
}

const cursorColumns = `id, epoch, last_processed_id AS last, window_snapshot IS NOT NULL AS open, xmin::text::bigint AS xid`

func (s *site) newest(t *testing.T) cursorRow {
	t.Helper()
	return s.oneCursorRow(t, `SELECT `+cursorColumns+` FROM outbox_cursor ORDER BY id DESC LIMIT 1`)
}

func (s *site) cursorRow(t *testing.T, id int64) cursorRow {
	t.Helper()
	return s.oneCursorRow(t, `SELECT `+cursorColumns+` FROM outbox_cursor WHERE id = $1`, id)
}

func (s *site) oneCursorRow(t *testing.T, sql string, args ...any) cursorRow {
	t.Helper()
	rows, err := s.db.Query(t.Context(), sql, args...)
	require.NoError(t, err)
	row, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[cursorRow])
	require.NoError(t, err)
	return row
}

// killBackend ends one session of its own with SIGKILL, waits until PostgreSQL has
// recovered, and requires that it is the same server.
func (s *site) killBackend(t *testing.T) {
	t.Helper()
	victim, witness, started := s.connect(t), s.connect(t), s.startTime(t)
	require.NoError(t, syscall.Kill(int(victim.PgConn().PID()), syscall.SIGKILL))
	require.Eventually(t, func() bool { return witness.Ping(t.Context()) != nil }, testenv.Patience, time.Millisecond,
		"PostgreSQL was meant to end all sessions")
	s.db.Reset()
	require.Eventually(t, func() bool { return s.db.Ping(t.Context()) == nil }, testenv.Patience, 10*time.Millisecond)
	require.Equal(t, started, s.startTime(t), "the server was meant to be the same")
}

func (s *site) connect(t *testing.T) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), s.url)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) }) // it may have died with the server
	return conn
}

// startTime returns when the server was started. Clean-ups call it, too, when the test's context has ended.
func (s *site) startTime(t *testing.T) (started time.Time) {
	t.Helper()
	require.NoError(t, s.db.QueryRow(context.Background(), `SELECT pg_postmaster_start_time()`).Scan(&started))
	return started
}

// gate is a tracer of the connections of a relay. It stops the relay in front of a
// statement that proves where the cursor is and reads a window, and notes the answers
// that such statements get after it is released.
type gate struct {
	mu       sync.Mutex
	left     int // such statements, until it stops them; negative: it stops none
	answers  []proof
	reached  chan struct{} // closed when it stops one
	released chan struct{}
	release  func()
	answered chan struct{} // closed by the first answer; renewals of the lease, which would tell of another leader, wait for it
	renews   func()
}

// proof is a statement that proves where the cursor is, and how many rows it returned: none
// if the proof failed.
type proof struct{ cursorID, epoch, rows int64 }

func newGate() *gate {
	g := &gate{left: -1, reached: make(chan struct{}), released: make(chan struct{}), answered: make(chan struct{})}
	g.release = sync.OnceFunc(func() { close(g.released) })
	g.renews = sync.OnceFunc(func() { close(g.answered) })
	return g
}

// stopAt stops the nth statement from now on, and those that follow.
func (g *gate) stopAt(n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.left = n
}

// firstAnswer waits for an answer after the release.
func (g *gate) firstAnswer(t *testing.T) (first proof) {
	t.Helper()
	require.Eventually(t, func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		if len(g.answers) > 0 {
			first = g.answers[0]
		}
		return len(g.answers) > 0
	}, testenv.Patience, time.Millisecond)
	return first
}

// TraceBatchStart is called before statements are sent.
func (g *gate) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, q := range data.Batch.QueuedQueries {
		if _, proves := proofOf(q.Arguments); proves && g.stops() {
			<-g.released
		}
		if isRenewal(q.Arguments) && g.stands() {
			<-g.answered
		}
	}
	return ctx
}

func (g *gate) stops() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.left < 0 {
		return false
	}
	g.left = max(0, g.left-1)
	if g.left > 0 {
		return false
	}
	select {
	case <-g.reached:
	default:
		close(g.reached)
	}
	return true
}

// TraceBatchQuery is called when the answer to a statement has been read.
func (g *gate) TraceBatchQuery(_ context.Context, _ *pgx.Conn, data pgx.TraceBatchQueryData) {
	p, proves := proofOf(data.Args)
	if !proves || data.Err != nil { // the connection died in the crash
		return
	}
	select {
	case <-g.released:
	default:
		return
	}
	p.rows = data.CommandTag.RowsAffected()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.answers = append(g.answers, p)
	g.renews()
}

// stands reports whether a statement has been stopped.
func (g *gate) stands() bool {
	select {
	case <-g.reached:
		return true
	default:
		return false
	}
}

// isRenewal recognises the statement that renews the lease: relay, holder, epoch, and how long it lasts.
func isRenewal(args []any) bool {
	if len(args) < 4 {
		return false
	}
	_, isEpoch := args[2].(int64)
	_, isDuration := args[3].(time.Duration)
	return isEpoch && isDuration
}

// proofOf recognises the statements by their first parameters: the row of outbox_cursor,
// the relay, the epoch, and the start time of the server.
func proofOf(args []any) (p proof, proves bool) {
	if len(args) < 4 {
		return p, false
	}
	id, isID := args[0].(int64)
	epoch, isEpoch := args[2].(int64)
	_, isTime := args[3].(time.Time)
	return proof{cursorID: id, epoch: epoch}, isID && isEpoch && isTime
}

// TraceBatchEnd, TraceQueryStart and TraceQueryEnd do nothing.
func (g *gate) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

func (g *gate) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (g *gate) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
