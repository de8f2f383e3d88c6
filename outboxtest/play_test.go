package outboxtest_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxtest"
)

var errBusy = errors.New("busy")

// worker returns a worker of handlers.
func (h *schemaFixture) worker(t testing.TB, cfg outbox.WorkerConfig, handlers ...outbox.Handler) *outbox.Worker {
	t.Helper()
	cfg.Schema, cfg.From, cfg.PollInterval = h.schema, outbox.FromStart, 20*time.Millisecond
	w, err := outbox.NewWorker(h.db, h.events, "shop", cfg, handlers...)
	require.NoError(t, err)
	return w
}

// short is an attempt without what differs from run to run.
type short struct {
	Action, ID string
	Number     int
	At, Wait   time.Duration
	Outcome    outboxtest.Outcome
}

func shortened(attempts []outboxtest.Attempt) (all []short) {
	for _, a := range attempts {
		all = append(all, short{a.Action, a.AggregateID, a.Number, a.At, a.Wait, a.Outcome})
	}
	return all
}

// A state machine with an hour of retries is played in a moment, in a transaction that no other
// session sees.
func TestPlay(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	h.exec(t, `CREATE TABLE {s}.parcel (id text PRIMARY KEY)`)
	cfg := outbox.WorkerConfig{}
	cfg.Retry.MaxRetries, cfg.Retry.RetryWait, cfg.Retry.MaxRetryWait = 3, 10*time.Minute, 30*time.Minute
	w := h.worker(t, cfg,
		outbox.Handle("PACK", func(ctx context.Context, tx pgx.Tx, e orderPlaced, m outbox.Metadata) error {
			if _, err := tx.Exec(ctx, "INSERT INTO "+h.table("parcel")+" VALUES ($1)", e.ID); err != nil {
				return err
			}
			if e.ID == "a" && m.Attempt < 3 {
				return errBusy // the parcel goes, too
			}
			return h.rec.Record(ctx, tx, productLiked{Product: e.ID, at: noon})
		}),
		outbox.HandleNoTx("NOTIFY", func(_ context.Context, e productLiked, m outbox.Metadata) error {
			switch {
			case e.Product == "b":
				return outbox.Permanent(errBusy)
			case m.Attempt == 1:
				return outbox.RetryAfter(errBusy, time.Second)
			}
			require.Equal(t, []string{"product-events", e.Product}, []string{m.Topic(), m.Key()})
			return nil
		}))
	tx := h.begin(t)
	h.record(t, tx, orderPlaced{ID: "a", At: noon}, orderPlaced{ID: "b", At: noon})
	began := time.Now()
	attempts := outboxtest.Play(background, t, h.in(tx), w)
	require.Less(t, time.Since(began), time.Minute)
	const minute = time.Minute
	require.Equal(t, []short{
		{"PACK", "a", 1, 0, 10 * minute, outboxtest.Retried},
		{"PACK", "b", 1, 0, 0, outboxtest.Done},
		{"NOTIFY", "b", 1, 0, 0, outboxtest.Dead},
		{"PACK", "a", 2, 10 * minute, 20 * minute, outboxtest.Retried},
		{"PACK", "a", 3, 30 * minute, 0, outboxtest.Done},
		{"NOTIFY", "a", 1, 30 * minute, time.Second, outboxtest.Retried},
		{"NOTIFY", "a", 2, 30*minute + time.Second, 0, outboxtest.Done},
	}, shortened(attempts))
	require.ErrorIs(t, attempts[0].Err, errBusy)
	require.NoError(t, attempts[1].Err)
	var parcels int
	require.NoError(t, tx.QueryRow(background, "SELECT count(*) FROM "+h.table("parcel")).Scan(&parcels))
	require.Equal(t, 2, parcels)

	// Once more, nothing is done twice.
	again := outboxtest.Play(background, t, h.in(tx), w)
	require.Equal(t, []outboxtest.Outcome{outboxtest.Repeated, outboxtest.Repeated}, []outboxtest.Outcome{again[0].Outcome, again[1].Outcome})
	require.NoError(t, tx.Rollback(background))
	for _, table := range []string{"outbox", "event_handled"} {
		var rows int
		require.NoError(t, h.db.QueryRow(background, "SELECT count(*) FROM "+h.table(table)).Scan(&rows))
		require.Zero(t, rows, table)
	}
}

