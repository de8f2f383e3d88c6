package faults

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// A run is right if nothing is wrong and everything has happened.
func TestBusResult(t *testing.T) {
	t.Parallel()
	right := func() busResult {
		v := busResult{Mishaps: map[string]int{}, Poisons: 1, SelfKills: 1, Retried: 1, Deliveries: 1, Delayed: delayedResult{Events: 1}, Expired: expiredResult{InTime: 1, Expired: 1}}
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
		func(v *busResult) *int { return &v.Expired.InTime },
		func(v *busResult) *int { return &v.Expired.Expired },
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
		func(v *busResult) *int { return &v.Expired.Early },
		func(v *busResult) *int { return &v.Expired.Late },
		func(v *busResult) *int { return &v.Expired.Unaccounted },
	} {
		v := right()
		*count(&v) = 1
		require.Error(t, v.Err())
	}
}

// sqlDropped makes a table of what no handler need have done, because the event had expired: a delivery that is DONE
// since then, and without an effect.
const sqlDropped = `
CREATE TABLE dropped AS
SELECT d.consumer_group, d.action, e.item, e.version, e.quantity
  FROM (SELECT event_id, expires_at, (payload->>'item')::int AS item, (payload->>'version')::bigint AS version, (payload->>'quantity')::int AS quantity
          FROM outbox WHERE expires_at IS NOT NULL) AS e
  JOIN event_delivery AS d USING (event_id)
 WHERE d.status = 'DONE' AND d.processed_at >= e.expires_at
   AND NOT EXISTS (SELECT FROM effect AS f WHERE (f.consumer_group, f.action, f.item, f.version) = (d.consumer_group, d.action, e.item, e.version))
   AND NOT EXISTS (SELECT FROM seen AS s WHERE (s.consumer_group, s.action, s.item, s.version) = (d.consumer_group, d.action, e.item, e.version));
CREATE UNIQUE INDEX ON dropped (consumer_group, action, item, version)`

// sqlExpiringDeliveries reads the deliveries of events that expire soon: before $1. What a handler without a
// transaction may have begun in an earlier attempt, or in a process that is gone, it finishes.
const sqlExpiringDeliveries = `
SELECT d.id, d.status = 'DONE' AS done, o.expires_at, coalesce(f.began, s.began) AS began, p.item IS NOT NULL AS dropped,
       coalesce(s.attempt > 1 OR s.attempt = 1 AND d.last_error_code = 'stale', false) AS resumed
  FROM outbox AS o JOIN event_delivery AS d USING (event_id)
  CROSS JOIN LATERAL (SELECT (o.payload->>'item')::int AS item, (o.payload->>'version')::bigint AS version) AS e
  LEFT JOIN effect AS f ON (f.consumer_group, f.action, f.item, f.version) = (d.consumer_group, d.action, e.item, e.version)
  LEFT JOIN seen AS s ON (s.consumer_group, s.action, s.item, s.version) = (d.consumer_group, d.action, e.item, e.version)
  LEFT JOIN dropped AS p ON (p.consumer_group, p.action, p.item, p.version) = (d.consumer_group, d.action, e.item, e.version)
 WHERE o.expires_at < $1`

// expiringDelivery is a delivery of an event that expires soon.
type expiringDelivery struct {
	ID      int64
	Done    bool
	Expires time.Time
	Began   *time.Time // when its handler began to do what was committed
	Dropped bool
	Resumed bool
}

// compareExpiring sets the counts of these deliveries.
func (b *bus) compareExpiring(t *testing.T, v *expiredResult) {
	t.Helper()
	rows, err := b.db.Query(b.ctx, sqlExpiringDeliveries, b.start.Add(farExpiry))
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[expiringDelivery])
	require.NoError(t, err)
	v.Events = len(all)
	for _, d := range all {
		switch {
		case !d.Done:
			v.Unaccounted++
		case d.Dropped:
			v.Expired++
		case d.Began == nil:
			v.Early++
		case d.Resumed && d.Began.After(d.Expires):
			v.Resumed++
		case v.isLate(b.crew, d.Expires, *d.Began):
			v.Late++
			b.show(t, fmt.Sprint(`id = `, d.ID))
		default:
			v.InTime++
		}
	}
}

// owed is what the handlers of each group must have done: everything that is committed, but for
// the poison of the group that it ends, and without what is dropped.
const owed = `
WITH owed AS (
    SELECT g.consumer_group, i.item, v.version, CASE i.item % 2 WHEN 0 THEN 'SALE_' ELSE 'RETURN_' END AS kind,
           g.consumer_group = '` + busFailing + `' AND EXISTS (SELECT FROM poison AS p WHERE p.item = i.item AND p.version = v.version) AS fatal
      FROM item AS i CROSS JOIN LATERAL generate_series(1, i.version) AS v (version)
     CROSS JOIN (SELECT unnest($1::text[]) AS consumer_group) AS g
)`

