package delivery

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/wakeup"
)

// Each process of a group has a row in event_member, which says what it handles. It renews the row with its leases.
// Processes of two releases differ in what they handle. A process that makes a row due which it cannot handle notifies
// the others then, and those listen. While all processes handle the same, there are no notifications.

// members is what a process knows of the other processes of its group.
type members struct {
	store  *Store
	routes []string // of this process, sorted
	every  time.Duration
	member *wakeup.Member
	hub    *wakeup.Hub

	othersHaveMore atomic.Bool // a live process has a handler that this one lacks

	mu    sync.Mutex
	named map[tables.Unhandled]bool // in the log
}

// sqlRenewMember renews the row of a process. It returns the handlers of the other live processes, if they differ.
const sqlRenewMember = `
WITH renewed AS (
    INSERT INTO {schema}.event_member AS m (consumer_group, member, from_kafka, renewed_at, renewed_every, routes)
    VALUES ($1::text, $2::text, $3::bool, clock_timestamp(), $4::interval, $5::text[])
        ON CONFLICT (consumer_group, member) DO UPDATE SET renewed_at = excluded.renewed_at
)
SELECT DISTINCT m.routes FROM {schema}.event_member AS m
 WHERE m.consumer_group = $1::text AND m.member <> $2::text AND m.from_kafka = $3::bool AND ` + tables.LiveMember + `
   AND NOT (m.routes OPERATOR(pg_catalog.<@) $5::text[] AND m.routes OPERATOR(pg_catalog.@>) $5::text[])`

const sqlRemoveMember = `DELETE FROM {schema}.event_member WHERE consumer_group = $1::text AND member = $2::text`

// sqlForgetMembers removes the rows of processes that have ended without removing them.
const sqlForgetMembers = `
DELETE FROM {schema}.event_member WHERE consumer_group = $1::text AND renewed_at < clock_timestamp() - interval '1 day'`

// sqlHandledElsewhere asks whether another live process has a handler for an event type of a stream.
const sqlHandledElsewhere = `
SELECT EXISTS (SELECT FROM {schema}.event_member AS m
                CROSS JOIN LATERAL pg_catalog.unnest(m.routes) AS r (route)
                WHERE m.consumer_group = $1::text AND m.member <> $2::text AND m.from_kafka = $3::bool AND ` + tables.LiveMember + `
                  AND pg_catalog.starts_with(r.route, $4::text))`

// routesOf returns the handlers of pairs.
func routesOf(pairs [2][]Claimable) (routes []string) {
	for _, p := range slices.Concat(pairs[0], pairs[1]) {
		for _, t := range p.Types {
			routes = append(routes, tables.Route(t, p.Stream, p.Action))
		}
	}
	slices.Sort(routes)
	return routes
}

// renewMember renews the row of this process, and returns the handlers of other live processes that have others.
func (s *Store) renewMember(ctx context.Context, routes []string, every time.Duration) (others [][]string, err error) {
	err = s.transactAsync(ctx, func(b *pgx.Batch) {
		b.Queue(s.sqlRenewMember, s.group, s.process, s.records, every, routes).Query(func(rows pgx.Rows) (err error) {
			others, err = pgx.CollectRows(rows, pgx.RowTo[[]string])
			return err
		})
	})
	if err != nil {
		return nil, fmt.Errorf("renew the row of this process in event_member: %w", err)
	}
	return others, nil
}

// removeMember removes the row of this process.
func (s *Store) removeMember(ctx context.Context) error {
	return s.transactAsync(ctx, func(b *pgx.Batch) { b.Queue(s.sqlRemoveMember, s.group, s.process) })
}

// handledElsewhere reports whether another live process of the group has a handler for an event type of a stream.
func (s *Store) handledElsewhere(ctx context.Context, eventType, stream string) (handled bool, err error) {
	err = pg.QueryRow(ctx, s.db, s.sqlHandledElsewhere, s.group, s.process, s.records, tables.Route(eventType, stream, "")).Scan(&handled)
	return handled, err
}

// unhandled returns kinds of PENDING deliveries that no live process of the group handles. It removes the rows of
// processes that have been gone for a day.
func (s *Store) unhandled(ctx context.Context) (kinds []tables.Unhandled, err error) {
	const most = 100
	err = s.transact(ctx, func(b *pgx.Batch) {
		b.Queue(s.sqlForgetMembers, s.group)
		b.Queue(s.sqlUnhandled, s.group, most).Query(func(rows pgx.Rows) (err error) {
			kinds, err = pgx.CollectRows(rows, pgx.RowToStructByPos[tables.Unhandled])
			return err
		})
	})
	if err != nil {
		return nil, fmt.Errorf("look for deliveries without a handler: %w", err)
	}
	return kinds, nil
}

// renew renews the row of this process, and learns whether the processes of the group handle different rows.
func (m *members) renew(ctx context.Context) error {
	others, err := m.store.renewMember(ctx, m.routes, m.every)
	if err != nil {
		return err
	}
	more, less := false, false
	for _, routes := range others {
		slices.Sort(routes)
		more = more || lacks(m.routes, routes)
		less = less || lacks(routes, m.routes)
	}
	m.othersHaveMore.Store(more)
	m.member.Lead(less)
	return nil
}

// lacks reports whether a sorted list lacks an element of another one.
func lacks(list, of []string) bool {
	return slices.ContainsFunc(of, func(route string) bool {
		_, found := slices.BinarySearch(list, route)
		return !found
	})
}

// notify notifies the processes that have handlers which this process lacks, if there are any.
func (m *members) notify() {
	if m != nil && m.othersHaveMore.Load() {
		m.hub.Wake()
	}
}

// fresh returns the kinds that were not named before.
func (m *members) fresh(kinds []tables.Unhandled) []tables.Unhandled {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.named
	m.named = map[tables.Unhandled]bool{}
	for _, k := range kinds {
		m.named[k] = true
	}
	return slices.DeleteFunc(kinds, func(k tables.Unhandled) bool { return before[k] })
}
