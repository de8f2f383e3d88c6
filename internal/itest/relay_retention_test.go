package itest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
)

// tidy is quick, with a relay that cleans all the time.
func tidy() outbox.RelayConfig {
	cfg := quick
	cfg.Retention = outbox.RetentionConfig{CursorsFor: 50 * time.Millisecond}
	return cfg
}

// aged makes rows of outbox old enough to go.
const aged = `UPDATE {s}.outbox SET created_at = now() - '8 days'::interval`

func (h *relayFixture) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	_, err := h.db.Exec(background, h.sql(sql), args...)
	require.NoError(t, err)
}

// update changes rows of outbox.
func (h *relayFixture) update(t testing.TB, sql string, args ...any) {
	t.Helper()
	testenv.UpdateEvents(t, h.db, h.sql(sql), args...)
}

// A relay publishes, cleans, and says so. What a transaction commits that was
// prepared long ago it still publishes.
func TestRelayCleans(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	reader := h.follow(t)
	late := numbered("late", 1, 3)
	tx, err := h.db.Begin(background)
	require.NoError(t, err)
	require.NoError(t, h.record(background, tx, late...))
	_, err = tx.Exec(background, h.sql(aged))
	require.NoError(t, err)
	_, err = tx.Exec(background, fmt.Sprintf(`PREPARE TRANSACTION '%s'`, h.schema))
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(background)) // ends pgx's part; the transaction is PostgreSQL's
	t.Cleanup(func() {                          // fails where the test has committed it
		_, _ = h.db.Exec(background, fmt.Sprintf(`ROLLBACK PREPARED '%s'`, h.schema))
	})

	const n = 1050 // more than a batch
	early := numbered("early", 1, n)
	h.commit(t, early...)
	cfg := tidy()
	var removed atomic.Int64
	cfg.Hooks.RowsRemoved = func(c outbox.RetentionResult) { removed.Add(c.Published) }
	log := new(testenv.Buffer)
	cfg.Logger = slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	stop := testenv.Run(t, h.relay(t, cfg).Run)
	requireArrival(t, reader, early...)
	require.Never(t, func() bool { return h.count(t, "outbox") < n }, 50*time.Millisecond, 10*time.Millisecond, "they are young")
	h.update(t, aged)
	require.Eventually(t, func() bool { return h.count(t, "outbox") == 0 }, testenv.Patience, 5*time.Millisecond)
	require.Eventually(t, func() bool { return removed.Load() == n }, testenv.Patience, 5*time.Millisecond)

	_, err = h.db.Exec(background, fmt.Sprintf(`COMMIT PREPARED '%s'`, h.schema))
	require.NoError(t, err)
	requireArrival(t, reader, late...)
	stop()
	require.Contains(t, log.String(), `level=DEBUG msg="outbox: rows removed" relay=default published=`)
	require.Equal(t, 3, h.count(t, "outbox"), "they lie behind; tomorrow it begins from the start again")
	testenv.Run(t, h.relay(t, cfg).Run) // and so does the next relay
	require.Eventually(t, func() bool { return h.count(t, "outbox") == 0 }, testenv.Patience, 5*time.Millisecond)
}

// Rows stay while a relay has not published them, and the log has its name, once.
func TestLaggingRelayKeepsRows(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	reader := h.follow(t)
	audit := tidy()
	audit.Name = "audit"
	audit.Retention.PublishedFor = outbox.Forever
	stop := testenv.Run(t, h.relay(t, audit).Run)
	first := numbered("key", 1, 5)
	h.commit(t, first...)
	requireArrival(t, reader, first...)
	stop()

	second := numbered("key", 6, 5)
	h.commit(t, second...)
	cfg := tidy()
	log := new(testenv.Buffer)
	cfg.Logger = slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	testenv.Run(t, h.relay(t, cfg).Run)
	requireArrival(t, reader, second...)
	h.update(t, aged)
	require.Eventually(t, func() bool { return h.count(t, "outbox") == 5 }, testenv.Patience, 5*time.Millisecond, "both have sent five")
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "lagging_relay=audit") }, testenv.Patience, 5*time.Millisecond)
	runs := strings.Count(log.String(), "outbox: rows removed")
	require.Eventually(t, func() bool { return strings.Count(log.String(), "outbox: rows removed") > runs+10 }, testenv.Patience, 5*time.Millisecond)
	require.Equal(t, 1, strings.Count(log.String(), "lagging_relay=audit"))
	require.Equal(t, 5, h.count(t, "outbox"))

	testenv.Run(t, h.relay(t, audit).Run)
	require.Eventually(t, func() bool { return h.count(t, "outbox") == 0 }, testenv.Patience, 5*time.Millisecond)
}

