package itest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
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
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// parkingFixture is a consumerFixture with a journal, which has a row for each effect of an action. The sales of a
// product have its name as their key, and numbers as their amounts.
type parkingFixture struct {
	*consumerFixture
	group string
}

func newParkingFixture(t testing.TB, partitions int32) *parkingFixture {
	t.Helper()
	s := &parkingFixture{newConsumerFixture(t, partitions), "parking-" + uuid.NewString()}
	s.exec(t, `CREATE TABLE {s}.journal (id bigserial, action text, product text, n int)`)
	return s
}

func (s *parkingFixture) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	_, err := s.db.Exec(background, s.sql(sql), args...)
	require.NoError(t, err)
}

// sale returns the n-th sale of a product.
func (s *parkingFixture) sale(product string, n int) *kgo.Record {
	r := s.saleRecord(uuid.NewString(), fmt.Appendf(nil, `{"product":%q,"amount":%d}`, product, n))
	r.Key = []byte(product)
	return r
}

// sold is what handlers and plays know of a sale: "product n".
func sold(e sale) string { return fmt.Sprint(e.Product, " ", e.Amount) }

// executor is a transaction, or a pool.
type executor interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

func (s *parkingFixture) write(ctx context.Context, db executor, action string, e sale) error {
	_, err := db.Exec(ctx, s.sql(`INSERT INTO {s}.journal (action, product, n) VALUES ($1, $2, $3)`), action, e.Product, e.Amount)
	return err
}

// play says what becomes of a sale before its effect is written. Nil: nothing.
type play func(context.Context, pgx.Tx, sale, outbox.Metadata) error

var errPlay = errors.New("not now")

