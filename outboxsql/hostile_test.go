package outboxsql_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxsql"
)

// panicking is an argument whose Value panics.
type panicking struct{}

func (panicking) Value() (driver.Value, error) { panic("value") }

// Statements that end the transaction fail the handler, however they are sent, and nothing of it stays. A savepoint
// does not.
func TestEndsAsSQL(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, err := s.pool.Exec(background, s.sql(`CREATE PROCEDURE {s}.commits() LANGUAGE plpgsql AS 'BEGIN COMMIT; END'`))
	require.NoError(t, err)
	send := map[string]func(ctx context.Context, tx *sql.Tx, query string) error{
		"exec": func(ctx context.Context, tx *sql.Tx, query string) error {
			_, err := tx.ExecContext(ctx, query)
			return err
		},
		"query": func(ctx context.Context, tx *sql.Tx, query string) error { return tx.QueryRowContext(ctx, query).Err() },
		"prepared": func(ctx context.Context, tx *sql.Tx, query string) error {
			st, err := tx.PrepareContext(ctx, query)
			if err != nil {
				return err
			}
			return st.QueryRowContext(ctx).Err()
		},
		"simple": func(ctx context.Context, tx *sql.Tx, query string) error {
			_, err := tx.ExecContext(ctx, query, pgx.QueryExecModeSimpleProtocol)
			return err
		},
	}
	for _, query := range []string{
		"COMMIT", "/* x */ commit and chain", "END", "ROLLBACK", "abort work", "PREPARE TRANSACTION 'x'", "COMMIT; BEGIN", "ROLLBACK; BEGIN", "SELECT 1; COMMIT; BEGIN",
		"DO $$ BEGIN COMMIT; END $$", "CALL {s}.commits()", "CLOSE ALL",
	} {
		for way, send := range send {
			for _, swallowed := range []bool{false, true} {
				order := fmt.Sprint(query, " by ", way, swallowed)
				err := s.handleOnce(t, order, func(ctx context.Context, tx *sql.Tx, e placed, _ outbox.Metadata) error {
					if err := s.insert(ctx, tx, e.Order); err != nil {
						return err
					}
					err := send(ctx, tx, s.sql(query))
					if swallowed {
						return nil
					}
					return errors.Join(err, s.insert(ctx, tx, "after "+e.Order))
				})
				require.Error(t, err, order)
				require.Empty(t, s.orders(t), order)
				require.Empty(t, s.handled(t), order)
			}
		}
	}
	require.Eventually(t, func() bool { return s.pool.Stat().AcquiredConns() == 0 }, testenv.Patience, time.Millisecond)
}