// The events of a key wait behind one that is tried again, those of others do not, and what has
// used up its attempts lets them go on.
func TestPlayKeepsOrder(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	cfg := outbox.WorkerConfig{Streams: map[string]outbox.RetryPolicy{"order-events": {MaxRetries: 1, RetryWait: time.Hour}}}
	w := h.worker(t, cfg, outbox.Handle("COUNT", func(_ context.Context, _ pgx.Tx, e orderPlaced, _ outbox.Metadata) error {
		if e.Cents == 1 {
			return errBusy
		}
		return nil
	}))
	tx := h.begin(t)
	h.record(t, tx, orderPlaced{ID: "a", Cents: 1, At: noon}, orderPlaced{ID: "a", Cents: 2, At: noon}, orderPlaced{ID: "b", Cents: 2, At: noon}, productLiked{"not for it", noon})
	require.Equal(t, []short{
		{"COUNT", "a", 1, 0, time.Hour, outboxtest.Retried},
		{"COUNT", "b", 1, 0, 0, outboxtest.Done},
		{"COUNT", "a", 2, time.Hour, 0, outboxtest.Dead},
		{"COUNT", "a", 1, time.Hour, 0, outboxtest.Done},
	}, shortened(outboxtest.Play(background, t, h.in(tx), w)))
}

// Behind a dead event that is held, its key gets no attempt of the action, also not with a delayed event. Other keys
// and other actions go on.
func TestPlayHoldDead(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	cfg := outbox.WorkerConfig{}
	cfg.HoldDead, cfg.Retry.MaxRetries, cfg.Retry.RetryWait = true, 1, time.Hour
	w := h.worker(t, cfg,
		outbox.Handle("COUNT", func(_ context.Context, _ pgx.Tx, e orderPlaced, _ outbox.Metadata) error {
			if e.Cents == 1 {
				return errBusy
			}
			return nil
		}),
		outbox.HandleNoTx("NOTIFY", func(context.Context, orderPlaced, outbox.Metadata) error { return nil }))
	tx := h.begin(t)
	h.record(t, tx, orderPlaced{ID: "a", Cents: 1, At: noon}, orderPlaced{ID: "a", Cents: 2, At: noon}, orderPlaced{ID: "b", Cents: 2, At: noon},
		outbox.With(orderPlaced{ID: "a", Cents: 3, At: noon}, outbox.EventOptions{NotBefore: time.Now().Add(2 * time.Hour)}))
	attempts := shortened(outboxtest.Play(background, t, h.in(tx), w))
	for i := range attempts {
		attempts[i].At = attempts[i].At.Round(time.Minute)
	}
	require.Equal(t, []short{
		{"COUNT", "a", 1, 0, time.Hour, outboxtest.Retried},
		{"NOTIFY", "a", 1, 0, 0, outboxtest.Done},
		{"NOTIFY", "a", 1, 0, 0, outboxtest.Done},
		{"COUNT", "b", 1, 0, 0, outboxtest.Done},
		{"NOTIFY", "b", 1, 0, 0, outboxtest.Done},
		{"COUNT", "a", 2, time.Hour, 0, outboxtest.Dead},
		{"NOTIFY", "a", 1, 2 * time.Hour, 0, outboxtest.Done},
	}, attempts)
}