// handler returns a handler that writes the journal, of the form "Handle", "HandleBatch" or "HandleNoTx".
func (s *parkingFixture) handler(form, action string, p play) outbox.Handler {
	one := func(ctx context.Context, tx pgx.Tx, db executor, e sale, m outbox.Metadata) error {
		if p != nil {
			if err := p(ctx, tx, e, m); err != nil {
				return err
			}
		}
		return s.write(ctx, db, action, e)
	}
	switch form {
	case "HandleNoTx":
		return outbox.HandleNoTx(action, func(ctx context.Context, e sale, m outbox.Metadata) error { return one(ctx, nil, s.db, e, m) })
	case "HandleBatch":
		return outbox.HandleBatch(action, func(ctx context.Context, tx pgx.Tx, sales []outbox.Received[sale]) error {
			for _, r := range sales {
				if err := one(ctx, tx, tx, r.Event, r.Metadata); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return outbox.Handle(action, func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error { return one(ctx, tx, tx, e, m) })
}

// config returns the configuration of a member of the fixture's group, which tries soon and often.
func (s *parkingFixture) config(t testing.TB) outbox.ConsumerConfig {
	return outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.schema,
		Retry: outbox.RetryPolicy{MaxRetries: 100_000, RetryWait: 20 * time.Millisecond, MaxRetryWait: 20 * time.Millisecond}, Logger: slog.New(slog.DiscardHandler), From: outbox.FromStart}}
}

// journal returns the numbers of an action's effects on a product, in their order.
func (s *parkingFixture) journal(t testing.TB, action, product string) (numbers []int) {
	t.Helper()
	require.NoError(t, s.db.QueryRow(background, s.sql(`SELECT array_agg(n ORDER BY id) FROM {s}.journal WHERE action = $1 AND product = $2`), action, product).Scan(&numbers))
	return numbers
}

// awaitJournal waits until an action has handled so many sales of a product, and requires that it has all of them in
// order, each once.
func (s *parkingFixture) awaitJournal(t testing.TB, action, product string, upTo int) {
	t.Helper()
	assert.Eventually(t, func() bool { return len(s.journal(t, action, product)) >= upTo }, testenv.Patience, 10*time.Millisecond)
	require.Equal(t, upToN(upTo), s.journal(t, action, product), "%s %s: %s", action, product, s.rowStates(t))
}

func upToN(n int) (numbers []int) {
	for i := range n {
		numbers = append(numbers, i+1)
	}
	return numbers
}

func (s *parkingFixture) rowStates(t testing.TB) (states string) {
	return s.text(t, `SELECT coalesce(string_agg(concat_ws(' ', action, partition_key, record_offset, status), '; ' ORDER BY id), '')
		FROM (SELECT id, action, partition_key, position AS record_offset, status FROM {s}.event_delivery) AS d`)
}

func (s *parkingFixture) text(t testing.TB, sql string, args ...any) (text string) {
	t.Helper()
	require.NoError(t, s.db.QueryRow(background, s.sql(sql), args...).Scan(&text))
	return text
}

// statuses returns how many rows of an action have each status, "DEAD 1 DONE 2" for example.
func (s *parkingFixture) statuses(t testing.TB, action string) string {
	t.Helper()
	return s.text(t, `SELECT coalesce(string_agg(status || ' ' || n, ' ' ORDER BY status), '') FROM (SELECT status, count(*) AS n FROM {s}.event_delivery WHERE action = $1 GROUP BY status) AS c`, action)
}

func (s *parkingFixture) awaitStatuses(t testing.TB, action, want string) {
	t.Helper()
	if !assert.Eventually(t, func() bool { return s.statuses(t, action) == want }, testenv.Patience, 10*time.Millisecond) {
		require.Fail(t, "other statuses", "want %s: %s", want, s.parked(t))
	}
}

// awaitOffset waits until the group has committed an offset of a partition.
func (s *parkingFixture) awaitOffset(t testing.TB, partition int32, offset int64) {
	t.Helper()
	require.Eventually(t, func() bool { return s.committed(t, s.group, partition) == offset }, testenv.Patience, 10*time.Millisecond)
}

// openFailures opens the group's failures for an operator.
func (s *parkingFixture) failure(t testing.TB) (*outboxops.Failures, outboxops.Failure) {
	t.Helper()
	f, err := outboxops.NewFailures(s.db, outboxops.FailuresConfig{Schema: s.schema})
	require.NoError(t, err)
	all, err := f.List(background, outboxops.FailureFilter{Group: s.group, Statuses: []string{outbox.StatusDead}}, outboxops.FailurePage{})
	require.NoError(t, err)
	require.Len(t, all, 1)
	return f, all[0]
}

var operator = outboxops.AuditInfo{Operator: "test", Reason: "test"}

// What fails is parked at once, and what is behind it in its key waits behind it, for this action only. Other keys,
// other actions and offsets go on. In the end everything is handled once, in order.
func TestFailedEventIsParked(t *testing.T) {
	t.Parallel()
	for _, form := range []string{"Handle", "HandleBatch", "HandleNoTx"} {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			s := newParkingFixture(t, 2)
			var open atomic.Bool
			const each = 10
			fails := func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
				if !open.Load() && (sold(e) == "a 3" || sold(e) == "b 1") {
					return errPlay
				}
				return nil
			}
			testenv.Run(t, s.groupConsumer(t, s.group, s.config(t), s.handler(form, "FAILS", fails), s.handler("Handle", "WORKS", nil), s.handler("HandleNoTx", "LOOKS", nil)).Run)
			for n := range each { // two sends, so that some are behind what was parked before
				s.send(t, s.sale("a", n+1), s.sale("b", n+1), s.sale("c", n+1))
			}
			s.awaitOffset(t, 0, 3*each)
			for _, product := range []string{"a", "b", "c"} {
				s.awaitJournal(t, "WORKS", product, each)
				s.awaitJournal(t, "LOOKS", product, each)
			}
			s.awaitJournal(t, "FAILS", "c", each)
			require.Equal(t, upToN(2), s.journal(t, "FAILS", "a"))
			require.Empty(t, s.journal(t, "FAILS", "b"))
			require.Equal(t, "16", s.text(t, `SELECT count(*)::text FROM {s}.event_delivery WHERE status = 'PARKED'`), s.rowStates(t))
			require.Equal(t, "18", s.text(t, `SELECT count(*)::text FROM {s}.event_delivery WHERE action = 'FAILS'`), s.rowStates(t))

			open.Store(true)
			s.send(t, s.sale("a", each+1), s.sale("b", each+1), s.sale("c", each+1))
			for _, product := range []string{"a", "b", "c"} {
				s.awaitJournal(t, "FAILS", product, each+1)
			}
			require.Eventually(t, func() bool {
				return s.text(t, `SELECT count(*)::text FROM {s}.event_delivery WHERE status <> 'DONE'`) == "0"
			}, testenv.Patience, 10*time.Millisecond)
			s.awaitOffset(t, 0, 3*each+3)
		})
	}
}

