package mover

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// BenchmarkIdleRound measures a round that finds nothing to move, with and without events that are not due yet.
func BenchmarkIdleRound(b *testing.B) {
	for _, rows := range []int{0, 1_000_000} {
		b.Run(fmt.Sprint("rows=", rows), func(b *testing.B) {
			s := largeTables(b)
			s.exec(b, `SELECT set_config('synchronous_commit', 'off', false)`)
			s.delay(b, rows, "later", 1e6, 1)
			s.exec(b, `VACUUM ANALYZE {schema}.outbox_delayed`)
			for b.Loop() {
				if r := s.anyRound(b); r.Moved > 0 {
					b.Fatal("moved")
				}
			}
		})
	}
}

// BenchmarkRoundUnderOldSnapshot measures a round with one event that is due while an old snapshot is open, which keeps
// the index entries of a million moved events. Most rounds begin at the floor. OneKey has all events under one key.
func BenchmarkRoundUnderOldSnapshot(b *testing.B) {
	const moved = 1_000_000
	for _, keys := range []int{moved, 1} {
		b.Run(fmt.Sprint("keys=", keys), func(b *testing.B) {
			s := largeTables(b)
			s.exec(b, `INSERT INTO {schema}.outbox_delayed (due_at, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
				SELECT now() - interval '1 day' + make_interval(secs => n * 0.001), gen_random_uuid(), 'acme.order.due.v1', 'shop', 'Order', (n % $2)::text,
				       '1', 'application/json', now() FROM generate_series(1, $1) AS n`, moved, keys)
			s.exec(b, `ANALYZE {schema}.outbox_delayed`)
			old := s.begin(b)
			_, err := old.Exec(background, `SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT 1`)
			require.NoError(b, err)
			began := time.Now()
			for s.anyRound(b).Next == 0 { // there is more
			}
			b.Logf("%d events moved in %v", moved, time.Since(began).Round(time.Millisecond))
			cold, full := s.round(b).looking, s.round(b).looking // the first one notes what is dead
			var floored, all time.Duration
			n := 0
			for b.Loop() {
				s.delay(b, 1, "0", 0, 0)
				began := time.Now()
				s.mover.nextFull = began.Add(time.Hour)
				r := s.anyRound(b)
				floored, all = floored+r.looking, all+time.Since(began)
				n++
			}
			b.ReportMetric(float64(cold.Microseconds())/1000, "first-full-ms")
			b.ReportMetric(float64(full.Microseconds())/1000, "full-ms")
			b.ReportMetric(float64(floored.Microseconds())/1000/float64(n), "floored-ms")
			b.ReportMetric(float64(all.Microseconds())/1000/float64(n), "round-ms")
		})
	}
}

// largeTables returns tables that no other test gets.
func largeTables(b *testing.B) *tables {
	b.Helper()
	_, schema := testenv.Schema(b)
	db := testenv.Pool(b, func(cfg *pgxpool.Config) { cfg.MaxConns = 4 })
	migrate(b, db, schema)
	return tablesIn(db, schema)
}
