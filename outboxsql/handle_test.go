package outboxsql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxsql"
)

// handle is a function of a handler.
type handle = func(ctx context.Context, tx *sql.Tx, e placed, m outbox.Metadata) error

// consumer returns a consumer with handlers.
func (s *shop) consumer(t testing.TB, cfg outbox.HandlerConfig, handlers ...outbox.Handler) *outbox.Consumer {
	t.Helper()
	cfg.Schema = s.schema
	c, err := outbox.NewConsumer(s.pool, nil, s.events, "shop", outbox.ConsumerConfig{HandlerConfig: cfg}, handlers...)
	require.NoError(t, err)
	return c
}

// deliver passes an event to a consumer, as often as times says.
func (s *shop) deliver(t testing.TB, c *outbox.Consumer, order string, times int) (err error) {
	t.Helper()
	record, err := s.rec.KafkaRecord(background, placed{order})
	require.NoError(t, err)
	for range times {
		err = errors.Join(err, c.Deliver(background, record))
	}
	return err
}

// handleOnce passes an event to a handler with f.
func (s *shop) handleOnce(t testing.TB, order string, f handle) error {
	t.Helper()
	return s.deliver(t, s.consumer(t, outbox.HandlerConfig{}, outboxsql.Handle("DONE", f)), order, 1)
}

func (s *shop) insert(ctx context.Context, tx outboxsql.Tx, order string) error {
	_, err := tx.ExecContext(ctx, s.sql(`INSERT INTO {s}.orders VALUES ($1, $2)`), order, 1)
	return err
}

// What a handler writes commits with the note that it is done, and only once.
func TestHandle(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	var metadata outbox.Metadata
	c := s.consumer(t, outbox.HandlerConfig{}, outboxsql.Handle("ORDERED", func(ctx context.Context, tx *sql.Tx, e placed, m outbox.Metadata) error {
		metadata = m
		var notes int // those of this event are there before the handler
		if err := tx.QueryRowContext(ctx, s.sql(`SELECT count(*) FROM {s}.event_handled WHERE xmin::text = pg_current_xact_id()::xid::text`)).Scan(&notes); err != nil {
			return err
		}
		if notes != 1 {
			return fmt.Errorf("%d notes in this transaction", notes)
		}
		// What the service records in turn is in the same transaction.
		return errors.Join(s.insert(ctx, tx, e.Order), outboxsql.Record(ctx, tx, s.rec, placed{"next of " + e.Order}))
	}))
	require.NoError(t, s.deliver(t, c, "1", 3))
	require.Equal(t, []string{"1"}, s.orders(t))
	require.Equal(t, []string{"ORDERED"}, s.handled(t))
	require.Equal(t, []string{"next of 1"}, s.recorded(t))
	require.Equal(t, "1", metadata.Subject)
}

