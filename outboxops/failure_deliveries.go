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

// The functions of 0005_operators_and_audit.sql change the rows and write the audit rows. The functions for
// failed events do the same.
const (
	sqlRequeueDeliveries = `SELECT {schema}.outbox_requeue_deliveries($1::bigint[], $2::text, $3::text)`
	sqlResolveDeliveries = `SELECT {schema}.outbox_resolve_deliveries($1::bigint[], $2::text, $3::text)`
	sqlHoldDeliveries    = `SELECT {schema}.outbox_hold_deliveries($1::bigint[], $2::text, $3::text)`
	sqlReleaseDeliveries = `SELECT {schema}.outbox_release_deliveries($1::bigint[], $2::text, $3::text)`
	sqlEditDelivery      = `SELECT {schema}.outbox_edit_delivery($1::bigint, $2::bytea, $3::text, $4::text)`
	sqlReadDelivery      = `SELECT count(*) FILTER (WHERE {schema}.outbox_audit_read_delivery(d.id, $2::text, $3::text)) FROM pg_catalog.unnest($1::bigint[]) AS d (id)`
)

// deliveryStore has the deliveries of consumer groups.
type deliveryStore struct {
	db      *pgxpool.Pool
	reader  tables.DeliveryReader
	rows    reader
	sqlGet  string
	actions map[string]string
}

func newDeliveryStore(db *pgxpool.Pool, schema string, most int) deliveryStore {
	in := func(sql string) string { return pg.InSchema(sql, schema) }
	return deliveryStore{
		db: db, reader: tables.NewDeliveryReader(db, schema), rows: newReader(db, schema, "event_delivery", most), sqlGet: in(sqlDeliveryGet),
		actions: map[string]string{actionRetry: in(sqlRequeueDeliveries), actionResolve: in(sqlResolveDeliveries), actionHold: in(sqlHoldDeliveries),
			actionRelease: in(sqlReleaseDeliveries), actionRead: in(sqlReadDelivery), actionEdit: in(sqlEditDelivery)},
	}
}

func failureOfDelivery(r tables.Delivery) Failure {
	status := deliveryStatus(r.Status, r.ErrorCode)
	if !r.ResolvedAt.IsZero() {
		status = outbox.StatusResolved
	}
	f := Failure{
		FailedEvent: outbox.FailedEvent{EventID: r.EventID, Type: r.Type, AggregateType: r.AggregateType, AggregateID: r.AggregateID,
			Topic: r.Stream, Key: r.Key, Retries: max(0, r.Attempts-1), Class: r.ErrorCode, Err: r.Err},
		ID: FailureID{KindDelivery, r.ID}, Group: r.Group, Action: r.Action, Status: status, Held: r.Held, Source: r.Source,
		OccurredAt: r.OccurredAt, CreatedAt: r.RecordedAt, FailedAt: r.CreatedAt, NextRetryAt: r.NextRetryAt,
		ResolvedAt: r.ResolvedAt, ResolvedBy: r.ResolvedBy, Resolution: r.Note, ContentType: r.ContentType,
		Attempts: r.Attempts, MaxAttempts: r.MaxAttempts, LastAttemptAt: r.LastAttemptAt, LockedBy: r.LockedBy, LockedUntil: r.LockedUntil, ChangedAt: r.UpdatedAt,
	}
	if r.Partition == nil {
		f.OutboxID = r.Position
	} else {
		f.Kafka = &outbox.KafkaMetadata{Topic: r.Stream, Partition: *r.Partition, Offset: r.Position, Key: []byte(r.Key)}
	}
	return f
}

// deliveryStatus returns the status of a delivery as a failure. It follows from the status of the row,
// which may be [tables.Resolved], and from the code of the last error.
func deliveryStatus(status, code string) string {
	switch {
	case status == DeliveryDead:
		return outbox.StatusDead
	case status == tables.Resolved:
		return outbox.StatusResolved
	case status == DeliveryDone:
		return StatusDone
	case status == DeliveryParked:
		return outbox.StatusParked
	case code != "":
		return outbox.StatusFailed
	}
	return outbox.StatusWaiting
}

