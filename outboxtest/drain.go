package outboxtest

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Drain runs a relay until all that was committed before the call has been sent,
// with the delayed events that were due then, and stops it. It decides by the tables,
// so another relay of the same name may do the work: one that runs in the program
// under test.
//
// The test fails if that takes longer than the deadline of ctx, or 30 s if it has
// none, and at once if an event is dead; the failure names what is still pending
// and why, and has the warnings of the relay. While Kafka does not answer, it comes
// up to one and a half DeliveryTimeout later.
//
// The configuration is that of the relay, with a PollInterval and a RetryInterval of
// 50 ms and a Logger for the failure, unless they are given.
func Drain(ctx context.Context, t T, db *pgxpool.Pool, kafka []kgo.Opt, cfg outbox.RelayConfig) {
	t.Helper()
	ctx, cancel := patiently(ctx)
	defer cancel()
	if err := drain(ctx, db, kafka, cfg); err != nil {
		t.Fatalf("outboxtest: %v", err)
	}
}

const drainInterval = 50 * time.Millisecond

func drain(ctx context.Context, db *pgxpool.Pool, kafka []kgo.Opt, cfg outbox.RelayConfig) error {
	cfg.PollInterval = cmp.Or(cfg.PollInterval, drainInterval)
	cfg.RetryInterval = cmp.Or(cfg.RetryInterval, drainInterval)
	var warnings logBuffer
	cfg.Logger = cmp.Or(cfg.Logger, slog.New(slog.NewTextHandler(&warnings, &slog.HandlerOptions{Level: slog.LevelWarn})))
	relay, err := outbox.NewRelay(db, kafka, cfg)
	if err != nil {
		return err
	}
	b, err := newBacklog(ctx, db, cfg)
	if err != nil {
		return err
	}
	return runUntilNone(ctx, "relay", relay.Run, b.left, &warnings)
}

// remaining returns what is left to do, dead events first; a nil limit is none.
type remaining = func(ctx context.Context, limit *int) ([]pending, error)

// runUntilNone runs a relay or a worker until nothing is left.
func runUntilNone(ctx context.Context, who string, begin func(context.Context) error, rest remaining, warnings *logBuffer) error {
	if left, err := rest(ctx, nil); err != nil || len(left) == 0 {
		return err
	}
	waiting, ended := context.WithCancel(ctx)
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	var failed error
	var running sync.WaitGroup
	running.Go(func() {
		defer ended()
		failed = begin(run)
	})
	left, err := await(waiting, rest)
	stop()
	running.Wait()
	switch {
	case failed != nil: // what the tables say then is a consequence
		return fmt.Errorf("%s: %w", who, failed)
	case err != nil:
		return err
	case len(left) > 0:
		return fmt.Errorf("%s:\n%s%s", map[string]string{"relay": "not sent", "worker": "not handled"}[who], list(left), warnings.tail())
	}
	return nil
}

// backlog is what was committed at some moment, and a relay of this name has to
// send.
type backlog struct {
	db     *pgxpool.Pool
	schema string
	relay  string
	until  string   // the snapshot of that moment
	due    []string // ids of the delayed events that were due
}

const sqlBacklog = `
SELECT pg_current_snapshot()::text, ARRAY(SELECT event_id::text FROM {schema}.outbox_delayed WHERE due_at <= now())`

func newBacklog(ctx context.Context, db *pgxpool.Pool, cfg outbox.RelayConfig) (backlog, error) {
	b := backlog{db: db, schema: cmp.Or(cfg.Schema, "public"), relay: cmp.Or(cfg.Name, "default")}
	if err := db.QueryRow(ctx, completed(sqlBacklog, b.schema)).Scan(&b.until, &b.due); err != nil {
		return b, fmt.Errorf("look at what is committed: %w", err)
	}
	return b, nil
}

// await returns what is left when ctx ends or an event is dead: nothing, if all goes
// well.
func await(ctx context.Context, rest remaining) ([]pending, error) {
	one := 1
	for {
		first, err := rest(ctx, &one)
		switch {
		case ctx.Err() != nil:
		case err != nil || len(first) == 0:
			return nil, err
		case first[0].status != "dead" && pause(ctx):
			continue
		}
		all, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		return rest(all, nil)
	}
}

// pending is an event that was committed and not sent.
type pending struct {
	id                     int64 // outbox.id, or that in outbox_delayed
	eventType, aggregateID string
	status                 string // in outbox_failed, due in outbox_delayed, or "" before the first attempt
	retries                int
	problem                string
}

