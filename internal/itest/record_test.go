package itest

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

func TestRecordOne(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	tx := c.begin(t)
	require.NoError(t, c.rec.Record(background, tx, good))
	require.Empty(t, c.ids(t), "nobody sees it before the commit")
	require.NoError(t, tx.Commit(background))
	require.Equal(t, []string{"good"}, c.ids(t))
}

func TestRecordKeepsOrder(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	events, ids := numberedParcels(manyEvents)
	c.commit(t, background, c.rec, events...)
	c.commit(t, background, c.rec, events[7], events[3])
	stored := c.ids(t)
	require.Len(t, stored, manyEvents+2)
	for i, id := range append(ids, ids[7], ids[3]) {
		require.Equal(t, id, stored[i], "event %d", i)
	}
}

func TestNothingToRecord(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	counts := &statements{}
	db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer = counts })
	tx, err := db.Begin(background)
	require.NoError(t, err)
	defer tx.Rollback(background)
	counts.reset()
	require.NoError(t, c.rec.Record(background, tx))
	require.NoError(t, c.rec.Record(background, tx, []outbox.DomainEvent{}...))
	require.Equal(t, statements{}, counts.reset())
	var batch pgx.Batch
	require.NoError(t, c.rec.Queue(background, &batch))
	require.Zero(t, batch.Len())
}

// statements counts what a connection asks PostgreSQL. It is a tracer of one
// connection at a time.
type statements struct{ queries, batches, queued, copies, prepares int }

func (s *statements) reset() statements { defer func() { *s = statements{} }(); return *s }

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	s.queries++
	return ctx
}
func (s *statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (s *statements) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	s.batches++
	return ctx
}
func (s *statements) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) { s.queued++ }
func (s *statements) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

func (s *statements) TraceCopyFromStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceCopyFromStartData) context.Context {
	s.copies++
	return ctx
}
func (s *statements) TraceCopyFromEnd(context.Context, *pgx.Conn, pgx.TraceCopyFromEndData) {}

func (s *statements) TracePrepareStart(ctx context.Context, _ *pgx.Conn, d pgx.TracePrepareStartData) context.Context {
	s.prepares++
	return ctx
}
func (s *statements) TracePrepareEnd(_ context.Context, _ *pgx.Conn, d pgx.TracePrepareEndData) {
	if d.AlreadyPrepared {
		s.prepares--
	}
}

// It is one statement, and COPY for many events. A connection that meets a
// statement for the first time prepares it before.
func TestRecordIsOneRoundTrip(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	counts := &statements{}
	db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer, cfg.MaxConns = counts, 1 })
	events, _ := numberedParcels(manyEvents)
	prepares := map[int]int{1: 1, 2: 1, 500: 1}
	for _, n := range []int{1, 2, 3, 499, 1, 500, manyEvents} {
		tx, err := db.Begin(background)
		require.NoError(t, err)
		defer tx.Rollback(background)
		counts.reset()
		require.NoError(t, c.rec.Record(background, tx, events[:n]...))
		want := statements{queries: 1, prepares: prepares[n]}
		if n >= 500 {
			want = statements{copies: 1, prepares: prepares[n]}
		}
		require.Equal(t, want, counts.reset(), "%d events", n)
		delete(prepares, n)
		require.NoError(t, tx.Commit(background))
	}
	require.Len(t, c.ids(t), 1006+manyEvents)
}

func TestPointersAreDereferenced(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	var seen []outbox.DomainEvent
	rec := c.recorder(t, outbox.RecorderConfig{Headers: func(_ context.Context, e outbox.DomainEvent) map[string]string {
		seen = append(seen, e)
		return nil
	}})
	p, r := id("a"), raw("key", []byte{1})
	c.commit(t, background, rec, &p, p, &r) // rawCodec asserts that it gets a value
	require.Equal(t, []string{"a", "a", "raw"}, c.ids(t))
	require.Equal(t, []outbox.DomainEvent{p, p, r}, seen, "the hook sees values")
}

