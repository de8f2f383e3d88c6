package outboxsql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxsql"
)

func TestRecord(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	tx := s.begin(t)
	require.NoError(t, outboxsql.Record(background, tx, s.rec))
	require.NoError(t, outboxsql.Record(background, tx, s.rec, placed{"1"}, &placed{"2"}))
	require.NoError(t, outboxsql.Record(background, tx, s.rec, placed{"3"}))
	require.Empty(t, s.recorded(t))
	require.NoError(t, tx.Commit())
	require.Equal(t, []string{"1", "2", "3"}, s.recorded(t))

	tx = s.begin(t)
	require.NoError(t, outboxsql.Record(background, tx, s.rec, placed{"4"}))
	require.NoError(t, tx.Rollback())
	require.Len(t, s.recorded(t), 3)
}

func TestRecordRaw(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	tx := s.begin(t)
	e := outbox.RawEvent{EventType: "stripe.invoice.paid.v1", AggregateType: "Invoice", AggregateID: "in_1", Payload: []byte{255}, ContentType: "a/b", Time: noon}
	require.NoError(t, outboxsql.Record(background, tx, s.rec, placed{"1"}, e))
	require.NoError(t, tx.Commit())
	require.Equal(t, []string{"1", "in_1"}, s.recorded(t))
	require.Equal(t, []string{`\xff`}, s.column(t, `SELECT payload_bytes::text FROM {s}.outbox WHERE payload IS NULL`))
}

func TestCancel(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	id := uuid.New()
	tx := s.begin(t)
	require.NoError(t, outboxsql.Record(background, tx, s.rec, outbox.With(placed{"1"}, outbox.EventOptions{ID: id, NotBefore: noon}), placed{"2"}))
	for _, want := range []bool{true, false} {
		cancelled, err := outboxsql.Cancel(background, bunLike{Tx: tx}, s.rec, id)
		require.NoError(t, err)
		require.Equal(t, want, cancelled)
	}
	require.NoError(t, tx.Commit())
	require.Equal(t, []string{"2"}, s.recorded(t))
	require.Empty(t, s.column(t, `SELECT aggregate_id FROM {s}.outbox_delayed`))
	_, err := outboxsql.Cancel(background, tx, s.rec, id)
	require.ErrorIs(t, err, sql.ErrTxDone)
	_, err = outboxsql.Cancel(background, nil, s.rec, id)
	require.ErrorIs(t, err, outbox.ErrNilArgument)
	_, err = outboxsql.Cancel(background, tx, nil, id)
	require.ErrorIs(t, err, outbox.ErrNilArgument)
}

// bunLike is a transaction whose statements are not those that it was given, as those of Bun.
type bunLike struct{ *sql.Tx }

func (bunLike) ExecContext(context.Context, string, ...any) (sql.Result, error) {
	panic("it would drop the arguments")
}

// Transactions that libraries have put around a [sql.Tx].
type (
	unitOfWork struct{ bunLike }
	txPointer  struct{ *unitOfWork }
	txHolder   struct{ outboxsql.Tx }
	another    struct{ tx *sql.Tx } // what is not embedded is its own affair
)

func (a another) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	return a.tx.ExecContext(ctx, query, args...)
}
func (a another) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	return a.tx.QueryContext(ctx, query, args...)
}
func (a another) Commit() error   { return a.tx.Commit() }
func (a another) Rollback() error { return a.tx.Rollback() }

func TestRecordInOtherTransactions(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for i, wrap := range []func(*sql.Tx) outboxsql.Tx{
		func(tx *sql.Tx) outboxsql.Tx { return bunLike{Tx: tx} },
		func(tx *sql.Tx) outboxsql.Tx { return &bunLike{Tx: tx} },
		func(tx *sql.Tx) outboxsql.Tx { return unitOfWork{bunLike{Tx: tx}} },
		func(tx *sql.Tx) outboxsql.Tx { return txPointer{&unitOfWork{bunLike{Tx: tx}}} },
		func(tx *sql.Tx) outboxsql.Tx { return &txHolder{&bunLike{Tx: tx}} },
		func(tx *sql.Tx) outboxsql.Tx { return another{tx} },
	} {
		tx := s.begin(t)
		require.NoError(t, outboxsql.Record(background, wrap(tx), s.rec, placed{fmt.Sprint(i)}), "%d", i)
		require.NoError(t, wrap(tx).Commit())
		require.Len(t, s.recorded(t), i+1)
	}
}

