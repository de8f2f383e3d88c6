package itest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// saleOf returns a sale of one, from a source.
func (s *consumerFixture) saleOf(source, id string) *kgo.Record {
	r := s.saleRecord(id, oneSale)
	at := slices.IndexFunc(r.Headers, func(h kgo.RecordHeader) bool { return h.Key == "ce_source" })
	r.Headers[at].Value = []byte(source)
	return r
}

// An event is its source and its id together. The same id from a second source used to be
// skipped without a word, and ("a", "b c") was the same as ("a b", "c").
func TestEventsOfTwoSources(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	long := strings.Repeat("long ", 100)
	group := "sources-" + uuid.NewString()
	c := s.groupConsumer(t, group, outbox.ConsumerConfig{}, outbox.Handle("COUNTED", s.count))
	same := uuid.NewString()
	events := [][2]string{
		{"shop", same}, {"store", same}, {"a third one", same}, {long, same}, {long + "x", same}, {"sha256:x", same},
		{"a", "b c"}, {"a b", "c"}, {"a", long}, {"b", long}, {"a " + long, "c"},
	}
	for range 3 {
		for _, e := range events {
			require.NoError(t, c.Deliver(background, s.saleOf(e[0], e[1])))
		}
	}
	require.Equal(t, len(events), s.counts(t)["p"], "each once")
	require.Equal(t, len(events), s.relayFixture.count(t, "event_handled"))

	// All at once, in a batch and across a restart.
	var records []*kgo.Record
	for _, e := range append(events, [2]string{"shop", "end"}) {
		records = append(records, s.saleOf(e[0], e[1]), s.saleOf(e[0], e[1]))
	}
	group = "another-" + group
	another := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}
	for range 2 {
		s.send(t, records...)
		stop := testenv.Run(t, s.groupConsumer(t, group, another, outbox.Handle("COUNTED", s.count)).Run)
		require.Eventually(t, func() bool {
			return s.committed(t, group, 0)%int64(len(records)) == 0 && s.committed(t, group, 0) > 0
		}, testenv.Patience, 10*time.Millisecond)
		stop()
	}
	require.Equal(t, 2*len(events)+1, s.counts(t)["p"])
}

// The same id of the same source as two types is two events, for the same action too: neither is a repeat of the other
// while the other waits, is DEAD or is done.
func TestEventsOfTwoTypes(t *testing.T) {
	t.Parallel()
	for name, first := range map[string]struct {
		err    error
		status string
	}{
		"waits": {errPlay, "PENDING 1"}, "is dead": {outbox.Permanent(errPlay), "DEAD 1"}, "is done": {nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newParkingFixture(t, 1)
			var err error
			s.events, err = outbox.NewRegistry("shop", outbox.Event(saleType, "Product", sale.productID).Topic(s.topic),
				outbox.Event("test.sale.made.v2", "Product", func(e saleV2) string { return e.Product }).Topic(s.topic))
			require.NoError(t, err)
			cfg := s.config(t)
			cfg.Retry.RetryWait, cfg.Retry.MaxRetryWait = time.Hour, time.Hour
			var fail, failOther atomic.Bool
			fail.Store(true)
			testenv.Run(t, s.groupConsumer(t, s.group, cfg,
				s.handler("Handle", "COUNTED", func(context.Context, pgx.Tx, sale, outbox.Metadata) error {
					if fail.Load() {
						return first.err
					}
					return nil
				}),
				outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e saleV2, _ outbox.Metadata) error {
					if failOther.Load() {
						return outbox.Permanent(errPlay)
					}
					return s.write(ctx, tx, "COUNTED", sale{Product: e.Product, Amount: e.Cents})
				})).Run)
			offset := int64(0)
			send := func(id, product string, v2 bool) {
				r := s.saleRecord(id, fmt.Appendf(nil, `{"product":%q,"amount":1}`, product))
				if v2 {
					r = s.saleRecord(id, fmt.Appendf(nil, `{"product":%q,"cents":1}`, product))
					at := slices.IndexFunc(r.Headers, func(h kgo.RecordHeader) bool { return h.Key == "ce_type" })
					r.Headers[at].Value = []byte("test.sale.made.v2")
				}
				r.Key = []byte(product)
				s.send(t, r)
				offset++
				s.awaitOffset(t, 0, offset)
			}
			id := uuid.NewString()
			send(id, "first", false)
			s.awaitStatuses(t, "COUNTED", first.status)
			send(id, "second", true)
			s.awaitJournal(t, "COUNTED", "second", 1)
			send(id, "second", true)
			send(id, "first", false)
			s.awaitStatuses(t, "COUNTED", first.status)
			require.Equal(t, []int{1}, s.journal(t, "COUNTED", "second"), "a repeat")

			// Neither does the first one, which is done, hide that the second one fails.
			fail.Store(false)
			failOther.Store(true)
			id = uuid.NewString()
			send(id, "third", false)
			s.awaitJournal(t, "COUNTED", "third", 1)
			send(id, "fourth", true)
			require.Eventually(t, func() bool {
				return s.number(t, `SELECT count(*)::int FROM {s}.event_delivery WHERE status = 'DEAD' AND event_type = 'test.sale.made.v2'`) == 1
			}, testenv.Patience, 10*time.Millisecond)
		})
	}
}

