package itest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// sales sends n sales of a product, of which some are poison.
func (s *consumerFixture) sendSales(t testing.TB, n int, poison map[int]string) {
	t.Helper()
	var records []*kgo.Record
	for i := range n {
		records = append(records, s.saleRecord(uuid.NewString(), fmt.Appendf(nil, `{"product":"p","amount":1,"poison":%q}`, poison[i])))
	}
	s.send(t, records...)
}

// A handler that ends the transaction of a batch and begins another one is found out before the next handler is
// called. A COMMIT of that one committed what was handled between the two without its notes, and so it was handled
// twice.
func TestTwoHandlersEndTransaction(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	h := outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
		sql := e.Poison
		if e.Poison = ""; sql == "" {
			return s.count(ctx, tx, e, m)
		}
		_, err := tx.Exec(ctx, sql)
		return err
	})
	s.sendSales(t, 10, map[int]string{2: "ROLLBACK; BEGIN", 6: "COMMIT"})
	testenv.Run(t, s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Retry: outbox.RetryPolicy{MaxRetries: -1}, From: outbox.FromStart}}, h).Run)
	s.deadLetters(t, 2)
	require.Eventually(t, func() bool { return s.relayFixture.count(t, "event_handled") == 8 }, testenv.Patience, 10*time.Millisecond)
	require.Equal(t, 8, s.counts(t)["p"])
}

// A handler that ends the transaction, however it does that, commits nothing: not its own
// effect, and not the notes of the events that arrived with its own, whose effects are
// still to come. They have theirs, and it is a dead letter that says why.
func TestHandlerEndsTransaction(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	ends := map[string]func(context.Context, pgx.Tx) error{
		"Commit":   func(ctx context.Context, tx pgx.Tx) error { _ = tx.Commit(ctx); return nil },
		"Rollback": func(ctx context.Context, tx pgx.Tx) error { _ = tx.Rollback(ctx); return nil },
	}
	poison := map[int]string{3: "Commit", 27: "Rollback"}
	for i, sql := range []string{"COMMIT", "COMMIT; BEGIN", "ROLLBACK", "ROLLBACK; BEGIN"} {
		ends[sql] = func(ctx context.Context, tx pgx.Tx) error { _, err := tx.Exec(ctx, sql); return err }
		ends["ignored "+sql] = func(ctx context.Context, tx pgx.Tx) error {
			_, _ = tx.Exec(ctx, sql)
			_, _ = tx.Exec(ctx, "BEGIN")
			return nil
		}
		poison[40+i*7], poison[70+i*7] = sql, "ignored "+sql
	}
	h := outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
		how := e.Poison
		if e.Poison = ""; how != "" {
			e.Product = "poison"
		}
		if err := s.count(ctx, tx, e, m); err != nil || how == "" {
			return err
		}
		return ends[how](ctx, tx)
	})
	s.sendSales(t, 100, poison)
	testenv.Run(t, s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Retry: outbox.RetryPolicy{MaxRetries: 1, MaxOutage: -1}, From: outbox.FromStart}}, h).Run)
	for _, r := range s.deadLetters(t, len(poison)) {
		h := deadLetterHeaders(r)
		require.Equal(t, []string{"transaction_ended", "2"}, []string{h["dlq_error_class"], h["dlq_attempts"]}, string(r.Value))
		require.Contains(t, h["dlq_error"], "handler COUNTED: "+outbox.ErrHandlerTx.Error())
	}
	require.Eventually(t, func() bool { return s.counts(t)["p"] == 100-len(poison) }, testenv.Patience, 10*time.Millisecond)
	require.NotContains(t, s.counts(t), "poison")
	require.Equal(t, 100-len(poison), s.relayFixture.count(t, "event_handled"))

	err := s.consumer(t, outbox.ConsumerConfig{}, h).Deliver(background, s.saleRecord(uuid.NewString(), []byte(`{"poison":"Commit"}`)))
	require.ErrorIs(t, err, outbox.ErrHandlerTx)
}

