package outboxschema_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A service changes from JSON to Protobuf with a registry while it records, one process after the other. Two groups
// of consumers and one of workers go on: some have JSON as the codec of the type and some Protobuf, and all read both.
// What was committed is what each group has handled, once and in order.
func TestJSONBecomesProtobuf(t *testing.T) {
	t.Parallel()
	testenv.Long(t)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	g, s := newGate(t), newShop(t)
	seen := pgx.Identifier{s.schema, "seen"}.Sanitize()
	_, err := s.db.Exec(t.Context(), "CREATE TABLE "+seen+" (id bigserial, reader text, key bigint, number bigint)")
	require.NoError(t, err)
	note := func(reader string) outbox.Handler {
		return outbox.Handle("NOTE", func(ctx context.Context, tx pgx.Tx, e order, _ outbox.Metadata) error {
			_, err := tx.Exec(ctx, "INSERT INTO "+seen+" (reader, key, number) VALUES ($1, $2, $3)", reader, e.OrderID, e.Lines[0].ProductID)
			return err
		})
	}
	definition := outbox.Event(orderCreated, "Order", order.AggregateID).Topic(s.topic)
	schemas := g.registry(t, nil)
	before, after := registryOf(t, definition), registryOf(t, definition.Codec(schemas.Codec(s.topic, structFormat())))
	both := outbox.HandlerConfig{Schema: s.schema, From: outbox.FromStart, Logger: quiet, Codecs: []outbox.Codec{g.registry(t, nil).Reader(structFormat())}}

	s.relay(t, outbox.Binary)
	s.consume(t, "before", before, outbox.ConsumerConfig{HandlerConfig: both}, note("before"))
	s.consume(t, "after", registryOf(t, definition.Codec(g.registry(t, nil).Reader(structFormat()))), outbox.ConsumerConfig{}, note("after"))
	w, err := outbox.NewWorker(s.db, before, "worker-"+uuid.NewString(), outbox.WorkerConfig{HandlerConfig: both}, note("worker"))
	require.NoError(t, err)
	testenv.Run(t, w.Run)

	const writers, events = 4, 150
	var changes atomic.Int64 // how many writers have changed
	registered := make(chan struct{})
	var committed sync.Map
	var all sync.WaitGroup
	rec := map[bool]*outbox.Recorder{false: recorderOf(t, s, before), true: recorderOf(t, s, after)}
	for writer := range writers {
		all.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(writer)))
			for n := range events {
				if n == events/3 && writer == 0 {
					assert.NoError(t, schemas.Register(t.Context()))
					close(registered)
				}
				changed := n > events/3+writer*10
				if n == events/3+writer*10+1 {
					changes.Add(1)
					<-registered // a writer whose schema the registry does not know records nothing
				}
				e := orderOf(int64(writer*10 + r.IntN(3) + 1))
				e.Lines[0].ProductID = int64(n)
				undone := r.IntN(5) == 0
				err := pgx.BeginFunc(t.Context(), s.db, func(tx pgx.Tx) error {
					if err := rec[changed].Record(t.Context(), tx, e); err != nil || !undone {
						return err
					}
					return errUndone
				})
				if !undone {
					assert.NoError(t, err)
					committed.Store([2]int64{e.OrderID, e.Lines[0].ProductID}, true)
				}
			}
		})
	}
	all.Wait()
	require.EqualValues(t, writers, changes.Load())
	want := 0
	committed.Range(func(any, any) bool { want++; return true })

	for _, reader := range []string{"before", "after", "worker"} {
		count := func() (n int) {
			require.NoError(t, s.db.QueryRow(t.Context(), "SELECT count(*) FROM "+seen+" WHERE reader = $1", reader).Scan(&n))
			return n
		}
		require.Eventually(t, func() bool { return count() >= want }, testenv.Patience, 20*time.Millisecond, "%s has %d of %d", reader, count(), want)
		rows, err := s.db.Query(t.Context(), "SELECT key, number FROM "+seen+" WHERE reader = $1 ORDER BY id", reader)
		require.NoError(t, err)
		last, handled := map[int64]int64{}, 0
		var key, number int64
		_, err = pgx.ForEachRow(rows, []any{&key, &number}, func() error {
			_, known := committed.Load([2]int64{key, number})
			require.True(t, known, "%s has handled what was not committed: %d of %d", reader, number, key)
			before, again := last[key]
			require.True(t, !again || before < number, "%s: %d of %d after %d", reader, number, key, before)
			last[key], handled = number, handled+1
			return nil
		})
		require.NoError(t, err)
		require.Equal(t, want, handled, reader)
	}
	forms := map[string]int{}
	for _, r := range s.records(t, s.topic, want) {
		forms[headerOf(r, "content-type")]++
	}
	require.Len(t, forms, 2, "%v", forms)
	dead := 0
	require.NoError(t, s.db.QueryRow(t.Context(), "SELECT count(*) FROM "+pgx.Identifier{s.schema, "event_delivery"}.Sanitize()+" WHERE status = 'DEAD'").Scan(&dead))
	require.Zero(t, dead)
	t.Logf("%d events were committed and handled by three groups: %v", want, forms)
}

var errUndone = errors.New("undone")

func recorderOf(t *testing.T, s *shop, events *outbox.Registry) *outbox.Recorder {
	t.Helper()
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{Schema: s.schema})
	require.NoError(t, err)
	return rec
}
