package faults

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A run is right if nothing is wrong and everything has happened.
func TestBusResult(t *testing.T) {
	t.Parallel()
	right := func() busResult {
		v := busResult{Mishaps: map[string]int{}, Poisons: 1, SelfKills: 1, Retried: 1, Deliveries: 1, Delayed: delayedResult{Events: 1}}
		for _, m := range mishapKinds() {
			v.Mishaps[m.kind] = 1
		}
		return v
	}
	require.NoError(t, right().Err())
	require.NoError(t, right().missing())
	for kind := range right().Mishaps {
		v := right()
		delete(v.Mishaps, kind)
		require.ErrorContains(t, v.missing(), kind)
	}
	for _, effect := range []func(*busResult) *int{
		func(v *busResult) *int { return &v.Poisons },
		func(v *busResult) *int { return &v.SelfKills },
		func(v *busResult) *int { return &v.Retried },
		func(v *busResult) *int { return &v.Delayed.Events },
		func(v *busResult) *int { return &v.Deliveries },
	} {
		v := right()
		*effect(&v) = 0
		require.Error(t, v.missing())
	}
	for _, count := range []func(*busResult) *int{
		func(v *busResult) *int { return &v.WrongCounts },
		func(v *busResult) *int { return &v.WrongNotes },
		func(v *busResult) *int { return &v.WrongDeliveries },
		func(v *busResult) *int { return &v.WrongDead },
		func(v *busResult) *int { return &v.Unseen },
		func(v *busResult) *int { return &v.Disorder },
		func(v *busResult) *int { return &v.Stuck },
		func(v *busResult) *int { return &v.Headless },
		func(v *busResult) *int { return &v.LateStops },
	} {
		v := right()
		*count(&v) = 1
		require.Error(t, v.Err())
	}
}

// owed is what the handlers of each group must have done: everything that is committed, but for
// the poison of the group that it ends.
const owed = `
WITH owed AS (
    SELECT g.consumer_group, i.item, v.version, CASE i.item % 2 WHEN 0 THEN 'SALE_' ELSE 'RETURN_' END AS kind,
           g.consumer_group = '` + busFailing + `' AND EXISTS (SELECT FROM poison AS p WHERE p.item = i.item AND p.version = v.version) AS fatal
      FROM item AS i CROSS JOIN LATERAL generate_series(1, i.version) AS v (version)
     CROSS JOIN (SELECT unnest($1::text[]) AS consumer_group) AS g
)`

const (
	sqlWrongEffects = owed + `
SELECT count(*) FROM (SELECT consumer_group, kind || 'COUNTED' AS action, item, version FROM owed WHERE NOT fatal) AS o
  FULL JOIN (SELECT consumer_group, action, item, version, count(*) AS n FROM effect GROUP BY 1, 2, 3, 4) AS e USING (consumer_group, action, item, version)
 WHERE e.n IS DISTINCT FROM 1 OR o IS NULL`
	sqlWrongShelves = `
SELECT count(*) FROM (SELECT g AS consumer_group, item % $2 AS shelf, sum(version) AS changes FROM item, unnest($1::text[]) AS g GROUP BY 1, 2) AS o
  LEFT JOIN (SELECT item % $2 AS shelf, count(*) AS n FROM poison GROUP BY 1) AS p ON p.shelf = o.shelf AND o.consumer_group = '` + busFailing + `'
  FULL JOIN shelf AS s ON s.consumer_group = o.consumer_group AND s.shelf = o.shelf
 WHERE o.changes - coalesce(p.n, 0) IS DISTINCT FROM s.changes`
	// Quantities of poison are nowhere: its shelves are left out.
	sqlWrongQuantities = `
SELECT count(*) FROM (SELECT g AS consumer_group, item % $2 AS shelf, sum(quantity) AS quantity FROM item, unnest($1::text[]) AS g GROUP BY 1, 2) AS o
  LEFT JOIN shelf AS s ON s.consumer_group = o.consumer_group AND s.shelf = o.shelf
 WHERE o.quantity IS DISTINCT FROM s.quantity AND (o.consumer_group <> '` + busFailing + `' OR o.shelf NOT IN (SELECT item % $2 FROM poison))`
	sqlUnseen = owed + `
SELECT count(*) FROM (SELECT consumer_group, kind || 'SEEN' AS action, item, version FROM owed) AS o
  FULL JOIN seen AS s USING (consumer_group, action, item, version) WHERE o IS NULL OR s.calls IS NULL`
	sqlDisorder = `
SELECT (SELECT count(*) FROM (SELECT version < max(version) OVER (PARTITION BY consumer_group, action, item ORDER BY id) AS late FROM effect) AS e WHERE late)
     + (SELECT count(*) FROM (SELECT version < max(version) OVER (PARTITION BY consumer_group, action, item ORDER BY id) AS late FROM seen) AS s WHERE late)`
	// Each event has a delivery for each of its handlers, which is DONE, or DEAD for the poison.
	sqlWrongDeliveries = owed + `, found AS (
    SELECT consumer_group, action, (payload->>'item')::int AS item, (payload->>'version')::bigint AS version, count(*) AS n, min(status) AS status
      FROM event_delivery GROUP BY 1, 2, 3, 4
)
SELECT count(*) FROM (SELECT consumer_group, kind || a AS action, item, version, CASE WHEN fatal AND a = 'COUNTED' THEN 'DEAD' ELSE 'DONE' END AS status
                        FROM owed CROSS JOIN (VALUES ('COUNTED'), ('SEEN')) AS v (a)) AS o
  FULL JOIN found AS f USING (consumer_group, action, item, version)
 WHERE o IS NULL OR f.n IS DISTINCT FROM 1 OR f.status IS DISTINCT FROM o.status`
	sqlWrongDead = `
SELECT count(*) FROM event_delivery AS d
 WHERE status = 'DEAD' AND (last_error_code <> 'stale' OR attempt_count <> $1 OR NOT coalesce((payload->>'poison')::bool, false))`
)

