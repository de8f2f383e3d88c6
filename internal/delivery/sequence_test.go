package delivery_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/pg"
)

// order returns the ids of events in the order of their rows.
func (f *tableFixture) order() (all []string) {
	rows, err := f.db.Query(f.t.Context(), pg.InSchema(`SELECT coalesce(record_id, position::text) FROM {schema}.event_delivery ORDER BY id`, f.schema))
	require.NoError(f.t, err)
	all, err = pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(f.t, err)
	return all
}

// A sequence that is behind drops no event, and no event comes before earlier ones of its key: neither if the ids are
// taken, nor if they are free between those of rows. Park returns an error until the sequence has passed them.
func TestParkWithSequenceBehind(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, set string
		errors    int
	}{
		{"taken ids", `SELECT setval('{schema}.event_delivery_id_seq', 1)`, 1},
		{"free ids", `UPDATE {schema}.event_delivery SET id = id + 1000; SELECT setval('{schema}.event_delivery_id_seq', 1)`, 1},
		{"restarted", `ALTER SEQUENCE {schema}.event_delivery_id_seq RESTART`, 1},
		{"a restart to the right id", `ALTER SEQUENCE {schema}.event_delivery_id_seq RESTART WITH 3`, 1},
		{"far behind", `UPDATE {schema}.event_delivery SET id = id + 1500000; SELECT setval('{schema}.event_delivery_id_seq', 1)`, 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			f := newTable(t)
			s := f.store("a", time.Minute).ForRecords()
			f.park(s, failed("k", 1), received("k", 2))
			f.exec(test.set)
			failures := 0
			for {
				parked, err := s.Park(t.Context(), []delivery.Received{received("k", 3), failed("other", 1), failed("", 1)})
				if err == nil {
					require.Len(t, parked, 3)
					for _, p := range parked {
						require.NotEmpty(t, p.Status)
						require.NotZero(t, p.Row)
					}
					break
				}
				require.ErrorIs(t, err, delivery.ErrSequenceBehind)
				require.Contains(t, err.Error(), "setval('"+pgx.Identifier{f.schema}.Sanitize()+`."event_delivery_id_seq"'`)
				require.Equal(t, []string{"k-1", "k-2"}, f.order(), "nothing is inserted")
				failures++
				require.LessOrEqual(t, failures, test.errors)
			}
			require.Equal(t, test.errors, failures)
			require.Equal(t, []string{"k-1", "k-2", "k-3", "other-1", "-1"}, f.order())
		})
	}
}

// Deliveries of workers do not come before earlier ones of their key either.
func TestInsertWithSequenceBehind(t *testing.T) {
	t.Parallel()
	f := newTable(t)
	s := f.store("a", time.Minute)
	f.insert(s, delivery.Processing, f.record("k"), "k")
	f.exec(`UPDATE {schema}.event_delivery SET id = 1000; SELECT setval('{schema}.event_delivery_id_seq', 1)`)
	events := f.record("k")
	insert := func() error {
		return delivery.Transact(t.Context(), f.db, func(b *pgx.Batch) {
			s.Queue(b, []delivery.New{{OutboxID: events[0], Action: action, Stream: stream, Key: delivery.KeyOf(group, action, stream, "k"), Status: delivery.Pending, MaxAttempts: 3}},
				room, func([]delivery.Delivery) error { return nil })
		})
	}
	err := insert()
	require.Error(t, err)
	require.Len(t, f.rows(), 1, "nothing is inserted")
	require.ErrorIs(t, s.PassTakenIDs(t.Context(), err), delivery.ErrSequenceBehind)
	require.NoError(t, insert())
	require.Equal(t, []string{"1", "2"}, f.order())
}

// Where Park inserts no row, it names the row or the note that the event has already.
func TestParkSaysWhyItInsertsNoRow(t *testing.T) {
	t.Parallel()
	f := newTable(t)
	s := f.store("a", time.Minute).ForRecords()
	park := func(rows ...delivery.Received) []delivery.ParkResult {
		parked, err := s.Park(t.Context(), rows)
		require.NoError(t, err)
		return parked
	}
	waiting := park(failed("k", 1))[0]
	require.Equal(t, delivery.Pending, waiting.Status)
	require.Equal(t, []delivery.ParkResult{{Row: waiting.Row}}, park(received("k", 1)))
	twice := park(received("k", 2), received("k", 2))
	require.Equal(t, []delivery.ParkResult{{Status: delivery.Parked, Row: twice[0].Row}, {Row: twice[0].Row}}, twice)
	f.exec(`SELECT setval('{schema}.event_handled_id_seq', 4711)`)
	f.note(received("k", 3))
	require.Equal(t, []delivery.ParkResult{{Note: 4712}}, park(received("k", 3)))
	moved := received("k", 1) // the same event under another key, as after an operator has sent it again
	moved.Key = delivery.KeyOf(group, action, stream, "another")
	require.Equal(t, []delivery.ParkResult{{Row: waiting.Row}}, park(moved))
}