// String is a line of a failure message.
func (p pending) String() string {
	line := fmt.Sprintf("%d %s of %s: ", p.id, p.eventType, p.aggregateID)
	if p.status == "" {
		return line + "not attempted"
	}
	line += p.status
	if p.retries > 0 {
		line += fmt.Sprintf(" after %d retries", p.retries)
	}
	if p.problem != "" {
		line += ", " + cut(p.problem)
	}
	return line
}

// sqlDue reads delayed events as pending ones.
const sqlDue = `    SELECT d.id, d.event_type, d.aggregate_id, CASE WHEN d.rejected_at IS NULL THEN 'due' ELSE 'dead' END, 0,
           coalesce('rejected by outbox: ' || d.rejection, '')
      FROM {schema}.outbox_delayed AS d`

// sqlPending reads what was visible in a snapshot and has not been sent: not
// attempted, as the newest row of outbox_cursor that is confirmed has it, or in outbox_failed. A row
// of another cluster says nothing until the relay has rebased it. What failed
// and is no longer in outbox has been there before. Of delayed events the ids
// are given, because they enter outbox later; one that outbox has rejected is dead.
const sqlPending = `
WITH at AS MATERIALIZED (
    SELECT c.* FROM pg_control_system() AS s,
           (SELECT coalesce(confirmed, id) AS id FROM {schema}.outbox_cursor WHERE relay = $1::text ORDER BY id DESC LIMIT 1) AS newest,
           {schema}.outbox_cursor AS c
     WHERE c.id = newest.id AND c.system_identifier = s.system_identifier
), pending AS (
    SELECT o.id, o.event_type, o.aggregate_id, '' AS status, 0 AS retries, '' AS problem
      FROM {schema}.outbox AS o
     WHERE (pg_visible_in_snapshot(o.xid, $2::pg_snapshot) OR o.event_id = ANY ($4::text[]::uuid[]))
       AND NOT EXISTS (SELECT FROM at
                        WHERE pg_visible_in_snapshot(o.xid, at.snapshot)
                           OR pg_visible_in_snapshot(o.xid, at.window_snapshot) AND o.id <= at.last_processed_id)
     UNION ALL
    SELECT f.outbox_id, f.event_type, f.aggregate_id, f.status, f.retry_count, pg_catalog.concat_ws(': ', f.error_class, f.last_error)
      FROM {schema}.outbox_failed AS f
     WHERE f.relay = $1::text AND f.status <> 'resolved'
       AND NOT EXISTS (SELECT FROM {schema}.outbox AS o
                        WHERE o.id = f.outbox_id AND o.event_id = f.event_id
                          AND NOT pg_visible_in_snapshot(o.xid, $2::pg_snapshot)
                          AND o.event_id <> ALL ($4::text[]::uuid[]))
     UNION ALL
` + sqlDue + `
     WHERE d.event_id = ANY ($4::text[]::uuid[])
)
SELECT * FROM pending ORDER BY status = 'dead' DESC, id LIMIT $3::bigint`

// left returns what is pending, dead events first; a nil limit is none.
func (b backlog) left(ctx context.Context, limit *int) (left []pending, err error) {
	return readPending(ctx, b.db, completed(sqlPending, b.schema), b.relay, b.until, limit, b.due)
}

func readPending(ctx context.Context, db DB, sql string, args ...any) (left []pending, err error) {
	rows, err := db.Query(ctx, sql, args...)
	if err != nil {
		return nil, fmt.Errorf("look at what is done: %w", err)
	}
	var p pending
	_, err = pgx.ForEachRow(rows, []any{&p.id, &p.eventType, &p.aggregateID, &p.status, &p.retries, &p.problem}, func() error {
		left = append(left, p)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("look at what is done: %w", err)
	}
	return left, nil
}

// logBuffer keeps what a relay logs.
type logBuffer struct {
	mu    sync.Mutex
	lines []string
}

// Write takes a line.
func (l *logBuffer) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, strings.TrimSpace(string(line)))
	return len(line), nil
}

// tail returns the last lines, for a failure message.
func (l *logBuffer) tail() string {
	if l == nil {
		return ""
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.lines) == 0 {
		return ""
	}
	return "the relay warned:\n" + list(l.lines[max(0, len(l.lines)-maxLines):])
}
