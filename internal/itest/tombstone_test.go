package itest

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxdlq"
	"github.com/outboxgo/outbox/outboxops"
)

var tombstone = outbox.EventOptions{Tombstone: true}

// A tombstone has no payload in its row, whichever statement stores it, and its codec is not called.
func TestRecordTombstone(t *testing.T) {
	t.Parallel()
	codec := outbox.JSON()
	codec.Encode = func(context.Context, any) ([]byte, error) { return nil, errTest }
	codec.DataSchema = func(context.Context) string { return "urn:schema" }
	events, err := outbox.NewRegistry("s", outbox.AllowRaw(), outbox.Event(parcelSent, "Parcel", parcel.Number).Key(parcel.To).Codec(codec))
	require.NoError(t, err)
	c := newCounter(t, events)
	gone := outbox.With(outbox.With(parcel{ID: "1", Address: "k", Sent: noon}, tombstone), outbox.EventOptions{Headers: map[string]string{"a": "b"}})
	raw := outbox.With(hook(func(e *outbox.RawEvent) { e.Payload, e.ContentType = nil, "" }), tombstone)
	many := make([]outbox.DomainEvent, 500)
	for i := range many {
		many[i] = gone
	}
	for _, add := range []func(tx pgx.Tx) error{
		func(tx pgx.Tx) error { return c.rec.Record(background, tx, gone) },
		func(tx pgx.Tx) error { return c.rec.Record(background, tx, gone, raw) },
		func(tx pgx.Tx) error { return c.rec.Record(background, tx, many...) },
		func(tx pgx.Tx) error {
			sql, args, err := c.rec.Statement(background, gone, raw)
			if err == nil {
				_, err = tx.Exec(background, sql, args...)
			}
			return err
		},
		func(tx pgx.Tx) error {
			sql, args, err := c.rec.Statement(background, outbox.With(gone, outbox.EventOptions{NotBefore: noon}), gone)
			if err == nil {
				_, err = tx.Exec(background, sql, args...)
			}
			return err
		},
		func(tx pgx.Tx) error {
			return c.rec.Record(background, tx, outbox.With(gone, outbox.EventOptions{NotBefore: noon}))
		},
	} {
		require.NoError(t, pgx.BeginFunc(background, c.db, add))
	}
	_, err = c.db.Exec(background, c.sql(`SELECT {s}.outbox_move_due(NULL, NULL)`))
	require.NoError(t, err)
	rows := c.rows(t)
	require.Len(t, rows, 3+len(many)+3+2)
	for _, r := range rows {
		require.Nil(t, r.Payload)
		require.Nil(t, r.PayloadBytes)
		require.Empty(t, r.ContentType)
		if r.EventType == parcelSent {
			require.Equal(t, []string{"1", "k", `{"a": "b"}`}, []string{r.AggregateID, *r.PartitionKey, *r.Headers})
		}
	}
	record, err := c.rec.KafkaRecord(background, gone)
	require.NoError(t, err)
	require.Nil(t, record.Value)
	require.Equal(t, "k", string(record.Key))
	_, has := deadLetterHeaders(record)["content-type"]
	require.False(t, has)
	require.ErrorContains(t, c.rec.Record(background, c.begin(t), outbox.With(hook(nil), tombstone)), "payload is malformed: a tombstone has none")

	const insert = `INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, occurred_at, content_type, payload) VALUES (gen_random_uuid(), 'a', 'a', 'a', 'a', now(), $1, $2)`
	for contentType, payload := range map[string]any{"": "{}", "application/json": nil} {
		_, err := c.db.Exec(background, c.sql(insert), contentType, payload)
		require.ErrorContains(t, err, "outbox_one_payload")
	}
	_, err = c.db.Exec(background, c.sql(insert), "", nil)
	require.NoError(t, err)
}

// A tombstone is a null value in Kafka, also if it was sent by a retry, and handlers get it: at once, after it was
// parked, from its dead letter, and from PostgreSQL.
func TestTombstones(t *testing.T) {
	t.Parallel()
	for _, mode := range []outbox.Mode{outbox.Binary, outbox.Structured} {
		t.Run(fmt.Sprint("mode ", mode), func(t *testing.T) {
			t.Parallel()
			relayed := quick
			relayed.Mode = mode
			testTombstones(t, relayed)
		})
	}
	t.Run("exactly once", func(t *testing.T) {
		t.Parallel()
		testenv.Long(t)
		testenv.RealBrokers(t)
		relayed := quick
		relayed.ExactlyOnce = "cursor-" + uuid.NewString()
		testTombstones(t, relayed)
	})
}

