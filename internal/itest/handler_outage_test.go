package itest

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// outageBy runs steps through a consumer or a worker, so that a test plays the same outage for both. A step of a
// consumer is a sale of the account's product, and its amount is the number of the step.
type outageBy struct {
	start  func(cfg outbox.HandlerConfig, try func(s step) error)
	record func(steps ...step)
	text   func(sql string) string // {s} is the schema
	health func() []string
}

func (o *outageBy) number(t *testing.T, sql string) (n int) {
	t.Helper()
	_, err := fmt.Sscan(o.text(sql), &n)
	require.NoError(t, err)
	return n
}

// done returns the effects of an account in their order.
func (o *outageBy) done(account string) string {
	return o.text(`SELECT coalesce(string_agg(n::text, ' ' ORDER BY id), '') FROM {s}.effect WHERE account = '` + account + `'`)
}

func (o *outageBy) dead(t *testing.T) int {
	t.Helper()
	return o.number(t, `SELECT count(*)::text FROM {s}.event_delivery WHERE status = 'DEAD'`)
}

const sqlEffect = `INSERT INTO {s}.effect (action, account, n) VALUES ($1, $2, $3)`

// outages returns a worker, or a consumer of one partition. Their handlers have the actions of try, which gets each
// step before its effect is written. "consumer in place" has two partitions, one of them for the account a, which wait
// for retries.
func outages(t *testing.T, by string, actions ...string) *outageBy {
	t.Helper()
	if by == "worker" {
		f := newWorkerFixture(t)
		o := &outageBy{record: f.commit}
		o.text = func(sql string) (text string) {
			require.NoError(t, f.db.QueryRow(background, f.sql(strings.ReplaceAll(sql, "{s}", "{schema}"))).Scan(&text))
			return text
		}
		o.start = func(cfg outbox.HandlerConfig, try func(step) error) {
			cfg.From = outbox.FromStart
			handlers := []outbox.Handler{f.effects("COUNTED", func(s step, _ outbox.Metadata) error { return try(s) })}
			for _, action := range actions {
				handlers = append(handlers, f.effects(action, nil))
			}
			w, _ := f.start(outbox.WorkerConfig{HandlerConfig: cfg, PollInterval: 50 * time.Millisecond}, handlers...)
			o.health = func() []string { return w.Health().Reasons }
		}
		return o
	}
	partitions := int32(1)
	if by == "consumer in place" {
		partitions = 2
	}
	s := newConsumerFixture(t, partitions)
	_, err := s.db.Exec(background, s.sql(`CREATE TABLE {s}.effect (id bigserial, action text, account text, n int)`))
	require.NoError(t, err)
	o := &outageBy{}
	o.text = func(sql string) (text string) {
		require.NoError(t, s.db.QueryRow(background, s.sql(sql)).Scan(&text))
		return text
	}
	o.record = func(steps ...step) {
		var records []*kgo.Record
		for _, one := range steps {
			r := s.saleRecord(uuid.NewString(), fmt.Appendf(nil, `{"product":%q,"amount":%d}`, one.Account, one.N))
			r.Key = []byte(one.Account)
			if one.Account != "a" {
				r.Partition = partitions - 1
			}
			records = append(records, r)
		}
		s.send(t, records...)
	}
	o.start = func(cfg outbox.HandlerConfig, try func(step) error) {
		cfg.From = outbox.FromStart
		write := func(action string, try func(step) error) outbox.Handler {
			h := outbox.Handle(action, func(ctx context.Context, tx pgx.Tx, e sale, _ outbox.Metadata) error {
				if err := try(step{e.Product, e.Amount}); err != nil {
					return err
				}
				_, err := tx.Exec(ctx, s.sql(sqlEffect), action, e.Product, e.Amount)
				return err
			})
			if partitions > 1 {
				return outbox.RetryInPlace(h)
			}
			return h
		}
		handlers := []outbox.Handler{write("COUNTED", try)}
		for _, action := range actions {
			handlers = append(handlers, write(action, func(step) error { return nil }))
		}
		c := s.consumer(t, outbox.ConsumerConfig{HandlerConfig: cfg}, handlers...)
		o.health = func() []string { return c.Health().Reasons }
		testenv.Run(t, c.Run)
	}
	return o
}