// A handler that leaves the transaction so that others fail in it is the one that failed.
func TestHandlerLeavesTransaction(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	damage := map[string]func(context.Context, pgx.Tx){
		"aborted": func(ctx context.Context, tx pgx.Tx) { _, _ = tx.Exec(ctx, "SELECT 1/0") },
		"open":    func(ctx context.Context, tx pgx.Tx) { _, _ = tx.Query(ctx, "SELECT generate_series(1, 100)") },
	}
	var blamed sync.Map
	h := outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
		if e.Poison != "" {
			damage[e.Poison](ctx, tx)
			return nil
		}
		return s.count(ctx, tx, e, m)
	})
	s.sendSales(t, 20, map[int]string{3: "aborted", 9: "open"})
	testenv.Run(t, s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Retry: outbox.RetryPolicy{MaxRetries: 1, MaxOutage: -1}, Hooks: outbox.ConsumerHooks{
		Failed: func(m outbox.Metadata, _ string, _ error, _ bool) { blamed.Store(m.Kafka.Offset, true) },
	}, From: outbox.FromStart}}, h).Run)
	for i, r := range s.deadLetters(t, 2) {
		require.Contains(t, deadLetterHeaders(r)["dlq_error"], []string{"handler COUNTED has left its transaction aborted", "handler COUNTED has left rows"}[i])
	}
	require.Eventually(t, func() bool { return s.counts(t)["p"] == 18 }, testenv.Patience, 10*time.Millisecond)
	blamed.Range(func(offset, _ any) bool { return assert.Contains(t, []any{int64(3), int64(9)}, offset) })
}

// refund is handled in batches, where a sale is handled alone.
type refund struct {
	Product string `json:"product"`
}

func (refund) OccurredAt() time.Time { return time.Unix(1, 0) }

// The events of a key reach their handlers in order, whichever form these have; events of
// other keys still arrive in batches.
func TestOrderAcrossForms(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1, outbox.Event("test.sale.refunded.v1", "Product", func(e refund) string { return e.Product }))
	var mu sync.Mutex
	last, seen, batches := map[string]int64{}, 0, 0
	see := func(m outbox.Metadata) {
		key := string(m.Kafka.Key)
		assert.Greater(t, m.Kafka.Offset, last[key], "key %s", key)
		last[key] = m.Kafka.Offset
		seen++
	}
	c := s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}},
		outbox.Handle("SOLD", func(_ context.Context, _ pgx.Tx, _ sale, m outbox.Metadata) error {
			mu.Lock()
			defer mu.Unlock()
			see(m)
			return nil
		}),
		outbox.HandleBatch("REFUNDED", func(_ context.Context, _ pgx.Tx, events []outbox.Received[refund]) error {
			mu.Lock()
			defer mu.Unlock()
			batches++
			for _, e := range events {
				see(e.Metadata)
			}
			return nil
		}))
	records := []*kgo.Record{s.saleRecord(uuid.NewString(), oneSale)} // offset 0 has no earlier one
	for i := range 199 {
		r := s.saleRecord(uuid.NewString(), oneSale)
		if r.Key = []byte("p-" + strconv.Itoa(i%50)); i%3 == 0 {
			r.Headers[3].Value = []byte("test.sale.refunded.v1")
		}
		records = append(records, r)
	}
	s.send(t, records[1:]...)
	s.send(t, records[0])
	last["p-0"] = -1
	testenv.Run(t, c.Run)
	require.Eventually(t, func() bool { mu.Lock(); defer mu.Unlock(); return seen == 200 }, testenv.Patience, 10*time.Millisecond)
	require.Less(t, batches, 30, "of 67 events")
}

// Settings that a handler changes in its transaction are not seen by the handlers of other
// events, nor by another handler of the same event: nothing of what one did that saw them is
// committed. The same with Deliver.
func TestSettingsAreNotShared(t *testing.T) {
	t.Parallel()
	change := map[string]string{
		"custom":   "SET LOCAL shop.tenant = 'theirs'",
		"function": "SELECT set_config('shop.tenant', 'theirs', true)",
		"timeout":  "SET LOCAL lock_timeout = '7s'",
		"inside":   "SELECT {s}.act()",
		"":         "SELECT 1",
	}
	for how := range change {
		s := newConsumerFixture(t, 1)
		_, err := s.db.Exec(background, s.sql(`CREATE FUNCTION {s}.act() RETURNS void LANGUAGE plpgsql AS $$ BEGIN PERFORM set_config('search_path', 'pg_catalog', true); END $$`))
		require.NoError(t, err)
		_, err = s.db.Exec(background, s.sql(`CREATE TABLE {s}.seen (settings text)`))
		require.NoError(t, err)
		log := new(testenv.Buffer)
		look := func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, s.sql(`INSERT INTO {s}.seen
				SELECT concat_ws('|', nullif(current_setting('shop.tenant', true), ''), current_setting('lock_timeout'), current_setting('search_path'))`))
			return err
		}
		seen := func() (different int) {
			require.NoError(t, s.db.QueryRow(background, s.sql(`SELECT count(DISTINCT settings) FROM {s}.seen`)).Scan(&different))
			return different
		}
		c := s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Logger: slog.New(slog.NewTextHandler(log, nil)), From: outbox.FromStart}},
			outbox.Handle("CHANGED", func(ctx context.Context, tx pgx.Tx, e sale, _ outbox.Metadata) error {
				if err := look(ctx, tx); err != nil {
					return err
				}
				_, err := tx.Exec(ctx, s.sql(change[e.Poison]))
				return err
			}),
			outbox.Handle("LOOKED", func(ctx context.Context, tx pgx.Tx, _ sale, _ outbox.Metadata) error { return look(ctx, tx) }))
		require.NoError(t, c.Deliver(background, s.saleRecord(uuid.NewString(), fmt.Appendf(nil, `{"product":"p","poison":%q}`, how))))
		require.Equal(t, 1, seen(), "%q with Deliver", how)
		s.sendSales(t, 10, map[int]string{4: how})
		testenv.Run(t, c.Run)
		require.Eventually(t, func() bool { return s.relayFixture.count(t, "event_handled") == 22 }, testenv.Patience, 10*time.Millisecond)
		require.Equal(t, 1, seen(), how)
		want := map[string]string{"": "", "inside": `action="CHANGED or LOOKED"`}
		if _, special := want[how]; !special {
			want[how] = "action=CHANGED\n"
		}
		require.Contains(t, log.String(), want[how])
		require.Equal(t, how != "", strings.Contains(log.String(), "a handler changes settings of its transaction"), "%q: %s", how, log.String())
	}
}