// A failure rolls back the note and all that was written.
func TestHandlerFails(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for name, tt := range map[string]struct {
		want error
		f    handle
	}{
		"an error":           {errOwn, func(context.Context, *sql.Tx, placed, outbox.Metadata) error { return errOwn }},
		"a permanent error":  {errOwn, func(context.Context, *sql.Tx, placed, outbox.Metadata) error { return outbox.Permanent(errOwn) }},
		"a commit":           {outbox.ErrHandlerTx, func(_ context.Context, tx *sql.Tx, _ placed, _ outbox.Metadata) error { return tx.Commit() }},
		"a swallowed commit": {outbox.ErrHandlerTx, func(_ context.Context, tx *sql.Tx, _ placed, _ outbox.Metadata) error { _ = tx.Commit(); return nil }},
		"a rollback":         {outbox.ErrHandlerTx, func(_ context.Context, tx *sql.Tx, _ placed, _ outbox.Metadata) error { return tx.Rollback() }},
		"a deferred rollback": {outbox.ErrHandlerTx, func(_ context.Context, tx *sql.Tx, _ placed, _ outbox.Metadata) error {
			defer tx.Rollback()
			return nil
		}},
		"an error and a rollback": {errOwn, func(_ context.Context, tx *sql.Tx, _ placed, _ outbox.Metadata) error {
			defer tx.Rollback()
			return errOwn
		}},
		"COMMIT": {outbox.ErrHandlerTx, func(_ context.Context, tx *sql.Tx, _ placed, _ outbox.Metadata) error {
			_, err := tx.Exec(`COMMIT`)
			return err
		}},
		"COMMIT, prepared": {outbox.ErrHandlerTx, func(ctx context.Context, tx *sql.Tx, _ placed, _ outbox.Metadata) error {
			st, err := tx.PrepareContext(ctx, `COMMIT`)
			if err == nil {
				_, err = st.ExecContext(ctx)
			}
			return err
		}},
	} {
		t.Run(name, func(t *testing.T) {
			err := s.handleOnce(t, name, func(ctx context.Context, tx *sql.Tx, e placed, m outbox.Metadata) error {
				if err := s.insert(ctx, tx, e.Order); err != nil {
					return err
				}
				return tt.f(ctx, tx, e, m)
			})
			require.ErrorIs(t, err, tt.want)
			require.Empty(t, s.orders(t))
			require.Empty(t, s.handled(t))
		})
	}
	require.ErrorContains(t, s.handleOnce(t, "aborted", func(_ context.Context, tx *sql.Tx, _ placed, _ outbox.Metadata) error {
		_, _ = tx.Exec(`SELECT 1/0`)
		return nil
	}), "left its transaction aborted")
	panicked, ok := errors.AsType[*outbox.PanicError](s.handleOnce(t, "panic", func(ctx context.Context, tx *sql.Tx, e placed, _ outbox.Metadata) error {
		rows, err := tx.QueryContext(ctx, `SELECT generate_series(1, 1000)`)
		require.NoError(t, err)
		rows.Next()
		require.NoError(t, rows.Err())
		panic("panic")
	}))
	require.True(t, ok)
	require.Equal(t, "panic", panicked.Value)
	require.ErrorContains(t, s.handleOnce(t, "goexit", func(context.Context, *sql.Tx, placed, outbox.Metadata) error {
		runtime.Goexit()
		return nil
	}), "DONE")
	require.Empty(t, s.handled(t))
	require.NoError(t, s.handleOnce(t, "good", func(ctx context.Context, tx *sql.Tx, e placed, _ outbox.Metadata) error {
		return s.insert(ctx, tx, e.Order)
	}))
	require.Equal(t, []string{"good"}, s.orders(t))
}

// Middleware that hides the error of a handler does not make a commit good.
func TestHiddenCommit(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	var seen pgx.Tx
	c := s.consumer(t, outbox.HandlerConfig{Middleware: []outbox.Middleware{func(ctx context.Context, call outbox.HandlerCall, next func(context.Context) error) error {
		seen = call.Tx
		_ = next(ctx)
		return nil
	}}}, outboxsql.Handle("DONE", func(ctx context.Context, tx *sql.Tx, e placed, _ outbox.Metadata) error {
		return errors.Join(s.insert(ctx, tx, e.Order), tx.Commit())
	}))
	require.ErrorIs(t, s.deliver(t, c, "1", 1), outbox.ErrHandlerTx)
	require.NotNil(t, seen)
	require.Empty(t, s.orders(t))
}

