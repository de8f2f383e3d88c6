package itest

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A call of Queue is one statement among the caller's own, with one result.
func TestQueue(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	counts := &statements{}
	db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer, cfg.MaxConns = counts, 1 })
	events, ids := numberedParcels(300)
	var batch pgx.Batch
	batch.Queue(`SELECT set_config('outbox.test', 'on', true)`)
	require.NoError(t, c.rec.Queue(background, &batch, events[0]))
	require.Equal(t, 2, batch.Len())
	require.NoError(t, c.rec.Queue(background, &batch))
	require.Equal(t, 2, batch.Len(), "no events, no statement")
	batch.Queue(`SELECT 42`)
	require.NoError(t, c.rec.Queue(background, &batch, events[1:]...))
	require.Equal(t, 4, batch.Len())

	require.NoError(t, pgx.BeginFunc(background, db, func(tx pgx.Tx) error {
		counts.reset()
		results := tx.SendBatch(background, &batch)
		_, err := results.Exec()
		require.NoError(t, err)
		tag, err := results.Exec()
		require.NoError(t, err)
		require.EqualValues(t, 1, tag.RowsAffected())
		var answer int
		require.NoError(t, results.QueryRow().Scan(&answer))
		require.Equal(t, 42, answer)
		tag, err = results.Exec()
		require.NoError(t, err)
		require.EqualValues(t, 299, tag.RowsAffected())
		require.NoError(t, results.Close())
		n := counts.reset()
		require.Equal(t, [3]int{0, 1, 4}, [3]int{n.queries, n.batches, n.queued})
		return nil
	}))
	require.Equal(t, ids, c.ids(t))
}

// A batch's results reach the functions that its statements were queued with.
func TestQueueBesideCallbacks(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	var batch pgx.Batch
	var before, after int
	scan := func(into *int) func(pgx.Row) error { return func(row pgx.Row) error { return row.Scan(into) } }
	batch.Queue(c.sql(`SELECT count(*)::int FROM {s}.outbox`)).QueryRow(scan(&before))
	require.NoError(t, c.rec.Queue(background, &batch, good, good))
	batch.Queue(c.sql(`SELECT count(*)::int FROM {s}.outbox`)).QueryRow(scan(&after))
	require.NoError(t, pgx.BeginFunc(background, c.db, func(tx pgx.Tx) error { return tx.SendBatch(background, &batch).Close() }))
	require.Equal(t, [2]int{0, 2}, [2]int{before, after})
}

// A statement that PostgreSQL would not take, and that would cost the caller his connection, is refused before.
func TestQueueTooMuch(t *testing.T) {
	// Not parallel: it takes memory.
	rec, err := outbox.NewRecorder(gateway(t), outbox.RecorderConfig{MaxPayload: 1 << 20})
	require.NoError(t, err)
	events := make([]outbox.DomainEvent, 300)
	payload := make([]byte, 1<<20)
	for i := range events {
		events[i] = hook(func(e *outbox.RawEvent) { e.ContentType, e.Payload = "application/avro", payload })
	}
	var batch pgx.Batch
	err = rec.Queue(background, &batch, events...)
	requireRefused(t, err, outbox.ErrTooLarge, refusal{"", -1, "events"})
	require.Zero(t, batch.Len())
}
