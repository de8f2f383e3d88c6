package show

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Connect returns a pool of at most conns connections. They look for tables in the schema, unless it is empty:
// PgBouncer refuses a search_path.
func Connect(ctx context.Context, url, schema string, conns int) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err // pgx leaves the password out of it
	}
	if schema != "" {
		cfg.ConnConfig.RuntimeParams["search_path"] = schema
	}
	cfg.MaxConns = int32(conns)
	db, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := db.Ping(ctx); err != nil {
		db.Close()
		return nil, fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	return db, nil
}

// AwaitCount waits until a query counts n or more. It ends early as [Await] does.
func AwaitCount(ctx context.Context, patience time.Duration, db *pgxpool.Pool, sql string, n int) error {
	_, err := Await(ctx, patience, func() (count int, reached bool, err error) {
		err = db.QueryRow(context.WithoutCancel(ctx), sql).Scan(&count)
		return count, count >= n, err
	})
	return err
}

// DropSchema removes the tables of a run, also after an error or Ctrl-C.
func DropSchema(db *pgxpool.Pool, schema string, out io.Writer) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if _, err := db.Exec(ctx, "DROP SCHEMA IF EXISTS "+pgx.Identifier{schema}.Sanitize()+" CASCADE"); err != nil {
		fmt.Fprintf(out, "schema %s was not dropped: %v\n", schema, err)
	}
}
