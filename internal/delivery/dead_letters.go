package delivery

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

// A worker handles the rows that consumers of its group have parked, and has no client for Kafka. If such a row dies
// there, its dead letter is owed. The next consumer of the group sends it. Later rows of the key do not wait for that.

// deadLetterLease is how long a dead letter is not sent by another process. Sending may need three tries of 10 s.
const deadLetterLease = time.Minute

// readOwedTimeout bounds each of readPayloadTries, which are a part of deadLetterLease.
const readOwedTimeout = 10 * time.Second

// deadLettersPoll is how often a consumer looks for owed dead letters.
const deadLettersPoll = 5 * time.Second

// sqlTakeDeadLetter takes the row of one of the streams $3 whose dead letter is owed for the longest time. It reads no
// record: one that PostgreSQL cannot read would keep the row the first one for ever.
const sqlTakeDeadLetter = `
UPDATE {schema}.event_delivery AS d SET next_retry_at = clock_timestamp() + $2::interval
 WHERE d.id = ANY (ARRAY(SELECT r.id FROM {schema}.event_delivery AS r
                          WHERE r.consumer_group = $1::text AND r.dead_letter_owed AND r.stream = ANY ($3::text[]) AND r.resolved_at IS NULL AND r.next_retry_at <= clock_timestamp()
                          ORDER BY r.consumer_group, r.next_retry_at LIMIT 1 FOR UPDATE SKIP LOCKED))
RETURNING ` + columns + `, true, NULL::bytea, NULL::bytea, NULL::bytea, d.next_retry_at`

// sqlDeadLetterTried notes that a dead letter was sent, or when it is sent again. A row that was requeued since it was
// taken, and is DEAD once more, has another dead letter: of another payload, if it was edited.
const sqlDeadLetterTried = `
UPDATE {schema}.event_delivery AS d SET dead_letter_owed = NOT $3::bool, next_retry_at = clock_timestamp() + $4::interval
 WHERE d.id = $1 AND d.consumer_group = $2::text AND d.dead_letter_owed AND d.next_retry_at = $5::timestamptz`

// takeDeadLetter returns the next delivery of streams whose dead letter this process has to send, and until when. There
// is at most one.
func (s *Store) takeDeadLetter(ctx context.Context, streams []string) (taken []Delivery, until time.Time, err error) {
	bounded, cancel := context.WithTimeout(ctx, DispatchTimeout)
	defer cancel()
	err = s.transactAsync(bounded, func(b *pgx.Batch) {
		b.Queue(s.sqlTakeDeadLetter, s.group, deadLetterLease, streams).Query(func(rows pgx.Rows) (err error) {
			taken, err = readRows(rows, &until)
			return err
		})
	})
	if err == nil && len(taken) > 0 {
		err = s.readOwed(ctx, &taken[0])
	}
	if errors.Is(err, ErrLost) { // it was requeued
		return nil, until, nil
	}
	if err != nil {
		return nil, until, fmt.Errorf("look for dead letters to send: %w", err)
	}
	return taken, until, nil
}

// readOwed reads the record of a row whose dead letter is owed. The row stays bare if PostgreSQL cannot read it: its
// dead letter says so, and those behind it do not wait.
func (s *Store) readOwed(ctx context.Context, d *Delivery) error {
	for try := 1; ; try++ {
		bounded, cancel := context.WithTimeout(ctx, readOwedTimeout)
		err := s.readPayload(bounded, d)
		cancel()
		switch {
		case err == nil || ctx.Err() != nil || !MayBeUnreadable(err):
			return err
		case pg.IsUnreadable(err) || try == readPayloadTries:
			return nil
		}
	}
}

// deadLetterTried notes whether the dead letter of a delivery was sent that was taken until then. See [Failure] for its
// place.
func (s *Store) deadLetterTried(ctx context.Context, d *Delivery, until time.Time, sent bool, place string) error {
	ctx, cancel := context.WithTimeout(ctx, WriteTimeout)
	defer cancel()
	return s.transact(ctx, func(b *pgx.Batch) {
		s.queueStrip(b, d, place, until)
		b.Queue(s.sqlDeadLetterTried, d.ID, s.group, sent, deadLetterWait, until)
	})
}

// deadLettersLoop sends owed dead letters until ctx is cancelled. Those of a stream whose dead-letter topic takes
// nothing wait, and hold up no others.
func (r *Run) deadLettersLoop(ctx context.Context) {
	streams := map[string]time.Time{} // of this process, and until when their dead letters wait
	for _, p := range slices.Concat(r.parts.Pairs[0], r.parts.Pairs[1]) {
		streams[p.Stream] = time.Time{}
	}
	for ctx.Err() == nil {
		began := time.Now()
		stream, sent, err := r.sendOwedDeadLetter(ctx, streams)
		if ctx.Err() == nil {
			r.reportOwed(began, err)
		}
		switch {
		case stream == "":
			wait.Sleep(ctx, deadLettersPoll)
		case !sent:
			streams[stream] = time.Now().Add(deadLettersPoll)
		}
	}
}

// reportOwed reports the result of a look for owed dead letters that began at a time. It may be all that a process asks
// of PostgreSQL. Neither a wait for a lock in vain is an outage of PostgreSQL, nor a deadlock.
func (r *Run) reportOwed(began time.Time, err error) {
	outages := r.parts.Outages
	switch {
	case pg.IsWaitInVain(err):
		outages.Report(outageLocks, began, err)
	case pg.IsTransient(err):
	case err != nil:
		outages.Report(handling.OutagePostgres, began, err)
	case outages.Failing():
		outages.Report(handling.OutagePostgres, began, nil)
		outages.Report(outageLocks, began, nil)
	}
}

// sendOwedDeadLetter sends an owed dead letter of a stream that does not wait, and returns the stream. It returns "" if
// there is none. The dead letter is sent again if this process is gone before it has noted that Kafka has it.
func (r *Run) sendOwedDeadLetter(ctx context.Context, streams map[string]time.Time) (stream string, sent bool, err error) {
	var open []string
	for stream, until := range streams {
		if time.Now().After(until) {
			open = append(open, stream)
		}
	}
	taken, until, err := r.Store.takeDeadLetter(ctx, open)
	if err != nil || len(taken) == 0 {
		return "", false, err
	}
	d := &taken[0]
	o := handling.Outcome{Result: handling.Dead, Action: d.Action, Class: d.LastCode, Attempt: d.Attempt, Err: &earlierError{d.LastCode, d.LastMessage}}
	topic, place, err := r.parts.DeadLetter(ctx, d, o) // reports an outage of the topic
	if sent = err == nil; sent {
		r.log.Info("outbox: the dead letter of an event is sent that was dead in a worker", "id", d.EventID, "type", d.Type,
			"action", d.Action, "delivery", d.ID, "dead_letter_topic", topic)
	}
	return d.Stream, sent, r.Store.deadLetterTried(ctx, d, until, sent, r.parts.Rules.stripped(d.LastCode, place))
}