// What a handler leaves behind is closed, and reaches the connection no more.
func TestLeftOpen(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	var late *sql.Tx
	var statement *sql.Stmt
	var open *sql.Rows
	require.NoError(t, s.handleOnce(t, "1", func(ctx context.Context, tx *sql.Tx, e placed, _ outbox.Metadata) (err error) {
		late = tx
		if statement, err = tx.PrepareContext(ctx, `SELECT $1::int`); err != nil {
			return err
		}
		if err := s.insert(ctx, tx, e.Order); err != nil {
			return err
		}
		if open, err = tx.QueryContext(ctx, `SELECT generate_series(1, 100000)`); err != nil {
			return err
		}
		open.Next()
		if err := open.Err(); err != nil {
			return err
		}
		var text sql.RawBytes // which keeps database/sql from closing the rows
		return open.Scan(&text)
	}))
	require.Equal(t, []string{"1"}, s.orders(t))
	for open.Next() {
		require.Fail(t, "a row behind the end")
	}
	require.Error(t, open.Err())
	_, err := late.Exec(s.sql(`INSERT INTO {s}.orders VALUES ('late', 1)`))
	require.ErrorIs(t, err, sql.ErrTxDone)
	require.ErrorIs(t, late.QueryRow(`SELECT 1`).Err(), sql.ErrTxDone)
	_, err = late.Prepare(`SELECT 1`)
	require.ErrorIs(t, err, sql.ErrTxDone)
	require.Error(t, statement.QueryRow(1).Err())
	require.ErrorIs(t, late.Commit(), sql.ErrTxDone)
	require.ErrorIs(t, late.Rollback(), sql.ErrTxDone)
	require.Equal(t, []string{"1"}, s.orders(t))
}

// Goroutines of a handler that go on when it has returned get errors, while others use the connection: go test -race
// watches it.
func TestGoroutinesOfHandler(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	var all sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	started := make(chan struct{})
	c := s.consumer(t, outbox.HandlerConfig{}, outboxsql.Handle("DONE", func(ctx context.Context, tx *sql.Tx, e placed, _ outbox.Metadata) error {
		for range 4 {
			all.Go(func() {
				for i := 0; ; i++ {
					rows, err := tx.QueryContext(background, `SELECT generate_series(1, 3)`)
					if err == nil {
						_, _ = rows.ColumnTypes()
						for rows.Next() {
							_, _ = rows.Columns()
						}
						err = errors.Join(rows.Err(), rows.Close())
					}
					select {
					case started <- struct{}{}:
					default:
					}
					if errors.Is(err, sql.ErrTxDone) {
						mu.Lock()
						errs = append(errs, err)
						mu.Unlock()
						return
					}
				}
			})
		}
		<-started
		return nil
	}))
	for i := range 5 {
		// It is an error of the handler if a statement was under way and another one failed for it.
		_ = s.deliver(t, c, fmt.Sprint(i), 1)
		require.NoError(t, s.pool.Ping(background))
	}
	all.Wait()
	require.Len(t, errs, 20)
	require.Eventually(t, func() bool { return s.pool.Stat().AcquiredConns() == 0 }, testenv.Patience, time.Millisecond)
}

// A context that ends in a handler ends its statement and no more than the transaction.
func TestContextsInHandler(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	err := s.handleOnce(t, "1", func(ctx context.Context, tx *sql.Tx, e placed, _ outbox.Metadata) error {
		short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		defer cancel()
		_, err := tx.ExecContext(short, `SELECT pg_sleep(100)`)
		return err
	})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Error(t, s.handleOnce(t, "2", func(ctx context.Context, tx *sql.Tx, e placed, _ outbox.Metadata) error {
		short, cancel := context.WithCancel(ctx)
		rows, err := tx.QueryContext(short, `SELECT generate_series(1, 1000000)`)
		require.NoError(t, err)
		rows.Next()
		require.NoError(t, rows.Err())
		cancel() // which closes the connection under open rows
		return nil
	}))
	require.NoError(t, s.handleOnce(t, "3", func(ctx context.Context, tx *sql.Tx, e placed, _ outbox.Metadata) error {
		ended, cancel := context.WithCancel(ctx)
		cancel()
		_, err := tx.ExecContext(ended, `SELECT 1`)
		require.ErrorIs(t, err, context.Canceled)
		return s.insert(ctx, tx, e.Order)
	}), "nothing was sent under the ended context")
	require.Equal(t, []string{"3"}, s.orders(t))
}

// HandlerTimeout ends statements without a context, too.
func TestHandlerTimeout(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	c := s.consumer(t, outbox.HandlerConfig{HandlerTimeout: 50 * time.Millisecond}, outboxsql.Handle("DONE", func(_ context.Context, tx *sql.Tx, _ placed, _ outbox.Metadata) error {
		_, err := tx.Exec(`SELECT pg_sleep(100)`)
		return err
	}))
	require.ErrorIs(t, s.deliver(t, c, "1", 1), context.DeadlineExceeded)
}

