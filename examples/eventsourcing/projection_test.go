package main

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxtest"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// projected is the program with the consumer of the projection, to which the test delivers events
// itself.
type projected struct {
	*app
	store   *EventStore
	deliver func(OrderEvent)
}

func newProjected(t *testing.T) *projected {
	t.Helper()
	a, store := newApp(t)
	c, err := a.consumer()
	require.NoError(t, err)
	return &projected{a, store, func(e OrderEvent) {
		t.Helper()
		require.NoError(t, c.Deliver(t.Context(), outboxtest.NewRecord(t.Context(), t, a.events, e)))
	}}
}

// requireRead requires that the read model has an order as it is after some events.
func (p *projected) requireRead(t *testing.T, events ...OrderEvent) {
	t.Helper()
	want, err := Rebuild(events)
	require.NoError(t, err)
	read, err := readModel(t.Context(), p.db)
	require.NoError(t, err)
	require.Equal(t, want.State, read[want.ID])
}

// Each event brings the read model forward, with the items, and once.
func TestProjection(t *testing.T) {
	t.Parallel()
	p := newProjected(t)
	for _, tt := range transitionTests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := p.db.Exec(t.Context(), `TRUNCATE orders, order_items`)
			require.NoError(t, err)
			events := play(t, tt.commands...).uncommitted
			for n, e := range events {
				p.deliver(e)
				p.deliver(e)
				p.requireRead(t, events[:n+1]...)
			}
			for _, e := range events { // all of them come again, and change nothing
				p.deliver(e)
			}
			p.requireRead(t, events...)
		})
	}
}

// Where an event is missing in the read model, the order is made again from the event store.
func TestProjectionCatchesUp(t *testing.T) {
	t.Parallel()
	p := newProjected(t)
	o := play(t, confirm, complete)
	events := o.uncommitted
	require.NoError(t, p.store.Save(t.Context(), o))
	p.deliver(events[1])
	p.requireRead(t, events...)
	p.deliver(events[0])
	p.deliver(events[2])
	p.requireRead(t, events...)
}

// What is wrong in the read model is right afterwards, whatever version it claims to be; an
// order without events is none.
func TestRebuildRepairs(t *testing.T) {
	t.Parallel()
	p := newProjected(t)
	o := play(t, confirm)
	events := o.uncommitted
	require.NoError(t, p.store.Save(t.Context(), o))
	for _, sql := range []string{
		`SELECT`, // it is not there at all
		`UPDATE orders SET status = 'LOST', final_amount = 1, version = 1`,
		`UPDATE orders SET version = 1000`,
		`DELETE FROM order_items WHERE product_id = 2`,
	} {
		_, err := p.db.Exec(t.Context(), sql)
		require.NoError(t, err)
		require.NoError(t, p.projection().RebuildOrder(t.Context(), o.ID))
		p.requireRead(t, events...)
	}
	require.NoError(t, p.projection().RebuildOrder(t.Context(), [16]byte{1}))
	require.NoError(t, p.projection().RebuildAll(t.Context()))
	p.requireRead(t, events...)
}

// An event that comes while its order is rebuilt waits for the rebuild, and is not lost: neither
// if the rebuild has seen it nor if it has not.
func TestEventDuringRebuild(t *testing.T) {
	t.Parallel()
	for name, isStored := range map[string]bool{"the rebuild has seen it": true, "the rebuild has not seen it": false} {
		t.Run(name, func(t *testing.T) {
			p := newProjected(t)
			o := play(t)
			events := o.uncommitted
			require.NoError(t, p.store.Save(t.Context(), o))
			p.deliver(events[0])
			require.NoError(t, confirm(o))
			events = append(events, o.uncommitted[0])
			if isStored {
				require.NoError(t, p.store.Save(t.Context(), o))
			}
			rebuild, err := p.db.Begin(t.Context())
			require.NoError(t, err)
			defer rebuild.Rollback(context.Background())
			require.NoError(t, p.projection().rebuild(t.Context(), rebuild, o.ID))
			if !isStored {
				require.NoError(t, p.store.Save(t.Context(), o))
			}
			var g errgroup.Group
			g.Go(func() error { p.deliver(events[1]); return nil })
			p.awaitBlocked(t, rebuild)
			require.NoError(t, rebuild.Commit(t.Context()))
			require.NoError(t, g.Wait())
			p.requireRead(t, events...)
		})
	}
}

// awaitBlocked waits until a session waits for a transaction.
func (p *projected) awaitBlocked(t *testing.T, tx pgx.Tx) {
	t.Helper()
	require.Eventually(t, func() bool {
		var blocked bool
		err := p.db.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid)))`,
			tx.Conn().PgConn().PID()).Scan(&blocked)
		return err == nil && blocked
	}, testenv.Patience, 5*time.Millisecond)
}

// The first event of an order that is projected while the order is rebuilt stays.
func TestFirstEventDuringRebuild(t *testing.T) {
	t.Parallel()
	p := newProjected(t)
	o := play(t, confirm)
	events := o.uncommitted
	require.NoError(t, p.store.Save(t.Context(), o))
	live, err := p.db.Begin(t.Context())
	require.NoError(t, err)
	defer live.Rollback(context.Background())
	require.NoError(t, p.projection().project(t.Context(), live, events[0]))
	var g errgroup.Group
	g.Go(func() error { return p.projection().RebuildOrder(t.Context(), o.ID) })
	p.awaitBlocked(t, live)
	require.NoError(t, live.Commit(t.Context()))
	require.NoError(t, g.Wait())
	p.requireRead(t, events[0])
	p.deliver(events[1])
	p.requireRead(t, events...)
}
