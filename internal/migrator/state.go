package migrator

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/privileges"
	"github.com/outboxgo/outbox/migrations"
)

// Applied is a file that was applied.
type Applied struct {
	Version int
	Name    string
	At      time.Time
	Unknown bool // this release does not have it
}

const sqlMigrations = `SELECT version, name, applied_at FROM {schema}.outbox_migration ORDER BY version`

// State returns the files that were applied to a schema, and those that Run would apply, both
// by version. Without the schema or the table all of them are pending.
func State(ctx context.Context, db *pgxpool.Pool, schema string) (applied []Applied, pending []Step, err error) {
	steps, err := readSteps(migrations.FS)
	if err != nil {
		return nil, nil, err
	}
	var a Applied
	err = readApplied(ctx, db, schema, sqlMigrations, []any{&a.Version, &a.Name, &a.At}, func() error {
		a.Unknown = a.Version > len(steps)
		applied = append(applied, a)
		return nil
	})
	highest := 0 // later files are pending
	if n := len(applied); n > 0 {
		highest = applied[n-1].Version
	}
	return applied, steps[min(highest, len(steps)):], err
}

const sqlMigrationVersion = `SELECT version FROM {schema}.outbox_migration ORDER BY version DESC LIMIT 1`

// sqlCompatibleFrom returns the lowest version of a release that may run on the tables, as far as the files behind
// version $1 say.
const sqlCompatibleFrom = `SELECT max(coalesce(compatible_from, version)) FROM {schema}.outbox_migration WHERE version > $1`

// compatibleFrom returns which releases may run on the tables that files behind a version have changed: those that have
// the files up to the returned version.
func compatibleFrom(ctx context.Context, db *pgxpool.Pool, schema string, version int) (from int, err error) {
	err = pg.Query(ctx, db, privileges.SafePath, func(rows pgx.Rows) error {
		_, err := pgx.ForEachRow(rows, []any{&from}, func() error { return nil })
		return err
	}, pg.InSchema(sqlCompatibleFrom, schema), version)
	return from, err
}

// sqlIsMigrationTable reports whether outbox_migration exists and is a plain table. A view of
// another role could run code when it is read.
const sqlIsMigrationTable = `
SELECT EXISTS (SELECT FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
                WHERE n.nspname = $1 AND c.relname = 'outbox_migration' AND c.relkind = 'r' AND NOT c.relrowsecurity)`

// appliedVersion returns the version of the last file that was applied, 0 before the first.
func appliedVersion(ctx context.Context, db *pgxpool.Pool, schema string) (version int, err error) {
	err = readApplied(ctx, db, schema, sqlMigrationVersion, []any{&version}, func() error { return nil })
	return version, err
}

// readApplied reads outbox_migration, if it is there.
func readApplied(ctx context.Context, db *pgxpool.Pool, schema, sql string, row []any, read func() error) error {
	is := false
	err := pg.Query(ctx, db, privileges.SafePath, func(rows pgx.Rows) error {
		_, err := pgx.ForEachRow(rows, []any{&is}, func() error { return nil })
		return err
	}, sqlIsMigrationTable, schema)
	if err != nil || !is {
		return err
	}
	return pg.Query(ctx, db, privileges.SafePath, func(rows pgx.Rows) error {
		_, err := pgx.ForEachRow(rows, row, read)
		return err
	}, pg.InSchema(sql, schema))
}