// A member that is taken for dead, and does not know yet, begins to handle what another member has parked meanwhile,
// and what is behind that. It calls no handler for them.
func TestEventIsParkedThatIsBeingHandled(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	var cable brokenDialer
	var beats heartbeats
	start := func(name string, beat time.Duration, dial func(context.Context, string, string) (net.Conn, error), change func(*outbox.ConsumerConfig), p play, opts ...kgo.Opt) {
		cfg := s.config(t)
		cfg.Retry.RetryWait, cfg.Retry.MaxRetryWait = time.Hour, time.Hour
		change(&cfg)
		opts = append(opts, kgo.ClientID(name), kgo.Dialer(dial), kgo.WithHooks(&beats), kgo.HeartbeatInterval(beat))
		c, err := outbox.NewConsumer(s.db, append(testenv.KafkaOpts(s.brokers), opts...), s.events, s.group, cfg, s.handler("Handle", "COUNTED", p))
		require.NoError(t, err)
		testenv.Run(t, c.Run)
	}
	stuck, goOn := make(chan struct{}), make(chan struct{})
	var called, repeated atomic.Int64
	s.send(t, s.sale("first", 1))
	start("slow", 40*time.Second, cable.dial, func(cfg *outbox.ConsumerConfig) {
		cfg.MaxPollInterval = 10 * time.Minute // so it finds out nothing
		cfg.Hooks.Repeated = func(outbox.Metadata, string) { repeated.Add(1) }
		cfg.Decode = func(r *kgo.Record) (*outbox.Message, error) {
			if r.Offset == 3 {
				close(stuck)
				<-goOn
			}
			return outbox.DecodeCloudEvent(r)
		}
	}, func(context.Context, pgx.Tx, sale, outbox.Metadata) error {
		called.Add(1)
		return nil
	}, kgo.SessionTimeout(5*time.Minute))
	s.awaitOffset(t, 0, 1)
	require.Eventually(t, func() bool { return beats.Load() > 0 }, testenv.Patience, time.Millisecond, "the client sends one soon, and the next after 40 s")
	s.send(t, s.sale("k", 1), s.sale("k", 2), s.sale("other", 1))
	<-stuck
	cable.breakAll()
	s.expel(t, s.group, "slow")
	start("new", 10*time.Second, new(net.Dialer).DialContext, func(*outbox.ConsumerConfig) {}, func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
		if sold(e) == "k 1" {
			return errPlay
		}
		return nil
	})
	s.awaitOffset(t, 0, 4)
	s.awaitJournal(t, "COUNTED", "other", 1)
	require.Equal(t, "COUNTED PENDING 1 handler; COUNTED PARKED 0", s.parked(t))
	close(goOn)
	require.Eventually(t, func() bool { return repeated.Load() == 3 }, testenv.Patience, time.Millisecond, "all of them are with the other member")
	require.EqualValues(t, 1, called.Load(), "only the first")
	require.Empty(t, s.journal(t, "COUNTED", "k"))
	require.Equal(t, "COUNTED PENDING 1 handler; COUNTED PARKED 0", s.parked(t))
	require.Equal(t, []int{1}, s.journal(t, "COUNTED", "other"))
}

// heartbeats counts the heartbeats of a client that were answered.
type heartbeats struct{ atomic.Int64 }

func (h *heartbeats) OnBrokerRead(_ kgo.BrokerMetadata, key int16, _ int, _, _ time.Duration, err error) {
	if key == kmsg.Heartbeat.Int16() && err == nil {
		h.Add(1)
	}
}