// contextKey is of this test.
type contextKey struct{}

// A statement has the values of its own context, which recorders read.
func TestStatementContextValues(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	rec := s.recorder(t, outbox.RecorderConfig{Headers: func(ctx context.Context, _ outbox.DomainEvent) map[string]string {
		return map[string]string{"tenant": fmt.Sprint(ctx.Value(contextKey{}))}
	}})
	require.NoError(t, s.handleOnce(t, "1", func(ctx context.Context, tx *sql.Tx, _ placed, _ outbox.Metadata) error {
		return outboxsql.Record(context.WithValue(ctx, contextKey{}, "a"), tx, rec, placed{"2"})
	}))
	require.Equal(t, []string{"a"}, s.column(t, `SELECT headers ->> 'tenant' FROM {s}.outbox`))
}

// Savepoints are SQL, as those of GORM; a statement may be prepared and run again and again.
func TestSavepointsAndStatements(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	require.NoError(t, s.handleOnce(t, "1", func(ctx context.Context, tx *sql.Tx, e placed, _ outbox.Metadata) error {
		insert, err := tx.PrepareContext(ctx, s.sql(`INSERT INTO {s}.orders VALUES ($1, $2) RETURNING quantity`))
		if err != nil {
			return err
		}
		for _, step := range []string{"a", "SAVEPOINT one", "b", "SAVEPOINT two", "c", "b again", "ROLLBACK TO SAVEPOINT two", "d", "RELEASE SAVEPOINT one"} {
			order, again := strings.CutSuffix(step, " again")
			if len(order) > 1 {
				if _, err := tx.ExecContext(ctx, step); err != nil {
					return err
				}
				continue
			}
			var quantity int
			if err := insert.QueryRowContext(ctx, order, 7).Scan(&quantity); (err != nil) != again {
				return fmt.Errorf("%s: %w", step, err)
			}
		}
		return nil
	}))
	require.Equal(t, []string{"a", "b", "d"}, s.orders(t))
}

// HandleBatch gets the events that arrive together, OncePer and WithRetry take the handlers, and a worker runs them.
func TestWorkerWithHandlers(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	const n = 200
	var mu sync.Mutex
	attempts := map[string]int{}
	once := outbox.OncePer(outboxsql.Handle("ONCE", func(ctx context.Context, tx *sql.Tx, e placed, _ outbox.Metadata) error {
		return s.insert(ctx, tx, e.Order)
	}), func(e placed, _ outbox.Metadata) (string, string) { return "Order", e.Order })
	batch := outboxsql.HandleBatch("BATCH", func(ctx context.Context, tx *sql.Tx, events []outbox.Received[placed]) error {
		for _, e := range events {
			if _, err := tx.ExecContext(ctx, s.sql(`INSERT INTO {s}.counts VALUES ($1, 1) ON CONFLICT (id) DO UPDATE SET n = {s}.counts.n + 1`), e.Event.Order); err != nil {
				return err
			}
		}
		return nil
	})
	retried := outbox.WithRetry(outboxsql.Handle("RETRIED", func(ctx context.Context, tx *sql.Tx, e placed, m outbox.Metadata) error {
		mu.Lock()
		defer mu.Unlock()
		if attempts[m.ID]++; e.Order == "7" && m.Attempt < 3 {
			return errOwn
		}
		return nil
	}), outbox.RetryPolicy{MaxRetries: 5, RetryWait: time.Millisecond, MaxOutage: -1})
	_, err := s.pool.Exec(background, s.sql(`CREATE TABLE {s}.counts (id text PRIMARY KEY, n int)`))
	require.NoError(t, err)
	worker, err := outbox.NewWorker(s.pool, s.events, "shop", outbox.WorkerConfig{
		HandlerConfig: outbox.HandlerConfig{Schema: s.schema, From: outbox.FromStart}, PollInterval: 10 * time.Millisecond,
	}, once, batch, retried)
	require.NoError(t, err)
	var events []outbox.DomainEvent
	for i := range n {
		events = append(events, placed{fmt.Sprint(i / 2)}) // each order twice
	}
	require.NoError(t, outboxsql.InTx(background, s.db, worker.Waker(), func(tx *sql.Tx) error { return outboxsql.Record(background, tx, s.rec, events...) }))
	testenv.Run(t, worker.Run)
	require.Eventually(t, func() bool { return len(s.handled(t)) == n/2+2*n }, testenv.Patience, 10*time.Millisecond, "notes of all")
	require.Len(t, s.orders(t), n/2)
	require.Equal(t, []string{"2"}, s.column(t, `SELECT DISTINCT n::text FROM {s}.counts`), "each event was counted once")
}

