package outboxops

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

// The functions of 0005_operators_and_audit.sql change the events and write the audit rows, with
// the rights of the owner of the tables: an operator needs no right to change them in any
// other way.
const (
	sqlRetry   = `SELECT {schema}.outbox_retry_failed($1::bigint[], $2::text, $3::text)`
	sqlResolve = `SELECT {schema}.outbox_resolve_failed($1::bigint[], $2::text, $3::text)`
	sqlHold    = `
SELECT count(*) FILTER (WHERE {schema}.outbox_hold_key(f.relay, f.parking_key, $2::text, $3::text)) FROM {schema}.outbox_failed AS f WHERE f.id = ANY ($1::bigint[])`
	sqlRelease = `
SELECT count(*) FILTER (WHERE {schema}.outbox_release_key(f.relay, f.parking_key, $2::text, $3::text)) FROM {schema}.outbox_failed AS f WHERE f.id = ANY ($1::bigint[])`
	sqlEdit = `SELECT {schema}.outbox_edit_failed($1::bigint, $2::bytea, $3::text, $4::text)`
	sqlRead = `SELECT count(*) FILTER (WHERE {schema}.outbox_audit_read(f.id, $2::text, $3::text)) FROM pg_catalog.unnest($1::bigint[]) AS f (id)`
)

// eventStore has the failed events of relays.
type eventStore struct {
	db              *pgxpool.Pool
	counter         tables.FailureCounter
	rows            reader
	sqlList, sqlGet string
	sqlIDs          string
	actions         map[string]string
}

func newEventStore(db *pgxpool.Pool, schema string, most int) eventStore {
	in := func(sql string) string { return pg.InSchema(sql, schema) }
	return eventStore{
		db: db, counter: tables.NewFailureCounter(db, schema), rows: newReader(db, schema, "outbox_failed", most),
		sqlList: in(sqlFailureList), sqlGet: in(sqlFailureGet), sqlIDs: in(sqlFailureIDs),
		actions: map[string]string{actionRetry: in(sqlRetry), actionResolve: in(sqlResolve), actionHold: in(sqlHold), actionRelease: in(sqlRelease), actionRead: in(sqlRead), actionEdit: in(sqlEdit)},
	}
}

func failureOf(r tables.Failure) Failure {
	return Failure{
		FailedEvent: outbox.FailedEvent(r.Event), ID: FailureID{KindEvent, r.ID}, Relay: r.Relay, Status: r.Status, Held: r.Held, Source: r.Source,
		OccurredAt: r.OccurredAt, CreatedAt: r.CreatedAt, FailedAt: r.FailedAt, NextRetryAt: r.NextRetryAt,
		ResolvedAt: r.ResolvedAt, ResolvedBy: r.ResolvedBy, Resolution: r.Resolution, ContentType: r.ContentType,
	}
}

// filter returns the filter for [tables.FailureWhere].
func (eventStore) filter(f FailureFilter) tables.FailureFilter {
	picked := f.Statuses
	if len(picked) == 0 {
		picked = unresolved
	}
	return tables.FailureFilter{
		Statuses: picked, Relay: f.Relay, Type: f.Type, Topic: f.Topic, Key: f.Key, AggregateType: f.AggregateType, AggregateID: f.AggregateID,
		OutboxID: f.OutboxID, EventID: f.EventID, Class: f.Class, Since: f.Since, Until: f.Until,
	}
}

const sqlFailureList = `
SELECT ` + tables.FailureColumns + `
  FROM {schema}.outbox_failed` + tables.FailureWhere + `
   AND ($13::bigint = 0 OR id < $13)
 ORDER BY id DESC LIMIT $14`

func (s eventStore) list(ctx context.Context, f FailureFilter, before int64, limit int) ([]Failure, error) {
	rows, err := s.db.Query(ctx, s.sqlList, slices.Concat([]any{pg.PlanEachTime}, s.filter(f).Args(), []any{before, limit})...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (Failure, error) {
		r, err := tables.ScanFailure(row)
		return failureOf(r), err
	})
}

func (s eventStore) count(ctx context.Context, f FailureFilter) ([]FailureCount, error) {
	rows, err := s.counter.Count(ctx, s.filter(f))
	counts := make([]FailureCount, len(rows))
	for i, r := range rows {
		counts[i] = FailureCount{Kind: KindEvent, Relay: r.Relay, Status: r.Status, Type: r.Type, Class: r.Class, Events: r.Events, More: r.More, Oldest: r.Oldest}
	}
	return counts, err
}

const sqlFailureGet = `
SELECT ` + tables.FailureColumns + `
  FROM {schema}.outbox_failed WHERE id = $1`

func (s eventStore) get(ctx context.Context, number int64) (Failure, error) {
	row, err := tables.ScanFailure(pg.QueryRow(ctx, s.db, s.sqlGet, number))
	return failureOf(row), err
}

func (s eventStore) stored() reader { return s.rows }

const sqlFailureIDs = `
SELECT id, ` + tables.FailureTopic + ` FROM {schema}.outbox_failed` + tables.FailureWhere + `
   AND id > $13 AND ($14::bool OR (NOT held OR status = 'dead') AND (pg_catalog.num_nonnulls(payload, payload_bytes) > 0 OR error_class IS DISTINCT FROM 'unreadable_row')
       AND (SELECT true FROM {schema}.outbox_cursor AS c WHERE c.relay = outbox_failed.relay LIMIT 1))
   AND ` + tables.Unchanged + `
 ORDER BY id LIMIT $15`

// pick omits events that are held, have no payload, or belong to a relay without a position, see outbox_check_relay,
// unless they are to be resolved.
func (s eventStore) pick(ctx context.Context, action string, f FailureFilter, snapshot string, above int64, limit int) (all []picked, err error) {
	possible := unresolved
	if action == actionRetry {
		possible = []string{outbox.StatusWaiting, outbox.StatusFailed, outbox.StatusDead}
	}
	filter := s.filter(f)
	filter.Statuses = onlyPossible(filter.Statuses, possible)
	rows, err := s.db.Query(ctx, s.sqlIDs, slices.Concat([]any{pg.PlanEachTime}, filter.Args(), []any{above, action == actionResolve, limit, snapshot})...)
	if err != nil {
		return nil, err
	}
	var p picked
	_, err = pgx.ForEachRow(rows, []any{&p.number, &p.topic}, func() error {
		all = append(all, p)
		return nil
	})
	return all, err
}

func (s eventStore) statement(action string) string { return s.actions[action] }