// An event is in its transaction when an earlier one of its key is parked, here from another partition, as after a
// change of their number. What handlers do to their transaction must not hide that.
func TestKeyIsBlockedWhileEventIsHandled(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct{ isolation, statement string }{
		"plain":             {},
		"repeatable read":   {isolation: "repeatable read"},
		"serializable":      {isolation: "serializable"},
		"role":              {statement: "SET LOCAL ROLE pg_monitor"},
		"search_path":       {statement: "SET LOCAL search_path = pg_temp"},
		"lock_timeout":      {statement: "SET LOCAL lock_timeout = '1ms'"},
		"statement_timeout": {statement: "SET LOCAL statement_timeout = '300ms'"},
		"repeatable role":   {isolation: "repeatable read", statement: "SET LOCAL ROLE pg_monitor"},
		"function":          {statement: "DO $$ BEGIN PERFORM set_config('role', 'pg_monitor', true); END $$"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newParkingFixture(t, 2)
			testenv.Direct(t)
			db := testenv.Pool(t, func(cfg *pgxpool.Config) {
				if tt.isolation != "" {
					cfg.ConnConfig.RuntimeParams["default_transaction_isolation"] = tt.isolation
				}
			})
			var open, blocked atomic.Bool
			stuck, goOn := make(chan struct{}, 100), make(chan struct{})
			h := outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, _ outbox.Metadata) error {
				if sold(e) == "k 1" && !open.Load() {
					return errPlay
				}
				if err := s.write(ctx, tx, "COUNTED", e); err != nil {
					return err
				}
				if sold(e) == "k 2" && !blocked.Load() {
					stuck <- struct{}{}
					<-goOn
				}
				if tt.statement != "" {
					_, err := tx.Exec(ctx, tt.statement)
					return err
				}
				return nil
			})
			cfg := s.config(t)
			c, err := outbox.NewConsumer(db, testenv.KafkaOpts(s.brokers), s.events, s.group, cfg, h)
			require.NoError(t, err)
			testenv.Run(t, c.Run)
			behind := s.sale("k", 2)
			behind.Partition = 1
			s.send(t, behind)
			<-stuck
			s.send(t, s.sale("k", 1))
			s.awaitOffset(t, 0, 1)
			blocked.Store(true)
			close(goOn)
			s.awaitOffset(t, 1, 1)
			require.Empty(t, s.journal(t, "COUNTED", "k"))
			require.Equal(t, "PARKED", s.text(t, `SELECT status FROM {s}.event_delivery WHERE partition_key = 'k' AND record_partition = 1`))
			open.Store(true)
			s.awaitJournal(t, "COUNTED", "k", 2)
			s.awaitStatuses(t, "COUNTED", "DONE 2")
		})
	}
}

var batchFailures = map[string]func(s *parkingFixture, ctx context.Context, tx pgx.Tx) error{
	"error": func(*parkingFixture, context.Context, pgx.Tx) error { return errPlay },
	"panic": func(*parkingFixture, context.Context, pgx.Tx) error { panic("spilled") },
	"session": func(_ *parkingFixture, ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "SELECT pg_terminate_backend(pg_backend_pid())")
		return err
	},
	"commit": func(s *parkingFixture, ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, s.sql("INSERT INTO {s}.single VALUES (1)"))
		return err
	},
}

// One event of a batch fails. The others are committed in few transactions, and their handlers are not called often.
func TestOneOfBatchFails(t *testing.T) {
	t.Parallel()
	for _, form := range []string{"Handle", "HandleBatch"} {
		for name, fail := range batchFailures {
			for _, at := range []int{1, 58, 100} {
				t.Run(fmt.Sprint(form, " ", name, " ", at), func(t *testing.T) {
					t.Parallel()
					s := newParkingFixture(t, 1)
					s.exec(t, `CREATE TABLE {s}.single (n int UNIQUE DEFERRABLE INITIALLY DEFERRED); INSERT INTO {s}.single VALUES (1)`)
					const n = 100
					var records []*kgo.Record
					for i := range n {
						records = append(records, s.sale(fmt.Sprint("p-", i+1), i+1))
					}
					s.send(t, records...)
					var calls atomic.Int64
					cfg := s.config(t)
					cfg.Retry.MaxRetries = -1
					stop := testenv.Run(t, s.groupConsumer(t, s.group, cfg, s.handler(form, "COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, _ outbox.Metadata) error {
						calls.Add(1)
						if e.Amount == at {
							return fail(s, ctx, tx)
						}
						return nil
					})).Run)
					s.awaitOffset(t, 0, n)
					s.awaitStatuses(t, "COUNTED", "DEAD 1")
					stop()
					require.Equal(t, "99", s.text(t, `SELECT count(DISTINCT n)::text FROM {s}.journal`))
					require.Equal(t, "99", s.text(t, `SELECT count(*)::text FROM {s}.journal`))
					require.LessOrEqual(t, int(calls.Load()), 6*n)
					// Each group of effects that were committed together has a number of its own.
					require.LessOrEqual(t, s.number(t, `SELECT count(DISTINCT xmin::text)::int FROM {s}.journal`), 16)
				})
			}
		}
	}
}

