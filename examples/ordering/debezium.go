package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox/examples/internal/show"
)

var errNotLogical = errors.New("-debezium needs a PostgreSQL with wal_level=logical")

const (
	sqlLevel = `SELECT current_setting('wal_level')`
	sqlReads = `SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = $1 AND active)`
)

func (a *app) checkLogical(ctx context.Context) error {
	var level string
	if err := a.db.QueryRow(ctx, sqlLevel).Scan(&level); err != nil {
		return err
	}
	if level != "logical" {
		return fmt.Errorf("%w; it is %s", errNotLogical, level)
	}
	return nil
}

// awaitDebezium waits until a connector reads the publication. What was committed before its slot was there it would
// not send.
func (a *app) awaitDebezium(ctx context.Context, out io.Writer) error {
	fmt.Fprintf(out, "  Debezium    is waited for: publication and slot %s, table %s.outbox\n", a.schema, a.schema)
	for {
		var reads bool
		if err := a.db.QueryRow(ctx, sqlReads, a.schema).Scan(&reads); err != nil || reads {
			return err
		}
		if !show.Pause(ctx, 50*time.Millisecond) {
			return ctx.Err()
		}
	}
}

// dropPublication removes the publication of a run. The slot is the connector's, and goes with it.
func dropPublication(db *pgxpool.Pool, name string, out io.Writer) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if _, err := db.Exec(ctx, "DROP PUBLICATION IF EXISTS "+pgx.Identifier{name}.Sanitize()); err != nil {
		fmt.Fprintf(out, "publication %s was not dropped: %v\n", name, err)
	}
}