// What commits each statement for itself is no transaction.
func TestOnlyTransactionsAreTransactions(t *testing.T) {
	t.Parallel()
	type (
		bunDB  struct{ *sql.DB } // so bun.DB and sqlx.DB are made
		bunTx  struct{ *sql.Tx }
		sqlxTx struct{ *sql.Tx }
	)
	tx := reflect.TypeFor[outboxsql.Tx]()
	require.Equal(t, tx, reflect.TypeOf(outboxsql.Record).In(1))
	for _, not := range []reflect.Type{
		reflect.TypeFor[*sql.DB](), reflect.TypeFor[*sql.Conn](), reflect.TypeFor[*sql.Stmt](), reflect.TypeFor[bunDB](), reflect.TypeFor[*bunDB](),
		reflect.TypeFor[pgx.Tx](), reflect.TypeFor[*pgxpool.Pool](),
	} {
		require.False(t, not.Implements(tx), "%s", not)
	}
	for _, is := range []reflect.Type{reflect.TypeFor[*sql.Tx](), reflect.TypeFor[bunTx](), reflect.TypeFor[*sqlxTx]()} {
		require.True(t, is.Implements(tx), "%s", is)
	}
}

func TestNilArguments(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	waker, err := outbox.NewWaker(s.pool, outbox.WakerConfig{Schema: s.schema})
	require.NoError(t, err)
	nothing := func(*sql.Tx) error { return nil }
	for name, tt := range map[string]struct {
		field string
		err   error
	}{
		"no transaction":            {"tx", outboxsql.Record(background, nil, s.rec, placed{"1"})},
		"no transaction, no events": {"tx", outboxsql.Record(background, nil, s.rec)},
		"a nil transaction":         {"tx", outboxsql.Record(background, (*sql.Tx)(nil), s.rec, placed{"1"})},
		"an empty transaction":      {"tx", outboxsql.Record(background, bunLike{}, s.rec, placed{"1"})},
		"a nil pointer to one":      {"tx", outboxsql.Record(background, (*bunLike)(nil), s.rec, placed{"1"})},
		"a typed nil inside":        {"tx", outboxsql.Record(background, txHolder{(*sql.Tx)(nil)}, s.rec, placed{"1"})},
		"no recorder":               {"recorder", outboxsql.Record(background, s.begin(t), nil, placed{"1"})},
		"no database":               {"db", outboxsql.InTx(background, nil, waker, nothing)},
		"no waker":                  {"waker", outboxsql.InTx(background, s.db, nil, nothing)},
		"no function":               {"function", outboxsql.InTx(background, s.db, waker, nil)},
	} {
		t.Run(name, func(t *testing.T) {
			rejected, ok := errors.AsType[*outbox.FieldError](tt.err)
			require.True(t, ok, "%v", tt.err)
			require.Equal(t, tt.field, rejected.Field)
			require.ErrorIs(t, tt.err, outbox.ErrNilArgument)
		})
	}
}

// A rejected event does not abort the transaction.
func TestRejectedEvent(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	tx := s.begin(t)
	err := outboxsql.Record(background, tx, s.rec, placed{"1"}, placed{""})
	rejected, ok := errors.AsType[*outbox.FieldError](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, 1, rejected.Index)
	require.ErrorIs(t, err, outbox.ErrEmpty)
	require.NoError(t, outboxsql.Record(background, tx, s.rec, placed{"2"}))
	require.NoError(t, tx.Commit())
	require.Equal(t, []string{"2"}, s.recorded(t))
}

func TestEndedTransaction(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	tx := s.begin(t)
	require.NoError(t, tx.Commit())
	err := outboxsql.Record(background, tx, s.rec, placed{"1"})
	require.ErrorIs(t, err, sql.ErrTxDone)
	require.ErrorContains(t, err, "outbox: record 1 events: ")
}

func TestNotMigrated(t *testing.T) {
	t.Parallel()
	pool, schema := testenv.Schema(t)
	db := stdlib.OpenDBFromPool(pool)
	defer db.Close()
	rec, err := outbox.NewRecorder(registry(t), outbox.RecorderConfig{Schema: schema})
	require.NoError(t, err)
	tx, err := db.BeginTx(background, nil)
	require.NoError(t, err)
	defer tx.Rollback()
	require.ErrorIs(t, outboxsql.Record(background, tx, rec, placed{"1"}), outbox.ErrNotMigrated)
}

// pqError is an error as lib/pq makes it.
type pqError struct{ code, where string }

func (e *pqError) Error() string    { return "pq: " + e.code }
func (e *pqError) SQLState() string { return e.code }
func (e *pqError) Get(field byte) string {
	return map[byte]string{'C': e.code, 'W': e.where}[field]
}

// failingTx is a transaction of another driver whose statements fail.
type failingTx struct {
	outboxsql.Tx
	err error
}

func (f failingTx) QueryContext(context.Context, string, ...any) (*sql.Rows, error) {
	return nil, fmt.Errorf("query: %w", f.err)
}

