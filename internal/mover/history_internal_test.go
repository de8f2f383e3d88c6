package mover

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// history is a run of several movers while events are recorded and cancelled. The backends of the movers are killed.
type history struct {
	*tables
	seed uint64

	mu        sync.Mutex
	recorded  map[uuid.UUID]delayed
	cancelled map[uuid.UUID]bool
	killed    int
}

// delayed is an event as it was recorded.
type delayed struct {
	key       string
	due       time.Time
	id        int64     // of outbox_delayed
	committed time.Time // by the clock of the database, after its commit was confirmed
}

const (
	historyMovers  = 4
	historyWriters = 4
	historyKeys    = 12
	historyFor     = 12 * time.Second
	moverName      = "outbox mover of a history"
)

// Whatever happens to movers, each event that was not cancelled is moved once, none before it is due, and those of a
// key in the order of their due times and ids. Transactions that record or cancel are open for a while, and some are
// rolled back.
func TestHistory(t *testing.T) {
	t.Parallel()
	testenv.Long(t)
	testenv.Direct(t) // it ends the backends of movers
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	h := &history{tables: newTables(t), seed: seed, recorded: map[uuid.UUID]delayed{}, cancelled: map[uuid.UUID]bool{}}
	movers := testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.MaxConns, cfg.ConnConfig.RuntimeParams["application_name"] = historyMovers, moverName+h.schema[:8]
	})
	ctx, stop := context.WithCancel(background)
	var work, moving sync.WaitGroup
	for n := range historyMovers {
		moving.Go(func() {
			m := New(Config{DB: movers, Schema: h.schema, Poll: 20 * time.Millisecond, Timeout: testenv.Patience, Moved: func() {}, Log: slog.New(slog.DiscardHandler), Outages: NewOutages(slog.New(slog.DiscardHandler))})
			if n%2 == 0 {
				m.quick = 0 // so most of its looks begin at the floor
			}
			m.Run(ctx, background)
		})
	}
	end := time.Now().Add(historyFor)
	for n := range historyWriters {
		work.Go(func() { h.write(t, rand.New(rand.NewPCG(seed, uint64(n))), end) })
	}
	work.Go(func() { h.cancelSome(t, rand.New(rand.NewPCG(seed, 100)), end) })
	work.Go(func() { h.kill(t, rand.New(rand.NewPCG(seed, 200)), end) })
	work.Wait()
	left := func() (n int) {
		require.NoError(t, h.db.QueryRow(background, h.sql(`SELECT count(*) FROM {schema}.outbox_delayed`)).Scan(&n))
		return n
	}
	require.Eventually(t, func() bool { return left() == 0 }, testenv.Patience, 10*time.Millisecond)
	stop()
	moving.Wait()
	h.check(t)
}

// write records events, of which some are due at the same time or already, in transactions that are open for a while.
func (h *history) write(t *testing.T, rnd *rand.Rand, end time.Time) {
	for time.Now().Before(end) {
		events := map[uuid.UUID]delayed{}
		err := pgx.BeginFunc(background, h.db, func(tx pgx.Tx) error {
			for range 1 + rnd.IntN(5) {
				e := delayed{key: fmt.Sprint(rnd.IntN(historyKeys))}
				id := uuid.New()
				late := time.Duration(rnd.IntN(600)-200) * time.Millisecond
				err := tx.QueryRow(background, h.sql(`
					INSERT INTO {schema}.outbox_delayed (due_at, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
					VALUES (date_trunc('second', now()) + $1::interval, $2, 'acme.order.due.v1', 'shop', 'Order', $3, '1', 'application/json', now()) RETURNING id, due_at`),
					late, id, e.key).Scan(&e.id, &e.due)
				if err != nil {
					return err
				}
				events[id] = e
			}
			time.Sleep(time.Duration(rnd.IntN(50)) * time.Millisecond)
			if rnd.IntN(10) == 0 {
				return errRolledBack
			}
			return nil
		})
		if errors.Is(err, errRolledBack) {
			continue
		}
		require.NoError(t, err)
		var committed time.Time
		require.NoError(t, h.db.QueryRow(background, `SELECT clock_timestamp()`).Scan(&committed))
		h.mu.Lock()
		for id, e := range events {
			e.committed = committed
			h.recorded[id] = e
		}
		h.mu.Unlock()
	}
}

