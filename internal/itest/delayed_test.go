package itest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// delayed returns an event that is due at a time.
func delayed(number string, due time.Time) outbox.DomainEvent {
	return outbox.With(id(number), outbox.EventOptions{NotBefore: due})
}

// delayedIDs returns the aggregate ids in outbox_delayed in the order of their ids.
func (c *counter) delayedIDs(t testing.TB) []string {
	t.Helper()
	rows, err := c.db.Query(background, c.sql(`SELECT aggregate_id FROM {s}.outbox_delayed ORDER BY id`))
	require.NoError(t, err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return ids
}

// waysToRecord are the methods of a recorder that store events in a transaction, by name.
func (c *counter) waysToRecord() map[string]func(tx pgx.Tx, events []outbox.DomainEvent) error {
	return map[string]func(tx pgx.Tx, events []outbox.DomainEvent) error{
		"Record": func(tx pgx.Tx, events []outbox.DomainEvent) error { return c.rec.Record(background, tx, events...) },
		"Queue": func(tx pgx.Tx, events []outbox.DomainEvent) error {
			var batch pgx.Batch
			return errors.Join(c.rec.Queue(background, &batch, events...), tx.SendBatch(background, &batch).Close())
		},
		"Statement": func(tx pgx.Tx, events []outbox.DomainEvent) error {
			sql, args, err := c.rec.Statement(background, events...)
			if err == nil {
				_, err = tx.Exec(background, sql, args...)
			}
			return err
		},
	}
}

// Events that are not due yet are stored by the statement of the call, in one round trip and in the order of the call.
func TestRecordDelayed(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	counts := &statements{}
	db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer, cfg.MaxConns = counts, 1 })
	due := time.Date(2100, 2, 3, 4, 5, 6, 1_500, time.UTC)
	for name, add := range c.waysToRecord() {
		for _, n := range []int{1, 7, 600} {
			t.Run(fmt.Sprint(name, " ", n), func(t *testing.T) {
				var events []outbox.DomainEvent
				var now, later []string
				for i := range n {
					number := fmt.Sprint(name, n, " ", i)
					if i%3 == 0 {
						events, later = append(events, delayed(number, due)), append(later, number)
						continue
					}
					events, now = append(events, id(number)), append(now, number)
				}
				tx, err := db.Begin(background)
				require.NoError(t, err)
				defer tx.Rollback(background)
				counts.reset()
				require.NoError(t, add(tx, events))
				got := counts.reset()
				require.Equal(t, 1, got.queries+got.batches, "one round trip")
				require.Zero(t, got.copies)
				require.NoError(t, tx.Commit(background))
				require.Equal(t, now, append([]string(nil), c.ids(t)...))
				require.Equal(t, later, c.delayedIDs(t))
				var wrong int
				require.NoError(t, c.db.QueryRow(background, c.sql(`SELECT count(*) FROM {s}.outbox_delayed WHERE due_at <> '2100-02-03 04:05:06.000002Z' OR key <> aggregate_id
					OR recorded_at > now() OR payload IS NULL OR event_type <> $1 OR rejected_at IS NOT NULL`), parcelSent).Scan(&wrong))
				require.Zero(t, wrong, "a due time is rounded up")
				_, err = c.db.Exec(background, c.sql(`DELETE FROM {s}.outbox; DELETE FROM {s}.outbox_delayed`), pgx.QueryExecModeSimpleProtocol)
				require.NoError(t, err)
			})
		}
	}
	tx := c.begin(t)
	require.NoError(t, c.rec.Record(background, tx, delayed("rolled back", due)))
	require.NoError(t, tx.Rollback(background))
	require.Empty(t, c.delayedIDs(t))
	c.requireRefused(t, background, c.rec, outbox.ErrTime, refusal{parcelSent, 1, "not_before"}, good, delayed("1", time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)))
	c.requireRefused(t, background, c.rec, outbox.ErrTime, refusal{parcelSent, 1, "not_before"}, good, delayed("1", time.Date(0, 12, 31, 0, 0, 0, 0, time.UTC)))
	_, options := outbox.Unwrap(outbox.With(delayed("1", due), outbox.EventOptions{Key: "k"}))
	require.Equal(t, due, options.NotBefore)
	_, options = outbox.Unwrap(outbox.With(delayed("1", due), outbox.EventOptions{NotBefore: noon}))
	require.Equal(t, noon, options.NotBefore)
}