// Events of a key do not wait for each other where the worker has no order, whatever becomes of the first one.
func TestPlayUnordered(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	for _, hold := range []bool{false, true} {
		cfg := outbox.WorkerConfig{Unordered: true}
		cfg.HoldDead, cfg.Retry.MaxRetries, cfg.Retry.RetryWait = hold, 1, time.Hour
		w := h.worker(t, cfg, outbox.Handle("COUNT", func(_ context.Context, _ pgx.Tx, e orderPlaced, _ outbox.Metadata) error {
			if e.Cents == 1 {
				return errBusy
			}
			return nil
		}))
		tx := h.begin(t)
		h.record(t, tx, orderPlaced{ID: "a", Cents: 1, At: noon}, orderPlaced{ID: "a", Cents: 2, At: noon},
			outbox.With(orderPlaced{ID: "a", Cents: 3, At: noon}, outbox.EventOptions{NotBefore: time.Now().Add(2 * time.Hour)}))
		attempts := shortened(outboxtest.Play(background, t, h.in(tx), w))
		attempts[len(attempts)-1].At = attempts[len(attempts)-1].At.Round(time.Minute)
		require.Equal(t, []short{
			{"COUNT", "a", 1, 0, time.Hour, outboxtest.Retried},
			{"COUNT", "a", 1, 0, 0, outboxtest.Done},
			{"COUNT", "a", 2, time.Hour, 0, outboxtest.Dead},
			{"COUNT", "a", 1, 2 * time.Hour, 0, outboxtest.Done},
		}, attempts)
	}
}

// An event expires in the time of the play, as it would while a worker waits: between attempts, behind an earlier event
// of its key, or after it was delayed. What a handler without a transaction has begun, it finishes. The expiry of an
// event that a handler records counts from then.
func TestPlayExpires(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	began := time.Now()
	at := func(id string, notBefore, expires time.Duration) outbox.DomainEvent {
		options := outbox.EventOptions{Expires: began.Add(expires)}
		if notBefore > 0 {
			options.NotBefore = began.Add(notBefore)
		}
		return outbox.With(orderPlaced{ID: id, At: noon}, options)
	}
	anHourLater := func(m outbox.Metadata) error {
		if m.Attempt == 1 {
			return outbox.RetryAfter(errBusy, time.Hour)
		}
		return nil
	}
	w := h.worker(t, outbox.WorkerConfig{},
		outbox.Handle("PACK", func(ctx context.Context, tx pgx.Tx, e orderPlaced, m outbox.Metadata) error {
			if err := anHourLater(m); err != nil {
				return err
			}
			liked := outbox.With(productLiked{e.ID, noon}, outbox.EventOptions{Expires: time.Now().Add(30 * time.Minute)})
			return h.rec.Record(ctx, tx, liked)
		}),
		outbox.HandleNoTx("NOTIFY", func(_ context.Context, _ orderPlaced, m outbox.Metadata) error { return anHourLater(m) }),
		outbox.HandleNoTx("LIKE", func(context.Context, productLiked, outbox.Metadata) error { return nil }))
	tx := h.begin(t)
	h.record(t, tx, at("expires", 0, 10*time.Minute), at("expires", 0, 10*time.Minute), at("lasts", 0, 2*time.Hour),
		at("delayed", 3*time.Hour, 210*time.Minute), at("delayed, lasts", 3*time.Hour, 5*time.Hour))
	attempts := shortened(outboxtest.Play(background, t, h.in(tx), w))
	for i := range attempts {
		attempts[i].At = attempts[i].At.Round(time.Minute)
	}
	const hour = time.Hour
	require.Equal(t, []short{
		{"NOTIFY", "expires", 1, 0, hour, outboxtest.Retried},
		{"PACK", "expires", 1, 0, hour, outboxtest.Retried},
		{"NOTIFY", "lasts", 1, 0, hour, outboxtest.Retried},
		{"PACK", "lasts", 1, 0, hour, outboxtest.Retried},
		{"NOTIFY", "expires", 2, hour, 0, outboxtest.Done},
		{"NOTIFY", "expires", 1, hour, 0, outboxtest.Repeated},
		{"PACK", "expires", 2, hour, 0, outboxtest.Repeated},
		{"PACK", "expires", 1, hour, 0, outboxtest.Repeated},
		{"NOTIFY", "lasts", 2, hour, 0, outboxtest.Done},
		{"PACK", "lasts", 2, hour, 0, outboxtest.Done},
		{"LIKE", "lasts", 1, hour, 0, outboxtest.Done},
		{"NOTIFY", "delayed", 1, 3 * hour, hour, outboxtest.Retried},
		{"PACK", "delayed", 1, 3 * hour, hour, outboxtest.Retried},
		{"NOTIFY", "delayed, lasts", 1, 3 * hour, hour, outboxtest.Retried},
		{"PACK", "delayed, lasts", 1, 3 * hour, hour, outboxtest.Retried},
		{"NOTIFY", "delayed", 2, 4 * hour, 0, outboxtest.Done},
		{"PACK", "delayed", 2, 4 * hour, 0, outboxtest.Repeated},
		{"NOTIFY", "delayed, lasts", 2, 4 * hour, 0, outboxtest.Done},
		{"PACK", "delayed, lasts", 2, 4 * hour, 0, outboxtest.Done},
		{"LIKE", "delayed, lasts", 1, 4 * hour, 0, outboxtest.Done},
	}, attempts)
}

