package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

// sqlArchivers returns who archives events, or did so last, since when, and whether such a process leads.
const sqlArchivers = `
SELECT string_agg(CASE WHEN pg_catalog.starts_with(a.name, '` + tables.WorkerPrefix + `') THEN 'group ' || substr(a.name, 8) ELSE 'relay ' || a.name END, ', ' ORDER BY a.name),
       min(a.since), coalesce(bool_or(l.epoch = a.epoch AND l.expires_at > clock_timestamp()), false)
  FROM {schema}.outbox_archiver AS a LEFT JOIN {schema}.outbox_lease AS l ON l.name = a.name`

// archive checks that a process with an archive leads, if events have to be archived before they are removed.
func (d *doctor) archive(ctx context.Context) error {
	var names pgtype.Text
	var since pgtype.Timestamptz
	var leads bool
	err := pg.QueryRow(ctx, d.e.db, pg.InSchema(sqlArchivers, d.e.schemaName())).Scan(&names, &since, &leads)
	if err == nil && names.Valid && !leads {
		d.add("archive.none", severityWarning, fmt.Sprintf("events are archived before they are removed, by %s since %s, and no process with an archive leads",
			visible(names.String), clock(since.Time)), "Published events stay in outbox, and it grows.",
			fmt.Sprintf("Start a process with Retention.Archive. If you have given up the archive: SELECT %s('your name', 'why')", d.inSchema("outbox_stop_archive")))
	}
	return err
}
