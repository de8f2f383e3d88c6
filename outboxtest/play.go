package outboxtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
)

// Outcome is what an [Attempt] has led to.
type Outcome string

const (
	// Done means that the handler has done its work.
	Done Outcome = "done"
	// Repeated means that the handler was not called: the action was done before, or the event had expired.
	Repeated Outcome = "repeated"
	// Retried means that the handler has failed, and is called again after a wait.
	Retried Outcome = "retried"
	// Dead means that the handler has failed, and is not called again until an operator requeues
	// the event.
	Dead Outcome = "dead"
)

// Attempt is an attempt of a handler on an event.
type Attempt struct {
	// Action is that of the handler. It is empty for an event of a type without a handler, see
	// [outbox.DeadLetterUnknown].
	Action string
	// Type, EventID and AggregateID are those of the event.
	Type, EventID, AggregateID string
	// Number counts the attempts of the action on the event, from 1.
	Number int
	// At is when the attempt would have been made, counted from the start of the play.
	At time.Duration
	// Outcome is what it has led to.
	Outcome Outcome
	// Err is the error of the handler, nil if there was none.
	Err error
	// Wait is how long a worker would wait before the next attempt, without the fifth that is added
	// or left out at random; zero if there is none.
	Wait time.Duration
}

// maxAttempts is after how many attempts a play is endless: a handler records the event that
// it handles, for example.
const maxAttempts = 1000

// Play passes the events that tx has recorded, and not committed, to the handlers of a worker, and
// those that the handlers record in turn, until none is left. It returns all attempts in the order in
// which they were made. Nothing is waited for: a play of retries that would take an hour takes
// milliseconds. A delayed event enters outbox, in tx, when it would be due, and an event expires when it would: both
// times count from when the event was recorded, because handlers know no other clock than the real one. So a test of
// handlers needs no more than a transaction that it rolls back:
//
//	require.NoError(t, Place(ctx, tx, rec, order))
//	attempts := outboxtest.Play(ctx, t, tx, worker)
//
// Code that takes a [sql.Tx] gets one inside tx from outboxsql.Within, whatever driver it has otherwise:
//
//	require.NoError(t, outboxsql.Within(ctx, tx, func(tx *sql.Tx) error { return Place(ctx, tx, rec, order) }))
//
// Each action gets the events of a key in their order, those behind a failed one after it was done
// or is dead. Where the worker has HoldDead, those behind a dead one get no attempt; where it is Unordered, none waits.
// An event is dead after its last attempt, as if other events of the action had succeeded meanwhile. Handlers with a
// transaction get a part of tx, and what they have done in it is rolled back where they fail. A handler that uses a
// connection of its own does not see what tx has recorded. What the handlers wait for by themselves, takes its time.
//
// Tables in another schema than public are those of InSchema(tx, schema), which must be that of the
// worker. The test fails if db is no transaction of pgx, or if there is no end.
func Play(ctx context.Context, t T, db DB, worker *outbox.Worker) []Attempt {
	t.Helper()
	attempts, err := play(ctx, newTable(db), worker)
	if err != nil {
		t.Fatalf("outboxtest: %v", err)
	}
	return attempts
}

func play(ctx context.Context, tab table, worker *outbox.Worker) ([]Attempt, error) {
	tx, ok := tab.db.(pgx.Tx)
	if !ok {
		return nil, fmt.Errorf("%s is no transaction of pgx, which handlers get a part of: outboxsql.Within gives code a *sql.Tx in one", tab.kind())
	}
	p := &player{tab: tab, tx: tx, worker: worker, start: time.Now()}
	for {
		if err := p.addRecorded(ctx, p.now); err != nil {
			return p.attempts, err
		}
		if moved, err := p.moveDelayed(ctx); err != nil {
			return p.attempts, err
		} else if moved {
			continue
		}
		next := p.next()
		if next < 0 {
			return p.attempts, nil
		}
		if len(p.attempts) == maxAttempts {
			return p.attempts, fmt.Errorf("there is no end after %d attempts; the last one: %+v", maxAttempts, p.attempts[maxAttempts-1])
		}
		if err := p.step(ctx, next); err != nil {
			return p.attempts, err
		}
	}
}

// player passes events to handlers.
type player struct {
	tab      table
	tx       pgx.Tx
	worker   *outbox.Worker
	start    time.Time
	last     int64 // outbox.id of the last event that was added
	now      time.Duration
	queue    []delivery // in the order of ids
	waits    []delayed  // in the order in which they are due
	lastWait int64      // outbox_delayed.id of the last one that was added
	attempts []Attempt
}

// delivery is an event that is owed to a handler.
type delivery struct {
	id                                          int64
	eventType, eventID, aggregateID, topic, key string
	action                                      string
	attempt                                     int
	due                                         time.Duration
	recorded                                    time.Duration // when it was, from which its Expires counts
	blocks                                      bool          // its last attempt has failed, and its line waits for it
	held                                        bool          // it is dead, and its line waits for an operator
}

// sqlUncommitted reads what this transaction has recorded behind $1.
const sqlUncommitted = `
SELECT id, event_type, event_id::text, aggregate_id, coalesce(topic, split_part(event_type, '.', 2) || '-events'), coalesce(partition_key, aggregate_id)
  FROM {schema}.outbox WHERE xid = pg_current_xact_id_if_assigned() AND id > $1 ORDER BY id`

