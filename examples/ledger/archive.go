package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
)

// sqlArchive makes the archive. Each transaction must be traceable for five years, so it has a partition for each
// year: one that nobody has to keep any more goes with DROP TABLE.
const sqlArchive = `
CREATE TABLE event_archive (
    outbox_id      bigint      NOT NULL,
    event_id       uuid        NOT NULL,
    event_type     text        NOT NULL,
    aggregate_type text        NOT NULL,
    aggregate_id   text        NOT NULL,
    payload        jsonb       NOT NULL,
    occurred_at    timestamptz NOT NULL,
    created_at     timestamptz NOT NULL
) PARTITION BY RANGE (created_at)`

// sqlArchiveYears makes the partitions of some years. A service calls it long before a year begins.
func sqlArchiveYears(from, to int) string {
	var sql strings.Builder
	for year := from; year <= to; year++ {
		fmt.Fprintf(&sql, "CREATE TABLE event_archive_%d PARTITION OF event_archive FOR VALUES FROM ('%d-01-01Z') TO ('%d-01-01Z');\n", year, year, year+1)
	}
	return sql.String()
}

var archiveColumns = []string{"outbox_id", "event_id", "event_type", "aggregate_type", "aggregate_id", "payload", "occurred_at", "created_at"}

// archive is a RetentionConfig.Archive: what retention removes from the outbox gets into the archive in the same
// transaction. The outbox stays small, and no event is in neither of them, or in both.
func archive(ctx context.Context, tx pgx.Tx, events []outbox.ArchivedEvent) error {
	_, err := tx.CopyFrom(ctx, pgx.Identifier{"event_archive"}, archiveColumns, pgx.CopyFromSlice(len(events), func(i int) ([]any, error) {
		e := events[i]
		return []any{e.OutboxID, e.EventID, e.Type, e.AggregateType, e.AggregateID, e.Payload, e.OccurredAt, e.CreatedAt}, nil
	}))
	return err
}
