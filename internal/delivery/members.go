package delivery

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/short"
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

	// report returns what this process says of itself in its row. Nil means nothing.
	report func() Report
	// others counts what the group has to handle and that has no delivery. It also returns what else keeps the group
	// from its events. Nil means that nothing is like that.
	others func(context.Context) ([]tables.EventCount, []string, error)
	groups tables.GroupReader
	seen   atomic.Pointer[seenWaiting]
	said   atomic.Pointer[Report] // the last report that was written

	elsewhere atomic.Pointer[time.Time] // when Kafka last answered another process, by the clock of this one

	mu    sync.Mutex
	named map[tables.Unhandled]bool // in the log
}

// Report is what a process says of itself in its row of event_member.
type Report struct {
	outage.State
	Skipped map[string]int64 // events of types without a handler, by type
	Kafka   time.Time        // when Kafka last answered; zero for a worker
}

// Bounds of a report in event_member.
const (
	maxTypeText = 500
	// MaxSkippedTypes is how many types a report names.
	MaxSkippedTypes = 20
)

// seenWaiting is what the group had to handle at a time.
type seenWaiting struct {
	at      time.Time
	clock   pg.Clock // of the database
	counts  []tables.EventCount
	reasons []string
}

// mostWaiting is up to which number events of a kind are counted for Health.
const mostWaiting = 1000

// sqlRenewMember renews the row of a process. It returns the handlers of the other live processes, or NULL for those
// that do not differ, and with each of them how long ago Kafka last answered any of these processes.
const sqlRenewMember = `
WITH renewed AS (
    INSERT INTO {schema}.event_member AS m (consumer_group, member, from_kafka, renewed_at, renewed_every, routes, works, reasons, skipped, state, kafka_at)
    VALUES ($1::text, $2::text, $3::bool, clock_timestamp(), $4::interval, $5::text[], $6::bool, $7::text[], $8::text::jsonb, $9::text::jsonb,
            clock_timestamp() - $10::interval)
        ON CONFLICT (consumer_group, member) DO UPDATE
       SET renewed_at = excluded.renewed_at, works = excluded.works, reasons = excluded.reasons, skipped = excluded.skipped,
           state = excluded.state, kafka_at = excluded.kafka_at
)
SELECT DISTINCT o.routes, now() - max(o.kafka_at) OVER ()
  FROM (SELECT CASE WHEN NOT (m.routes OPERATOR(pg_catalog.<@) $5::text[] AND m.routes OPERATOR(pg_catalog.@>) $5::text[]) THEN m.routes END AS routes, m.kafka_at
          FROM {schema}.event_member AS m
         WHERE m.consumer_group = $1::text AND m.member <> $2::text AND ` + tables.LiveMember + `) AS o`

const sqlRemoveMember = `SELECT {schema}.outbox_remove_member($1::text, $2::text)`

// sqlForgetMembers removes the rows of processes that have ended without removing them.
const sqlForgetMembers = `SELECT {schema}.outbox_remove_member($1::text, NULL::text)`

// sqlHandledElsewhere asks whether another live process has a handler for an event type of a stream. A process whose
// row is old counts, too, unless it has had time to renew the row: $4 says for how long.
const sqlHandledElsewhere = `
SELECT EXISTS (SELECT FROM {schema}.event_member AS m
                CROSS JOIN LATERAL pg_catalog.unnest(m.routes) AS r (route)
                WHERE m.consumer_group = $1::text AND m.member <> $2::text AND (` + tables.LiveMember + ` OR $4::interval < 3::float8 * m.renewed_every)
                  AND pg_catalog.starts_with(r.route, $3::text))`

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

// renewMember renews the row of this process. It returns the handlers of other live processes that have others, and
// when Kafka last answered one of the others, or zero.
func (s *Store) renewMember(ctx context.Context, routes []string, every time.Duration, says Report) (others [][]string, kafka time.Time, err error) {
	counts := map[string]int64{}
	for eventType, n := range says.Skipped {
		counts[short.Storable(eventType, maxTypeText)] = n
	}
	skipped, err := json.Marshal(counts)
	if err != nil {
		return nil, kafka, err
	}
	reasons, state := outage.StorableReasons(says.Reasons), says.State
	state.Reasons = nil // they have a column
	var sinceKafka *time.Duration
	if !says.Kafka.IsZero() {
		ago := time.Since(says.Kafka)
		sinceKafka = &ago
	}
	began := time.Now()
	err = s.transactAsync(ctx, func(b *pgx.Batch) {
		b.Queue(s.sqlRenewMember, s.group, s.process, s.records, every, routes, says.Works, reasons, string(skipped), state.JSON(), sinceKafka).Query(func(rows pgx.Rows) error {
			var handlers []string
			var ago *time.Duration
			_, err := pgx.ForEachRow(rows, []any{&handlers, &ago}, func() error {
				if handlers != nil {
					others = append(others, slices.Clone(handlers))
				}
				if ago != nil {
					kafka = time.Now().Add(-*ago)
				}
				return nil
			})
			return err
		})
	})
	s.renewals.note(err, began, every)
	if err != nil {
		return nil, kafka, fmt.Errorf("renew the row of this process in event_member: %w", err)
	}
	return others, kafka, nil
}