// quickRetries use up four attempts within a tenth of a second.
var quickRetries = outbox.RetryPolicy{MaxRetries: 3, RetryWait: 10 * time.Millisecond, MaxRetryWait: 20 * time.Millisecond}

func steps(accounts, each int) (all []step) {
	for n := range each {
		for a := range accounts {
			all = append(all, step{fmt.Sprint("a", a), n + 1})
		}
	}
	return all
}

// While what a handler needs is away, for all of its events, no event is DEAD, however long that is compared with the
// retries. Trials of the breaker used up attempts, and so did the retries of a single event: it was DEAD, and the next
// one of its key had its turn, until all were.
func TestOutageKillsNothing(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct{ accounts, each int }{
		"many keys": {accounts: 30, each: 2}, "one hot key": {accounts: 1, each: 60}, "a storm": {accounts: 300, each: 1},
	} {
		for _, by := range []string{"consumer", "worker"} {
			t.Run(name+" "+by, func(t *testing.T) {
				t.Parallel()
				var down atomic.Bool
				down.Store(true)
				o := outages(t, by)
				o.record(steps(tt.accounts, tt.each)...)
				o.start(outbox.HandlerConfig{Retry: quickRetries}, func(step) error {
					if down.Load() {
						return errDown
					}
					return nil
				})
				<-time.After(8 * time.Second) // the outage is longer than all attempts
				require.Zero(t, o.dead(t), "events are DEAD because of an outage")
				down.Store(false)
				require.Eventually(t, func() bool { return o.number(t, `SELECT count(*)::text FROM {s}.effect`) == tt.accounts*tt.each }, testenv.Patience, 20*time.Millisecond)
				require.Zero(t, o.number(t, `SELECT count(*)::text FROM (SELECT n, row_number() OVER (PARTITION BY account ORDER BY id) AS nth FROM {s}.effect) AS e WHERE n <> nth`), "out of order")
				require.Zero(t, o.dead(t))
			})
		}
	}
}

// Events come one by one in an outage, each after all attempts of the one before it.
func TestOutageUnderATrickle(t *testing.T) {
	t.Parallel()
	for _, by := range []string{"consumer", "worker"} {
		t.Run(by, func(t *testing.T) {
			t.Parallel()
			var down atomic.Bool
			down.Store(true)
			o := outages(t, by)
			o.start(outbox.HandlerConfig{Retry: quickRetries}, func(step) error {
				if down.Load() {
					return errDown
				}
				return nil
			})
			const events = 8
			for n := range events {
				o.record(step{fmt.Sprint("a", n), 1})
				<-time.After(500 * time.Millisecond)
			}
			require.Zero(t, o.dead(t), "events are DEAD because of an outage")
			down.Store(false)
			require.Eventually(t, func() bool { return o.number(t, `SELECT count(*)::text FROM {s}.effect`) == events }, testenv.Patience, 20*time.Millisecond)
		})
	}
}

// Forty events in a row fail for good. Those behind them are handled within seconds, and another action of the
// partition goes on. With the breaker open, one event was tried in half a minute.
func TestRunOfBadEvents(t *testing.T) {
	t.Parallel()
	const bad, good = 40, 100
	for _, by := range []string{"consumer", "worker"} {
		t.Run(by, func(t *testing.T) {
			t.Parallel()
			var mu sync.Mutex
			tried := map[string]int{}
			o := outages(t, by, "NOTED")
			var all []step
			for n := range bad + good {
				account := fmt.Sprint("good ", n)
				if n < bad {
					account = fmt.Sprint("bad ", n)
				}
				all = append(all, step{account, 1})
			}
			o.record(all...)
			began := time.Now()
			o.start(outbox.HandlerConfig{Retry: outbox.RetryPolicy{RetryWait: time.Second}}, func(s step) error {
				if s.Account[0] != 'b' {
					return nil
				}
				mu.Lock()
				tried[s.Account]++
				mu.Unlock()
				time.Sleep(110 * time.Millisecond) // ten of them fail over more than a second
				return errDown
			})
			count := func(action, accounts string) int {
				return o.number(t, `SELECT count(*)::text FROM {s}.effect WHERE action = '`+action+`' AND account LIKE '`+accounts+`'`)
			}
			require.Eventually(t, func() bool { return count("COUNTED", "good %") == good && count("NOTED", "%") == bad+good },
				testenv.Patience/2, 20*time.Millisecond, "good ones behind bad ones, and another action, are not handled")
			t.Logf("handled after %v", time.Since(began))
			next := 0
			require.Eventually(t, func() bool { // good ones go on
				next++
				o.record(step{fmt.Sprint("good later ", next), 1})
				return o.dead(t) == bad
			}, testenv.Patience, 200*time.Millisecond, "bad events in a healthy stream use up their attempts")
			mu.Lock()
			defer mu.Unlock()
			require.Len(t, tried, bad)
		})
	}
}