// moveDue moves what is due.
func (c *counter) moveDue(t testing.TB) (moved int) {
	t.Helper()
	require.NoError(t, c.db.QueryRow(background, c.sql(`SELECT moved FROM {s}.outbox_move_due(NULL, '{}')`)).Scan(&moved))
	return moved
}

// A cancellation belongs to its transaction. It says whether it was in time.
func TestCancel(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	record := func(due time.Time) uuid.UUID {
		id := uuid.New()
		c.commit(t, background, c.rec, outbox.With(good, outbox.EventOptions{ID: id, NotBefore: due}))
		return id
	}
	cancel := func(tx pgx.Tx, id uuid.UUID) bool {
		was, err := c.rec.Cancel(background, tx, id)
		require.NoError(t, err)
		return was
	}
	tomorrow, past := time.Now().Add(24*time.Hour), time.Now().Add(-time.Hour)
	id := record(tomorrow)
	tx := c.begin(t)
	require.True(t, cancel(tx, id))
	require.False(t, cancel(tx, id), "it is gone")
	require.NoError(t, tx.Rollback(background))
	tx = c.begin(t)
	require.True(t, cancel(tx, id))
	require.NoError(t, c.rec.Record(background, tx, outbox.With(good, outbox.EventOptions{ID: id, NotBefore: past})), "it is put off, or brought forward")
	require.NoError(t, tx.Commit(background))
	require.Equal(t, 1, c.moveDue(t))

	tx = c.begin(t)
	require.False(t, cancel(tx, id), "it was moved")
	require.False(t, cancel(tx, uuid.New()), "there is none")
	require.NoError(t, tx.Commit(background))

	repeatable, err := c.db.BeginTx(background, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	defer repeatable.Rollback(background)
	var n int
	id = record(past)
	require.NoError(t, repeatable.QueryRow(background, c.sql(`SELECT count(*) FROM {s}.outbox_delayed`)).Scan(&n))
	require.Equal(t, 1, n)
	require.Equal(t, 1, c.moveDue(t))
	_, err = c.rec.Cancel(background, repeatable, id)
	require.True(t, pg.IsTransient(err), "%v", err)

	_, err = c.rec.Cancel(background, nil, id)
	require.ErrorIs(t, err, outbox.ErrNilArgument)
}

// Relays and workers move delayed events and get them in the order of their due times, none of them early, at whatever
// isolation level they were recorded, also where outbox has partitions.
func TestDelayedEventsArrive(t *testing.T) {
	t.Parallel()
	h := newPartitionedFixture(t, 100)
	reader := h.follow(t)
	testenv.Run(t, h.relay(t, quick).Run)
	testenv.Run(t, h.relay(t, func() outbox.RelayConfig { other := quick; other.Name = "other"; return other }()).Run)
	var due time.Time
	hold, err := h.db.Begin(background) // nothing is moved before all are recorded
	require.NoError(t, err)
	defer hold.Rollback(background)
	_, err = hold.Exec(background, pg.InSchema(`LOCK TABLE {schema}.outbox_mover IN SHARE UPDATE EXCLUSIVE MODE`, h.schema))
	require.NoError(t, err)
	require.NoError(t, hold.QueryRow(background, `SELECT now() + interval '0.5 s'`).Scan(&due))
	events := numbered("a", 1, 120)
	times := map[string]time.Time{}
	for n := range events { // the last one is due first, and due times come twice
		i := len(events) - 1 - n
		at := due.Add(time.Duration(i/2) * 10 * time.Millisecond)
		times[events[i].ID] = at
		err := pgx.BeginTxFunc(background, h.db, pgx.TxOptions{IsoLevel: []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.ReadCommitted, pgx.Serializable}[n%3]}, func(tx pgx.Tx) error {
			return h.rec.Record(background, tx, outbox.With(events[i], outbox.EventOptions{ID: uuid.MustParse(events[i].ID), NotBefore: at}))
		})
		require.NoError(t, err)
	}
	require.NoError(t, hold.Commit(background))
	requireArrival(t, reader, events...)
	arrived, err := reader.Arrived()
	require.NoError(t, err)
	var pairs []oracle.Event // of those that are due at the same time, the one that was recorded first comes first
	for i := 0; i < len(events); i += 2 {
		pairs = append(pairs, events[i+1], events[i])
	}
	require.Equal(t, pairs, onceEach(arrived))
	rows, err := h.db.Query(background, pg.InSchema(`SELECT event_id::text, created_at FROM {schema}.outbox`, h.schema))
	require.NoError(t, err)
	var id string
	var at time.Time
	_, err = pgx.ForEachRow(rows, []any{&id, &at}, func() error {
		require.False(t, at.Before(times[id]), "%s is early", id)
		return nil
	})
	require.NoError(t, err)
}

