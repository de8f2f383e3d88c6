package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/internal/wait"
)

// A retrier sends failed events, a session sends new ones or parks them, and operators lock, retry and resolve rows in
// transactions that stay open for a while. By the history of what Kafka accepted:
//
//   - no event is sent twice, and none is lost that no operator has resolved;
//   - the events of each key are in order;
//   - in the end nothing waits any more.
func TestRetriesBesideOperatorsAtRandom(t *testing.T) {
	t.Parallel()
	for seed := range uint64(4) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			newOperatedRelay(t, seed).run()
		})
	}
}

const (
	operatedEvents = 500
	operatedKeys   = 6
)

// operatedRelay is a relay, its operators and its Kafka. It is the [Sender] of the retrier.
type operatedRelay struct {
	t   *testing.T
	d   *testenv.Tables
	r   *retrier
	log testenv.Buffer

	mu       sync.Mutex
	rng      *rand.Rand
	accepted map[string][]int64 // by key
	resolved map[int64]bool
}

func newOperatedRelay(t *testing.T, seed uint64) *operatedRelay {
	o := &operatedRelay{
		t: t, d: testenv.NewTables(t), rng: rand.New(rand.NewPCG(seed, 32)), accepted: map[string][]int64{}, resolved: map[int64]bool{},
	}
	o.r = newLockedFixture(t, o.d, &o.log)
	o.d.Exec(t, `INSERT INTO {schema}.outbox_cursor (last_processed_id, snapshot, highest_id, system_identifier, epoch) VALUES (0, '1:1:', 0, 1, 1)`)
	o.r.Rules = Rules{RetryInterval: 5 * time.Millisecond, MaxRetries: 1 << 30, RetryWait: 1, MaxRetryWait: 1}
	log := slog.New(slog.DiscardHandler)
	o.r.Deliverer = &Deliverer{DeliveryParts{
		Sender: o, Breaker: breaker.New(someRules, func(_, _ breaker.State, _ float64) {}), Log: log, OnSend: func() {},
		KafkaOutage: outage.NewLog(log, "Kafka"), Bad: o.r.Bad, Unanswered: o.r.Unanswered, OnRecovered: func() {},
	}}
	return o
}

func (o *operatedRelay) intN(n int) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.rng.IntN(n)
}

func (o *operatedRelay) run() {
	ended := make(chan struct{})
	var others sync.WaitGroup
	defer others.Wait()
	others.Go(func() {
		defer close(ended)
		o.relay()
	})
	for range 3 {
		others.Go(func() { o.operate(ended) })
	}
	const open = `outbox_failed WHERE status <> 'resolved'`
	for running, began := true, time.Now(); running || o.d.Count(o.t, open)+len(o.r.Parked.Unsaved()) > 0; {
		select {
		case <-ended:
			running = false
		default:
		}
		if !assertNil(o.t, o.r.retryAll(o.t.Context())) || time.Since(began) > testenv.Patience {
			o.t.Errorf("it does not end: %d", o.d.Count(o.t, open))
			return
		}
		wait.Sleep(o.t.Context(), o.r.pause())
	}
	others.Wait()
	require.Contains(o.t, o.log.String(), "has locked a row", "while its event was being sent")
	require.Empty(o.t, o.r.Parked.Unsaved())
	o.r.reconcileAt = time.Time{}
	require.NoError(o.t, o.r.reconcile(o.t.Context()))
	require.Empty(o.t, o.r.Parked.Keys, "no key waits")
	seen := map[int64]bool{}
	for key, ids := range o.accepted {
		require.IsIncreasing(o.t, append([]int64{-1, 0}, ids...), key)
		for _, id := range ids {
			seen[id] = true
		}
	}
	for id := range int64(operatedEvents) {
		require.True(o.t, seen[id+1] || o.resolved[id+1], "event %d is lost", id+1)
	}
}

// assertNil is for goroutines other than that of the test, too.
func assertNil(t *testing.T, err error) bool {
	if err != nil {
		t.Error(err)
	}
	return err == nil
}

