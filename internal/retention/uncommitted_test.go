package retention_test

import (
	"fmt"
	"math"
	"testing"

	"github.com/outboxgo/outbox/internal/retention"
	"github.com/outboxgo/outbox/internal/testenv"
)

// Retention walks no row of an open transaction that has recorded much since the last event was sent.
func TestUncommittedRowsCostNothing(t *testing.T) {
	testenv.Long(t)
	// Not parallel: it counts the buffers that PostgreSQL touches.
	testenv.Direct(t) // prepared statements
	d := newFixture(t)
	r, _ := d.cleaning(t, keep)
	d.Insert(t, 10)
	d.PassUncommitted(t, retention.SQLCleanSettings, func(snapshot string) []testenv.Statement {
		d.Exec(t, `
			INSERT INTO {schema}.outbox_cursor (last_processed_id, snapshot, highest_id, system_identifier, epoch)
			SELECT 10, $1::text::pg_snapshot, 10, system_identifier, 1 FROM pg_control_system()`, snapshot)
		args := fmt.Sprintf(`(0, 100, '7 days', %d, '{}', 1000000000, 1000000)`, math.MaxInt64)
		return []testenv.Statement{
			{Name: "published", Types: "(bigint, bigint, interval, bigint, bigint[], bigint, int)", SQL: r.SQLPublished, Args: args},
			{Name: "archived", Types: "(bigint, bigint, interval, bigint, bigint[], bigint, int)", SQL: r.SQLArchived, Args: args},
		}
	})
}
