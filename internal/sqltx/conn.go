package sqltx

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5"
)

// conn is a transaction of pgx as database/sql sees a connection. Each method holds mu while it uses
// tx, and after the end none does.
type conn struct {
	ctx context.Context // of the function that has the transaction

	mu    sync.Mutex
	tx    pgx.Tx
	ended bool
	open  *rows // the rows that have the connection; nil if none do
}

// use calls f, which may use the transaction, unless it has ended.
func (c *conn) use(f func() error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return errEnded
	}
	return final(f())
}

// final keeps an error from meaning something to database/sql, which would try the statement again.
// Such an error comes from an argument's Value method: pgx returns none of these.
func final(err error) error {
	if errors.Is(err, driver.ErrBadConn) || errors.Is(err, driver.ErrSkip) {
		return errors.New(err.Error())
	}
	return err
}

// detach ends the use of the transaction, and reports whether rows were open.
func (c *conn) detach() (rowsOpen bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	if c.open == nil {
		return false
	}
	c.open.from.Close() // its error is in the transaction, too
	c.open = nil
	return true
}

// contextOf returns the context of a statement.
func (c *conn) contextOf(ctx context.Context) context.Context {
	if ctx.Done() != nil {
		return ctx
	}
	return statementContext{Context: c.ctx, own: ctx}
}

// statementContext is for a statement whose own context cannot end: it ends with the context of the
// function.
type statementContext struct {
	context.Context
	own context.Context
}

// Value implements [context.Context].
func (s statementContext) Value(key any) any {
	if v := s.own.Value(key); v != nil {
		return v
	}
	return s.Context.Value(key)
}

// Begin implements [driver.Conn].
func (c *conn) Begin() (driver.Tx, error) { return c, nil }

// BeginTx implements [driver.ConnBeginTx].
func (c *conn) BeginTx(context.Context, driver.TxOptions) (driver.Tx, error) { return c, nil }

// Close implements [driver.Conn]. The connection is not ours.
func (c *conn) Close() error { return nil }

// Commit implements [driver.Tx].
func (c *conn) Commit() error { return c.use(func() error { return c.tx.Commit(c.ctx) }) }

// Rollback implements [driver.Tx].
func (c *conn) Rollback() error { return c.use(func() error { return c.tx.Rollback(c.ctx) }) }

// CheckNamedValue implements [driver.NamedValueChecker]: pgx takes values of any type.
func (c *conn) CheckNamedValue(v *driver.NamedValue) error {
	if v.Name != "" {
		return fmt.Errorf("argument %q has a name: PostgreSQL numbers them, as $1", v.Name)
	}
	if _, ok := v.Value.(sql.Out); ok {
		return errors.New("sql.Out: PostgreSQL has no output arguments; use RETURNING")
	}
	return nil
}

// ExecContext implements [driver.ExecerContext].
func (c *conn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (result driver.Result, err error) {
	err = c.use(func() error {
		tag, err := c.tx.Exec(c.contextOf(ctx), query, appendValues(make([]any, 0, len(args)), args)...)
		result = driver.RowsAffected(tag.RowsAffected())
		return err
	})
	if err != nil {
		return nil, err
	}
	return result, nil
}

// QueryContext implements [driver.QueryerContext].
func (c *conn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (result driver.Rows, err error) {
	err = c.use(func() error {
		from, err := c.tx.Query(c.contextOf(ctx), query, appendValues(append(make([]any, 0, 1+len(args)), formats), args)...)
		if err != nil {
			return err
		}
		more := from.Next() // the columns are known only then
		if err := from.Err(); err != nil {
			from.Close()
			return err
		}
		c.open = newRows(c, from, more)
		result = c.open
		return nil
	})
	if err != nil {
		return nil, err
	}
	return result, nil
}

func appendValues(values []any, args []driver.NamedValue) []any {
	for _, a := range args {
		values = append(values, a.Value)
	}
	return values
}

// Prepare implements [driver.Conn]. It sends nothing: pgx prepares a statement when it first runs it, if
// the pool is configured so, which it is not behind a pooler that shares connections. So an
// error of the statement comes when it runs.
func (c *conn) Prepare(query string) (driver.Stmt, error) {
	if err := c.use(func() error { return nil }); err != nil {
		return nil, err
	}
	return &statement{conn: c, query: query}, nil
}

// statement is a prepared statement.
type statement struct {
	conn  *conn
	query string
}

var errNoContext = errors.New("statements run with a context")

// Close implements [driver.Stmt].
func (s *statement) Close() error { return nil }

// NumInput implements [driver.Stmt]: pgx counts the arguments.
func (s *statement) NumInput() int { return -1 }

// Exec implements [driver.Stmt]; database/sql calls ExecContext.
func (s *statement) Exec([]driver.Value) (driver.Result, error) { return nil, errNoContext }

// Query implements [driver.Stmt]; database/sql calls QueryContext.
func (s *statement) Query([]driver.Value) (driver.Rows, error) { return nil, errNoContext }

// ExecContext implements [driver.StmtExecContext].
func (s *statement) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	return s.conn.ExecContext(ctx, s.query, args)
}

// QueryContext implements [driver.StmtQueryContext].
func (s *statement) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	return s.conn.QueryContext(ctx, s.query, args)
}