func (s *parkingFixture) number(t testing.TB, sql string) (n int) {
	t.Helper()
	require.NoError(t, s.db.QueryRow(background, s.sql(sql)).Scan(&n))
	return n
}

// After its last attempt, an event is DEAD, and its dead letter is sent. With HoldDead, what is behind it waits for
// an operator.
func TestParkedEventDies(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		hold    bool
		decide  func(*outboxops.Failures, outboxops.FailureID) error
		before  []int // handled before an operator decides
		after   []int
		statues string
	}{
		"goes on":           {before: []int{2, 3}, after: []int{2, 3}, statues: "DEAD 1 DONE 2"},
		"goes on, retried":  {before: []int{2, 3}, after: []int{2, 3, 1}, statues: "DONE 3", decide: func(f *outboxops.Failures, id outboxops.FailureID) error { return f.Retry(background, id, operator) }},
		"held":              {hold: true, statues: "DEAD 1 PARKED 2"},
		"held and retried":  {hold: true, after: []int{1, 2, 3}, statues: "DONE 3", decide: func(f *outboxops.Failures, id outboxops.FailureID) error { return f.Retry(background, id, operator) }},
		"held and resolved": {hold: true, after: []int{2, 3}, statues: "DEAD 1 DONE 2", decide: func(f *outboxops.Failures, id outboxops.FailureID) error { return f.Resolve(background, id, operator) }},
		"held and released": {hold: true, after: []int{2, 3}, statues: "DEAD 1 DONE 2", decide: func(f *outboxops.Failures, id outboxops.FailureID) error { return f.Release(background, id, operator) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newParkingFixture(t, 1)
			var open atomic.Bool
			cfg := s.config(t)
			cfg.Retry.MaxRetries, cfg.HoldDead = 2, tt.hold
			cfg.Retry.MaxOutage = -1
			testenv.Run(t, s.groupConsumer(t, s.group, cfg, s.handler("Handle", "COUNTED", func(_ context.Context, _ pgx.Tx, e sale, m outbox.Metadata) error {
				if sold(e) == "k 1" && !open.Load() {
					return fmt.Errorf("attempt %d", m.Attempt)
				}
				return nil
			})).Run)
			s.send(t, s.sale("k", 1), s.sale("k", 2), s.sale("k", 3))
			h := deadLetterHeaders(s.deadLetters(t, 1)[0])
			require.Equal(t, []string{"3", "COUNTED", "handler", "attempt 3"}, []string{h["dlq_attempts"], h["dlq_action"], h["dlq_error_class"], h["dlq_error"]})
			want := "DEAD 1 PARKED 2"
			if !tt.hold {
				want = "DEAD 1 DONE 2"
			}
			s.awaitStatuses(t, "COUNTED", want)
			require.Equal(t, tt.before, s.journal(t, "COUNTED", "k"))
			open.Store(true)
			f, dead := s.failure(t)
			if tt.decide != nil {
				require.NoError(t, tt.decide(f, dead.ID))
			}
			s.awaitStatuses(t, "COUNTED", tt.statues)
			require.Equal(t, tt.after, s.journal(t, "COUNTED", "k"))
			s.awaitOffset(t, 0, 3)
			s.deadLetters(t, 1)
		})
	}
}