// filter returns the filter for [tables.DeliveryWhere].
func (deliveryStore) filter(f FailureFilter) tables.DeliveryFilter {
	picked := f.Statuses
	if len(picked) == 0 {
		picked = []string{outbox.StatusFailed, outbox.StatusDead}
	}
	rows := []string{}
	for _, s := range []string{DeliveryPending, DeliveryProcessing, DeliveryParked, DeliveryDead, DeliveryDone, tables.Resolved} {
		if slices.Contains(picked, deliveryStatus(s, "")) || slices.Contains(picked, deliveryStatus(s, "some")) {
			rows = append(rows, s)
		}
	}
	filter := tables.DeliveryFilter{
		Group: f.Group, Stream: f.Topic, Action: f.Action, Statuses: rows, Type: f.Type, ErrorCode: f.Class, Key: f.Key,
		AggregateType: f.AggregateType, AggregateID: f.AggregateID, EventID: f.EventID, Since: f.Since, Until: f.Until,
	}
	if erred := slices.Contains(picked, outbox.StatusFailed); erred != slices.Contains(picked, outbox.StatusWaiting) {
		filter.Erred = &erred
	}
	return filter
}

func (s deliveryStore) list(ctx context.Context, f FailureFilter, before int64, limit int) ([]Failure, error) {
	rows, err := s.reader.List(ctx, s.filter(f), before, limit)
	all := make([]Failure, len(rows))
	for i, r := range rows {
		all[i] = failureOfDelivery(r)
	}
	return all, err
}

// count adds up deliveries that are due and deliveries that are with a worker.
func (s deliveryStore) count(ctx context.Context, f FailureFilter) (counts []FailureCount, err error) {
	rows, err := s.reader.FailureCounts(ctx, s.filter(f))
	more := slices.ContainsFunc(rows, func(r tables.DeliveryFailureCount) bool { return r.Status == DeliveryProcessing && r.More })
	for _, r := range rows {
		c := FailureCount{Kind: KindDelivery, Group: r.Group, Action: r.Action, Status: deliveryStatus(r.Status, r.ErrorCode), Type: r.Type, Class: r.ErrorCode}
		i := slices.IndexFunc(counts, func(o FailureCount) bool {
			return o.Group == c.Group && o.Action == c.Action && o.Status == c.Status && o.Type == c.Type && o.Class == c.Class
		})
		if i < 0 {
			c.Oldest = r.Oldest
			i, counts = len(counts), append(counts, c)
		}
		counts[i].Events, counts[i].More = counts[i].Events+r.Deliveries, counts[i].More || r.More || more && r.Status == DeliveryPending
		if r.Oldest.Before(counts[i].Oldest) {
			counts[i].Oldest = r.Oldest
		}
	}
	return counts, err
}

const sqlDeliveryGet = `
SELECT ` + tables.DeliveryColumns + `
  FROM {schema}.event_delivery AS d WHERE d.id = $1`

func (s deliveryStore) get(ctx context.Context, number int64) (Failure, error) {
	var found tables.Delivery
	err := pg.Query(ctx, s.db, "", func(rows pgx.Rows) (err error) {
		found, err = pgx.CollectExactlyOneRow(rows, tables.ScanDelivery)
		return err
	}, s.sqlGet, number)
	return failureOfDelivery(found), err
}

func (s deliveryStore) stored() reader { return s.rows }

// pick omits deliveries that are with a worker.
func (s deliveryStore) pick(ctx context.Context, action string, f FailureFilter, snapshot string, above int64, limit int) (all []picked, err error) {
	filter := s.filter(f)
	possible := []string{DeliveryPending, DeliveryParked, DeliveryDead}
	if action == actionRetry {
		possible = []string{DeliveryDead, tables.Resolved}
	}
	filter.Statuses = onlyPossible(filter.Statuses, possible)
	ids, err := s.reader.IDs(ctx, filter, snapshot, above, limit)
	for _, d := range ids {
		all = append(all, picked{d.ID, d.Stream, FailureHandler{d.Group, d.Action}})
	}
	return all, err
}

func (s deliveryStore) statement(action string) string { return s.actions[action] }