var errRolledBack = errors.New("rolled back")

// cancelSome cancels events at random, in transactions that are open for a while, and of which some are rolled back.
func (h *history) cancelSome(t *testing.T, rnd *rand.Rand, end time.Time) {
	for time.Now().Before(end) {
		var ids []uuid.UUID
		err := pgx.BeginFunc(background, h.db, func(tx pgx.Tx) error {
			rows, err := tx.Query(background, h.sql(`SELECT event_id FROM {schema}.outbox_delayed ORDER BY random() LIMIT 3`))
			if err != nil {
				return err
			}
			chosen, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
			if err != nil {
				return err
			}
			for _, id := range chosen {
				var was bool
				if err := tx.QueryRow(background, h.sql(`SELECT {schema}.outbox_cancel($1)`), id).Scan(&was); err != nil {
					return err
				}
				if was {
					ids = append(ids, id)
				}
			}
			time.Sleep(time.Duration(rnd.IntN(100)) * time.Millisecond)
			if rnd.IntN(2) == 0 {
				return errRolledBack
			}
			return nil
		})
		if errors.Is(err, errRolledBack) {
			continue
		}
		require.NoError(t, err)
		h.mu.Lock()
		for _, id := range ids {
			h.cancelled[id] = true
		}
		h.mu.Unlock()
	}
}

// kill ends backends of movers.
func (h *history) kill(t *testing.T, rnd *rand.Rand, end time.Time) {
	for time.Now().Before(end) {
		tag, err := h.db.Exec(background, `
			SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1 AND state = 'active' ORDER BY random() LIMIT 1`, moverName+h.schema[:8])
		require.NoError(t, err)
		h.killed += int(tag.RowsAffected())
		time.Sleep(time.Duration(rnd.IntN(20)) * time.Millisecond)
	}
}

// check compares what was recorded with outbox.
func (h *history) check(t *testing.T) {
	rows, err := h.db.Query(background, h.sql(`SELECT event_id, created_at FROM {schema}.outbox ORDER BY id`))
	require.NoError(t, err)
	type movedEvent struct {
		Event uuid.UUID
		At    time.Time // when its transaction began
	}
	moves, err := pgx.CollectRows(rows, pgx.RowToStructByPos[movedEvent])
	require.NoError(t, err)
	var lost, repeated, early, inversions, undead int
	times := map[uuid.UUID]int{}
	byKey := map[string][]movedEvent{}
	for _, m := range moves {
		e := h.recorded[m.Event]
		times[m.Event]++
		byKey[e.key] = append(byKey[e.key], m)
		if m.At.Before(e.due) {
			early++
		}
	}
	for id := range h.recorded {
		switch n := times[id]; {
		case n == 0 && !h.cancelled[id]:
			lost++
		case n > 0 && h.cancelled[id]:
			undead++
		case n > 1:
			repeated++
		}
	}
	for _, ofKey := range byKey {
		for i, m := range ofKey {
			for _, before := range ofKey[:i] {
				first, second := h.recorded[before.Event], h.recorded[m.Event]
				inOrder := first.due.Before(second.due) || first.due.Equal(second.due) && first.id < second.id
				if !inOrder && second.committed.Before(before.At) {
					inversions++
				}
			}
		}
	}
	t.Logf("%d recorded, %d cancelled, %d moved, %d movers killed: lost %d, repeated %d, early %d, inversions %d, sent although cancelled %d",
		len(h.recorded), len(h.cancelled), len(moves), h.killed, lost, repeated, early, inversions, undead)
	require.Zero(t, lost+repeated+early+inversions+undead)
	require.NotZero(t, len(moves))
	require.NotZero(t, len(h.cancelled))
	require.NotZero(t, h.killed)
}