// What one tenant's events need is away for longer than all attempts take, and the handler says so. The events of other
// tenants are handled at once. Those of the tenant wait, use up no attempt, and are handled in order afterwards.
func TestOutageOfOneTenant(t *testing.T) {
	t.Parallel()
	for _, by := range []string{"consumer", "worker"} {
		t.Run(by, func(t *testing.T) {
			t.Parallel()
			var down atomic.Bool
			down.Store(true)
			o := outages(t, by)
			o.start(outbox.HandlerConfig{Retry: quickRetries}, func(s step) error {
				if s.Account == "a" && down.Load() {
					return outbox.Unavailable(errDown)
				}
				return nil
			})
			const events = 5
			for n := range events {
				o.record(step{"a", n + 1}, step{"b", n + 1})
				<-time.After(500 * time.Millisecond)
			}
			require.Eventually(t, func() bool { return o.done("b") == "1 2 3 4 5" }, time.Second+testenv.Patience/10, 10*time.Millisecond)
			require.Empty(t, o.done("a"))
			require.Equal(t, "unavailable", o.text(`SELECT string_agg(last_error_code, ' ') FROM {s}.event_delivery WHERE last_error_code IS NOT NULL AND failed_at IS NOT NULL`))
			require.Zero(t, o.number(t, `SELECT count(*)::text FROM {s}.event_delivery WHERE status IN ('PENDING', 'PARKED') AND attempt_count > 0`), "no attempt is used up")
			down.Store(false)
			require.Eventually(t, func() bool { return o.done("a") == "1 2 3 4 5" }, testenv.Patience, 20*time.Millisecond)
			require.Zero(t, o.dead(t))
		})
	}
}

// The only event of an idle action fails. It may be an outage, so the event is kept, which row and health say. Once
// others succeed between its attempts, it is a bad event. A single success may lie between two outages.
func TestLoneBadEvent(t *testing.T) {
	t.Parallel()
	for _, by := range []string{"consumer", "worker"} {
		t.Run(by, func(t *testing.T) {
			t.Parallel()
			o := outages(t, by)
			o.record(step{"bad", 1})
			o.start(outbox.HandlerConfig{Retry: quickRetries}, func(s step) error {
				if s.Account == "bad" {
					return errTest
				}
				return nil
			})
			require.Eventually(t, func() bool {
				return o.number(t, `SELECT count(*)::text FROM {s}.event_delivery WHERE last_error_message LIKE 'the attempt does not count, because no other event%no luck'`) == 1
			}, testenv.Patience, 10*time.Millisecond)
			require.Contains(t, strings.Join(o.health(), "; "), "an event of action COUNTED fails and is tried again without using up attempts")
			<-time.After(3 * time.Second) // many times as long as all attempts
			require.Zero(t, o.dead(t))
			n := 0
			require.Eventually(t, func() bool {
				n++
				o.record(step{"good", n})
				return o.dead(t) == 1
			}, testenv.Patience, 20*time.Millisecond)
			require.NotContains(t, o.text(`SELECT last_error_message FROM {s}.event_delivery WHERE status = 'DEAD'`), "does not count")
			require.Equal(t, 4, o.number(t, `SELECT attempt_count::text FROM {s}.event_delivery WHERE status = 'DEAD'`))
			require.Eventually(t, func() bool {
				return o.number(t, `SELECT count(*)::text FROM {s}.event_success WHERE action = 'COUNTED'`) == 1
			}, testenv.Patience, 20*time.Millisecond,
				"other processes can see the success")
		})
	}
}