// addRecorded adds the events that were recorded at this time of the play, all since the last call.
func (p *player) addRecorded(ctx context.Context, at time.Duration) error {
	rows, err := p.tab.query(ctx, sqlUncommitted, p.last)
	if err != nil {
		return fmt.Errorf("read outbox: %w", err)
	}
	var d delivery
	_, err = pgx.ForEachRow(rows, []any{&d.id, &d.eventType, &d.eventID, &d.aggregateID, &d.topic, &d.key}, func() error {
		p.last = d.id
		if !slices.Contains(p.worker.Topics(), d.topic) {
			return nil
		}
		for _, d.action = range p.worker.Actions(d.eventType) {
			d.attempt, d.due, d.recorded = 1, p.now, at
			p.queue = append(p.queue, d)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("read outbox: %w", err)
	}
	return nil
}

// delayed is an event in outbox_delayed.
type delayed struct {
	id            int64
	due, recorded time.Duration
}

// sqlDelayed reads what this transaction has recorded for later behind $1, for some topics, and in how many
// microseconds after $3 it is due; 290 years are the most that a [time.Duration] holds. recorded_at is the start of the
// transaction, which says whose a delayed event is.
const sqlDelayed = `
SELECT id, (least(greatest(extract(epoch FROM due_at - $3::timestamptz), 0), 9e9) * 1e6)::bigint
  FROM {schema}.outbox_delayed
 WHERE recorded_at = now() AND id > $1
   AND coalesce(topic, split_part(event_type, '.', 2) || '-events') = ANY ($2::text[])
 ORDER BY id`

// sqlMoveDelayed moves an event to outbox, unless it was cancelled. It gets a new id there.
const sqlMoveDelayed = `
WITH gone AS (DELETE FROM {schema}.outbox_delayed WHERE id = $1 RETURNING *)
INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, payload_bytes,
                             content_type, topic, partition_key, headers, occurred_at, expires_at)
SELECT event_id, event_type, source, aggregate_type, aggregate_id, payload, payload_bytes, content_type,
       topic, partition_key, headers, occurred_at, expires_at FROM gone`

// moveDelayed moves the delayed event that is due first to outbox, if no attempt is due before, and reports whether it
// did. The clock of the play is ahead of the real one, by which handlers delay events. It is the start of the play that
// their times are compared with: with the real time, what is due at the same time would be due the earlier the later it
// is read.
func (p *player) moveDelayed(ctx context.Context) (moved bool, err error) {
	rows, err := p.tab.query(ctx, sqlDelayed, p.lastWait, p.worker.Topics(), p.start)
	if err != nil {
		return false, fmt.Errorf("read outbox_delayed: %w", err)
	}
	var d delayed
	var micros int64
	_, err = pgx.ForEachRow(rows, []any{&d.id, &micros}, func() error {
		p.lastWait, d.due, d.recorded = d.id, p.now+time.Duration(micros)*time.Microsecond, p.now
		p.waits = append(p.waits, d)
		return nil
	})
	if err != nil {
		return false, fmt.Errorf("read outbox_delayed: %w", err)
	}
	slices.SortStableFunc(p.waits, func(a, b delayed) int { return cmp.Compare(a.due, b.due) })
	if next := p.next(); len(p.waits) == 0 || next >= 0 && max(p.now, p.queue[next].due) < p.waits[0].due {
		return false, nil
	}
	d, p.waits = p.waits[0], p.waits[1:]
	p.now = max(p.now, d.due)
	if _, err := p.tx.Exec(ctx, completed(sqlMoveDelayed, p.tab.schema), d.id); err != nil {
		return false, fmt.Errorf("move a delayed event to outbox: %w", err)
	}
	return true, p.addRecorded(ctx, d.recorded)
}

// next returns the index of the delivery that is due first, or -1 if there is none, of those that no other one of their
// key and action blocks. Deliveries that have not failed are due in the order of their events.
func (p *player) next() int {
	type line struct{ topic, key, action string }
	blocked, first := map[line]bool{}, -1
	for i, d := range p.queue {
		of := line{d.topic, d.key, d.action}
		if !d.held && !blocked[of] && (first < 0 || d.due < p.queue[first].due) {
			first = i
		}
		blocked[of] = blocked[of] || d.blocks
	}
	return first
}

// step makes the next attempt, of the delivery at an index. Its event expires in the time of the play, which has gone
// on since the event was recorded.
func (p *player) step(ctx context.Context, i int) error {
	d := &p.queue[i]
	p.now = max(p.now, d.due)
	repeated, err := p.worker.Deliver(ctx, p.tx, d.id, d.action, d.attempt, p.now-d.recorded)
	if ctx.Err() != nil {
		return errors.Join(err, context.Cause(ctx))
	}
	if p.tx.Conn().PgConn().TxStatus() != 'T' {
		return fmt.Errorf("the handler of %s has ended the transaction of the test, or left it aborted: %w", d.action, err)
	}
	a := Attempt{Action: d.action, Type: d.eventType, EventID: d.eventID, AggregateID: d.aggregateID, Number: d.attempt, At: p.now, Outcome: Done, Err: err}
	switch {
	case err != nil:
		a.Outcome = Dead
		var again bool
		if a.Wait, again, d.blocks = p.worker.RetryWait(d.eventType, d.action, d.attempt, err); again {
			a.Outcome = Retried
		}
	case repeated:
		a.Outcome = Repeated
	}
	p.attempts = append(p.attempts, a)
	switch {
	case a.Outcome == Retried:
		d.attempt, d.due = d.attempt+1, p.now+a.Wait
	case a.Outcome == Dead && d.blocks:
		d.held = true
	default:
		p.queue = slices.Delete(p.queue, i, i+1)
	}
	return nil
}
