package tables

import "time"

// RouteLife is how long a group of workers keeps a handler that no worker confirms.
const RouteLife = time.Hour

// Route returns a handler as event_member and event_subscription store it.
func Route(eventType, stream, action string) string { return eventType + "\n" + stream + "\n" + action }

// LiveMember is the condition that a row m of event_member belongs to a process that runs.
const LiveMember = `m.renewed_at > clock_timestamp() - 3::float8 * m.renewed_every`

// Unhandled is a kind of deliveries that no live process of their group handles: a row of [SQLUnhandled].
type Unhandled struct {
	Action, Stream, Type string
}

// SQLUnhandled finds the PENDING deliveries of a group $1 for which no live process of the group has a handler, by
// action, stream and event type, up to $2 of them. Deliveries without an action are for all processes. Each kind is one
// step in the index of due rows, however many rows it has.
const SQLUnhandled = `
WITH RECURSIVE kinds AS (
   (SELECT ` + dueKind + ` FROM {schema}.event_delivery AS d
     WHERE d.status = 'PENDING' AND d.consumer_group = $1::text AND d.action > '' ORDER BY d.consumer_group, ` + dueOrder + ` LIMIT 1)
     UNION ALL
    SELECT next.* FROM kinds AS k
     CROSS JOIN LATERAL (
           SELECT ` + dueKind + ` FROM {schema}.event_delivery AS d
            WHERE d.status = 'PENDING' AND d.consumer_group = $1::text AND (` + dueOrder + `) > (k.action, k.stream, k.type)
            ORDER BY d.consumer_group, ` + dueOrder + ` LIMIT 1) AS next
)
SELECT k.action, k.stream, k.type FROM kinds AS k
 WHERE NOT EXISTS (SELECT FROM {schema}.event_member AS m
                    WHERE m.consumer_group = $1::text AND ` + LiveMember + `
                      AND k.type || E'\n' || k.stream || E'\n' || k.action = ANY (m.routes))
 ORDER BY k.action, k.stream, k.type LIMIT $2`

const (
	dueKind  = `d.action::text, d.stream::text, ` + dueType + `::text AS type`
	dueOrder = `d.action, d.stream, ` + dueType
)