// What one action needs is away for as long as the test looks. The other action on the same events goes on after a
// few seconds: its partition waited behind the open breaker. The events of the first action are handled in order
// afterwards.
func TestOutageStopsNoOtherAction(t *testing.T) {
	t.Parallel()
	const accounts, each = 6, 10
	for _, by := range []string{"consumer", "worker"} {
		t.Run(by, func(t *testing.T) {
			t.Parallel()
			var down atomic.Bool
			down.Store(true)
			o := outages(t, by, "NOTED")
			count := func(action string) int {
				return o.number(t, `SELECT count(*)::text FROM {s}.effect WHERE action = '`+action+`'`)
			}
			o.record(steps(20, 1)...)
			o.start(outbox.HandlerConfig{Retry: outbox.RetryPolicy{RetryWait: time.Second}}, func(step) error {
				if down.Load() {
					time.Sleep(110 * time.Millisecond)
					return errDown
				}
				return nil
			})
			require.Eventually(t, func() bool {
				return strings.Contains(strings.Join(o.health(), "; "), "the breaker of action COUNTED is ")
			}, testenv.Patience, time.Millisecond)
			var more []step
			for n := range each {
				for a := range accounts {
					more = append(more, step{fmt.Sprint("later ", a), n + 1})
				}
			}
			o.record(more...)
			require.Eventually(t, func() bool { return count("NOTED") == 20+accounts*each }, testenv.Patience, 20*time.Millisecond, "the other action waits")
			require.Zero(t, count("COUNTED"))
			require.Contains(t, strings.Join(o.health(), "; "), "the breaker of action COUNTED is ")
			down.Store(false)
			require.Eventually(t, func() bool { return count("COUNTED") == 20+accounts*each }, testenv.Patience, 20*time.Millisecond)
			for a := range accounts {
				require.Equal(t, "1 2 3 4 5 6 7 8 9 10", o.text(`SELECT string_agg(n::text, ' ' ORDER BY id) FROM {s}.effect WHERE action = 'COUNTED' AND account = 'later `+fmt.Sprint(a)+`'`))
			}
			require.Zero(t, o.dead(t))
		})
	}
}

// A call that takes beyond the end of an outage, and then fails, is no last attempt: the successes that came meanwhile
// say nothing about the time at which it began. The event was DEAD.
func TestCallBeyondOutageKillsNothing(t *testing.T) {
	t.Parallel()
	for _, by := range []string{"consumer", "worker"} {
		t.Run(by, func(t *testing.T) {
			t.Parallel()
			var down, hangs atomic.Bool
			down.Store(true)
			tries, answered := make(chan struct{}, 100), make(chan struct{})
			answer := sync.OnceFunc(func() { close(answered) })
			o := outages(t, by)
			t.Cleanup(answer)
			o.start(outbox.HandlerConfig{Retry: quickRetries}, func(s step) error {
				if s.Account != "a" || !down.Load() {
					return nil
				}
				hung := hangs.Load()
				tries <- struct{}{}
				if hung {
					<-answered
				}
				return errDown
			})
			awaitTry := func() {
				select {
				case <-tries:
				case <-time.After(testenv.Patience):
					require.Fail(t, "the event is not tried again", "%d are DEAD", o.dead(t))
				}
			}
			o.record(step{"a", 1})
			for range quickRetries.MaxRetries + 2 { // its attempts are used up, and it is kept
				awaitTry()
			}
			hangs.Store(true)
			awaitTry()
			o.record(step{"b", 1})
			require.Eventually(t, func() bool { return o.done("b") == "1" }, testenv.Patience, 5*time.Millisecond)
			down.Store(false)
			answer()
			require.Eventually(t, func() bool { return o.done("a") == "1" || o.dead(t) > 0 }, testenv.Patience, 20*time.Millisecond)
			require.Zero(t, o.dead(t), "the event is DEAD because of an outage")
		})
	}
}
