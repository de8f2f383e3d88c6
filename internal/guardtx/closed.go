package guardtx

import (
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// closed is the result of a query in a transaction that the function must not use any more.
type closed struct{}

func (closed) Close()                                       {}
func (closed) Err() error                                   { return pgx.ErrTxClosed }
func (closed) CommandTag() pgconn.CommandTag                { return pgconn.CommandTag{} }
func (closed) FieldDescriptions() []pgconn.FieldDescription { return nil }
func (closed) Next() bool                                   { return false }
func (closed) Scan(...any) error                            { return pgx.ErrTxClosed }
func (closed) Values() ([]any, error)                       { return nil, pgx.ErrTxClosed }
func (closed) RawValues() [][]byte                          { return nil }
func (closed) Conn() *pgx.Conn                              { return nil }
func (closed) TypeMap() *pgtype.Map                         { return nil }

// closedBatch is closed for a batch.
type closedBatch struct{}

func (closedBatch) Exec() (pgconn.CommandTag, error) { return pgconn.CommandTag{}, pgx.ErrTxClosed }
func (closedBatch) Query() (pgx.Rows, error)         { return closed{}, pgx.ErrTxClosed }
func (closedBatch) QueryRow() pgx.Row                { return closed{} }
func (closedBatch) Close() error                     { return pgx.ErrTxClosed }
func (closedBatch) Tx() pgx.Tx                       { return nil }