// onceEach returns the first of each event: two relays have sent it.
func onceEach(arrived []oracle.Event) (all []oracle.Event) {
	seen := map[string]bool{}
	for _, e := range arrived {
		if !seen[e.ID] {
			all = append(all, e)
		}
		seen[e.ID] = true
	}
	return all
}

// A worker moves delayed events where there is no relay.
func TestWorkerGetsDelayed(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	arrived := make(chan int, 3)
	w := f.worker(f.db, "savers", outbox.WorkerConfig{PollInterval: 20 * time.Millisecond}, outbox.Handle("SAVE", func(_ context.Context, _ pgx.Tx, e step, _ outbox.Metadata) error {
		arrived <- e.N
		return nil
	}))
	due := time.Now().Add(time.Second)
	require.NoError(t, pgx.BeginFunc(background, f.db, func(tx pgx.Tx) error {
		var events []outbox.DomainEvent
		for n := 3; n > 0; n-- {
			events = append(events, outbox.With(step{"a", n}, outbox.EventOptions{NotBefore: due.Add(time.Duration(n) * time.Millisecond)}))
		}
		return f.rec.Record(background, tx, events...)
	}))
	testenv.Run(t, w.Run)
	for n := 1; n <= 3; n++ {
		select {
		case got := <-arrived:
			require.Equal(t, n, got)
		case <-time.After(testenv.Patience):
			require.Fail(t, "no event")
		}
	}
}

// A process that should move delayed events and cannot does not work, and says why.
func TestHealthWithoutMoves(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	relay := h.relay(t, quick)
	testenv.Run(t, relay.Run)
	w := newWorkerFixture(t)
	worker, _ := w.start(outbox.WorkerConfig{}, w.effects("ACCOUNT_STEPPED", nil))
	for _, of := range []struct {
		schema  string
		outages func() (works bool, outages []outbox.Outage, reasons []string)
	}{
		{h.schema, func() (bool, []outbox.Outage, []string) {
			s := relay.Health()
			return s.Works, s.Outages, s.Reasons
		}},
		{w.schema, func() (bool, []outbox.Outage, []string) {
			s := worker.Health()
			return s.Works, s.Outages, s.Reasons
		}},
	} {
		requireWorks := func(want bool, name string) {
			require.Eventually(t, func() bool {
				works, outages, reasons := of.outages()
				if want {
					return works
				}
				return !works && len(outages) == 1 && outages[0].What == "the move of delayed events" && strings.Contains(strings.Join(reasons, "; "), name)
			}, testenv.Patience, 10*time.Millisecond)
		}
		rename := func(from, to string) {
			_, err := h.db.Exec(background, pg.InSchema(`ALTER FUNCTION {schema}.`+from+` RENAME TO `+to, of.schema))
			require.NoError(t, err)
		}
		requireWorks(true, "")
		rename("outbox_move_due", "gone")
		requireWorks(false, "outbox_move_due")
		rename("gone", "outbox_move_due")
		requireWorks(true, "")
	}
}

// A process that cannot move the delayed events of one key works: those of other keys are moved.
func TestHealthBesideAKeyThatCannotBeMoved(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	h.exec(t, `CREATE FUNCTION {s}.rejects() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.aggregate_id = 'bad' THEN RAISE EXCEPTION 'no'; END IF; RETURN NEW; END $$`)
	h.exec(t, `CREATE TRIGGER rejects BEFORE INSERT ON {s}.outbox FOR EACH ROW EXECUTE FUNCTION {s}.rejects()`)
	var log testenv.Buffer
	cfg := quick
	cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
	relay := h.relay(t, cfg)
	testenv.Run(t, relay.Run)
	inASecond := outbox.EventOptions{NotBefore: time.Now().Add(time.Second)}
	h.commitAll(t, outbox.With(oracle.Event{ID: uuid.NewString(), Key: "bad", Version: 1}, inASecond), outbox.With(oracle.Event{ID: uuid.NewString(), Key: "good", Version: 1}, inASecond))
	require.Eventually(t, func() bool {
		return h.countWhere(t, `SELECT count(*) FROM {s}.outbox WHERE aggregate_id = 'good'`) == 1 && relay.Health().Works &&
			strings.Contains(log.String(), "the move of delayed events of some keys fails")
	}, testenv.Patience, 10*time.Millisecond)
	require.NotContains(t, log.String(), "the move of delayed events fails")
}
