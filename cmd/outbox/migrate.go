package main

import (
	"context"
	"flag"
	"fmt"
	"io/fs"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/migrations"
)

var migrateUpCommand = command{
	name:    "migrate up",
	summary: "create the tables or bring them up to date",
	about: `
Applies pending migrations, each in a transaction. It may run at every
deployment, in many places at once, and while services record. A migration that
does not get its locks within 100 ms tries again. The role needs CREATE on the
schema, or on the database to create it. --timeout limits only connecting.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var cfg outbox.MigrateConfig
		fs.Int64Var(&cfg.PartitionRows, "partition-rows", 0, "`NUMBER` ids per partition of outbox (0: no change)")
		fs.BoolVar(&cfg.AggregateIndex, "aggregate-index", false, "index for outbox events list --aggregate")
		fs.StringVar(&cfg.Publication, "publication", "", "`NAME` of a publication for Debezium")
		fs.BoolVar(&cfg.UniqueEventIDs, "unique-event-ids", false, "refuse an event whose id is in outbox")
		return func(ctx context.Context, e *env) error { return migrateUp(ctx, e, cfg) }
	},
}

// migrationJSON is a migration in the output.
type migrationJSON struct {
	Version   int        `json:"version"`
	Name      string     `json:"name"`
	AppliedAt *time.Time `json:"applied_at,omitempty"`
	Unknown   bool       `json:"unknown,omitempty"`
}

func migrationsJSON(all []outbox.Migration) []migrationJSON {
	out := make([]migrationJSON, 0, len(all))
	for _, m := range all {
		out = append(out, migrationJSON{m.Version, m.Name, optional(m.AppliedAt), m.Unknown})
	}
	return out
}

func migrateUp(ctx context.Context, e *env, cfg outbox.MigrateConfig) error {
	db, err := e.connect(ctx)
	if err != nil {
		return err
	}
	cfg.Schema, cfg.Logger = e.schema, slog.New(slog.NewTextHandler(e.stderr, nil))
	before, err := outbox.MigrationStatus(ctx, db, cfg)
	if err == nil {
		err = outbox.Migrate(ctx, db, cfg)
	}
	if err != nil {
		return err
	}
	after, err := outbox.MigrationStatus(ctx, db, cfg)
	if err != nil {
		return err
	}
	version, applied := appliedSince(before, after)
	if e.json {
		return e.writeJSON(map[string]any{"schema": e.schemaName(), "applied": migrationsJSON(applied), "version": version})
	}
	for _, m := range applied {
		e.printf("applied %s\n", visible(m.Name))
	}
	for _, thing := range askedFor(cfg) {
		e.printf("%s: there\n", visible(thing))
	}
	e.printf("schema %s is up to date: version %d\n", visible(e.schemaName()), version)
	return nil
}

// appliedSince returns the version of a schema, and the migrations that were pending before: this command has applied
// them, or another process meanwhile.
func appliedSince(before, after []outbox.Migration) (version int, applied []outbox.Migration) {
	pending := map[int]bool{}
	for _, m := range before {
		pending[m.Version] = m.AppliedAt.IsZero()
	}
	for _, m := range after {
		if m.AppliedAt.IsZero() {
			continue
		}
		version = max(version, m.Version)
		if pending[m.Version] {
			applied = append(applied, m)
		}
	}
	return version, applied
}

// askedFor names what flags have asked for besides the migrations.
func askedFor(cfg outbox.MigrateConfig) (things []string) {
	if cfg.PartitionRows > 0 {
		things = append(things, "partitions of outbox")
	}
	if cfg.Publication != "" {
		things = append(things, "publication "+cfg.Publication)
	}
	if cfg.AggregateIndex {
		things = append(things, "index for --aggregate")
	}
	if cfg.UniqueEventIDs {
		things = append(things, "unique index of event ids")
	}
	return things
}

var migrateStatusCommand = command{
	name:    "migrate status",
	summary: "which migrations are applied, and which pending",
	about: `
It does not know what another tool has applied: outbox doctor checks the tables
themselves.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		check := fs.Bool("check", false, "exit with 3 if one is pending or unknown")
		return func(ctx context.Context, e *env) error { return migrateStatus(ctx, e, *check) }
	},
}

func migrateStatus(ctx context.Context, e *env, check bool) error {
	db, err := e.connect(ctx)
	if err != nil {
		return err
	}
	all, err := outbox.MigrationStatus(ctx, db, outbox.MigrateConfig{Schema: e.schema})
	if err != nil {
		return err
	}
	if e.json {
		err = e.writeJSON(map[string]any{"schema": e.schemaName(), "migrations": migrationsJSON(all)})
	} else {
		t := table{head: []string{"VERSION", "NAME", "APPLIED"}, flex: []int{1}}
		for _, m := range all {
			t.add(strconv.Itoa(m.Version), m.Name, migrationState(m))
		}
		e.writeTable(t)
	}
	if check && err == nil {
		for _, m := range all {
			if m.AppliedAt.IsZero() || m.Unknown {
				return errProblems
			}
		}
	}
	return err
}

func migrationState(m outbox.Migration) string {
	switch {
	case m.AppliedAt.IsZero():
		return "pending"
	case m.Unknown:
		return clock(m.AppliedAt) + " by a newer release"
	}
	return clock(m.AppliedAt)
}

var migratePrintCommand = command{
	name:    "migrate print",
	summary: "the statements, for another tool or to read",
	about: `
Writes all migrations as SQL, without a database. With --schema it first creates
and selects the schema. Do not mix this with outbox migrate up, which does not
know what was applied by hand.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		from := fs.Int("from", 1, "`VERSION` to begin with (1)")
		return func(_ context.Context, e *env) error { return migratePrint(e, *from) }
	},
}

// gooseUp is the first line of each migration.
const gooseUp = "-- +goose Up\n"

func migratePrint(e *env, from int) error {
	names, err := fs.Glob(migrations.FS, "*.sql")
	if err != nil {
		return err
	}
	if from < 1 || from > len(names) {
		return usagef("--from %d: there are versions 1 to %d", from, len(names))
	}
	type file struct {
		Name string `json:"name"`
		SQL  string `json:"sql"`
	}
	var files []file
	inSchema := ""
	if e.schema != "" {
		schema := pgx.Identifier{e.schema}.Sanitize()
		inSchema = fmt.Sprintf("CREATE SCHEMA IF NOT EXISTS %[1]s;\nSET search_path TO %[1]s;\n\n", schema)
	}
	for _, name := range names[from-1:] {
		sql, err := fs.ReadFile(migrations.FS, name)
		if err != nil {
			return err
		}
		text := string(sql)
		if e.json { // each may run in a session of its own
			text = strings.Replace(text, gooseUp, gooseUp+inSchema, 1)
		}
		files = append(files, file{name, text})
	}
	if e.json {
		return e.writeJSON(map[string]any{"migrations": files})
	}
	e.printf("%s", inSchema)
	for _, f := range files {
		e.printf("-- %s\n%s\n", f.Name, strings.TrimRight(f.SQL, "\n"))
	}
	return nil
}