// Whatever a handler does with rows and statements, the next one on its connection has a good transaction.
func TestHandlersThatMisbehave(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	pool := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.MaxConns = 2 })
	consumer := func(f handle) *outbox.Consumer {
		c, err := outbox.NewConsumer(pool, nil, s.events, "shop", outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{
			Schema: s.schema}}, outboxsql.Handle("DONE", f))
		require.NoError(t, err)
		return c
	}
	tests := []struct {
		name string
		fine bool // the handler succeeds
		f    func(ctx context.Context, tx *sql.Tx) error
	}{
		{"no rows and no Close, then others", true, func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.QueryContext(ctx, `SELECT 1 WHERE false`) //nolint:rowserrcheck // they are left open
			var n int
			return errors.Join(err, tx.QueryRowContext(ctx, `SELECT 2`).Scan(&n))
		}},
		{"a row that nobody scans", true, func(ctx context.Context, tx *sql.Tx) error {
			return tx.QueryRowContext(ctx, `SELECT generate_series(1, 1000)`).Err()
		}},
		{"two sets of open rows", false, func(ctx context.Context, tx *sql.Tx) error {
			first, err := tx.QueryContext(ctx, `SELECT generate_series(1, 1000)`)
			require.NoError(t, err)
			first.Next()
			_, err = tx.QueryContext(ctx, `SELECT 1`) //nolint:rowserrcheck // there are none
			return errors.Join(err, first.Err())
		}},
		{"rows that fail at their end", false, func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.QueryContext(ctx, `SELECT 1/(9999-n) FROM generate_series(1, 9999) AS n`) //nolint:rowserrcheck // they are left open
			return err
		}},
		{"an error of the statement, and a savepoint", true, func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, `SAVEPOINT here`)
			require.NoError(t, err)
			_, err = tx.ExecContext(ctx, `SELECT 1/0`)
			require.Error(t, err)
			_, err = tx.ExecContext(ctx, `ROLLBACK TO SAVEPOINT here`)
			return err
		}},
		{"a panic in an argument", false, func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, `SELECT $1::int`, panicking{})
			return err
		}},
		{"COPY FROM STDIN", false, func(ctx context.Context, tx *sql.Tx) error {
			short, cancel := context.WithTimeout(ctx, 50*time.Millisecond) // pgx waits for it
			defer cancel()
			_, err := tx.ExecContext(short, s.sql(`COPY {s}.orders FROM STDIN`))
			return err
		}},
		{"COPY TO STDOUT", false, func(ctx context.Context, tx *sql.Tx) error {
			rows, err := tx.QueryContext(ctx, s.sql(`COPY (SELECT generate_series(1, 100000)) TO STDOUT`))
			if err != nil {
				return err
			}
			for rows.Next() {
			}
			return errors.Join(rows.Err(), errors.New("no rows"))
		}},
		{"a lost connection, hidden", false, func(ctx context.Context, tx *sql.Tx) error {
			_, _ = tx.ExecContext(ctx, `SELECT pg_terminate_backend(pg_backend_pid())`)
			return nil
		}},
		{"rows of a lost connection, hidden", false, func(ctx context.Context, tx *sql.Tx) error {
			_ = tx.QueryRowContext(ctx, `SELECT pg_terminate_backend(pg_backend_pid()), repeat('x', 1000) FROM generate_series(1, 10000)`)
			return nil
		}},
		{"a statement of another database", false, func(ctx context.Context, tx *sql.Tx) error {
			st, err := s.db.PrepareContext(ctx, `SELECT 1`)
			require.NoError(t, err)
			defer st.Close()
			_, err = tx.StmtContext(ctx, st).ExecContext(ctx)
			return err
		}},
		{"NUL in a string", false, func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, `SELECT $1::text`, "a\x00b")
			return err
		}},
		{"a large argument", true, func(ctx context.Context, tx *sql.Tx) error {
			var n int
			err := tx.QueryRowContext(ctx, `SELECT length($1::text)`, strings.Repeat("x", 8<<20)).Scan(&n)
			if err == nil && n != 8<<20 {
				return errOwn
			}
			return err
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := s.deliver(t, consumer(func(ctx context.Context, tx *sql.Tx, e placed, _ outbox.Metadata) error {
				return errors.Join(s.insert(ctx, tx, e.Order), tt.f(ctx, tx))
			}), tt.name, 1)
			if tt.fine {
				require.NoError(t, err)
				require.Contains(t, s.orders(t), tt.name)
			} else {
				require.Error(t, err)
				require.NotContains(t, s.orders(t), tt.name)
			}
			require.NoError(t, s.deliver(t, consumer(func(ctx context.Context, tx *sql.Tx, e placed, _ outbox.Metadata) error {
				return s.insert(ctx, tx, e.Order)
			}), "after "+tt.name, 1))
			require.Contains(t, s.orders(t), "after "+tt.name)
		})
	}
}

// Many events at once share two connections, in which handlers that fail, leave rows open, or panic stand between
// good ones. Each good event is handled once.
func TestManyHandlersOnTwoConnections(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	pool := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.MaxConns = 2 })
	const n = 120
	var calls atomic.Int64
	cfg := outbox.HandlerConfig{Schema: s.schema}
	c, err := outbox.NewConsumer(pool, nil, s.events, "shop", outbox.ConsumerConfig{HandlerConfig: cfg},
		outboxsql.Handle("MIXED", func(ctx context.Context, tx *sql.Tx, e placed, _ outbox.Metadata) error {
			if err := s.insert(ctx, tx, e.Order); err != nil {
				return err
			}
			switch calls.Add(1) % 5 {
			case 0:
				return errOwn
			case 1:
				panic("panic")
			case 2:
				rows, err := tx.QueryContext(ctx, `SELECT generate_series(1, 1000)`)
				if err == nil {
					rows.Next()
					err = rows.Err()
				}
				return err
			case 3:
				_ = tx.Rollback()
			}
			return nil
		}))
	require.NoError(t, err)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			record, err := s.rec.KafkaRecord(background, placed{fmt.Sprint(i)})
			if err != nil {
				t.Error(err)
				return
			}
			for range 100 {
				if err = c.Deliver(background, record); err == nil {
					return
				}
			}
			t.Error("event", i, err)
		})
	}
	all.Wait()
	require.Len(t, s.orders(t), n)
	require.Len(t, s.handled(t), n)
	require.Zero(t, pool.Stat().AcquiredConns())
}

// Of a batch with an event that fails, the others are handled, in transactions that it is not in.
func TestBatchWithFailingEvent(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	const n = 40
	var mu sync.Mutex
	sizes := map[int]bool{}
	cfg := outbox.HandlerConfig{From: outbox.FromStart, Schema: s.schema, Retry: outbox.RetryPolicy{RetryWait: time.Millisecond, MaxRetries: 1, MaxOutage: -1}}
	w, err := outbox.NewWorker(s.pool, s.events, "shop", outbox.WorkerConfig{HandlerConfig: cfg, PollInterval: 5 * time.Millisecond},
		outboxsql.HandleBatch("BATCH", func(ctx context.Context, tx *sql.Tx, events []outbox.Received[placed]) error {
			mu.Lock()
			sizes[len(events)] = true
			mu.Unlock()
			rows, err := tx.QueryContext(ctx, `SELECT generate_series(1, 1000)`)
			if err != nil {
				return err
			}
			rows.Next()
			if err := errors.Join(rows.Err(), rows.Close()); err != nil {
				return err
			}
			for _, e := range events {
				if err := s.insert(ctx, tx, e.Event.Order); err != nil {
					return err
				}
				if e.Event.Order == "17" {
					_, err := tx.ExecContext(ctx, `SELECT 1/0`)
					return err
				}
			}
			return nil
		}))
	require.NoError(t, err)
	s.place(t, w.Waker(), n)
	testenv.Run(t, w.Run)
	require.Eventually(t, func() bool { return len(s.handled(t)) == n-1 }, testenv.Patience, 5*time.Millisecond)
	require.NotContains(t, s.orders(t), "17")
	require.Len(t, s.orders(t), n-1)
}