// relay is the session: it sends each event, unless an earlier event of its key waits.
func (o *operatedRelay) relay() {
	for id := range int64(operatedEvents) {
		key := fmt.Sprintf("t/k%d", o.intN(operatedKeys))
		f := cursor.Failure{Event: &envelope.Event{ID: id + 1}, Key: key, Status: statusParked, Pending: true}
		if !o.r.Parked.MustWait(key) {
			if o.intN(5) > 0 {
				o.accept(key, f.Event.ID)
				continue
			}
			f.Status, f.Pending = statusFailed, false
		}
		if !assertNil(o.t, o.park(f)) {
			return
		}
		time.Sleep(time.Duration(o.intN(4)) * time.Millisecond)
	}
}

func (o *operatedRelay) accept(key string, id int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.accepted[key] = append(o.accepted[key], id)
}

const sqlParkOne = `
INSERT INTO {schema}.outbox_failed
       (outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, occurred_at, created_at, status)
VALUES ($1, $2::text, gen_random_uuid(), 'a.b.c.v1', 's', 'a', $2::text, '{}', 'application/json', 't', now(), now(), $3)`

// park is what the session does in record.
func (o *operatedRelay) park(f cursor.Failure) error {
	o.r.Parked.mu.Lock()
	defer o.r.Parked.mu.Unlock()
	failures := []cursor.Failure{f}
	o.r.Parked.assign(failures)
	_, err := o.d.DB.Exec(o.t.Context(), pg.InSchema(sqlParkOne, o.d.Schema), f.Event.ID, f.Key, failures[0].Status)
	o.r.Parked.rowsWritten(failures)
	return err
}

// operate locks rows until there are no new events.
func (o *operatedRelay) operate(ended <-chan struct{}) {
	for {
		select {
		case <-ended:
			return
		default:
			if err := o.change(); err != nil && !pg.IsTransient(err) && !errors.Is(err, pgx.ErrNoRows) {
				assertNil(o.t, err)
				return
			}
		}
	}
}

// change is one transaction of an operator.
func (o *operatedRelay) change() error {
	ctx := o.t.Context()
	time.Sleep(time.Millisecond)
	tx, err := o.d.DB.Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	var row, id int64
	err = tx.QueryRow(ctx, pg.InSchema(`SELECT id, outbox_id FROM {schema}.outbox_failed WHERE status <> 'resolved' ORDER BY random() LIMIT 1`, o.d.Schema)).Scan(&row, &id)
	if err != nil {
		return err
	}
	do := []string{`outbox_retry_failed`, `outbox_resolve_failed`}[o.intN(2)]
	var n int
	if err := tx.QueryRow(ctx, pg.InSchema(`SELECT {schema}.`+do+`(ARRAY[$1::bigint], 'kim', 'why')`, o.d.Schema), row).Scan(&n); err != nil {
		return err
	}
	time.Sleep(time.Duration(o.intN(100)) * time.Millisecond)
	if o.intN(3) > 0 {
		return nil
	}
	o.mu.Lock()
	o.resolved[id] = o.resolved[id] || do == `outbox_resolve_failed` && n == 1
	o.mu.Unlock()
	return tx.Commit(ctx)
}

func (o *operatedRelay) topic(e *envelope.Event) (string, error) { return string(e.Topic), nil }

func (o *operatedRelay) prepare(context.Context, []string) {}

func (o *operatedRelay) works(context.Context, string) bool { return false }

func (o *operatedRelay) partition(e *envelope.Event) kafka.Partition {
	return kafka.Partition{Topic: string(e.Topic)}
}

// produce implements [Sender]. Some events are rejected.
func (o *operatedRelay) produce(_, _ context.Context, batch []envelope.Event, which []int) (sendResult, error) {
	time.Sleep(time.Duration(o.intN(10)) * time.Millisecond)
	sent := sendResult{records: make([]kgo.Record, len(which)), errs: make([]error, len(which)), works: true}
	var rejected []string
	for n, i := range which {
		key := string(batch[i].AggregateID)
		switch {
		case slices.Contains(rejected, key):
			sent.errs[n] = errBlocked
		case o.intN(10) == 0:
			sent.errs[n] = &envelope.FieldError{Field: "Type", Err: check.ErrEmpty}
			rejected = append(rejected, key)
		default:
			o.accept(key, batch[i].ID)
		}
	}
	return sent, nil
}