// removeMember removes the row of this process.
func (s *Store) removeMember(ctx context.Context) error {
	return s.transactAsync(ctx, func(b *pgx.Batch) { b.Queue(s.sqlRemoveMember, s.group, s.process) })
}

// renewals records since when this process has renewed its row without an outage of PostgreSQL. Meanwhile, the other
// processes can renew theirs. The zero value is ready, and safe for concurrent use.
type renewals struct {
	mu          sync.Mutex
	since, last time.Time // of a try that has succeeded; zero behind an error
	longest     time.Duration
}

// note records the result of a try that began at a time. There is one in each interval.
func (r *renewals) note(err error, began time.Time, every time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.longest = 2 * every // between two of them; an outage that no try has met is shorter
	switch now := time.Now(); {
	case err != nil:
		r.since, r.last = time.Time{}, time.Time{}
	case r.last.IsZero() || began.Sub(r.last) > r.longest:
		r.since, r.last = now, now
	default:
		r.last = now
	}
}

// unbroken returns for how long there was no outage.
func (r *renewals) unbroken() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.last.IsZero() || time.Since(r.last) > r.longest {
		return 0
	}
	return time.Since(r.since)
}

// handledElsewhere reports whether another live process of the group has a handler for an event type of a stream. After
// an outage of PostgreSQL, a process may have to wait for takeOverTimeout before it renews its row.
func (s *Store) handledElsewhere(ctx context.Context, eventType, stream string) (handled bool, err error) {
	others := s.renewals.unbroken() - takeOverTimeout
	err = pg.QueryRow(ctx, s.db, s.sqlHandledElsewhere, s.group, s.process, tables.Route(eventType, stream, ""), others).Scan(&handled)
	return handled, err
}

// unhandled returns kinds of PENDING deliveries that no live process of the group handles. It removes the rows of
// processes that have been gone for a day, unless PostgreSQL may have been away as long.
func (s *Store) unhandled(ctx context.Context) (kinds []tables.Unhandled, err error) {
	const most = 100
	err = s.transact(ctx, func(b *pgx.Batch) {
		if s.renewals.unbroken() > s.lease+takeOverTimeout {
			b.Queue(s.sqlForgetMembers, s.group)
		}
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
	says := Report{State: outage.State{Works: true}}
	if m.report != nil {
		says = m.report()
	}
	others, kafka, err := m.store.renewMember(ctx, m.routes, m.every, says)
	if err != nil {
		return err
	}
	m.elsewhere.Store(&kafka)
	m.said.Store(&says)
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

// hasNews reports whether this process says something else now than in its row.
func (m *members) hasNews() bool {
	said := m.said.Load()
	if m.report == nil || said == nil {
		return false
	}
	return m.report().Differs(said.State)
}

// lookTimeout bounds a look at what the group has to handle.
const lookTimeout = 10 * time.Second

// look counts what the group has to handle, for Health. Nothing depends on it, so an error is no outage, and it has a
// loop of its own.
func (m *members) look(ctx context.Context, log *slog.Logger) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	now := &seenWaiting{at: time.Now()}
	var err error
	if now.clock, err = pg.ReadClock(ctx, m.store.db); err == nil {
		now.counts, err = m.groups.Waiting(ctx, m.store.group, mostWaiting)
	}
	if err == nil && m.others != nil {
		var more []tables.EventCount
		more, now.reasons, err = m.others(ctx)
		now.counts = append(now.counts, more...)
	}
	if err != nil {
		log.Debug("outbox: what the group has to handle is not counted", "error", err)
		return
	}
	m.seen.Store(now)
}

// waiting returns what the group had to handle when this process last looked, and reasons for Health. It returns
// nothing if that is too long ago.
func (m *members) waiting() (counts []tables.EventCount, reasons []string) {
	const intervals = 3
	seen := m.seen.Load()
	if seen == nil || time.Since(seen.at) > intervals*m.every {
		return nil, nil
	}
	return seen.counts, append(tables.WaitReasons(seen.counts, seen.clock.Now()), seen.reasons...)
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
