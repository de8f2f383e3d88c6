package tables_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/testenv"
)

// sqlInsertOwed adds $1 deliveries with a status to group g, in turns of the types even and odd, of which the odd ones
// have failed.
const sqlInsertOwed = `
INSERT INTO {schema}.event_delivery (position, order_key, attempt_count, max_attempts, next_retry_at, locked_until, locked_by, created_at, updated_at, processed_at,
       occurred_at, recorded_at, event_id, status, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, payload, last_error_code)
SELECT n, n, 0, 10, now(), CASE WHEN $2::text = 'PROCESSING' THEN now() + '1 h'::interval END, CASE WHEN $2 = 'PROCESSING' THEN 'w' END,
       now(), now(), CASE WHEN $2 = 'DEAD' THEN now() END,
       now(), now(), gen_random_uuid(), $2, 'g', 'A', $3::text, CASE n % 2 WHEN 0 THEN 'even' ELSE 'odd' END, 's', 'a', 'k', 'application/json', '{}',
       CASE n % 2 WHEN 1 THEN 'timeout' END
  FROM generate_series(1, $1::bigint) AS n`

// texts returns counts as sorted lines: a plus says that there may be more.
func texts(counts []tables.EventCount) (lines []string) {
	for _, c := range counts {
		plus := map[bool]string{true: "+"}[c.More]
		lines = append(lines, fmt.Sprintf("%s%s %s%s %s %d%s", c.Relay, c.Group, c.Topic, c.Type, c.Status, c.Events, plus))
	}
	slices.Sort(lines)
	return lines
}