// A handler without a function is refused where all are.
func TestHandlerWithoutFunction(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for _, h := range []outbox.Handler{outboxsql.Handle[placed]("NONE", nil), outboxsql.HandleBatch[placed]("NONE", nil)} {
		_, err := outbox.NewConsumer(s.pool, nil, s.events, "shop", outbox.ConsumerConfig{}, h)
		require.ErrorIs(t, err, outbox.ErrNilArgument)
	}
}

// A handler that has pgx for one thing has a library for another.
func TestWithinHandler(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	c := s.consumer(t, outbox.HandlerConfig{}, outbox.Handle("BOTH", func(ctx context.Context, tx pgx.Tx, e placed, _ outbox.Metadata) error {
		rows := pgx.CopyFromRows([][]any{{"copied " + e.Order, 1}})
		if _, err := tx.CopyFrom(ctx, pgx.Identifier{s.schema, "orders"}, []string{"id", "quantity"}, rows); err != nil {
			return err
		}
		err := outboxsql.Within(ctx, tx, func(tx *sql.Tx) error {
			err := s.insert(ctx, tx, e.Order)
			if e.Order == "commits" {
				return errors.Join(err, tx.Commit())
			}
			return err
		})
		_, failed := tx.Exec(ctx, s.sql(`UPDATE {s}.orders SET quantity = 7`))
		return errors.Join(err, failed)
	}))
	require.NoError(t, s.deliver(t, c, "1", 2))
	require.ErrorIs(t, s.deliver(t, c, "commits", 1), outbox.ErrHandlerTx)
	require.Equal(t, []string{"1", "copied 1"}, s.orders(t))
}

// Within is a *sql.Tx inside a transaction of pgx, which goes on as it likes.
func TestWithin(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	tx, err := s.pool.Begin(background)
	require.NoError(t, err)
	defer tx.Rollback(background)
	var late *sql.Tx
	require.ErrorIs(t, outboxsql.Within(background, tx, func(tx *sql.Tx) error {
		late = tx
		require.NoError(t, s.insert(background, tx, "1"))
		require.NoError(t, outboxsql.Record(background, tx, s.rec, placed{"1"}))
		return errOwn
	}), errOwn)
	require.ErrorIs(t, s.insert(background, late, "2"), sql.ErrTxDone)
	require.NoError(t, s.rec.Record(background, tx, placed{"2"}), "an error does not roll back")
	require.Empty(t, s.recorded(t))
	require.NoError(t, outboxsql.Within(background, tx, func(tx *sql.Tx) error { return tx.Commit() }))
	require.Equal(t, []string{"1", "2"}, s.recorded(t))
	require.Equal(t, []string{"1"}, s.orders(t))
	require.ErrorIs(t, outboxsql.Within(background, tx, func(tx *sql.Tx) error { return s.insert(background, tx, "3") }), pgx.ErrTxClosed)

	for field, err := range map[string]error{
		"tx":       outboxsql.Within(background, (*pgxpool.Tx)(nil), func(*sql.Tx) error { return nil }),
		"function": outboxsql.Within(background, tx, nil),
	} {
		require.ErrorIs(t, err, outbox.ErrNilArgument)
		require.ErrorContains(t, err, field)
	}
}
