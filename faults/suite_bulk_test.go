package faults

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// bulkEvents returns how many events a bulk writer records: a million in a run of 15 minutes.
func bulkEvents() int { return max(20_000, int(1e6*min(*faultMinutes/15, 1))) }

// recordMuch records very many events in one transaction that stays open, and then commits or
// rolls back: in the database of the relay with default options, and a tenth of them in that of the relays
// that are killed. Behind the commit healthy events wait for those that were recorded before them.
func (s *suite) recordMuch(t *testing.T, p step) ongoing {
	t.Helper()
	all := []*bulk{newBulk(t, s.steady.site, p.chance, bulkEvents()), newBulk(t, s.site, p.chance, bulkEvents()/10)}
	return ongoing{
		ready: func() bool { return all[0].recorded.Load() && all[1].recorded.Load() },
		end: func() {
			commit := p.chance%2 == 0
			if commit {
				s.steady.excuse()
				defer s.steady.excuseEnds()
			}
			for _, b := range all {
				b.decide <- commit
			}
			for _, b := range all {
				t.Logf("%5.1f s: a bulk writer has recorded %d events, and then: %s", time.Since(s.start).Seconds(), b.n, b.outcome(t))
			}
		},
	}
}

// bulk is a transaction that records n events of a thousand keys, and stays open until it is decided what to do
// with it.
type bulk struct {
	*site
	n        int
	server   time.Time   // when it was started
	recorded atomic.Bool // or failed
	decide   chan bool   // whether to commit
	done     chan error
}

func newBulk(t *testing.T, s *site, chance uint64, n int) *bulk {
	t.Helper()
	b := &bulk{site: s, n: n, server: s.startTime(t), decide: make(chan bool, 1), done: make(chan error, 1)}
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	go func() {
		b.done <- pgx.BeginFunc(ctx, s.db, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, sqlBulk, n, fmt.Sprintf("bulk-%x-", chance), s.topic)
			b.recorded.Store(true)
			if err == nil && !<-b.decide {
				err = errRollback
			}
			return err
		})
	}()
	return b
}

// outcome says how the transaction has ended. It fails the test if that was neither as decided, nor because the
// server was killed.
func (b *bulk) outcome(t *testing.T) string {
	t.Helper()
	err := <-b.done
	switch {
	case err == nil:
		return "committed"
	case errors.Is(err, errRollback):
		return "rolled back"
	case b.startTime(t).Equal(b.server):
		t.Errorf("a bulk writer fails: %v", err)
	}
	return err.Error()
}

var errRollback = errors.New("this one rolls back")

// sqlBulk records $1 events whose keys begin with $2, in their order.
const sqlBulk = `
WITH made AS MATERIALIZED (
    SELECT gen_random_uuid() AS id, $2::text || n % 1000 AS key, n FROM generate_series(1, $1::bigint) AS n
), noted AS (
    INSERT INTO oracle_history SELECT id::text FROM made
)
INSERT INTO outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, occurred_at)
SELECT id, 'test.fault.happened.v1', 'faults', 'Key', key, jsonb_build_object('id', id, 'key', key, 'version', n, 'filler', ''),
       'application/json', $3::text, clock_timestamp()
  FROM made ORDER BY n`