// One recorder serves all requests at once; go test -race watches it.
func TestConcurrentRecord(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	var all sync.WaitGroup
	errs := make(chan error, 16)
	for i := range 16 {
		all.Go(func() {
			for j := range 20 {
				id := fmt.Sprintf("%d-%d", i, j)
				ctx := outbox.WithCorrelationID(background, id)
				err := pgx.BeginFunc(ctx, c.db, func(tx pgx.Tx) error {
					return c.rec.Record(ctx, tx, parcel{ID: id, Sent: noon, Content: id}, &rawParcel{parcel{id, id, noon, []byte(id)}})
				})
				if err != nil {
					errs <- err
					return
				}
			}
		})
	}
	all.Wait()
	require.Empty(t, errs)
	seen := map[string]int{}
	for _, r := range c.rows(t) {
		seen[r.AggregateID]++
		require.Equal(t, `{"correlationid": "`+r.AggregateID+`"}`, *r.Headers, "nobody else's")
		if r.EventType == rawSent {
			require.Equal(t, r.AggregateID, string(r.PayloadBytes))
		} else {
			require.Equal(t, `"`+r.AggregateID+`"`, *r.Payload)
		}
	}
	require.Len(t, seen, 320)
	require.Equal(t, []int{2}, slices.Compact(slices.Collect(maps.Values(seen))))
}

// Three events of one transaction, by convention to three topics, arrive each in
// its own (T10).
func TestThreeTopicsInOneTransaction(t *testing.T) {
	t.Parallel()
	shop := "shop" + strings.ReplaceAll(uuid.NewString(), "-", "")
	topics := map[string]string{}
	for _, domain := range []string{"order", "payment", "like"} {
		topics[domain] = fmt.Sprintf("%s-%s-events", shop, domain)
	}
	name := func(domain, action string) string { return fmt.Sprintf("loopers.%s-%s.%s.v1", shop, domain, action) }
	events, err := outbox.NewRegistry("commerce-api",
		outbox.Event(name("order", "created"), "Order", orderCreated.AggregateID),
		outbox.Event(name("payment", "paid"), "Payment", paymentPaid.AggregateID),
		outbox.Event(name("like", "created"), "Like", likeCreated.AggregateID))
	require.NoError(t, err)
	c := newCounter(t, events)
	c.commit(t, background, c.rec,
		orderCreated{shopEvent{"order-1", noon}}, paymentPaid{shopEvent{"payment-1", noon}}, likeCreated{shopEvent{"like-1", noon}})

	kafka := []kgo.Opt{kgo.SeedBrokers(testenv.Brokers(t)...), kgo.AllowAutoTopicCreation(), kgo.MetadataMinAge(100 * time.Millisecond)}
	cfg := quick
	cfg.Schema = c.schema
	relay, err := outbox.NewRelay(c.db, kafka, cfg)
	require.NoError(t, err)
	testenv.Run(t, relay.Run)
	require.Equal(t, map[string]string{
		topics["order"]: "order-1", topics["payment"]: "payment-1", topics["like"]: "like-1",
	}, keysByTopic(t, kafka, slices.Collect(maps.Values(topics))))
}

// keysByTopic waits for a record of each topic and returns its key.
func keysByTopic(t *testing.T, kafka []kgo.Opt, topics []string) map[string]string {
	t.Helper()
	client, err := kgo.NewClient(append(kafka, kgo.ConsumeTopics(topics...), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchMaxWait(100*time.Millisecond))...) // a topic that appears later waits for the fetch before it
	require.NoError(t, err)
	defer client.Close()
	ctx, cancel := context.WithTimeout(background, testenv.Patience)
	defer cancel()
	keys := map[string]string{}
	for len(keys) < len(topics) {
		fetches := client.PollFetches(ctx)
		require.NoError(t, ctx.Err(), "so far %v", keys)
		fetches.EachRecord(func(r *kgo.Record) { keys[r.Topic] = string(r.Key) })
	}
	return keys
}

// The functions of one call are called once for each event, in order, and none
// of them for events behind a refused one.
func TestHooksAreCalledOnce(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	var ids atomic.Int64
	rec := c.recorder(t, outbox.RecorderConfig{NewID: func() (uuid.UUID, error) { ids.Add(1); return uuid.NewV7() }})
	c.commit(t, background, rec, good, good, good)
	require.EqualValues(t, 3, ids.Swap(0))
	require.Error(t, rec.Queue(background, &pgx.Batch{}, good, id(""), good))
	require.EqualValues(t, 1, ids.Load())
}