// What is no transaction, and what has no end, fail the test.
func TestPlayFails(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	h := newSchemaFixture(t)
	w := h.worker(t, outbox.WorkerConfig{}, outbox.Handle("LOOP", func(ctx context.Context, tx pgx.Tx, e orderPlaced, _ outbox.Metadata) error {
		_, err := tx.Exec(ctx, "COMMIT")
		return err
	}))
	require.Contains(t, failure(t, func(ft *fakeT) { outboxtest.Play(background, ft, h.db, w) }), "is no transaction")
	tx := h.begin(t)
	h.record(t, tx, orderPlaced{ID: "a", At: noon})
	require.Contains(t, failure(t, func(ft *fakeT) { outboxtest.Play(background, ft, h.in(tx), w) }), "has ended the transaction")

	tx = h.begin(t)
	h.record(t, tx, productLiked{"a", noon})
	endless := h.worker(t, outbox.WorkerConfig{}, outbox.Handle("LOOP", func(ctx context.Context, tx pgx.Tx, e productLiked, _ outbox.Metadata) error {
		return h.rec.Record(ctx, tx, productLiked{"a", noon})
	}))
	require.Contains(t, failure(t, func(ft *fakeT) { outboxtest.Play(background, ft, h.in(tx), endless) }), "no end after 1000 attempts")
}

// DrainWorker returns when all is handled, also what handlers have recorded.
func TestDrainWorker(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	cfg := outbox.WorkerConfig{}
	cfg.Retry.RetryWait, cfg.Retry.MaxRetries, cfg.Retry.MaxOutage = 10*time.Millisecond, 2, -1
	liked := make(chan string, 10)
	w := h.worker(t, cfg,
		outbox.Handle("PACK", func(ctx context.Context, tx pgx.Tx, e orderPlaced, m outbox.Metadata) error {
			if m.Attempt < 3 {
				return errBusy
			}
			return h.rec.Record(ctx, tx, productLiked{Product: e.ID, at: noon})
		}),
		outbox.HandleNoTx("NOTIFY", func(_ context.Context, e productLiked, _ outbox.Metadata) error {
			if e.Product == "bad" {
				return outbox.Permanent(errBusy)
			}
			liked <- e.Product
			return nil
		}))
	tables := h.in(h.db)
	h.commit(t, orderPlaced{ID: "a", At: noon}, orderPlaced{ID: "b", At: noon})
	outboxtest.DrainWorker(background, t, tables, w)
	require.Len(t, liked, 2)
	outboxtest.DrainWorker(background, t, tables, w)

	h.commit(t, orderPlaced{ID: "bad", At: noon})
	require.Regexp(t, `not handled:\n  \d+ \S+ of bad: dead, NOTIFY: permanent: busy`, failure(t, func(ft *fakeT) { outboxtest.DrainWorker(background, ft, tables, w) }))
}

