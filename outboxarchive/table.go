package outboxarchive

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
)

// Table is the table outbox_archive, which has a partition for each month of the time of recording, in UTC.
// An event enters it in the transaction that removes the event from outbox. Table is safe for concurrent
// use, and any number of relays may write to it.
type Table struct {
	db  *pgxpool.Pool
	cfg TableConfig

	sqlPrepare, sqlInsert, sqlPartitions, sqlRange string
	reader                                         rowReader
}

// TableConfig tunes a [Table]. The zero value is ready for production.
type TableConfig struct {
	// Schema is the schema of outbox_archive. Empty means public.
	Schema string
	// OutboxSchema is the schema of outbox and outbox_audit. Empty means public.
	OutboxSchema string
	// KeepMonths is the age, in months, at which [Table.Expire] drops events. Negative keeps all. Zero means 60.
	KeepMonths int
}

const (
	defaultKeepMonths = 60
	maxKeepMonths     = 12_000
)

// ErrNoTable means that the table outbox_archive or its function is missing. Call [Table.Ensure] as the
// role that owns the table.
var ErrNoTable = errors.New("outbox_archive is missing, or is not that of this release")

// NewTable returns the archive in a schema. It does no I/O; [Table.Ensure] makes the table.
func NewTable(db *pgxpool.Pool, cfg TableConfig) (*Table, error) {
	cfg.Schema = cmp.Or(cfg.Schema, pg.DefaultSchema)
	cfg.OutboxSchema = cmp.Or(cfg.OutboxSchema, pg.DefaultSchema)
	cfg.KeepMonths = cmp.Or(cfg.KeepMonths, defaultKeepMonths)
	err := errors.Join(check.Schema(cfg.Schema), check.NotAbove("KeepMonths", cfg.KeepMonths, maxKeepMonths))
	if serr := check.Schema(cfg.OutboxSchema); serr != nil {
		err = errors.Join(err, fmt.Errorf("OutboxSchema: %w", serr))
	}
	if strings.Contains(cfg.Schema, "$") {
		err = errors.Join(err, fmt.Errorf("field Schema %w: $ in the name %q", outbox.ErrMalformed, cfg.Schema))
	}
	if db == nil {
		err = errors.Join(fmt.Errorf("db %w", outbox.ErrNilArgument), err)
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: archive table config: %w", err)
	}
	in := func(sql string) string { return inSchema(sql, cfg.Schema) }
	both := in(sqlArchivedRows) + ` UNION ALL ` + pg.InSchema(sqlRecordedRows, cfg.OutboxSchema)
	return &Table{db: db, cfg: cfg, sqlPrepare: in(sqlPrepare), sqlInsert: in(sqlInsert), sqlPartitions: in(sqlPartitions), sqlRange: in(sqlRange),
		reader: newRowReader(db, both)}, nil
}

// inSchema is [pg.InSchema], which also replaces {archive} and {prepare} by texts with the qualified
// names of the table and its function.
func inSchema(sql, schema string) string {
	literal := func(name string) string {
		return "'" + strings.ReplaceAll(pgx.Identifier{schema}.Sanitize()+name, "'", "''") + "'"
	}
	names := strings.NewReplacer("{archive}", literal(".outbox_archive"), "{prepare}", literal(".outbox_archive_prepare(timestamptz[])"))
	return pg.InSchema(names.Replace(sql), schema)
}

// sqlPrepare makes the missing partitions for some times.
const sqlPrepare = `SELECT {schema}.outbox_archive_prepare($1::timestamptz[])`

// sqlInsert adds rows. A row that exists already is the same event: rows of a partitioned outbox are
// archived before their partition is dropped, and may be archived twice. The id alone does not identify an
// event, because a server that lagged before a failover assigns ids again. The statement has no conflict target:
// the primary key is the only unique index, and PostgreSQL wants SELECT on the columns of a target, which roles of
// relays do not have.
const sqlInsert = `
INSERT INTO {schema}.outbox_archive (id, event_id, event_type, source, aggregate_type, aggregate_id, payload, payload_bytes, content_type,
                                     topic, partition_key, headers, occurred_at, created_at, size, sent)
SELECT id, event_id, type, source, aggregate_type, aggregate_id, payload::jsonb, payload_bytes, content_type,
       nullif(topic, ''), nullif(partition_key, ''), headers::jsonb, occurred_at, created_at, size, sent::jsonb
  FROM unnest($1::bigint[], $2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::bytea[], $9::text[],
              $10::text[], $11::text[], $12::text[], $13::timestamptz[], $14::timestamptz[], $15::bigint[], $16::text[])
       AS r (id, event_id, type, source, aggregate_type, aggregate_id, payload, payload_bytes, content_type,
             topic, partition_key, headers, occurred_at, created_at, size, sent)
    ON CONFLICT DO NOTHING`