// compare sets the counts of the result, when all workers have finished.
func (b *bus) compare(t *testing.T, v *busResult) {
	t.Helper()
	v.Seconds = time.Since(b.start).Seconds()
	v.Kills, v.SelfKills, v.Stops, v.Freezes, v.LateStops, v.LongestStop = b.kills, b.selfKills, b.stops, b.freezes, b.late, b.longestStop.Milliseconds()
	v.Stuck, v.Headless = len(b.watch.stuck), len(b.watch.headless)
	v.LongestGap, v.LongestDue = b.watch.gap.Milliseconds(), b.watch.due.Milliseconds()
	v.Events = b.events(t)
	v.Deliveries = b.count(t, `SELECT count(*) FROM event_delivery`)
	v.Poisons = b.count(t, `SELECT count(*) FROM poison`)
	v.Retried = b.count(t, `SELECT count(*) FROM event_delivery WHERE attempt_count > 1`)
	v.RepeatsSeen = b.count(t, `SELECT sum(calls - 1)::bigint FROM seen`)

	v.WrongCounts = b.count(t, sqlWrongEffects, busGroups) + b.count(t, sqlWrongShelves, busGroups, shelves) + b.count(t, sqlWrongQuantities, busGroups, shelves)
	notes := b.count(t, `SELECT count(*) FROM event_handled WHERE action LIKE '%COUNTED'`) - (v.Events*len(busGroups) - v.Poisons)
	v.WrongNotes = max(notes, -notes)
	v.Unseen = b.count(t, sqlUnseen, busGroups)
	v.Disorder = b.count(t, sqlDisorder)
	v.WrongDeliveries = b.count(t, sqlWrongDeliveries, busGroups)
	v.WrongDead = b.count(t, sqlWrongDead, busAttempts)
	v.Delayed = delayedOf(b.ctx, t, b.db)
	if v.Err() != nil {
		b.show(t, `status <> 'DONE' AND NOT coalesce((payload->>'poison')::bool, false)`)
	}
}

// show logs some deliveries.
func (b *bus) show(t *testing.T, which string) {
	t.Helper()
	rows, err := b.db.Query(b.ctx, `SELECT to_json(d)::text FROM event_delivery AS d WHERE `+which+` ORDER BY id LIMIT 20`)
	require.NoError(t, err)
	defer rows.Close()
	for rows.Next() {
		var row string
		require.NoError(t, rows.Scan(&row))
		t.Log(row)
	}
	require.NoError(t, rows.Err())
}