// A delayed event that is due is handled too.
func TestDrainWorkerHandlesDelayedEvents(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	handled := make(chan string, 10)
	w := h.worker(t, outbox.WorkerConfig{}, outbox.HandleNoTx("PACK", func(_ context.Context, e orderPlaced, _ outbox.Metadata) error {
		handled <- e.ID
		return nil
	}))
	h.commit(t, outbox.With(productLiked{"of another worker", noon}, outbox.EventOptions{NotBefore: time.Now().Add(time.Hour)}))
	outboxtest.DrainWorker(background, t, h.in(h.db), w)
	h.exec(t, "DELETE FROM {s}.outbox_delayed")

	h.delay(t, orderPlaced{ID: "due", At: noon})
	outboxtest.DrainWorker(background, t, h.in(h.db), w)
	require.Len(t, handled, 1)

	h.delay(t, orderPlaced{ID: "refused", At: noon})
	h.exec(t, "ALTER TABLE {s}.outbox ADD CONSTRAINT refused CHECK (aggregate_id <> 'refused')")
	says := failure(t, func(ft *fakeT) { outboxtest.DrainWorker(background, ft, h.in(h.db), w) })
	require.Regexp(t, `not handled:\n  \d+ acme.order.placed.v1 of refused: dead, rejected by outbox: 23514: `, says)
}

// A new group that begins behind the events handles none of them, which is no success. What it has no handler for does
// not count.
func TestDrainWorkerOfNewGroup(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	worker := func(group string, from outbox.Start) *outbox.Worker {
		cfg := outbox.WorkerConfig{PollInterval: 20 * time.Millisecond}
		cfg.Schema, cfg.From, cfg.Topics = h.schema, from, []string{"product-events"}
		w, err := outbox.NewWorker(h.db, h.events, group, cfg, outbox.HandleNoTx("PACK", func(context.Context, orderPlaced, outbox.Metadata) error { return nil }))
		require.NoError(t, err)
		return w
	}
	h.commit(t, productLiked{"without a handler", noon})
	outboxtest.DrainWorker(background, t, h.in(h.db), worker("likes", outbox.FromEnd))
	outboxtest.DrainWorker(background, t, h.in(h.db), worker("late", outbox.FromEnd))
	h.commit(t, orderPlaced{ID: "a", At: noon}, orderPlaced{ID: "b", At: noon})
	outboxtest.DrainWorker(background, t, h.in(h.db), worker("late", outbox.FromEnd)) // it is not new
	outboxtest.DrainWorker(background, t, h.in(h.db), worker("early", outbox.FromStart))
	says := failure(t, func(ft *fakeT) {
		outboxtest.DrainWorker(background, ft, h.in(h.db), worker("new", outbox.StartDefault))
	})
	require.Regexp(t, `group new .* without From: outbox.FromStart .*:\n  \d+ acme.order.placed.v1 of a: skipped\n  \d+ acme.order.placed.v1 of b: skipped`, says)
}

// Delayed events of the transaction are handled when they are due, in virtual time, and behind earlier ones of their
// key that are tried again.
func TestPlayDelayedEvents(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	in := func(e orderPlaced, d time.Duration) outbox.DomainEvent {
		return outbox.With(e, outbox.EventOptions{NotBefore: time.Now().Add(d)})
	}
	h.commit(t, in(orderPlaced{ID: "of another transaction", At: noon}, time.Hour))
	cfg := outbox.WorkerConfig{}
	cfg.Retry.MaxRetries, cfg.Retry.RetryWait = 1, 3*time.Hour
	w := h.worker(t, cfg,
		outbox.Handle("PACK", func(ctx context.Context, tx pgx.Tx, e orderPlaced, m outbox.Metadata) error {
			switch {
			case e.ID == "first" && m.Attempt == 1:
				return errBusy
			case e.ID == "remind":
				return h.rec.Record(ctx, tx, outbox.With(productLiked{e.ID, noon}, outbox.EventOptions{NotBefore: time.Now().Add(time.Hour)}))
			}
			return nil
		}),
		outbox.HandleNoTx("NOTIFY", func(context.Context, productLiked, outbox.Metadata) error { return nil }))
	tx := h.begin(t)
	h.record(t, tx, in(orderPlaced{ID: "late", At: noon}, 2*time.Hour), in(orderPlaced{ID: "soon", At: noon}, time.Hour),
		orderPlaced{ID: "first", At: noon}, in(orderPlaced{ID: "first", At: noon}, time.Hour), in(orderPlaced{ID: "remind", At: noon}, 4*time.Hour))
	attempts := shortened(outboxtest.Play(background, t, h.in(tx), w))
	for i := range attempts {
		attempts[i].At = attempts[i].At.Round(time.Minute)
	}
	const hour = time.Hour
	require.Equal(t, []short{
		{"PACK", "first", 1, 0, 3 * hour, outboxtest.Retried},
		{"PACK", "soon", 1, hour, 0, outboxtest.Done},
		{"PACK", "late", 1, 2 * hour, 0, outboxtest.Done},
		{"PACK", "first", 2, 3 * hour, 0, outboxtest.Done},
		{"PACK", "first", 1, 3 * hour, 3 * hour, outboxtest.Retried},
		{"PACK", "remind", 1, 4 * hour, 0, outboxtest.Done},
		{"NOTIFY", "remind", 1, 5 * hour, 0, outboxtest.Done},
		{"PACK", "first", 2, 6 * hour, 0, outboxtest.Done},
	}, attempts)
}

