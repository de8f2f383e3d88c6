package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/outboxops"
)

// sqlMissingRoutes reads the handlers of groups of workers that no live worker has, with the time at which a worker
// last had each. A group without a live worker has other findings.
const sqlMissingRoutes = `
SELECT s.consumer_group, r.key, to_timestamp(r.value::text::float8)
  FROM {schema}.event_subscription AS s CROSS JOIN LATERAL jsonb_each(s.routes) AS r
 WHERE s.state = 'active'
   AND EXISTS (SELECT FROM {schema}.event_member AS m WHERE m.consumer_group = s.consumer_group AND NOT m.from_kafka AND ` + tables.LiveMember + `)
   AND NOT EXISTS (SELECT FROM {schema}.event_member AS m
                    WHERE m.consumer_group = s.consumer_group AND NOT m.from_kafka AND ` + tables.LiveMember + ` AND r.key = ANY (m.routes))
 ORDER BY s.consumer_group, r.key LIMIT 1000`

const sqlHasMember = `
SELECT EXISTS (SELECT FROM {schema}.event_member AS m WHERE m.consumer_group = $1::text AND ` + tables.LiveMember + `)`

// missingHandlers reports handlers that no live process has: events are owed to them, or deliveries wait for them.
func (d *doctor) missingHandlers(ctx context.Context, counts []outboxops.DeliveryCount, now time.Time) error {
	var group, route string
	var last time.Time
	rows, err := d.e.db.Query(ctx, pg.InSchema(sqlMissingRoutes, d.e.schemaName()))
	if err != nil {
		return err
	}
	if _, err := pgx.ForEachRow(rows, []any{&group, &route, &last}, func() error {
		eventType, rest, _ := strings.Cut(route, "\n")
		stream, action, _ := strings.Cut(rest, "\n")
		d.add("delivery.handler", severityWarning, fmt.Sprintf("group %s: no running worker has the handler of action %s for type %s of stream %s", group, action, eventType, stream),
			fmt.Sprintf("Its events wait for it. A worker last had it %s ago; after %s the group forgets it, and later events are not handled by it.", age(last, now), tables.RouteLife),
			"Start a release that has the handler. If it is gone for good, nothing has to be done.")
		return nil
	}); err != nil {
		return err
	}
	groups := map[string]bool{}
	for _, c := range counts {
		if c.Status == outboxops.DeliveryPending {
			groups[c.Group] = true
		}
	}
	for _, group := range slices.Sorted(maps.Keys(groups)) {
		if err := d.unhandled(ctx, group); err != nil {
			return err
		}
	}
	return nil
}

// unhandled reports deliveries of a group that no live process of the group has a handler for, by their types.
func (d *doctor) unhandled(ctx context.Context, group string) error {
	const most = 100
	var kinds []tables.Unhandled
	if err := pg.Query(ctx, d.e.db, pg.PlannerSettings, func(rows pgx.Rows) (err error) {
		kinds, err = pgx.CollectRows(rows, pgx.RowToStructByPos[tables.Unhandled])
		return err
	}, pg.InSchema(tables.SQLUnhandled, d.e.schemaName()), group, most); err != nil {
		return err
	}
	if len(kinds) == 0 {
		return nil
	}
	var runs bool
	err := pg.QueryRow(ctx, d.e.db, pg.InSchema(sqlHasMember, d.e.schemaName()), group).Scan(&runs)
	if err != nil || !runs { // deliveries that have been due for long are another finding
		return err
	}
	for _, k := range kinds {
		h := handlerOf{group, k.Stream, k.Action}
		d.add("delivery.handler", severityWarning, fmt.Sprintf("group %s: deliveries of type %s of stream %s wait for action %s, which no running process has for this type", group, k.Type, k.Stream, k.Action),
			"Each keeps its place, and the later ones of its key wait behind it. It is not dead: a release that has the handler takes it.",
			"Start a release that has the handler. If it is gone for good: "+resolveWaiting(h))
	}
	return nil
}
