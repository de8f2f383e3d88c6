package worker

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/handling"
)

// routeLife is how long a group keeps a route that no worker confirms.
//
// All workers of a group decide together which deliveries an event needs. While a release is rolled out,
// old processes insert deliveries too, although they do not know its new handlers. So each worker stores
// the routes of its handlers in event_subscription, and every worker inserts deliveries for all stored
// routes. A delivery without a handler in one process waits for a process that has it.
const routeLife = time.Hour

// sqlSubscribe adds the routes $2 of a worker to the routes of its group, and removes routes that no worker
// has confirmed for $3. The version of the routes grows if the set of routes changes.
const sqlSubscribe = `
INSERT INTO {schema}.event_subscription AS s (consumer_group, routes, routes_version)
SELECT $1::text, jsonb_object_agg(route, extract(epoch FROM now())::bigint), 1 FROM pg_catalog.unnest($2::text[]) AS route
    ON CONFLICT (consumer_group) DO UPDATE
   SET (routes, routes_version) = (
       SELECT m.routes, s.routes_version + CASE
              WHEN ARRAY(SELECT k FROM jsonb_object_keys(m.routes) AS k ORDER BY k)
                 OPERATOR(pg_catalog.=) ARRAY(SELECT k FROM jsonb_object_keys(s.routes) AS k ORDER BY k) THEN 0 ELSE 1 END
         FROM (SELECT jsonb_object_agg(key, value) AS routes FROM jsonb_each(s.routes || excluded.routes)
                WHERE value::numeric > extract(epoch FROM now() - $3::interval)) AS m)`

// sqlRoutes reads the routes of a group if their version is not $2.
const sqlRoutes = `
SELECT routes_version, CASE WHEN routes_version <> $2 THEN routes::text END
  FROM {schema}.event_subscription WHERE consumer_group = $1::text`

// groupRoutes are the routes of a group: which actions take an event type, and from which streams.
type groupRoutes struct {
	version int64
	streams map[string]bool
	byType  map[string][]delivery.Pair
}

// read replaces the routes by a version of event_subscription, in its stored form.
func (g *groupRoutes) read(version int64, text string) error {
	var stored map[string]int64
	if err := json.Unmarshal([]byte(text), &stored); err != nil {
		return fmt.Errorf("read event_subscription.routes: %w", err)
	}
	*g = groupRoutes{version: version, streams: map[string]bool{}, byType: map[string][]delivery.Pair{}}
	for _, route := range slices.Sorted(maps.Keys(stored)) {
		parts := strings.SplitN(route, "\n", 3)
		if len(parts) < 3 {
			return fmt.Errorf("read event_subscription.routes: %w: %q", check.ErrMalformed, route)
		}
		eventType, stream, action := parts[0], parts[1], parts[2]
		g.streams[stream] = true
		g.byType[eventType] = append(g.byType[eventType], delivery.Pair{Action: action, Stream: stream})
	}
	return nil
}

// routesOf returns the routes of the handlers of a process as event_subscription stores them: event type,
// stream and action, separated by line breaks.
func routesOf(r handling.Routes) (all []string) {
	for eventType, route := range r.ByName {
		for _, topic := range r.TopicsOf(route) {
			for h := range route.Handlers() {
				all = append(all, eventType+"\n"+topic+"\n"+h.Action)
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}
