package retention

import (
	"context"
	"errors"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/tables"
)

// Each relay, and each group of workers, has a cleaner with the rules of its own process. A process without an archive
// would remove events that the archive of another one should get. So a cleaner with an archive notes in outbox_archiver
// that it leads, and as long as there are such notes, cleaners without an archive remove no published event. The
// statements that remove rows, and outbox_drop_partition, check that themselves.

// unlessArchived is a condition of statements that remove rows without an archive. It is part of the ceiling.
const unlessArchived = ` AND NOT EXISTS (SELECT FROM {schema}.outbox_archiver)`

// sqlNoteArchiver notes that the holder of a lease archives. It locks the lease only if there is something to write.
const sqlNoteArchiver = `
WITH lease AS MATERIALIZED (
    SELECT name, epoch FROM {schema}.outbox_lease
     WHERE name = $1::text AND holder = $2::text AND epoch = $3
       AND NOT EXISTS (SELECT FROM {schema}.outbox_archiver WHERE name = $1::text AND epoch = $3) FOR SHARE
)
INSERT INTO {schema}.outbox_archiver (name, epoch) SELECT name, epoch FROM lease
    ON CONFLICT (name) DO UPDATE SET epoch = excluded.epoch`

// sqlArchiver returns the name of a relay or a group that archives.
const sqlArchiver = `SELECT name FROM {schema}.outbox_archiver ORDER BY name LIMIT 1`

// mayRemovePublished reports whether this cleaner may remove published events: if it has an archive, or if no process
// has one. A cleaner with an archive first notes that.
func (c *Cleaner) mayRemovePublished() (bool, error) {
	ctx, cancel := c.WithStatementTimeout()
	defer cancel()
	if c.cfg.Rules.Archive != nil {
		err := c.store.noteArchiver(ctx, c.proof())
		return err == nil, err
	}
	name, err := c.store.archiver(ctx)
	if name != "" && !c.archiverReported {
		c.log.Warn("outbox: events are archived before they are removed, and this process has no archive, so it removes no published event; "+
			"to end the archive, call outbox_stop_archive", attrOf("archiving", name)...)
	}
	if err == nil {
		c.archiverReported = name != ""
	}
	return name == "" && err == nil, err
}

// attrOf returns the attribute of a log line for the name of a relay, or of the lease of a group of workers.
func attrOf(what, name string) []any {
	if group, is := strings.CutPrefix(name, tables.WorkerPrefix); is {
		return []any{what + "_group", group}
	}
	return []any{what + "_relay", name}
}

// noteArchiver notes that the process with a lease archives.
func (r *Store) noteArchiver(ctx context.Context, l *Proof) error {
	err := r.transact(ctx, r.DB, nil, func(tx pgx.Tx) (int64, error) {
		_, err := tx.Exec(ctx, r.sqlNoteArchiver, l.Relay, l.Holder, l.Epoch)
		return 0, err
	})
	return wrapClean("outbox_archiver", err)
}

// archiver returns the name of a relay or a group that archives, or nothing.
func (r *Store) archiver(ctx context.Context) (name string, err error) {
	err = r.DB.QueryRow(ctx, r.sqlArchiver).Scan(&name)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", nil
	}
	return name, wrapClean("outbox_archiver", err)
}
