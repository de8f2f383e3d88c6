package relay

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// acceptingKafka is a [Sender] that accepts everything.
type acceptingKafka struct{ sent []int64 }

func (k *acceptingKafka) topic(e *envelope.Event) (string, error) { return string(e.Topic), nil }
func (k *acceptingKafka) prepare(context.Context, []string)       {}
func (k *acceptingKafka) works(context.Context, string) bool      { return false }
func (k *acceptingKafka) partition(e *envelope.Event) kafka.Partition {
	return kafka.Partition{Topic: string(e.Topic)}
}

func (k *acceptingKafka) produce(_, _ context.Context, batch []envelope.Event, which []int) (sendResult, error) {
	for _, i := range which {
		k.sent = append(k.sent, batch[i].ID)
	}
	return sendResult{records: make([]kgo.Record, len(which)), errs: make([]error, len(which)), works: true}, nil
}

// newAnsweredFixture returns a retrier beside events that Kafka has not answered, and these events by their ids.
func newAnsweredFixture(t *testing.T, d *testenv.Tables, unanswered ...int64) (r *retrier, to *acceptingKafka, sent map[int64]*envelope.Event) {
	r, to, sent = newLockedFixture(t, d, new(testenv.Buffer)), &acceptingKafka{}, map[int64]*envelope.Event{}
	log := slog.New(slog.DiscardHandler)
	r.Deliverer = &Deliverer{DeliveryParts{
		Sender: to, Breaker: breaker.New(someRules, func(_, _ breaker.State, _ float64) {}), Log: log, OnSend: func() {},
		KafkaOutage: outage.NewLog(log, "Kafka"), Bad: r.Bad, Unanswered: r.Unanswered, OnRecovered: func() {},
	}}
	for _, id := range unanswered {
		var eventID, key string
		require.NoError(t, d.DB.QueryRow(t.Context(), pg.InSchema(`SELECT event_id::text, aggregate_id FROM {schema}.outbox_failed WHERE outbox_id = $1`, d.Schema), id).
			Scan(&eventID, &key))
		e := &envelope.Event{ID: id, EventID: []byte(eventID), Topic: []byte("b-events"), AggregateID: []byte(key)}
		r.Unanswered.add(e, kafka.Partition{Topic: "b-events", Number: 0})
		sent[id] = e
	}
	return r, to, sent
}

// Once the answer to an event has come, the events that are parked behind it are sent at once, and not after another
// RetryInterval.
func TestEventsBehindAnAnsweredOneAreSent(t *testing.T) {
	t.Parallel()
	d := testenv.NewTables(t)
	d.InsertParked(t, 4, 1)
	r, to, sent := newAnsweredFixture(t, d, 1)
	r.Unanswered.accept(sent[1], SentTo{})
	require.NoError(t, r.retryAll(t.Context()))
	require.Equal(t, []int64{2, 3, 4}, to.sent)
	require.Zero(t, d.Count(t, "outbox_failed"))
}

// An operator resolves an event before its answer comes. Its key goes on when the answer is there.
func TestKeyOfResolvedUnansweredEventGoesOn(t *testing.T) {
	t.Parallel()
	d := testenv.NewTables(t)
	d.InsertParked(t, 4, 1)
	r, to, sent := newAnsweredFixture(t, d, 1)
	tx := lockRow(t, d, 1)
	require.NoError(t, tx.Commit(t.Context()))
	r.Unanswered.recorded(1, func(int) *envelope.Event { return sent[1] })
	r.Unanswered.accept(sent[1], SentTo{})
	require.NoError(t, r.retryAll(t.Context()))
	r.reconcileAt = time.Time{}
	require.NoError(t, r.retryAll(t.Context()))
	require.Equal(t, []int64{2, 3, 4}, to.sent)
	require.False(t, r.Unanswered.holds("b-events/"+string(sent[1].Key())))
}

// When the lease is lost, the rows of answered events are left to the next leader, and the log says nothing about
// PostgreSQL.
func TestLostLeaseIsNoOutageOfPostgreSQL(t *testing.T) {
	t.Parallel()
	d := testenv.NewTables(t)
	d.InsertParked(t, 1, 1)
	var log testenv.Buffer
	r, _, sent := newAnsweredFixture(t, d, 1)
	r.Outage = outage.NewLog(slog.New(slog.NewTextHandler(&log, nil)), "PostgreSQL")
	r.Unanswered.accept(sent[1], SentTo{})
	held, lose := context.WithCancelCause(t.Context())
	lose(lease.ErrLeaseLost)
	r.Held = held
	r.Finish()
	require.Empty(t, log.String())
}

// An event without a key fails late, before the client has chosen a partition. The topic is not bad for that.
func TestLateFailureWithoutAPartition(t *testing.T) {
	t.Parallel()
	for _, number := range []int32{kafka.Unassigned, 3} {
		bad := NewBadPartitions(outage.NewLogs(slog.New(slog.DiscardHandler)))
		f := &flight{acks: &acks{records: []kgo.Record{{Topic: "orders", Partition: number}}}, grace: context.Background(), began: time.Now()}
		e := &envelope.Event{ID: 1}
		l := &lateAnswers{to: NewUnanswered(bad, func() {}), flight: f, events: map[int]*envelope.Event{0: e}}
		l.take(0, kgo.ErrRecordTimeout)
		require.Equal(t, number == 3, len(bad.All()) == 1)
	}
}
