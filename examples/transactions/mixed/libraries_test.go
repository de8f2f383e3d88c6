package mixed_test

import (
	"context"
	"database/sql"

	entsql "entgo.io/ent/dialect/sql"
	"github.com/jackc/pgx/v5"
	"gorm.io/gorm"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/outboxsql"
)

// options returns how database/sql begins a transaction of a level.
func options(level pgx.TxIsoLevel) *sql.TxOptions {
	return &sql.TxOptions{Isolation: map[pgx.TxIsoLevel]sql.IsolationLevel{
		pgx.ReadCommitted: sql.LevelReadCommitted, pgx.RepeatableRead: sql.LevelRepeatableRead, pgx.Serializable: sql.LevelSerializable,
	}[level]}
}

// sqlLibrary is database/sql, with pgx or lib/pq.
type sqlLibrary struct {
	db  *sql.DB
	rec *outbox.Recorder
}

func (l sqlLibrary) InTx(ctx context.Context, level pgx.TxIsoLevel, f func(oracle.Tx) error) error {
	tx, err := l.db.BeginTx(ctx, options(level))
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := f(sqlTx{tx, l.rec}); err != nil {
		return err
	}
	return tx.Commit()
}

type sqlTx struct {
	tx  *sql.Tx
	rec *outbox.Recorder
}

func (t sqlTx) Exec(ctx context.Context, query string, args ...any) error {
	_, err := t.tx.ExecContext(ctx, query, args...)
	return err
}

func (t sqlTx) QueryInt(ctx context.Context, query string, args ...any) (n int64, err error) {
	err = t.tx.QueryRowContext(ctx, query, args...).Scan(&n)
	return n, err
}

func (t sqlTx) Record(ctx context.Context, events ...oracle.Event) error {
	return outboxsql.Record(ctx, t.tx, t.rec, domainEvents(events)...)
}

func (t sqlTx) Savepoint(ctx context.Context, f func(oracle.Tx) error) error {
	return savepoint(ctx, t, f)
}

// savepoint is [oracle.Tx.Savepoint] where the library has none.
func savepoint(ctx context.Context, tx oracle.Tx, f func(oracle.Tx) error) error {
	if err := tx.Exec(ctx, `SAVEPOINT step`); err != nil {
		return err
	}
	if err := f(tx); err != nil {
		_ = tx.Exec(ctx, `ROLLBACK TO SAVEPOINT step`) // if it fails, so does the commit
		return err
	}
	return tx.Exec(ctx, `RELEASE SAVEPOINT step`)
}

// gormLibrary is GORM, with savepoints of its own.
type gormLibrary struct {
	db  *gorm.DB
	rec *outbox.Recorder
}

func (l gormLibrary) InTx(ctx context.Context, level pgx.TxIsoLevel, f func(oracle.Tx) error) error {
	return l.db.WithContext(ctx).Transaction(func(tx *gorm.DB) error { return f(gormTx{tx, l.rec}) }, options(level))
}

type gormTx struct {
	tx  *gorm.DB
	rec *outbox.Recorder
}

func (t gormTx) Exec(_ context.Context, query string, args ...any) error {
	return t.tx.Exec(query, args...).Error
}

func (t gormTx) QueryInt(_ context.Context, query string, args ...any) (n int64, err error) {
	err = t.tx.Raw(query, args...).Row().Scan(&n)
	return n, err
}

func (t gormTx) Record(ctx context.Context, events ...oracle.Event) error {
	return outboxsql.Record(ctx, t.tx.Statement.ConnPool.(outboxsql.Tx), t.rec, domainEvents(events)...)
}

func (t gormTx) Savepoint(_ context.Context, f func(oracle.Tx) error) error {
	return t.tx.Transaction(func(tx *gorm.DB) error { return f(gormTx{tx, t.rec}) })
}

// entLibrary is the driver of ent, whose transactions are those of a client with the feature sql/execquery.
type entLibrary struct {
	driver *entsql.Driver
	rec    *outbox.Recorder
}

func (l entLibrary) InTx(ctx context.Context, level pgx.TxIsoLevel, f func(oracle.Tx) error) error {
	tx, err := l.driver.BeginTx(ctx, options(level))
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := f(entTx{tx.(*entsql.Tx), l.rec}); err != nil {
		return err
	}
	return tx.Commit()
}

type entTx struct {
	tx  *entsql.Tx
	rec *outbox.Recorder
}

func (t entTx) Exec(ctx context.Context, query string, args ...any) error {
	_, err := t.tx.ExecContext(ctx, query, args...)
	return err
}

func (t entTx) QueryInt(ctx context.Context, query string, args ...any) (n int64, err error) {
	rows, err := t.tx.QueryContext(ctx, query, args...)
	if err != nil {
		return 0, err
	}
	defer rows.Close()
	for rows.Next() {
		if err := rows.Scan(&n); err != nil {
			return 0, err
		}
	}
	return n, rows.Err()
}

func (t entTx) Record(ctx context.Context, events ...oracle.Event) error {
	return outboxsql.Record(ctx, t.tx, t.rec, domainEvents(events)...)
}

func (t entTx) Savepoint(ctx context.Context, f func(oracle.Tx) error) error {
	return savepoint(ctx, t, f)
}