// A note without a source is of a handler that chose its key. It counts for the events of all sources under that key,
// also once the handler chooses none any more.
func TestNotesWithoutSource(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	c := s.groupConsumer(t, "before", outbox.ConsumerConfig{}, outbox.Handle("COUNTED", s.count))
	id := uuid.NewString()
	for _, key := range []string{id, "shop not a uuid"} {
		_, err := s.db.Exec(background, s.sql(`INSERT INTO {s}.event_handled (consumer_group, aggregate_type, aggregate_id, action) VALUES ('before', $1, $2, 'COUNTED')`), saleType, key)
		require.NoError(t, err)
	}
	for _, id := range []string{id, "not a uuid"} {
		require.NoError(t, c.Deliver(background, s.saleOf("shop", id)))
	}
	require.Empty(t, s.counts(t))
	require.NoError(t, c.Deliver(background, s.saleOf("shop", "another")))
	require.Equal(t, map[string]int{"p": 1}, s.counts(t))
}

// The note of a second source is looked for behind that of the first, so the first is kept
// as long as the second.
func TestNotesOfTwoSourcesAreKept(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	c := s.groupConsumer(t, "kept", outbox.ConsumerConfig{}, outbox.Handle("COUNTED", s.count))
	id := uuid.NewString()
	deliver := func(source string) { require.NoError(t, c.Deliver(background, s.saleOf(source, id))) }
	older := func(age string) {
		_, err := s.db.Exec(background, s.sql(`UPDATE {s}.event_handled SET handled_at = handled_at - $1::interval`), age)
		require.NoError(t, err)
	}
	clean := func() {
		_, err := outbox.CleanHandled(background, s.db, s.schema, outbox.RetentionConfig{HandledFor: 24 * time.Hour})
		require.NoError(t, err)
	}
	deliver("a")
	older("20 hours")
	deliver("b")
	older("20 hours")
	clean()
	deliver("b")
	require.Equal(t, 2, s.counts(t)["p"], "b is not done again")
	require.Equal(t, 2, s.relayFixture.count(t, "event_handled"))
	older("5 hours")
	clean()
	require.Zero(t, s.relayFixture.count(t, "event_handled"))
}

// Records without an id go by their position. A topic that is deleted and created again has the same
// positions: what was in it then is not what is in it now.
func TestPositionsOfTopicCreatedAgain(t *testing.T) {
	t.Parallel()
	s := newStartFixture(t, 1)
	cfg := outbox.ConsumerConfig{
		HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, Decode: outbox.PlainRecords{Type: saleType}.Decode,
	}
	put := func(n int) {
		records := make([]*kgo.Record, n)
		for i := range records {
			records[i] = &kgo.Record{Topic: s.topic, Value: oneSale}
		}
		s.send(t, records...)
	}
	for round := range 3 {
		put(5)
		for range 2 { // the second time, from the same offsets
			stop := testenv.Run(t, s.groupConsumer(t, s.group, cfg, outbox.Handle("COUNTED", s.count)).Run)
			require.Eventually(t, func() bool { return s.committed(t, s.group, 0) == 5 }, testenv.Patience, 10*time.Millisecond)
			stop()
			require.Equal(t, 5*(round+1), s.counts(t)["p"], "round %d", round)
			s.commitFor(t, 0)
		}
		s.deleteTopic(t)
		testenv.CreateTopic(t, s.brokers, s.topic, 1)
	}
}

// Two events with the same id from two sources arrive in a batch, and the first one fails. Its note is taken back, and
// that of the second one was not found any more.
func TestFailedSourceHidesNoOther(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	group, id := "beside-"+uuid.NewString(), uuid.NewString()
	failing, other := s.saleOf("shop", id), s.saleOf("store", id)
	failing.Value, failing.Key = []byte(`{"product":"failing","amount":1,"poison":"permanent"}`), []byte("failing")
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}
	for round, records := range [][]*kgo.Record{{failing, other}, {other}} {
		s.send(t, records...)
		stop := testenv.Run(t, s.groupConsumer(t, group, cfg, outbox.Handle("COUNTED", s.count)).Run)
		require.Eventually(t, func() bool { return s.committed(t, group, 0) == int64(2+round) }, testenv.Patience, 10*time.Millisecond)
		stop()
	}
	require.Equal(t, map[string]int{"p": 1}, s.counts(t))
}