// While PostgreSQL answers the consumer, an error about another server counts as the handler's. So
// does an error of a kind that sounds like an outage. The event is dead-lettered, and the events
// before it do not wait for that.
func TestErrorsOfOthersAreNoOutage(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	elsewhere, err := pgxpool.New(background, "postgres://nobody@127.0.0.1:1/none")
	require.NoError(t, err)
	defer elsewhere.Close()
	var failed sync.Map
	fail := func(ctx context.Context, tx pgx.Tx, how string) error {
		switch how {
		case "elsewhere":
			return elsewhere.Ping(ctx)
		case "limit":
			_, err := tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'temporary files' USING ERRCODE = '53400'; END $$`)
			return err
		case "read-only":
			return &pgconn.PgError{Code: "25006"}
		case "cut":
			_, err := tx.Exec(ctx, `SELECT pg_terminate_backend(pg_backend_pid())`)
			return err
		}
		return nil
	}
	poison := map[int]string{3: "elsewhere", 5: "limit", 7: "read-only", 8: "cut"}
	s.sendSales(t, 10, poison)
	testenv.Run(t, s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Hooks: outbox.ConsumerHooks{
		Failed: func(m outbox.Metadata, _ string, _ error, _ bool) {
			if _, again := failed.LoadOrStore(m.Kafka.Offset, true); !again {
				done := 0 // poison before it
				for at := range poison {
					if int64(at) < m.Kafka.Offset {
						done++
					}
				}
				assert.Equal(t, int(m.Kafka.Offset)-done, s.counts(t)["p"], "those before it are committed")
			}
		},
	}, From: outbox.FromStart, Retry: outbox.RetryPolicy{MaxOutage: -1}}}, outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
		if e.Poison != "" {
			return fail(ctx, tx, e.Poison)
		}
		return s.count(ctx, tx, e, m)
	})).Run)
	for _, r := range s.deadLetters(t, 4) {
		require.Equal(t, "4", deadLetterHeaders(r)["dlq_attempts"])
	}
	require.Eventually(t, func() bool { return s.counts(t)["p"] == 6 }, testenv.Patience, 10*time.Millisecond)
}

// While the consumer cannot mark events as handled, events wait. In one case the table is locked,
// and a timeout of the connection ends each statement; in the other the table is missing. No
// attempt is counted, no event is dead-lettered, and the log says so once.
func TestNotesCannotBeMade(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // statement_timeout of the session
	for name, block := range map[string]func(*testing.T, *consumerFixture) (unblock func()){
		"locked": func(t *testing.T, s *consumerFixture) func() {
			tx, err := s.db.Begin(background)
			require.NoError(t, err)
			_, err = tx.Exec(background, s.sql(`LOCK TABLE {s}.event_handled`))
			require.NoError(t, err)
			return func() { require.NoError(t, tx.Rollback(background)) }
		},
		"missing": func(t *testing.T, s *consumerFixture) func() {
			_, err := s.db.Exec(background, s.sql(`ALTER TABLE {s}.event_handled RENAME TO away`))
			require.NoError(t, err)
			return func() {
				_, err := s.db.Exec(background, s.sql(`ALTER TABLE {s}.away RENAME TO event_handled`))
				require.NoError(t, err)
			}
		},
	} {
		s, log := newConsumerFixture(t, 1), new(testenv.Buffer)
		db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["statement_timeout"] = "100" })
		group := "g-" + s.topic
		cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Retry: outbox.RetryPolicy{RetryWait: time.Millisecond},
			Logger: slog.New(slog.NewTextHandler(log, nil)), Hooks: outbox.ConsumerHooks{
				Failed:       func(_ outbox.Metadata, _ string, err error, _ bool) { assert.NoError(t, err, name) },
				DeadLettered: func(_ outbox.Metadata, _, _ string, err error) { assert.NoError(t, err, name) },
			}, From: outbox.FromStart}}
		c, err := outbox.NewConsumer(db, testenv.KafkaOpts(s.brokers), s.events, group, cfg, outbox.Handle("COUNTED", s.count))
		require.NoError(t, err)
		s.sendSales(t, 1, nil)
		testenv.Run(t, c.Run)
		require.Eventually(t, func() bool { return s.counts(t)["p"] == 1 }, testenv.Patience, 10*time.Millisecond)
		unblock := block(t, s)
		s.sendSales(t, 10, nil)
		require.Eventually(t, func() bool { return strings.Contains(log.String(), "PostgreSQL fails") }, testenv.Patience, 10*time.Millisecond, name)
		time.Sleep(time.Second) // for ten tries
		require.False(t, c.Health().Works, name)
		unblock()
		require.Eventually(t, func() bool { return s.counts(t)["p"] == 11 }, testenv.Patience, 10*time.Millisecond, name)
		require.Eventually(t, func() bool { return strings.Contains(log.String(), "PostgreSQL works again") }, testenv.Patience, 10*time.Millisecond)
		require.Equal(t, 1, strings.Count(log.String(), "PostgreSQL fails"), log.String())
		require.NotContains(t, log.String(), "dead-letter")
	}
}

// A handler may call runtime.Goexit, as require does in a test: it has failed, and the worker
// goes on with the others.
func TestHandlerEndsGoroutine(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	exit := func(e sale) {
		if e.Poison == "exit" {
			runtime.Goexit()
		}
	}
	c := s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Retry: outbox.RetryPolicy{MaxOutage: -1}}},
		outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
			exit(e)
			return s.count(ctx, tx, e, m)
		}),
		outbox.HandleNoTx("SEEN", func(_ context.Context, e sale, _ outbox.Metadata) error { exit(e); return nil }))
	s.sendSales(t, 10, map[int]string{4: "exit"})
	stop := testenv.Run(t, c.Run)
	var actions []string
	for _, r := range s.deadLetters(t, 2) {
		h := deadLetterHeaders(r)
		require.Equal(t, []string{"goexit", "4"}, []string{h["dlq_error_class"], h["dlq_attempts"]})
		require.Contains(t, h["dlq_error"], "has ended its goroutine")
		actions = append(actions, h["dlq_action"])
	}
	require.ElementsMatch(t, []string{"COUNTED", "SEEN"}, actions)
	require.Eventually(t, func() bool { return s.counts(t)["p"] == 9 }, testenv.Patience, 10*time.Millisecond)
	require.ErrorContains(t, c.Deliver(background, s.saleRecord(uuid.NewString(), []byte(`{"poison":"exit"}`))), "handler COUNTED: call has ended its goroutine")
	stop()
	require.Zero(t, s.db.Stat().AcquiredConns())
}

// An event that arrives alone runs its handler once for each attempt, and each failure
// reaches the hook.
func TestAttemptsOfASingleEvent(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		err  error
		want int32
	}{{errors.New("not today"), 4}, {outbox.Permanent(errors.New("never")), 1}} {
		for name, form := range map[string]func(func() error) outbox.Handler{
			"Handle": func(f func() error) outbox.Handler {
				return outbox.Handle("COUNTED", func(context.Context, pgx.Tx, sale, outbox.Metadata) error { return f() })
			},
			"HandleBatch": func(f func() error) outbox.Handler {
				return outbox.HandleBatch("COUNTED", func(context.Context, pgx.Tx, []outbox.Received[sale]) error { return f() })
			},
			"HandleNoTx": func(f func() error) outbox.Handler {
				return outbox.HandleNoTx("COUNTED", func(context.Context, sale, outbox.Metadata) error { return f() })
			},
		} {
			s := newConsumerFixture(t, 1)
			var calls, failed, dead atomic.Int32
			cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Hooks: outbox.ConsumerHooks{
				Failed:       func(m outbox.Metadata, _ string, _ error, _ bool) { assert.EqualValues(t, failed.Add(1), m.Attempt) },
				DeadLettered: func(outbox.Metadata, string, string, error) { dead.Add(1) },
			}, From: outbox.FromStart, Retry: outbox.RetryPolicy{MaxOutage: -1}}}
			s.sendSales(t, 1, nil)
			testenv.Run(t, s.consumer(t, cfg, form(func() error { calls.Add(1); return tt.err })).Run)
			require.Eventually(t, func() bool { return dead.Load() == 1 }, testenv.Patience, 10*time.Millisecond)
			require.Equal(t, []int32{tt.want, tt.want}, []int32{calls.Load(), failed.Load()}, name)
		}
	}
}