// What cannot be archived stays, and the log says so once, and when it works again.
func TestArchiveFails(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	reader := h.follow(t)
	events := numbered("key", 1, 5)
	h.commit(t, events...)
	cfg := tidy()
	var works atomic.Bool
	var tries atomic.Int64
	cfg.Retention.Archive = func(_ context.Context, _ pgx.Tx, rows []outbox.ArchivedEvent) error {
		tries.Add(1)
		if !works.Load() {
			return errors.New("no space is remaining")
		}
		return nil
	}
	log := new(testenv.Buffer)
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	testenv.Run(t, h.relay(t, cfg).Run)
	requireArrival(t, reader, events...)
	h.update(t, aged)
	require.Eventually(t, func() bool { return tries.Load() > 5 }, testenv.Patience, 5*time.Millisecond)
	require.Equal(t, 5, h.count(t, "outbox"))
	require.Equal(t, 1, strings.Count(log.String(), "retention of outbox fails"))
	require.Contains(t, log.String(), "no space is remaining")
	works.Store(true)
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "retention of outbox works again") }, testenv.Patience, 5*time.Millisecond)
	require.Zero(t, h.count(t, "outbox"))
}

// Writers and the relay do not wait for a cleaning of very many rows.
func TestCleaningBlocksNobody(t *testing.T) {
	// Not parallel: its writers wait for a lock for 100 ms at most.
	h := newRelayFixture(t)
	reader := h.follow(t)
	cfg := tidy()
	cfg.PollInterval = 2 * time.Millisecond
	stop := testenv.Run(t, h.relay(t, cfg).Run)
	first := numbered("first", 1, 1)
	h.commit(t, first...)
	requireArrival(t, reader, first...)
	stop()
	const many = 20_000
	h.update(t, `
		INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, created_at, xid)
		SELECT gen_random_uuid(), 'a.b.c.v1', 's', 'a', 'k', '{}', 'application/json', now(), now() - '8 days'::interval, '3' FROM generate_series(1, $1)`, many)
	h.exec(t, `UPDATE {s}.outbox_cursor SET highest_id = $1`, many+1)

	testenv.Run(t, h.relay(t, cfg).Run)
	var all []oracle.Event
	remaining := many
	for version := 1; remaining > 1000; version++ {
		e := numbered("key", version, 1)
		require.NoError(t, pgx.BeginFunc(background, h.db, func(tx pgx.Tx) error {
			if _, err := tx.Exec(background, `SET LOCAL lock_timeout = '100ms'`); err != nil {
				return err
			}
			return h.record(background, tx, e...)
		}))
		all = append(all, e...)
		if version%20 == 0 {
			remaining = h.countWhere(t, `SELECT count(*) FROM {s}.outbox WHERE created_at < now() - '7 days'::interval`)
		}
	}
	t.Logf("%d events recorded meanwhile", len(all))
	requireArrival(t, reader, all...)
}

// partitions returns the names of outbox's partitions.
func (h *relayFixture) partitions(t testing.TB) []string {
	t.Helper()
	rows, err := h.db.Query(background, h.sql(`SELECT name::text FROM {s}.outbox_partitions() ORDER BY first`))
	require.NoError(t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return names
}

// ahead counts the partitions of 50 ids that no id has reached.
func (h *relayFixture) ahead(t testing.TB) (n int) {
	t.Helper()
	require.NoError(t, h.db.QueryRow(background, h.sql(
		`SELECT count(*) FROM {s}.outbox_partitions(), {s}.outbox_id_seq WHERE first > last_value AND behind - greatest(first, 0) = 50`)).Scan(&n))
	return n
}

// A relay makes partitions ahead, publishes over all of them, drops what is old, and
// removes one by one what came to where no partition is any more.
func TestRelayKeepsPartitions(t *testing.T) {
	t.Parallel()
	h := newPartitionedFixture(t, 50)
	reader := h.follow(t)
	log := new(testenv.Buffer)
	cfg := tidy()
	cfg.Logger = slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	var removed atomic.Int64
	cfg.Hooks.RowsRemoved = func(c outbox.RetentionResult) { removed.Add(c.Published) }
	stop := testenv.Run(t, h.relay(t, cfg).Run)
	var all []oracle.Event
	for i := range 6 {
		events := numbered(fmt.Sprint("key-", i), 1, 100)
		h.commit(t, events...)
		requireArrival(t, reader, events...)
		all = append(all, events...)
		require.Eventually(t, func() bool { return h.ahead(t) >= 6 }, testenv.Patience, 5*time.Millisecond)
	}
	require.Equal(t, 600, h.count(t, "outbox"), "they are young")
	h.update(t, aged)
	require.Eventually(t, func() bool { return h.count(t, "outbox") < 60 }, testenv.Patience, 5*time.Millisecond)
	require.Eventually(t, func() bool { return !slices.Contains(h.partitions(t), "outbox_min_50") }, testenv.Patience, 5*time.Millisecond, "dropped")
	require.Eventually(t, func() bool { return removed.Load() >= 550 }, testenv.Patience, 5*time.Millisecond)
	require.Contains(t, log.String(), "outbox: partition removed")
	h.update(t, `UPDATE {s}.outbox SET id = 7, xid = pg_current_xact_id() WHERE id = (SELECT max(id) FROM {s}.outbox)`)
	require.Eventually(t, func() bool {
		var n int
		require.NoError(t, h.db.QueryRow(background, h.sql(`SELECT count(*) FROM {s}.outbox_default`)).Scan(&n))
		return n == 0
	}, testenv.Patience, 5*time.Millisecond, "it was published, and went")
	stop()
	arrived, err := reader.Arrived()
	require.NoError(t, err)
	require.Subset(t, arrived, all)
}
