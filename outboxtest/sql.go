package outboxtest

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// SQLDB is a transaction, a pool or a connection of database/sql: [*sql.Tx], [*sql.DB], [*sql.Conn], or
// what a library has for them.
type SQLDB interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// SQL looks for recorded events through database/sql, with any driver, as through pgx: in a transaction
// only what it has recorded itself counts, and in a [*sql.DB] or a [*sql.Conn] all that is committed.
//
//	outboxtest.RequireRecorded(ctx, t, outboxtest.SQL(tx), events, want)
//
//	*sql.Tx, *sqlx.Tx, bun.Tx   outboxtest.SQL(tx)
//	*ent.Tx                     the same, with ent's feature sql/execquery
//	*gorm.DB                    outboxtest.SQL(tx.Statement.ConnPool)
//
// [InSchema] takes what it returns. [Play] needs a transaction of pgx; its documentation says how code gets a
// [*sql.Tx] that runs in one.
func SQL(db SQLDB) DB {
	db = innermost(db)
	_, tx := db.(interface {
		Commit() error
		Rollback() error
	})
	return sqlDB{db, tx}
}

// innermost returns the [*sql.Tx] or [*sql.DB] that a library has put its own type around, if it is embedded
// or has the usual name. That of Bun has a QueryContext that does not pass arguments on.
func innermost(db SQLDB) SQLDB {
	v := reflect.Indirect(reflect.ValueOf(db))
	if v.Kind() != reflect.Struct {
		return db
	}
	for _, name := range []string{"Tx", "DB"} {
		field, ok := v.Type().FieldByName(name)
		if !ok {
			continue
		}
		if inner, err := v.FieldByIndexErr(field.Index); err == nil && inner.CanInterface() {
			switch inner := inner.Interface().(type) {
			case *sql.Tx:
				return inner
			case *sql.DB:
				return inner
			}
		}
	}
	return db
}

// sqlDB is a [DB] of database/sql.
type sqlDB struct {
	db SQLDB
	tx bool // it is a transaction
}

// Query implements [DB]. Drivers of database/sql know no slices, so these travel as texts.
func (s sqlDB) Query(ctx context.Context, query string, args ...any) (pgx.Rows, error) {
	if v := reflect.ValueOf(s.db); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return noDB{}.Query(ctx, query)
	}
	neutral := make([]any, len(args))
	for i, a := range args {
		texts, ok := a.([]string)
		if !ok {
			neutral[i] = a
			continue
		}
		array, err := pgtype.NewMap().Encode(pgtype.TextArrayOID, pgx.TextFormatCode, texts, nil)
		if err != nil {
			return nil, fmt.Errorf("argument %d: %w", i+1, err)
		}
		neutral[i] = string(array)
	}
	rows, err := s.db.QueryContext(ctx, query, neutral...) //nolint:rowserrcheck // the caller does
	if err != nil {
		return nil, err
	}
	return &sqlRows{rows: rows}, nil
}

// sqlRows are rows of database/sql, as far as they can be those of pgx.
type sqlRows struct {
	pgx.Rows // nil: a later release of pgx may have methods that nothing here calls
	rows     *sql.Rows
	err      error // of Close, or of an earlier call
}

// Close implements [pgx.Rows].
func (r *sqlRows) Close() { r.err = errors.Join(r.err, r.rows.Close()) }

// Err implements [pgx.Rows].
func (r *sqlRows) Err() error { return errors.Join(r.err, r.rows.Err()) }

// Next implements [pgx.Rows]. As with pgx, rows that were read to their end are closed.
func (r *sqlRows) Next() bool { return r.rows.Next() }

// Scan implements [pgx.Rows].
func (r *sqlRows) Scan(dest ...any) error {
	if len(dest) == 1 {
		if row, ok := dest[0].(pgx.RowScanner); ok {
			return row.ScanRow(r)
		}
	}
	return r.rows.Scan(dest...)
}

// FieldDescriptions implements [pgx.Rows]. They have names, and nothing else.
func (r *sqlRows) FieldDescriptions() []pgconn.FieldDescription {
	names, err := r.rows.Columns()
	r.err = errors.Join(r.err, err)
	fields := make([]pgconn.FieldDescription, len(names))
	for i, name := range names {
		fields[i].Name = name
	}
	return fields
}

// Values implements [pgx.Rows].
func (r *sqlRows) Values() ([]any, error) {
	values := make([]any, len(r.FieldDescriptions()))
	pointers := make([]any, len(values))
	for i := range values {
		pointers[i] = &values[i]
	}
	return values, r.Scan(pointers...)
}

// RawValues implements [pgx.Rows]. There are none: database/sql does not say what was sent.
func (r *sqlRows) RawValues() [][]byte { return nil }

// CommandTag implements [pgx.Rows]. There is none.
func (r *sqlRows) CommandTag() pgconn.CommandTag { return pgconn.CommandTag{} }

// TypeMap implements [pgx.Rows].
func (r *sqlRows) TypeMap() *pgtype.Map { return pgtype.NewMap() }

// Conn implements [pgx.Rows]. There is none.
func (r *sqlRows) Conn() *pgx.Conn { return nil }
