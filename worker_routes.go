package outbox

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/outboxgo/outbox/internal/deliveries"
)

// Which deliveries an event is owed is said by all workers of a group together: while a release is
// rolled out, processes that do not know its new handlers make deliveries too. So each worker
// writes down in event_subscription what its handlers take, and what a process has no handler for
// it makes deliveries of that wait for one which has. What no worker has confirmed for
// routeLife is no longer owed.
const (
	routeLife    = time.Hour
	confirmEvery = 10 * time.Minute
)

// sqlSubscribe adds the routes $2 of a worker to those of its group, and drops what nobody confirms. Their
// version says whether there are others than before.
const sqlSubscribe = `
INSERT INTO {schema}.event_subscription AS s (consumer_group, routes, routes_version)
SELECT $1::text, jsonb_object_agg(route, extract(epoch FROM now())::bigint), 1 FROM unnest($2::text[]) AS route
    ON CONFLICT (consumer_group) DO UPDATE
   SET (routes, routes_version) = (
       SELECT m.routes, s.routes_version + CASE WHEN ARRAY(SELECT k FROM jsonb_object_keys(m.routes) AS k ORDER BY k)
                                                   = ARRAY(SELECT k FROM jsonb_object_keys(s.routes) AS k ORDER BY k) THEN 0 ELSE 1 END
         FROM (SELECT jsonb_object_agg(key, value) AS routes FROM jsonb_each(s.routes || excluded.routes)
                WHERE value::bigint > extract(epoch FROM now() - $3::interval)) AS m)`

// sqlRoutes reads the routes of a group if they are others than those of version $2.
const sqlRoutes = `
SELECT routes_version, CASE WHEN routes_version <> $2 THEN routes::text END FROM {schema}.event_subscription WHERE consumer_group = $1::text`

// groupRoutes say which pairs of action and stream get an event type, in a group.
type groupRoutes struct {
	version int64
	streams map[string]bool
	byType  map[string][]deliveries.Pair
}

// read takes over routes of a version.
func (g *groupRoutes) read(version int64, text string) error {
	var stored map[string]int64
	if err := json.Unmarshal([]byte(text), &stored); err != nil {
		return fmt.Errorf("read event_subscription.routes: %w", err)
	}
	*g = groupRoutes{version: version, streams: map[string]bool{}, byType: map[string][]deliveries.Pair{}}
	for _, route := range slices.Sorted(maps.Keys(stored)) {
		parts := strings.SplitN(route, "\n", 3)
		if len(parts) < 3 {
			return fmt.Errorf("read event_subscription.routes: %w: %q", ErrMalformed, route)
		}
		eventType, stream, action := parts[0], parts[1], parts[2]
		g.streams[stream] = true
		g.byType[eventType] = append(g.byType[eventType], deliveries.Pair{Action: action, Stream: stream})
	}
	return nil
}

// routesOf returns what the handlers of a process take, as event_subscription has it: event type, stream
// and action, with line breaks between them.
func routesOf(r routes) (all []string) {
	for eventType, route := range r.byName {
		for h := range route.handlers() {
			all = append(all, eventType+"\n"+route.def.destination()+"\n"+h.action)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}