// Rows are read up to a limit and then counted by type or status. Each of these counts says whether the limit was met,
// which its number does not show.
func TestCountsOfABoundedReadSaySo(t *testing.T) {
	t.Parallel()
	d, ctx := testenv.NewTables(t), context.Background()
	const rows, less, enough = 30, 10, 100
	d.Exec(t, `INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
		SELECT r, 0, pg_current_snapshot(), 0, 1, 1 FROM unnest('{default,worker:g}'::text[]) AS r`)
	d.Insert(t, rows)
	d.Exec(t, `UPDATE {schema}.outbox SET event_type = CASE id % 2 WHEN 0 THEN 'even' ELSE 'odd' END, xid = DEFAULT`)
	d.InsertParked(t, rows, 5)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET failed_at = now() - id * '1 s'::interval, created_at = now() - CASE outbox_id % 2 WHEN 0 THEN '1 h' ELSE '0' END::interval`)
	for _, status := range []string{"PENDING", "PARKED", "DEAD"} {
		d.Exec(t, sqlInsertOwed, rows, status, "s")
	}
	d.Exec(t, sqlInsertOwed, 2, "PENDING", "other")
	d.Exec(t, sqlInsertOwed, 2, "PROCESSING", "other")
	counter, groups := tables.NewTypeCounter(d.DB, d.Schema), tables.NewGroupReader(d.DB, d.Schema)
	pending := tables.Relay{Name: "default", Pending: 1}
	worker := tables.Relay{Name: "g", Pending: 1}

	for _, c := range []struct {
		name           string
		count          func(limit int) ([]tables.EventCount, error)
		bounded, exact []string
	}{
		{"pending", func(limit int) ([]tables.EventCount, error) {
			return counter.Stale(ctx, time.Now().Add(time.Hour), tables.Owners{Relays: []tables.Relay{pending}, Groups: []tables.Relay{worker}}, limit)
		},
			[]string{"default even pending 5+", "default odd pending 5+", "g even pending 5+", "g odd pending 5+"},
			[]string{"default even pending 15", "default odd pending 15", "g even pending 15", "g odd pending 15"}},
		{"failed", func(limit int) ([]tables.EventCount, error) {
			return counter.Stale(ctx, time.Now().Add(-time.Minute), tables.Owners{Relays: []tables.Relay{{Name: "default", Waiting: 1}}}, limit)
		},
			[]string{"default a.b.c.v1 parked 5+", "default a.b.c.v1 waiting 2"},
			[]string{"default a.b.c.v1 parked 13", "default a.b.c.v1 waiting 2"}},
		{"deliveries", func(limit int) ([]tables.EventCount, error) {
			return counter.Stale(ctx, time.Now().Add(time.Hour), tables.Owners{Deliveries: true}, limit)
		},
			[]string{"g even parked 5+", "g even waiting 7+", "g odd failed 7+", "g odd parked 5+"},
			[]string{"g even parked 15", "g even waiting 17", "g odd failed 17", "g odd parked 15"}},
		{"waiting", func(limit int) ([]tables.EventCount, error) { return groups.Waiting(ctx, "", limit) },
			[]string{"g other failed 2", "g other waiting 2", "g s dead 10+", "g s failed 5+", "g s parked 10+", "g s waiting 5+"},
			[]string{"g other failed 2", "g other waiting 2", "g s dead 30", "g s failed 15", "g s parked 30", "g s waiting 15"}},
		{"waiting of a group", func(limit int) ([]tables.EventCount, error) { return groups.Waiting(ctx, "g", limit) },
			[]string{"g other failed 2", "g other waiting 2", "g s dead 10+", "g s failed 5+", "g s parked 10+", "g s waiting 5+"},
			[]string{"g other failed 2", "g other waiting 2", "g s dead 30", "g s failed 15", "g s parked 30", "g s waiting 15"}},
	} {
		bounded, err := c.count(less)
		require.NoError(t, err, c.name)
		require.Equal(t, c.bounded, texts(bounded), c.name)
		exact, err := c.count(enough)
		require.NoError(t, err, c.name)
		require.Equal(t, c.exact, texts(exact), c.name)
	}
}

// The dead of each group, action and topic are read up to MaxCounted, and counted by type.
func TestCountsOfTheDeadSaySo(t *testing.T) {
	t.Parallel()
	d := testenv.NewTables(t)
	counter := tables.NewTypeCounter(d.DB, d.Schema)
	d.Exec(t, sqlInsertOwed, tables.MaxCounted+10, "DEAD", "s")
	dead, err := counter.DeadDeliveries(t.Context())
	require.NoError(t, err)
	require.Equal(t, []string{"g even dead 5000+", "g odd dead 5000+"}, texts(dead))

	d.Exec(t, `UPDATE {schema}.event_delivery SET resolved_at = now(), resolved_by = 'kim' WHERE position > $1`, tables.MaxCounted-10)
	dead, err = counter.DeadDeliveries(t.Context())
	require.NoError(t, err)
	require.Equal(t, []string{"g even dead 4995", "g odd dead 4995"}, texts(dead))
}

// The rows of consumer_gap are read up to a limit, too.
func TestCountsOfMissedEventsSaySo(t *testing.T) {
	t.Parallel()
	testenv.Long(t)
	d := testenv.NewTables(t)
	groups := tables.NewGroupReader(d.DB, d.Schema)
	d.Exec(t, `INSERT INTO {schema}.consumer_gap (consumer_group, topic, topic_id, partition, action, event_type, from_offset)
		SELECT 'g', 't', gen_random_uuid(), n, 'A', 'e', 0 FROM generate_series(1, $1::int) AS n`, tables.MaxGaps-1)
	missed, err := groups.Missed(t.Context(), "g")
	require.NoError(t, err)
	require.Len(t, missed, 1)
	require.False(t, missed[0].More)
	d.Exec(t, `INSERT INTO {schema}.consumer_gap (consumer_group, topic, topic_id, partition, action, event_type, from_offset)
		SELECT 'g', 't', gen_random_uuid(), 0, 'A', 'e', 0`)
	missed, err = groups.Missed(t.Context(), "g")
	require.NoError(t, err)
	require.True(t, missed[0].More)
}