// place records that orders 0 to n-1 were placed, in one transaction.
func (s *shop) place(t *testing.T, waker *outbox.Waker, n int) {
	t.Helper()
	var events []outbox.DomainEvent
	for i := range n {
		events = append(events, placed{fmt.Sprint(i)})
	}
	require.NoError(t, outboxsql.InTx(background, s.db, waker, func(tx *sql.Tx) error { return outboxsql.Record(background, tx, s.rec, events...) }))
}

// Handlers that share a transaction leave rows open, and goroutines that go on with theirs. None of it reaches the
// next handler.
func TestLeftOpenInSharedTransaction(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	const n = 50
	var goroutines sync.WaitGroup
	var failed atomic.Int64
	cfg := outbox.HandlerConfig{From: outbox.FromStart, Schema: s.schema}
	untidy := func(ctx context.Context, tx *sql.Tx, e placed, _ outbox.Metadata) error {
		if err := s.insert(ctx, tx, e.Order); err != nil {
			failed.Add(1)
			return err
		}
		began := make(chan struct{})
		goroutines.Go(func() {
			close(began)
			for {
				_, err := tx.ExecContext(background, s.sql(`INSERT INTO {s}.orders SELECT 'late' WHERE false`))
				if errors.Is(err, sql.ErrTxDone) {
					return
				}
			}
		})
		<-began
		rows, err := tx.QueryContext(ctx, `SELECT generate_series(1, 1000)`)
		if err != nil || !rows.Next() {
			failed.Add(1)
			return errors.Join(errOwn, err)
		}
		return rows.Err()
	}
	w, err := outbox.NewWorker(s.pool, s.events, "shop", outbox.WorkerConfig{HandlerConfig: cfg, PollInterval: 5 * time.Millisecond}, outboxsql.Handle("UNTIDY", untidy))
	require.NoError(t, err)
	s.place(t, w.Waker(), n)
	testenv.Run(t, w.Run)
	require.Eventually(t, func() bool { return len(s.handled(t)) == n }, testenv.Patience, 5*time.Millisecond)
	goroutines.Wait()
	require.Len(t, s.orders(t), n)
	require.Zero(t, failed.Load())
}

// A savepoint is that of the handler that has set it: another one, in the same transaction, cannot roll its work back.
func TestSavepointOfAnotherHandler(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for name, statements := range map[string][]string{
		"to":        {`ROLLBACK TO here`},
		"savepoint": {`rollback transaction to savepoint "here"`},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := outbox.HandlerConfig{From: outbox.FromStart, Concurrency: 1, Schema: s.schema, Retry: outbox.RetryPolicy{RetryWait: time.Millisecond, MaxRetries: 1, MaxOutage: -1}}
			w, err := outbox.NewWorker(s.pool, s.events, "shop "+name, outbox.WorkerConfig{HandlerConfig: cfg, PollInterval: 5 * time.Millisecond},
				outboxsql.Handle("SAVED "+name, func(ctx context.Context, tx *sql.Tx, e placed, _ outbox.Metadata) error {
					if !strings.HasPrefix(e.Order, name) {
						return nil
					}
					run := []string{`SAVEPOINT here`}
					if strings.HasSuffix(e.Order, "2") {
						run = statements
					}
					for _, statement := range run {
						if _, err := tx.ExecContext(ctx, statement); err != nil {
							return err
						}
					}
					return s.insert(ctx, tx, e.Order)
				}))
			require.NoError(t, err)
			require.NoError(t, outboxsql.InTx(background, s.db, w.Waker(), func(tx *sql.Tx) error {
				return outboxsql.Record(background, tx, s.rec, placed{name + "1"}, placed{name + "2"}, placed{name + "3"})
			}))
			testenv.Run(t, w.Run)
			require.Eventually(t, func() bool {
				return len(s.column(t, `SELECT 1::text FROM {s}.event_delivery WHERE consumer_group = 'shop `+name+`' AND status = 'DEAD'`)) == 1
			}, testenv.Patience, 5*time.Millisecond)
			require.Contains(t, s.orders(t), name+"1")
			require.NotContains(t, s.orders(t), name+"2")
		})
	}
}
