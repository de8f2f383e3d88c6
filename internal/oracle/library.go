package oracle

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Library runs the transactions of a writer: [Pgx], or another database library that
// records events.
type Library interface {
	// InTx runs f in a transaction of a level. It commits if f returns nil; otherwise it rolls
	// back and returns the error of f.
	InTx(ctx context.Context, level pgx.TxIsoLevel, f func(Tx) error) error
}

// Tx is a transaction that runs, or a savepoint in it.
type Tx interface {
	// Exec runs a statement. Its parameters are written $1, $2 and so on.
	Exec(ctx context.Context, sql string, args ...any) error
	// QueryInt runs a statement that returns one number.
	QueryInt(ctx context.Context, sql string, args ...any) (int64, error)
	// Record stores events by the implementation under test.
	Record(ctx context.Context, events ...Event) error
	// Savepoint runs f in a savepoint. It releases the savepoint if f returns nil; otherwise it
	// rolls back to it and returns the error of f.
	Savepoint(ctx context.Context, f func(Tx) error) error
}

// Record stores events in tx by the implementation under test.
type Record func(ctx context.Context, tx pgx.Tx, events ...Event) error

// Pgx returns the library of transactions that pgx runs.
func Pgx(db *pgxpool.Pool, record Record) Library { return pgxLibrary{db, record} }

type pgxLibrary struct {
	db     *pgxpool.Pool
	record Record
}

// errLost says that a transaction was broken off with its connection, or at its commit: then
// it is not known whether it has committed.
var errLost = errors.New("the transaction was broken off")

func (l pgxLibrary) InTx(ctx context.Context, level pgx.TxIsoLevel, f func(Tx) error) error {
	broken := true // it did not begin
	err := pgx.BeginTxFunc(ctx, l.db, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
		err := f(pgxTx{tx, l.record})
		// Later the connection may be another writer's. If f went well, what
		// remains to fail is the commit.
		broken = err == nil || tx.Conn().IsClosed()
		return err
	})
	if err != nil && broken && !isConflict(err) {
		err = fmt.Errorf("%w: %w", errLost, err)
	}
	return err
}

type pgxTx struct {
	tx     pgx.Tx
	record Record
}

func (t pgxTx) Exec(ctx context.Context, sql string, args ...any) error {
	_, err := t.tx.Exec(ctx, sql, args...)
	return err
}

func (t pgxTx) QueryInt(ctx context.Context, sql string, args ...any) (n int64, err error) {
	err = t.tx.QueryRow(ctx, sql, args...).Scan(&n)
	return n, err
}

func (t pgxTx) Record(ctx context.Context, events ...Event) error {
	return t.record(ctx, t.tx, events...)
}

func (t pgxTx) Savepoint(ctx context.Context, f func(Tx) error) error {
	return pgx.BeginFunc(ctx, t.tx, func(savepoint pgx.Tx) error { return f(pgxTx{savepoint, t.record}) })
}