// The policy of a handler goes before RetriesFor, and that before MaxRetries.
func TestRetryPolicies(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	fails := func(context.Context, pgx.Tx, sale, outbox.Metadata) error { return errPlay }
	cfg := s.config(t)
	cfg.Retry.MaxRetries = 1
	cfg.Retry.MaxOutage = -1
	cfg.Retry.RetriesFor = func(error) int { return 2 }
	testenv.Run(t, s.groupConsumer(t, s.group, cfg,
		outbox.WithRetry(s.handler("Handle", "FOUR", fails), outbox.RetryPolicy{MaxRetries: 3, RetryWait: time.Millisecond}),
		outbox.WithRetry(s.handler("HandleNoTx", "ONE", fails), outbox.RetryPolicy{MaxRetries: -1}),
		outbox.RetryInPlace(s.handler("Handle", "THREE IN PLACE", fails)),
		outbox.WithRetry(s.handler("HandleBatch", "THREE", fails), outbox.RetryPolicy{RetryWait: time.Millisecond}),
	).Run)
	s.send(t, s.sale("k", 1))
	attempts := map[string]string{}
	for _, r := range s.deadLetters(t, 4) {
		attempts[deadLetterHeaders(r)["dlq_action"]] = deadLetterHeaders(r)["dlq_attempts"]
	}
	require.Equal(t, map[string]string{"FOUR": "4", "ONE": "1", "THREE IN PLACE": "3", "THREE": "3"}, attempts)

	for _, policy := range []outbox.RetryPolicy{{RetryWait: -1}, {MaxRetryWait: -1}} {
		_, err := outbox.NewConsumer(s.db, testenv.KafkaOpts(s.brokers), s.events, s.group, cfg, outbox.WithRetry(s.handler("Handle", "COUNTED", nil), policy))
		var field *outbox.FieldError
		require.ErrorAs(t, err, &field)
		require.Equal(t, "WithRetry", field.Field)
	}
}

// A retry in place delays its partition. Later events of the partition keep their order, also when
// the event is dead-lettered.
func TestRetryInPlace(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	var open atomic.Bool
	cfg := s.config(t)
	testenv.Run(t, s.groupConsumer(t, s.group, cfg, outbox.RetryInPlace(s.handler("Handle", "COUNTED", func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
		switch {
		case sold(e) == "k 1":
			return outbox.Permanent(errPlay)
		case sold(e) == "j 2" && !open.Load():
			return errPlay
		}
		return nil
	}))).Run)
	var records []*kgo.Record
	for n := range 20 {
		records = append(records, s.sale("k", n+1), s.sale("j", n+1))
	}
	s.send(t, records...)
	require.Eventually(t, func() bool { return s.number(t, `SELECT count(*)::int FROM {s}.journal`) >= 2 }, testenv.Patience, 10*time.Millisecond)
	require.Never(t, func() bool { return s.number(t, `SELECT count(*)::int FROM {s}.journal`) > 2 }, 300*time.Millisecond, 20*time.Millisecond)
	require.LessOrEqual(t, s.committed(t, s.group, 0), int64(3))
	open.Store(true)
	s.awaitOffset(t, 0, 40)
	var got []string
	rows, err := s.db.Query(background, s.sql(`SELECT product || ' ' || n FROM {s}.journal ORDER BY id`))
	require.NoError(t, err)
	got, err = pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	var want []string
	for n := range 20 {
		want = append(want, fmt.Sprint("k ", n+1), fmt.Sprint("j ", n+1))
	}
	require.Equal(t, slices.Delete(want, 0, 1), got)
	s.awaitStatuses(t, "COUNTED", "DEAD 1")
}

// dead returns what an operator sees of the group.
func (s *parkingFixture) dead() outboxops.FailureFilter {
	return outboxops.FailureFilter{Kind: outboxops.KindDelivery, Group: s.group, Statuses: []string{outbox.StatusDead}}
}

var bulk = outboxops.BulkConfig{}

// retryDead has an operator retry all dead deliveries of the group, of which there are n.
func (s *parkingFixture) retryDead(t *testing.T, n int) {
	t.Helper()
	retried, err := s.failures(t).RetryAll(background, s.dead(), bulk, operator)
	require.NoError(t, err)
	require.Equal(t, n, retried)
}