func testTombstones(t *testing.T, relayed outbox.RelayConfig) {
	s := newConsumerFixtureOn(t, func(h *relayFixture) { testenv.CreateTopic(t, h.brokers, h.topic+".dlq", 1) })
	testenv.Run(t, s.plainRelay(t, relayed).Run)
	record := func(events ...outbox.DomainEvent) {
		require.NoError(t, pgx.BeginFunc(background, s.db, func(tx pgx.Tx) error { return s.rec.Record(background, tx, events...) }))
	}
	gone := outbox.With(sale{Product: "p"}, outbox.EventOptions{Tombstone: true, Attributes: map[string]string{"by": "user"}, Headers: map[string]string{"h": "x"}})
	record(gone)
	require.Eventually(t, func() bool { return s.relayFixture.count(t, "outbox_failed") == 1 }, testenv.Patience, 10*time.Millisecond, "the topic is missing")
	testenv.CreateTopic(t, s.brokers, s.topic, 1)
	record(sale{Product: "q"}, gone)

	var got, worked arrivals
	handle := func(a *arrivals, fail bool) outbox.Handler {
		h := outbox.Handle("COUNTED", func(ctx context.Context, _ pgx.Tx, e sale, m outbox.Metadata) error {
			a.add(ctx, m)
			switch {
			case m.Tombstone && e != (sale{}):
				return outbox.Permanent(fmt.Errorf("a tombstone has %v", e))
			case m.Tombstone && fail && m.Attempt < 3:
				return errTest
			}
			return nil
		})
		return outbox.OncePer(h, func(e sale, _ outbox.Metadata) (string, string) { return "Product", e.Product })
	}
	check := func(seen []outbox.Metadata, want int) {
		ids := map[string]bool{}
		for _, m := range seen {
			if m.Tombstone {
				ids[m.ID] = true
				require.Equal(t, []string{saleType, "p", "p", "", "user", "x"}, []string{m.Type, m.Subject, m.Key(), m.ContentType, m.Extensions["by"], m.Header("h")})
			}
		}
		require.Len(t, ids, want)
	}
	cfg := outbox.HandlerConfig{Schema: s.schema, From: outbox.FromStart, Retry: outbox.RetryPolicy{RetryWait: time.Millisecond, MaxOutage: -1}}
	testenv.Run(t, s.consumer(t, outbox.ConsumerConfig{HandlerConfig: cfg}, handle(&got, true)).Run)
	w, err := outbox.NewWorker(s.db, s.events, "workers", outbox.WorkerConfig{HandlerConfig: cfg, PollInterval: 20 * time.Millisecond}, handle(&worked, false))
	require.NoError(t, err)
	testenv.Run(t, w.Run)
	for _, r := range readAll(t, s.brokers, s.topic, 3) {
		h := deadLetterHeaders(r)
		if r.Value != nil {
			require.Equal(t, "q", string(r.Key))
			continue
		}
		_, has := h["content-type"]
		require.False(t, has)
		require.Equal(t, []string{"p", "p", "1.0", "shop", saleType, "Product", "user", "x"},
			[]string{string(r.Key), h["ce_subject"], h["ce_specversion"], h["ce_source"], h["ce_type"], h["ce_aggregatetype"], h["ce_by"], h["h"]})
	}
	seen, _ := got.await(t, 1+2*3) // each tombstone three times
	check(seen, 2)
	seen, _ = worked.await(t, 3)
	check(seen, 2)
	s.testDeadTombstone(t)
	require.Empty(t, verified(t, s.relayFixture, "").Findings)
}

// testDeadTombstone handles the dead letter of a tombstone.
func (s *consumerFixture) testDeadTombstone(t *testing.T) {
	group := "dead-" + uuid.NewString()
	var got arrivals
	fixed := make(chan struct{})
	cfg := outbox.HandlerConfig{Schema: s.schema, From: outbox.FromStart}
	testenv.Run(t, s.groupConsumer(t, group, outbox.ConsumerConfig{HandlerConfig: cfg}, outbox.Handle("KEPT", func(ctx context.Context, _ pgx.Tx, _ sale, m outbox.Metadata) error {
		if !m.Tombstone {
			return nil
		}
		select {
		case <-fixed:
			got.add(ctx, m)
			return nil
		default:
			return outbox.Permanent(errors.New("not yet"))
		}
	})).Run)
	for _, r := range s.deadLetters(t, 2) {
		require.Nil(t, r.Value)
		require.Equal(t, "p", string(r.Key))
		require.NotContains(t, deadLetterHeaders(r), outbox.DeadLetterValueOmitted)
	}
	close(fixed)
	report, err := outboxdlq.Replay(background, testenv.KafkaOpts(s.brokers), outboxdlq.ReplayConfig{
		Topic: s.topic + ".dlq", DB: s.db, Schema: s.schema, Audit: outboxops.AuditInfo{Operator: "test", Reason: "fixed"},
	})
	require.NoError(t, err)
	require.Equal(t, 2, report.Sent)
	seen, _ := got.await(t, 2)
	for _, m := range seen {
		require.Equal(t, []any{true, "p", "user"}, []any{m.Tombstone, m.Subject, m.Extensions["by"]})
	}
	for _, r := range readAll(t, s.brokers, s.topic, 5) {
		if deadLetterHeaders(r)[outbox.ReplayGroup] != "" {
			require.Nil(t, r.Value)
		}
	}
}
