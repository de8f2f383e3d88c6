package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

// All workers of a group decide together which deliveries an event needs. While a release is rolled out,
// old processes insert deliveries too, although they do not know its new handlers. So each worker stores
// the routes of its handlers in event_subscription, and every worker inserts deliveries for all stored
// routes. A delivery without a handler in one process waits for a process that has it. A group keeps a route that no
// worker confirms for [tables.RouteLife], while any of its workers can confirm its own.

// sqlSubscribe adds the routes $2 of a worker to the routes of its group, and the routes $4 of other workers that this
// worker knows: the database may have lost them in a failover. It removes routes that no worker has confirmed for $3.
// If no worker at all has confirmed its routes for a third of $3, as while PostgreSQL was away, that time does not
// count: it adds it to the times of all routes, because those of live workers may be confirmed only after this one.
// The version of the routes is a digest of them, so the same version never stands for other routes. $5 says that
// workers keep no order. The statement returns the routes as they are then, and those that it has removed.
const sqlSubscribe = `
WITH before AS MATERIALIZED (
    SELECT routes FROM {schema}.event_subscription WHERE consumer_group = $1::text
), own AS MATERIALIZED (
    SELECT pg_catalog.jsonb_object_agg(r.route, extract(epoch FROM now())::bigint) AS routes FROM pg_catalog.unnest($2::text[]) AS r (route)
), written AS (
    INSERT INTO {schema}.event_subscription AS s (consumer_group, routes, routes_version, unordered)
    SELECT $1::text, own.routes, ` + digestOf + `own.routes` + endDigest + `, $5::bool FROM own
        ON CONFLICT (consumer_group) DO UPDATE
       SET unordered = excluded.unordered, (routes, routes_version) = (
           SELECT m.routes, ` + digestOf + `m.routes` + endDigest + `
             FROM (SELECT pg_catalog.jsonb_object_agg(r.key, r.at) AS routes
                     FROM (SELECT e.key, max(e.at) AS at
                             FROM (SELECT k.key, k.at + CASE WHEN k.away > extract(epoch FROM $3::interval) / 3::numeric THEN k.away ELSE 0::numeric END AS at
                                     FROM (SELECT key, value::text::numeric AS at,
                                                  extract(epoch FROM now())::bigint::numeric - max(value::text::numeric) OVER () AS away
                                             FROM (SELECT key, value FROM jsonb_each(s.routes) UNION ALL SELECT key, value FROM jsonb_each($4::text::jsonb)) AS b) AS k
                                    UNION ALL SELECT key, value::text::numeric FROM jsonb_each(excluded.routes)) AS e GROUP BY e.key) AS r
                    WHERE r.at > extract(epoch FROM now() - $3::interval)) AS m)
 RETURNING s.routes, s.routes_version
)
SELECT w.routes_version, w.routes::text,
       ARRAY(SELECT k FROM before AS b CROSS JOIN LATERAL jsonb_object_keys(b.routes) AS k WHERE NOT w.routes ? k)
  FROM written AS w`

// Around routes, these are the expression for their version: 63 bits of a digest of their names.
const (
	digestOf  = `(('x' || encode(substr(sha256(pg_catalog.convert_to((SELECT string_agg(n.name, E'\n\n' ORDER BY n.name COLLATE "C") FROM jsonb_object_keys(`
	endDigest = `) AS n (name)), 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint & 9223372036854775807)`
)

// sqlRoutes reads the routes of a group if their version is not $2.
const sqlRoutes = `
SELECT routes_version, CASE WHEN routes_version <> $2 THEN routes::text END
  FROM {schema}.event_subscription WHERE consumer_group = $1::text`

// errRoutesLost is the error of a round that has found that event_subscription lacks routes which this worker has or
// knows, as after a failover to a standby that lagged.
var errRoutesLost = errors.New("event_subscription has lost handlers of the group")

// groupRoutes are the routes of a group: which actions take an event type, and from which streams.
type groupRoutes struct {
	version int64
	streams map[string]bool
	byType  map[string][]delivery.Pair
}

// knownRoutes are the routes of a group with the times at which workers have confirmed them, as this worker has read
// them last. It is safe for concurrent use.
type knownRoutes struct {
	mu sync.Mutex
	at map[string]int64 // in seconds since 1970
}

func (k *knownRoutes) set(at map[string]int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.at = at
}

// json returns the routes as event_subscription stores them.
func (k *knownRoutes) json() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	text, err := json.Marshal(k.at)
	if err != nil || k.at == nil {
		return "{}"
	}
	return string(text)
}

// lacks reports whether a known route is not in stored.
func (k *knownRoutes) lacks(stored map[string]int64) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	for route := range k.at {
		if _, ok := stored[route]; !ok {
			return true
		}
	}
	return false
}

// subscribe writes the routes of this process into event_subscription, and logs the routes that are forgotten with
// that. Any goroutine may call it.
func (f *fanOut) subscribe(ctx context.Context, db pg.BatchSender) error {
	var version int64
	var text string
	var forgotten []string
	err := pg.QueryRow(ctx, db, f.sqlSubscribe, f.group, f.own, tables.RouteLife, f.seen.json(), f.unordered).Scan(&version, &text, &forgotten)
	if err != nil {
		return err
	}
	stored, err := readRoutes(text)
	if err != nil {
		return err
	}
	f.seen.set(stored)
	for _, route := range forgotten {
		if eventType, p, err := parseRoute(route); err == nil {
			f.log.Warn("outbox: no worker of the group has had this handler for an hour, later events get no deliveries for it",
				"type", eventType, "stream", p.Stream, "action", p.Action)
		}
	}
	return nil
}

// readRoutes reads event_subscription.routes.
func readRoutes(text string) (stored map[string]int64, err error) {
	if err := json.Unmarshal([]byte(text), &stored); err != nil {
		return nil, fmt.Errorf("read event_subscription.routes: %w", err)
	}
	return stored, nil
}

// parseRoute returns the parts of a route.
func parseRoute(route string) (eventType string, p delivery.Pair, err error) {
	parts := strings.SplitN(route, "\n", 3)
	if len(parts) < 3 {
		return "", p, fmt.Errorf("read event_subscription.routes: %w: %q", check.ErrMalformed, route)
	}
	return parts[0], delivery.Pair{Action: parts[2], Stream: parts[1]}, nil
}

// set replaces the routes by a version of event_subscription.
func (g *groupRoutes) set(version int64, stored map[string]int64) error {
	*g = groupRoutes{version: version, streams: map[string]bool{}, byType: map[string][]delivery.Pair{}}
	for _, route := range slices.Sorted(maps.Keys(stored)) {
		eventType, p, err := parseRoute(route)
		if err != nil {
			return err
		}
		g.streams[p.Stream] = true
		g.byType[eventType] = append(g.byType[eventType], p)
	}
	return nil
}

// routesOf returns the routes of the handlers of a process as event_subscription stores them: event type,
// stream and action, separated by line breaks.
func routesOf(r handling.Routes) (all []string) {
	for eventType, route := range r.ByName {
		for _, topic := range r.TopicsOf(route) {
			for h := range route.Handlers() {
				all = append(all, tables.Route(eventType, topic, h.Action))
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}
