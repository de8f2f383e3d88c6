package faults

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outboxgo/outbox/internal/wait"
)

const (
	manyOperators = 3
	// maxIdle is the longest that an operator does nothing in a transaction. PostgreSQL ends some of them before, after
	// the 10 s that the functions of operators set.
	maxIdle = 13 * time.Second
)

// operators are clients that change failed events, and then do nothing for seconds before their transactions end.
type operators struct {
	*site
	spared []string // keys whose events they do not touch
	mu     sync.Mutex
	locked map[string]int // events whose rows are locked, and how many operators have locked them
	opened int            // transactions
}

// keepOpen lets the operators leave transactions open until stop is called. None of them resolves an event in the
// end.
func (o *operators) keepOpen(t *testing.T, seed uint64) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var working sync.WaitGroup
	for n := range manyOperators {
		working.Go(func() {
			for rng := rand.New(rand.NewPCG(seed, uint64(n))); ctx.Err() == nil; {
				err := o.open(ctx, rng)
				var wrong *pgconn.PgError
				if errors.As(err, &wrong) && strings.HasPrefix(wrong.Code, "42") { // the statement is wrong
					t.Errorf("an operator: %v", err)
				}
				if err != nil { // there is nothing to do, or no server
					wait.Sleep(ctx, 100*time.Millisecond)
				}
			}
		})
	}
	stop = sync.OnceFunc(func() {
		cancel()
		working.Wait()
		t.Logf("operators have left %d transactions open", o.opened)
	})
	t.Cleanup(stop)
	return stop
}

func newOperators(s *site) *operators { return &operators{site: s, locked: map[string]int{}} }

// What operators do with some events, by the ids of their rows. Only a retry may be committed: an
// event that is resolved does not arrive.
var operations = []struct {
	sql     string
	commits bool
}{
	{`SELECT outbox_resolve_failed($1, 'kim', 'left open')`, false},
	{`SELECT outbox_retry_failed($1, 'kim', 'left open')`, true},
	{`SELECT count(outbox_hold_key(relay, parking_key, 'kim', 'left open')) FROM outbox_failed WHERE id = ANY ($1)`, false},
}

// open begins one transaction, does something with up to three events of a status, and ends it seconds later.
func (o *operators) open(ctx context.Context, rng *rand.Rand) error {
	does := operations[rng.IntN(len(operations))]
	status := []string{"waiting", "failed", "parked"}[rng.IntN(3)]
	some, idle := 1+rng.IntN(3), time.Second+time.Duration(rng.Int64N(int64(maxIdle)))
	tx, err := o.db.Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(context.Background()) }() // the server may have ended it
	var ids []int64
	var events []string
	if _, err := tx.Exec(ctx, `SET LOCAL lock_timeout = '1s'`); err != nil { // operators lock rows of each other
		return err
	}
	if err := tx.QueryRow(ctx, `
		SELECT array_agg(id), array_agg(payload->>'id')
		  FROM (SELECT id, payload FROM outbox_failed
		         WHERE status = $1 AND aggregate_id <> ALL (coalesce($3::text[], '{}')) ORDER BY random() LIMIT $2) AS chosen
		HAVING count(*) > 0`, status, some, o.spared).Scan(&ids, &events); err != nil {
		return err
	}
	o.lock(events, 1)
	defer o.lock(events, -1)
	if _, err := tx.Exec(ctx, does.sql, ids); err != nil {
		return err
	}
	wait.Sleep(ctx, idle)
	if does.commits {
		return tx.Commit(context.Background())
	}
	return nil
}

// lock adds to, or takes from, the operators that have locked events.
func (o *operators) lock(events []string, n int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if n > 0 {
		o.opened++
	}
	for _, id := range events {
		if o.locked[id] += n; o.locked[id] == 0 {
			delete(o.locked, id)
		}
	}
}
