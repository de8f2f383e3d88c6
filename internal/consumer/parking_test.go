package consumer

import (
	"context"
	"log/slog"
	"runtime"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/migrator"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// An event is found to be blocked, and a moment later its key is free. It is parked all the same, and so is what is
// behind it in a later batch: that was handled before it.
func TestKeyIsFreeBeforeItsEventIsParked(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Schema(t)
	ctx := t.Context()
	require.NoError(t, (&migrator.Migrator{DB: db, Schema: schema, LockTimeout: time.Minute, Logger: slog.New(slog.DiscardHandler)}).Run(ctx))
	store := delivery.NewStore(db, schema, "g", "w", time.Minute).ForRecords()
	calls := 0
	var s *partitionFixture
	s = newPartitionFixture(t, Rules{}, handle("ACTED", func(ctx context.Context, _ pgx.Tx, e played, m envelope.Received) error {
		if calls++; calls == 3 { // alone in its transaction
			rows, err := store.Claim(ctx, []delivery.Claimable{{Pair: delivery.Pair{Action: "ACTED", Stream: "play-events"}, Types: []string{playedType}}}, 10, 0, false, 1<<20)
			require.NoError(t, err)
			require.Len(t, rows, 1)
			_, err = store.Finish(ctx, rows)
			require.NoError(t, err)
		}
		return s.handle(ctx, e, m)
	}))
	w := s.worker
	w.parking = &consumerParking{store: store, group: "g", dueAt: func(time.Time) {}}
	w.processor.Queue, w.processor.Begin, s.db = w.queueBlocked, w.checkInTx, db
	w.batch, w.mostBlock = 3, true
	s.handlers["fails"] = "-"
	records := s.arrive("blocks", "works", "fails", "blocked", "behind")
	for _, n := range []int{0, 3, 4} {
		records[n].Topic, records[n].Key = "play-events", []byte("k")
	}
	from := originOf(records[0], [16]byte{})
	first := w.reader.read(ctx, records[0], replay{}, &from)
	require.NoError(t, w.parkFailed(&first, first.Tasks[0], handling.Outcome{Attempt: 1, Retries: 3, Err: errPlayed}))

	w.handle(records[1:])
	require.Equal(t, []string{"works1 fails1: rolled back", "works1: committed", "fails1: committed"}, s.log)
	var rows string
	require.NoError(t, db.QueryRow(ctx, pg.InSchema(`SELECT string_agg(record_offset || ' ' || status, ', ' ORDER BY id) FROM (SELECT id, position AS record_offset, status FROM {schema}.event_delivery) AS d`, schema)).Scan(&rows))
	require.Equal(t, "0 DONE, 3 PENDING, 4 PARKED", rows)
}

// A commit marks only what was in it: a task that was blocked then is still to be called when its key is free again.
func TestCommitMarksWhatWasInIt(t *testing.T) {
	t.Parallel()
	s := newPartitionFixture(t, Rules{})
	records := s.arrive("blocked")
	from := originOf(records[0], [16]byte{})
	it := s.worker.reader.read(t.Context(), records[0], replay{}, &from)
	it.block(it.Tasks[0])
	it.noteDone(nil)
	delete(it.blocked, it.Tasks[0].Handler)
	require.False(t, it.isBlocked(it.Tasks[0]))
	it.noteDone(nil)
	require.True(t, it.isBlocked(it.Tasks[0]))
}

// A key of OncePer that ends its goroutine fails its event alone: the worker parks it, and handles the records behind
// it.
func TestWorkerOutlivesGoexitOfKey(t *testing.T) {
	t.Parallel()
	for name, blocked := range map[string]bool{"a task that has failed": false, "a task that is blocked": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, schema := testenv.Schema(t)
			ctx := t.Context()
			require.NoError(t, (&migrator.Migrator{DB: db, Schema: schema, LockTimeout: time.Minute, Logger: slog.New(slog.DiscardHandler)}).Run(ctx))
			handled := make(chan string, 10)
			s := newPartitionFixture(t, Rules{}, oncePer(handle("ACTED", func(_ context.Context, _ pgx.Tx, e played, _ envelope.Received) error {
				handled <- e.Name
				return nil
			}), func(e played, _ envelope.Received) (string, string) {
				if e.Name == "exits" {
					runtime.Goexit()
				}
				return "Play", e.Name
			}))
			w := s.worker
			w.parking = &consumerParking{store: delivery.NewStore(db, schema, "g", "w", time.Minute).ForRecords(), group: "g", dueAt: func(time.Time) {}}
			w.processor.Queue, w.processor.Begin, s.db = w.queueBlocked, w.checkInTx, db
			w.mostBlock = blocked // so that it looks before it tries
			records := s.arrive("first", "exits", "behind")
			for _, r := range records[:2] {
				r.Topic, r.Key = "play-events", []byte("k")
			}
			if blocked {
				from := originOf(records[0], [16]byte{})
				first := w.reader.read(ctx, records[0], replay{}, &from)
				require.NoError(t, w.parkFailed(&first, first.Tasks[0], handling.Outcome{Attempt: 1, Retries: 3, Err: errPlayed}))
			}
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				w.handle(records[1:])
			}()
			<-ended
			require.Len(t, handled, 1)
			require.Equal(t, "behind", <-handled)
			var rows int
			require.NoError(t, db.QueryRow(ctx, pg.InSchema(`SELECT count(*) FROM {schema}.event_delivery WHERE position = 1`, schema)).Scan(&rows))
			require.Equal(t, 1, rows)
		})
	}
}