// Delayed events of a key that are due at the same time are handled in the order in which they were recorded, whether
// that was at once or by several attempts.
func TestPlayDelayedTogether(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	then := outbox.EventOptions{NotBefore: time.Now().Add(time.Hour)}
	var handled []int64
	recorded := int64(50)
	w := h.worker(t, outbox.WorkerConfig{},
		outbox.Handle("REMIND", func(ctx context.Context, tx pgx.Tx, _ productLiked, _ outbox.Metadata) error {
			time.Sleep(3 * time.Millisecond)
			recorded++
			return h.rec.Record(ctx, tx, outbox.With(orderPlaced{ID: "a", Cents: recorded, At: noon}, then))
		}),
		outbox.HandleNoTx("COUNT", func(_ context.Context, e orderPlaced, _ outbox.Metadata) error {
			handled = append(handled, e.Cents)
			return nil
		}))
	var want []int64
	t.Run("recorded by the test", func(t *testing.T) {
		tx := h.begin(t)
		for i := range recorded {
			h.record(t, tx, outbox.With(orderPlaced{ID: "a", Cents: i + 1, At: noon}, then))
			want = append(want, i+1)
		}
		outboxtest.Play(background, t, h.in(tx), w)
		require.Equal(t, want, handled)
	})
	t.Run("recorded by handlers", func(t *testing.T) {
		handled, want = nil, nil
		tx := h.begin(t)
		for i := range int64(5) {
			h.record(t, tx, productLiked{"b", noon})
			want = append(want, recorded+i+1)
		}
		outboxtest.Play(background, t, h.in(tx), w)
		require.Equal(t, want, handled)
	})
}

// Where a type without a handler is a dead letter, it is in a play.
func TestPlayUnknownType(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	pack := outbox.HandleNoTx("PACK", func(context.Context, orderPlaced, outbox.Metadata) error { return nil })
	cfg := outbox.WorkerConfig{}
	cfg.Topics = []string{"product-events"}
	tx := h.begin(t)
	h.record(t, tx, orderPlaced{ID: "a", At: noon}, productLiked{"b", noon}, parcelSent{"of no topic of the worker", noon})
	require.Equal(t, []short{{"PACK", "a", 1, 0, 0, outboxtest.Done}}, shortened(outboxtest.Play(background, t, h.in(tx), h.worker(t, cfg, pack))))
	cfg.Unknown = outbox.DeadLetterUnknown
	attempts := outboxtest.Play(background, t, h.in(tx), h.worker(t, cfg, pack))
	require.Equal(t, []short{{"PACK", "a", 1, 0, 0, outboxtest.Done}, {"", "b", 1, 0, 0, outboxtest.Dead}}, shortened(attempts))
	require.ErrorContains(t, attempts[1].Err, "acme.product.liked.v1")
}