// Archive adds rows of outbox in the transaction that removes them. Set it as RetentionConfig.Archive.
// Missing partitions are made in the same transaction, by a function that runs with the rights of the
// table's owner. So the role of the relay needs only the rights that docs/archive.md names.
func (t *Table) Archive(ctx context.Context, tx pgx.Tx, rows []outbox.ArchivedEvent) error {
	if len(rows) == 0 {
		return nil
	}
	if tx == nil {
		return fmt.Errorf("outbox: archive: tx %w", outbox.ErrNilArgument)
	}
	if _, err := tx.Exec(ctx, t.sqlPrepare, monthsOf(rows)); err != nil {
		return fmt.Errorf("outbox: make partitions of outbox_archive: %w", orNoTable(err))
	}
	if _, err := tx.Exec(ctx, t.sqlInsert, columnsOf(rows)...); err != nil {
		return fmt.Errorf("outbox: insert into outbox_archive, rows %d to %d of outbox: %w", rows[0].OutboxID, rows[len(rows)-1].OutboxID, orNoTable(err))
	}
	return nil
}

// sqlRange reads the ids at both ends of the archive.
const sqlRange = `
SELECT coalesce((SELECT a.id FROM {schema}.outbox_archive AS a ORDER BY a.id LIMIT 1), 0),
       coalesce((SELECT a.id FROM {schema}.outbox_archive AS a ORDER BY a.id DESC LIMIT 1), 0)`

// Range returns the lowest and the highest id in outbox that events of the archive have, or zeros. Events that are
// still in outbox do not count.
func (t *Table) Range(ctx context.Context) (first, last int64, err error) {
	if err := pg.QueryRow(ctx, t.db, t.sqlRange).Scan(&first, &last); err != nil {
		return 0, 0, fmt.Errorf("outbox: range of the archive: %w", orNoTable(err))
	}
	return first, last, nil
}

// monthsOf returns the months in which rows were recorded, each once.
func monthsOf(rows []outbox.ArchivedEvent) (months []time.Time) {
	for i := range rows {
		if month := monthOf(rows[i].CreatedAt); !slices.Contains(months, month) {
			months = append(months, month)
		}
	}
	return months
}

func monthOf(t time.Time) time.Time {
	t = t.UTC()
	return time.Date(t.Year(), t.Month(), 1, 0, 0, 0, 0, time.UTC)
}

// columnsOf returns the arguments of sqlInsert.
func columnsOf(rows []outbox.ArchivedEvent) []any {
	var (
		ids, sizes                                 []int64
		eventIDs, types, sources, aggTypes, aggIDs []string
		contentTypes, topics, keys                 []string
		payloads, headers, sent                    []pgtype.Text
		payloadBytes                               [][]byte
		occurred, created                          []time.Time
		text                                       = func(b []byte, valid bool) pgtype.Text { return pgtype.Text{String: string(b), Valid: valid} }
	)
	for i := range rows {
		r := &rows[i]
		ids, sizes = append(ids, r.OutboxID), append(sizes, int64(len(r.Payload)+len(r.Headers)))
		eventIDs, types, sources = append(eventIDs, r.EventID), append(types, r.Type), append(sources, r.Source)
		aggTypes, aggIDs = append(aggTypes, r.AggregateType), append(aggIDs, r.AggregateID)
		switch {
		case r.ContentType == "": // a tombstone
			payloads, payloadBytes = append(payloads, pgtype.Text{}), append(payloadBytes, nil)
		case r.JSON:
			payloads, payloadBytes = append(payloads, text(r.Payload, true)), append(payloadBytes, nil)
		default:
			payloads, payloadBytes = append(payloads, pgtype.Text{}), append(payloadBytes, notNil(r.Payload))
		}
		contentTypes, topics, keys = append(contentTypes, r.ContentType), append(topics, r.Topic), append(keys, r.PartitionKey)
		headers = append(headers, text(r.Headers, r.Headers != nil))
		occurred, created = append(occurred, r.OccurredAt), append(created, r.CreatedAt)
		sent = append(sent, text(r.Sent, r.Sent != nil))
	}
	return []any{ids, eventIDs, types, sources, aggTypes, aggIDs, payloads, payloadBytes, contentTypes, topics, keys, headers, occurred, created, sizes, sent}
}

// notNil returns an empty slice for nil, because nil would become NULL.
func notNil(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}

// orNoTable adds [ErrNoTable] to errors that mean a missing table or function.
func orNoTable(err error) error {
	if pg.IsUndefined(err) {
		return fmt.Errorf("%w: %w", ErrNoTable, err)
	}
	return err
}