const (
	sqlWrongEffects = owed + `
SELECT count(*) FROM (SELECT consumer_group, kind || 'COUNTED' AS action, item, version FROM owed WHERE NOT fatal
                        EXCEPT SELECT consumer_group, action, item, version FROM dropped) AS o
  FULL JOIN (SELECT consumer_group, action, item, version, count(*) AS n FROM effect GROUP BY 1, 2, 3, 4) AS e USING (consumer_group, action, item, version)
 WHERE e.n IS DISTINCT FROM 1 OR o IS NULL`
	sqlWrongShelves = `
SELECT count(*) FROM (SELECT g AS consumer_group, item % $2 AS shelf, sum(version) AS changes FROM item, unnest($1::text[]) AS g GROUP BY 1, 2) AS o
  LEFT JOIN (SELECT item % $2 AS shelf, count(*) AS n FROM poison GROUP BY 1) AS p ON p.shelf = o.shelf AND o.consumer_group = '` + busFailing + `'
  LEFT JOIN (SELECT consumer_group, item % $2 AS shelf, count(*) AS n FROM dropped WHERE action LIKE '%COUNTED' GROUP BY 1, 2) AS d
    ON d.shelf = o.shelf AND d.consumer_group = o.consumer_group
  FULL JOIN shelf AS s ON s.consumer_group = o.consumer_group AND s.shelf = o.shelf
 WHERE o.changes - coalesce(p.n, 0) - coalesce(d.n, 0) IS DISTINCT FROM coalesce(s.changes, 0)`
	// Quantities of poison are nowhere: its shelves are left out.
	sqlWrongQuantities = `
SELECT count(*) FROM (SELECT g AS consumer_group, item % $2 AS shelf, sum(quantity) AS quantity FROM item, unnest($1::text[]) AS g GROUP BY 1, 2) AS o
  LEFT JOIN shelf AS s ON s.consumer_group = o.consumer_group AND s.shelf = o.shelf
  LEFT JOIN (SELECT consumer_group, item % $2 AS shelf, sum(quantity) AS quantity FROM dropped WHERE action LIKE '%COUNTED' GROUP BY 1, 2) AS d
    ON d.shelf = o.shelf AND d.consumer_group = o.consumer_group
 WHERE o.quantity - coalesce(d.quantity, 0) IS DISTINCT FROM coalesce(s.quantity, 0) AND (o.consumer_group <> '` + busFailing + `' OR o.shelf NOT IN (SELECT item % $2 FROM poison))`
	sqlUnseen = owed + `
SELECT count(*) FROM (SELECT consumer_group, kind || 'SEEN' AS action, item, version FROM owed EXCEPT SELECT consumer_group, action, item, version FROM dropped) AS o
  FULL JOIN seen AS s USING (consumer_group, action, item, version) WHERE o IS NULL OR s.calls IS NULL`
	sqlDisorder = `
SELECT consumer_group, action, item, version, highest
  FROM (SELECT *, max(version) OVER (PARTITION BY consumer_group, action, item ORDER BY id) AS highest FROM effect) AS e WHERE version < highest
 UNION ALL
SELECT consumer_group, action, item, version, highest
  FROM (SELECT *, max(version) OVER (PARTITION BY consumer_group, action, item ORDER BY id) AS highest FROM seen) AS s WHERE version < highest`
	// sqlVersions reads what is known of two versions of an item for an action.
	sqlVersions = `
SELECT concat_ws(E'\n    ', 'version ' || version,
       'expires ' || (SELECT expires_at FROM outbox WHERE outbox.event_id = d.event_id),
       'delivery ' || (to_jsonb(d) - '{payload,payload_bytes,headers,aggregate_id,aggregate_type,source}'::text[])::text,
       'seen ' || (SELECT to_json(s) FROM seen AS s WHERE (s.consumer_group, s.action, s.item, s.version) = ($1, $2, $3, v.version))::text,
       'effect ' || (SELECT to_json(e) FROM effect AS e WHERE (e.consumer_group, e.action, e.item, e.version) = ($1, $2, $3, v.version))::text)
  FROM unnest($4::bigint[]) AS v (version)
  LEFT JOIN event_delivery AS d ON d.consumer_group = $1 AND d.action = $2 AND (d.payload->>'item')::int = $3 AND (d.payload->>'version')::bigint = v.version`
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

	_, err := b.db.Exec(b.ctx, sqlDropped)
	require.NoError(t, err)
	b.compareExpiring(t, &v.Expired)
	v.WrongCounts = b.count(t, sqlWrongEffects, busGroups) + b.count(t, sqlWrongShelves, busGroups, shelves) + b.count(t, sqlWrongQuantities, busGroups, shelves)
	notes := b.count(t, `SELECT count(*) FROM event_handled WHERE action LIKE '%COUNTED'`) - (v.Events*len(busGroups) - v.Poisons)
	v.WrongNotes = max(notes, -notes)
	v.Unseen = b.count(t, sqlUnseen, busGroups)
	v.Disorder = b.disorder(t)
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

// outOfOrder is a version of an item whose effect or first sight is behind that of a later one.
type outOfOrder struct {
	Group, Action          string
	Item, Version, Highest int64
}

// disorder counts the effects and first sights that are out of order, and logs what is known of them.
func (b *bus) disorder(t *testing.T) int {
	t.Helper()
	rows, err := b.db.Query(b.ctx, sqlDisorder)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[outOfOrder])
	require.NoError(t, err)
	for _, o := range all {
		rows, err := b.db.Query(b.ctx, sqlVersions, o.Group, o.Action, o.Item, []int64{o.Version, o.Highest})
		require.NoError(t, err)
		known, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		t.Logf("out of order: %s %s item %d version %d behind %d:\n    %s", o.Group, o.Action, o.Item, o.Version, o.Highest, strings.Join(known, "\n    "))
	}
	return len(all)
}