func (f failingTx) ExecContext(context.Context, string, ...any) (sql.Result, error) {
	return nil, fmt.Errorf("exec: %w", f.err)
}

func TestNotMigratedByOtherDrivers(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for _, tt := range []struct {
		err  error
		want bool
	}{
		{&pqError{code: "42P01"}, true},
		{&pqError{code: "42703"}, true},
		{&pqError{code: "3F000"}, true},
		{&pqError{code: "23505"}, false},
		{&pqError{code: "42P01", where: "PL/pgSQL function audit()"}, false},
		{errors.New("42P01"), false},
	} {
		err := outboxsql.Record(background, failingTx{err: tt.err}, s.rec, placed{"1"})
		require.ErrorIs(t, err, tt.err)
		require.Equal(t, tt.want, errors.Is(err, outbox.ErrNotMigrated), "%v", tt.err)
	}
}

var errOwn = errors.New("own")

func TestInTx(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	waker, err := outbox.NewWaker(s.pool, outbox.WakerConfig{Schema: s.schema})
	require.NoError(t, err)
	record := func(order string, end func(tx *sql.Tx) error) func(tx *sql.Tx) error {
		return func(tx *sql.Tx) error {
			if err := outboxsql.Record(background, tx, s.rec, placed{order}); err != nil {
				return err
			}
			return end(tx)
		}
	}
	require.NoError(t, outboxsql.InTx(background, s.db, waker, record("1", func(*sql.Tx) error { return nil })))
	require.Same(t, errOwn, outboxsql.InTx(background, s.db, waker, record("error", func(*sql.Tx) error { return errOwn })))
	require.PanicsWithValue(t, "panic", func() {
		_ = outboxsql.InTx(background, s.db, waker, record("panic", func(*sql.Tx) error { panic("panic") }))
	})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = outboxsql.InTx(background, s.db, waker, record("goexit", func(*sql.Tx) error { runtime.Goexit(); return nil }))
	}()
	<-ended
	require.ErrorIs(t, outboxsql.InTx(background, s.db, waker, func(tx *sql.Tx) error { return tx.Rollback() }), sql.ErrTxDone)
	ctx, cancel := context.WithCancel(background)
	require.ErrorIs(t, outboxsql.InTx(ctx, s.db, waker, record("cancelled", func(*sql.Tx) error { cancel(); return nil })), context.Canceled)
	require.ErrorIs(t, func() error {
		ctx, cancel := context.WithCancel(background)
		return outboxsql.InTx(ctx, s.db, waker, record("rolled back for it", func(tx *sql.Tx) error {
			cancel()
			for {
				if _, err := tx.Exec(`SELECT 1`); errors.Is(err, sql.ErrTxDone) {
					return nil
				}
			}
		}))
	}(), context.Canceled)
	require.ErrorIs(t, outboxsql.InTx(ctx, s.db, waker, record("begun", func(*sql.Tx) error { return nil })), context.Canceled)
	require.Equal(t, []string{"1"}, s.recorded(t))
	require.Eventually(t, func() bool { return s.pool.Stat().AcquiredConns() == 0 }, testenv.Patience, time.Millisecond, "no connection is kept")
}

// A relay that would look in an hour looks now, and after what does not commit it does not.
func TestInTxWakes(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, err := s.pool.Exec(background, s.sql(`CREATE TABLE {s}.late (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED)`))
	require.NoError(t, err)
	done := make(chan string, 10)
	worker, err := outbox.NewWorker(s.pool, s.events, "wakes", outbox.WorkerConfig{
		HandlerConfig: outbox.HandlerConfig{Schema: s.schema}, PollInterval: time.Hour,
	}, outbox.HandleNoTx("SEEN", func(_ context.Context, e placed, _ outbox.Metadata) error { done <- e.Order; return nil }))
	require.NoError(t, err)
	testenv.Run(t, worker.Run)
	require.Eventually(t, func() bool {
		return len(s.column(t, `SELECT relay FROM {s}.outbox_cursor`)) > 0
	}, testenv.Patience, 5*time.Millisecond, "the worker does not look")
	require.Error(t, outboxsql.InTx(background, s.db, worker.Waker(), func(tx *sql.Tx) error {
		_, err := tx.Exec(s.sql(`INSERT INTO {s}.late VALUES (1), (1)`)) // which fails at the commit
		return errors.Join(err, outboxsql.Record(background, tx, s.rec, placed{"lost"}))
	}))
	require.NoError(t, outboxsql.InTx(background, s.db, worker.Waker(), func(tx *sql.Tx) error {
		return outboxsql.Record(background, tx, s.rec, placed{"1"})
	}))
	select {
	case order := <-done:
		require.Equal(t, "1", order)
	case <-time.After(testenv.Patience):
		require.Fail(t, "the worker was not woken")
	}
}
