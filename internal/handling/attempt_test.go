package handling

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/handled"
	"github.com/outboxgo/outbox/internal/testenv"
)

// play tries a task until it needs no other attempt, as a scheduler does. It returns the last outcome and names all.
func (f *fixture) play(t *Task) (last Outcome, outcomes string) {
	f.t.Helper()
	var all []string
	for {
		o := f.attempts.Try(t, t.Retry.Over(f.processor.Rules.Retry), nil)
		name := []string{"done", "stopped", "interrupted", "postponed", "again", "dead"}[o.Result]
		if o.Result != Stopped {
			require.Equal(f.t, []any{t.Action, t.Meta.Attempt}, []any{o.Action, o.Attempt}, name)
			name += fmt.Sprint(" ", o.Attempt)
		}
		if o.Result == Dead {
			name += ": " + o.Class
		}
		all = append(all, name)
		switch o.Result {
		case Again:
			f.attempts.ReportAgain(t, o)
			t.NoteFailure(o)
			time.Sleep(o.Wait)
			continue
		case Postponed:
			f.attempts.ReportAgain(t, o)
		case Dead:
			f.attempts.ReportDead(t.Meta, "", o)
		case Done, Stopped, Interrupted:
		}
		require.Zero(f.t, f.scheduler.inside, "each call that was entered has been left")
		return o, strings.Join(all, ", ")
	}
}

var attemptTests = []struct {
	name              string
	handler, postgres string // plays, see fixture.handle and fixture.InTx
	policy            RetryPolicy
	putBack           bool
	want              string
	outages           int
}{
	{name: "it goes well", want: "done 1"},
	{name: "it fails twice", handler: "--", want: "again 1, again 2, done 3"},
	{name: "it fails too often", handler: "----", want: "again 1, again 2, again 3, dead 4: handler"},
	{name: "no retries", handler: "-", policy: RetryPolicy{MaxRetries: -1}, want: "dead 1: handler"},
	{name: "one retry", handler: "--", policy: RetryPolicy{MaxRetries: 1}, want: "again 1, dead 2: handler"},
	{name: "as many retries as the error has", handler: "--p", policy: RetryPolicy{RetriesFor: retriesOfPlayed}, want: "again 1, again 2, dead 3: permanent"},
	{name: "no retries for this error", handler: "f", policy: RetryPolicy{RetriesFor: retriesOfPlayed}, want: "dead 1: postgres_53400"},
	{name: "it fails for good", handler: "p", want: "dead 1: permanent"},
	{name: "it fails, then for good", handler: "-p", want: "again 1, dead 2: permanent"},
	{name: "it panics", handler: "!", want: "again 1, done 2"},
	{name: "it ends its goroutine", handler: "xxxx", want: "again 1, again 2, again 3, dead 4: goexit"},
	{name: "it uses up its time", handler: "tttt", want: "again 1, again 2, again 3, dead 4: timeout"},
	{name: "it says when to try again", handler: "rr", want: "again 1, again 2, done 3"},
	{name: "nine conflicts", handler: "444444444", want: "done 1"},
	{name: "ten conflicts", handler: "4444444444", want: "done 1"},
	{name: "eleven conflicts are an attempt", handler: "44444444444", want: "again 1, done 2"},
	{name: "conflicts of all attempts count together", handler: "444-44444444", want: "again 1, again 2, done 3"},
	{name: "a conflict for good", handler: "P", want: "dead 1: postgres_40001"},
	{name: "deadlocks at the commit", postgres: "ddd", want: "done 1"},
	{name: "an outage is no attempt", postgres: "oooooooooooo", want: "done 1", outages: 12},
	{name: "locked notes are no attempt", postgres: "nn", want: "done 1", outages: 2},
	{name: "it fails, and PostgreSQL does", handler: "--", postgres: "+no", want: "again 1, again 2, done 3", outages: 2},
	{name: "a lost connection is its own", postgres: "c", want: "again 1, done 2"},
	{name: "a connection that is lost in an outage", postgres: "co", want: "done 1", outages: 2},
	{name: "it is put back in an outage", postgres: "o", putBack: true, want: "postponed 1", outages: 1},
	{name: "it fails, and is put back", handler: "-", postgres: "+o", putBack: true, want: "again 1, postponed 2", outages: 1},
	{name: "the work ends in it", handler: "s", want: "stopped"},
	{name: "the work ends in a retry", handler: "-s", want: "again 1, stopped"},
}

func retriesOfPlayed(err error) int {
	if errors.Is(err, errPlayed) {
		return 9
	}
	return 0
}

// What becomes of a task, by what its handler and PostgreSQL do.
func TestAttempts(t *testing.T) {
	t.Parallel()
	for _, tt := range attemptTests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, Rules{Retry: tt.policy})
				f.handlers["a"], f.postgres, f.scheduler.putBack = tt.handler, tt.postgres, tt.putBack
				_, got := f.play(&f.arrive("a")[0].Tasks[0])
				require.Equal(t, tt.want, got)
				require.Equal(t, tt.outages, f.scheduler.outages)
				require.Empty(t, f.handlers["a"], "all of the play is over")
				require.Equal(t, strings.Contains(got, "done"), len(f.noted) == 1)
			})
		})
	}
}

// An attempt is not made if the work is to end, and its error does not count if the scheduler says so.
func TestAttemptsEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var calls []string
		f := newFixture(t, Rules{Hooks: Hooks{
			Failed:     func(*envelope.Received, string, error, bool) { calls = append(calls, "failed") },
			Conflicted: func(*envelope.Received, string, error) { calls = append(calls, "conflicted") },
		}})
		task := &f.arrive("a")[0].Tasks[0]
		f.handlers["a"], f.scheduler.lost = "-4", errPlayed
		o := f.attempts.Try(task, RetryPolicy{}, nil)
		require.Equal(t, Outcome{Result: Interrupted, Action: "ACTED", Err: errPlayed}, o)

		f.scheduler.ends = true
		require.Equal(t, Outcome{Result: Stopped}, f.attempts.Try(task, RetryPolicy{}, nil))
		require.Equal(t, []string{"a1: rolled back"}, f.log, "it was not called again")
		require.Empty(t, calls)
	})
}

// A handler without a transaction that has begun before the expiry of its event is called again after it, also where
// its attempt does not count.
func TestAttemptsBegunBeforeTheExpiry(t *testing.T) {
	t.Parallel()
	for play, want := range map[string][]string{"4+": {"a1", "a1"}, "-+": {"a1", "a2"}} {
		synctest.Test(t, func(t *testing.T) {
			var f *fixture
			f = newFixture(t, Rules{}, noTxOf("ACTED", func(ctx context.Context, e played, m *envelope.Received) error { return f.handle(ctx, e, m) }))
			f.handlers["a"] = play
			task := &f.arrive("a")[0].Tasks[0]
			task.Meta.Expires = time.Now().Add(time.Millisecond)
			f.play(task)
			require.Equal(t, want, f.current)
		})
	}
}

// The first attempt that was made with other tasks counts, and is not repeated. A later one is made alone.
func TestAttemptsBefore(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, Rules{Retry: RetryPolicy{MaxRetries: 1}})
		task := &f.arrive("a")[0].Tasks[0]
		o := f.attempts.Try(task, f.processor.Rules.Retry, errPlayed)
		require.Equal(t, []any{Again, 1}, []any{o.Result, o.Attempt})
		task.Meta.Attempt = 2
		o = f.attempts.Try(task, f.processor.Rules.Retry, errPlayed)
		require.Equal(t, []any{Again, true}, []any{o.Result, o.Kept}, "it has not failed before: its first attempt has not returned")
		task.FirstFailed = time.Now()
		require.Empty(t, f.log, "no transaction")
		f.handlers["a"] = "-"
		o = f.attempts.Try(task, f.processor.Rules.Retry, errPlayed)
		require.Equal(t, []any{Dead, 2}, []any{o.Result, o.Attempt})
		require.Equal(t, []string{"a2: rolled back"}, f.log, "it is tried alone: who knows what had succeeded when the other tasks began")
		f.log = nil

		conflict := &pgconn.PgError{Code: "40001"}
		require.Equal(t, Done, f.attempts.Try(task, f.processor.Rules.Retry, conflict).Result, "a conflict is repeated alone")
		require.Equal(t, []string{"a2: committed"}, f.log)

		later := PostponedError(&TaskError{task: *task, events: 1, Certain: true, Err: RetryAfter(errPlayed, time.Minute)})
		o = f.attempts.Try(task, f.processor.Rules.Retry, later.Of(*task))
		require.Equal(t, []any{Postponed, 2, time.Minute}, []any{o.Result, o.Attempt, o.Wait})
		require.Nil(t, PostponedError(&TaskError{task: *task, events: 2, Err: errPlayed}), "whose error it is, is not certain")
	})
}

// A repeat calls no handler, so it says nothing about what the action needs.
func TestRepeatIsNoSuccess(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, Rules{})
		task := &f.arrive("a")[0].Tasks[0]
		require.Equal(t, Done, f.attempts.Try(task, RetryPolicy{}, nil).Result)
		first := time.Now()
		time.Sleep(time.Second)
		require.Equal(t, Done, f.attempts.Try(task, RetryPolicy{}, nil).Result)
		require.False(t, f.attempts.Breakers.SucceededSince("ACTED", first))
		done, err := f.processor.ProcessBatch(t.Context(), []Task{*task}, func(time.Duration) bool { return false })
		require.NoError(t, err)
		require.True(t, done.Repeats.Has(task))
		other := &f.arrive("b")[0].Tasks[0]
		require.Equal(t, Done, f.attempts.Try(other, RetryPolicy{}, nil).Result)
		require.True(t, f.attempts.Breakers.SucceededSince("ACTED", first))
	})
}

// A wait grows from attempt to attempt, but for its random part, a fifth. RetryAfter is exact.
func TestAttemptsWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, Rules{Retry: RetryPolicy{MaxRetries: 9, MaxRetryWait: 5 * time.Second}})
		f.handlers["a"] = "----r"
		began := time.Now()
		_, got := f.play(&f.arrive("a")[0].Tasks[0])
		require.Equal(t, "again 1, again 2, again 3, again 4, again 5, done 6", got)
		require.InDelta(t, (1+2+4+5+7)*time.Second, time.Since(began), float64((1+2+4+5)*time.Second)/5)

		f.handlers["b"] = "r"
		began = time.Now()
		_, got = f.play(&f.arrive("b")[0].Tasks[0])
		require.Equal(t, "again 1, done 2", got)
		require.Equal(t, 7*time.Second, time.Since(began))

		f.handlers["c"], f.scheduler.slept = "4444444444", 0
		f.play(&f.arrive("c")[0].Tasks[0])
		require.Positive(t, f.scheduler.slept)
		require.Less(t, f.scheduler.slept, 4*time.Second, "conflicts wait for a second or two")
	})
}

// Hooks get the number of the attempt that was made.
func TestAttemptsHooks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var heard []string
		note := func(hook string, m *envelope.Received, action string) {
			heard = append(heard, fmt.Sprintf("%s %s %s%d", hook, action, m.Subject, m.Attempt))
		}
		failure := func(hook string) func(*envelope.Received, string, error) {
			return func(m *envelope.Received, action string, err error) {
				require.Error(t, err)
				note(hook, m, action)
			}
		}
		f := newFixture(t, Rules{Retry: RetryPolicy{MaxRetries: 1}, Hooks: Hooks{
			Conflicted: failure("conflicted"),
			Failed: func(m *envelope.Received, action string, err error, retry bool) {
				failure(map[bool]string{true: "retried", false: "failed"}[retry])(m, action, err)
			},
			DeadLettered: func(m *envelope.Received, action, topic string, err error) { failure("dead"+topic)(m, action, err) },
			Handled:      func(m *envelope.Received, action string, _ time.Duration) { note("handled", m, action) },
			Repeated:     func(m *envelope.Received, action string) { note("repeated", m, action) },
			Unknown:      func(m *envelope.Received) { note("unknown", m, "") },
		}})
		items := f.arrive("a", "b")
		f.handlers["a"], f.handlers["b"] = "4-", "--"
		for _, it := range items {
			f.play(&it.Tasks[0])
		}
		f.play(&items[0].Tasks[0])
		f.attempts.ReportUnknown(&items[0].Meta, "")
		require.Equal(t, []string{
			"conflicted ACTED a1", "retried ACTED a1", "handled ACTED a2",
			"retried ACTED b1", "failed ACTED b2", "dead ACTED b2",
			"repeated ACTED a2", "unknown  a1",
		}, heard)

		heard, f.postgres, f.scheduler.putBack = nil, "o", true
		f.play(&f.arrive("c")[0].Tasks[0])
		require.Empty(t, heard, "an outage of PostgreSQL is no failure of the handler")
	})
}

var attemptBreakerTests = []struct {
	name, play string // of one event each: + goes well, - fails, p fails for good, r asks for a later try, u lacks something; , 300 ms pass, . ten seconds
	want       breaker.State
}{
	{"too few events in a row", "-,-,-,,,,", breaker.Closed},
	{"enough, but at once", "------", breaker.Closed},
	{"enough over a second", "-,-,-,-,-", breaker.Open},
	{"a success between them", "-,-,-,+,-,-,-", breaker.Closed},
	{"nine of ten fail", "-,-,-,+-,-,-,+-,-,-,+-,-,-,+", breaker.Closed},
	{"a storm", strings.Repeat("-", 40), breaker.Open},
	{"not quite a storm", strings.Repeat("-", 39), breaker.Closed},
	{"what fails for good says nothing about the action", strings.Repeat("p,", 50), breaker.Closed},
	{"what asks for a later try says nothing about the action", strings.Repeat("r,", 50), breaker.Closed},
	{"and nothing good either", "-,-,-r,p,-", breaker.Open},
	{"what all events lack", "u,u,u,u,u", breaker.Open},
	{"what the events of one tenant lack", strings.Repeat("u,u,+", 50), breaker.Closed},
	{"half-open after a second", "-,-,-,-,-,,,,", breaker.HalfOpen},
	{"a trial that fails is not the last one", "-,-,-,-,-.-", breaker.HalfOpen},
	{"all trials fail", "-,-,-,-,-.--", breaker.Open},
	{"for two seconds", "-,-,-,-,-.--,,,,", breaker.Open},
	{"and half-open then", "-,-,-,-,-.--,,,,,,,", breaker.HalfOpen},
	{"twice as many trials fail", "-,-,-,-,-.--.---", breaker.HalfOpen},
	{"all of them", "-,-,-,-,-.--.----", breaker.Open},
	{"a trial that asks for a later try", "-,-,-,-,-.rprprp", breaker.HalfOpen},
	{"a trial that goes well", "-,-,-,-,-.+", breaker.Closed},
	{"one that goes well behind another one", "-,-,-,-,-.-+", breaker.Closed},
}

// The breaker of an action opens after different events have failed in a row. Trials close it.
func TestAttemptsBreaker(t *testing.T) {
	t.Parallel()
	for _, tt := range attemptBreakerTests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, Rules{Breaker: BreakerRules{Events: 4, Trials: 2}})
				for n, sign := range tt.play {
					if pause, is := map[rune]time.Duration{'.': 10 * time.Second, ',': 300 * time.Millisecond}[sign]; is {
						time.Sleep(pause)
						continue
					}
					name := fmt.Sprint(n)
					f.handlers[name] = string(sign)
					var ok bool
					f.scheduler.trial, ok = f.attempts.Breakers.TryOne("ACTED")
					require.True(t, ok, "of event %d", n)
					o := f.attempts.Try(&f.arrive(name)[0].Tasks[0], f.processor.Rules.Retry, nil)
					require.Equal(t, o.Result == Again && (f.scheduler.trial != nil && sign != 'r' || sign == 'u'), o.Uncounted, "failed trials use up no attempt")
					f.scheduler.trial.Release()
				}
				require.Equal(t, tt.want, stateOf(f.attempts.Breakers, "ACTED"))
			})
		})
	}
}

func stateOf(a *ActionBreakers, action string) breaker.State {
	b := a.of[action]
	b.mu.Lock()
	defer b.unlock()
	return b.now()
}

// Retries of one event count once.
func TestAttemptsBreakerCountsEventsOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, Rules{Retry: RetryPolicy{MaxRetries: 9}, Breaker: BreakerRules{Events: 2}})
		f.handlers["a"] = "--------"
		f.play(&f.arrive("a")[0].Tasks[0])
		require.True(t, f.attempts.Breakers.IsClosed("ACTED"))
	})
}

// Trials run at the same time in a quarter of the slots. Parked events have none while a partition waits for one. The
// time without trials doubles up to OpenFor, and the number of trials up to sixteen times the first one.
func TestActionBreakerTrials(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := &actionBreaker{rules: &BreakerRules{Events: 1, FirstOpenFor: time.Second, OpenFor: 30 * time.Second, Trials: 3}, slots: 2, trials: map[*Trial]struct{}{}, changed: func(breakerChange) {}}
		event := handled.Identity{ID: "1"}
		b.mu.Lock()
		defer b.mu.Unlock()
		b.note(event)
		time.Sleep(time.Second)
		b.note(event)
		var waits []time.Duration
		var trials []int
		for range 8 {
			began := time.Now()
			for _, ok := b.try(false, time.Hour); !ok; _, ok = b.try(false, time.Hour) {
				time.Sleep(time.Second)
			}
			waits = append(waits, time.Since(began))
			require.Len(t, b.trials, 1)
			b.heads = 1
			_, ok := b.try(true, time.Hour)
			require.False(t, ok, "a partition waits for it")
			b.heads = 0
			second, ok := b.try(true, time.Hour)
			require.True(t, ok)
			_, ok = b.try(false, time.Hour)
			require.False(t, ok, "two are under way")
			b.release(second)
			n := 0
			for b.now() == breaker.HalfOpen {
				for trial := range b.trials {
					require.True(t, b.fail(trial))
					n++
				}
				b.try(false, time.Hour)
			}
			trials = append(trials, n)
		}
		const s = time.Second
		require.Equal(t, []time.Duration{s, 2 * s, 4 * s, 8 * s, 16 * s, 30 * s, 30 * s, 30 * s}, waits)
		require.Equal(t, []int{3, 6, 12, 24, 48, 48, 48, 48}, trials)

		time.Sleep(time.Minute)
		first, _ := b.try(false, time.Hour)
		require.NotNil(t, first)
		b.succeed(nil, time.Now())
		require.Equal(t, breaker.HalfOpen, b.now(), "a call that is no trial may have begun before the outage")
		time.Sleep(2 * time.Hour)
		_, ok := b.try(false, time.Hour)
		require.True(t, ok, "a trial whose handler does not return is given up")
		require.False(t, b.fail(first))
		for trial := range b.trials {
			b.succeed(trial, time.Now())
		}
		require.Equal(t, breaker.Closed, b.now())
	})
}

// A failure after the first one counts only if another event of the action has succeeded since the last one that
// counts. The event is tried until MaxOutage.
func TestAttemptsWitness(t *testing.T) {
	t.Parallel()
	const many = 20_000
	for name, tt := range map[string]struct {
		play   string
		policy RetryPolicy
		here   time.Duration // after which another event succeeds in this process, or 0
		others time.Duration // and in another one
		want   string        // what becomes of it
		after  time.Duration // about
	}{
		"others succeed at once":             {play: "-", others: time.Millisecond, want: "dead 4: handler", after: 7 * time.Second},
		"others of this process succeed":     {play: "-", here: time.Millisecond, want: "dead 4: handler", after: 7 * time.Second},
		"others succeed after two minutes":   {play: "-", others: 2 * time.Minute, want: "dead 4: handler", after: 2*time.Minute + 15*time.Second},
		"no other succeeds":                  {play: "-", want: "dead 4: handler", after: 24 * time.Hour},
		"no other succeeds for an hour":      {play: "-", policy: RetryPolicy{MaxOutage: time.Hour}, want: "dead 4: handler", after: time.Hour},
		"without the rule":                   {play: "-", policy: RetryPolicy{MaxOutage: -1}, want: "dead 4: handler", after: 7 * time.Second},
		"no retries":                         {play: "-", policy: RetryPolicy{MaxRetries: -1}, want: "dead 1: handler"},
		"it fails for good":                  {play: "p", want: "dead 1: permanent"},
		"it says when to try again":          {play: "r", want: "dead 4: handler", after: 24 * time.Hour},
		"something is away for it":           {play: "u", others: time.Millisecond, want: "dead 4: unavailable", after: 24 * time.Hour},
		"and it says when to try again":      {play: "U", others: time.Millisecond, want: "dead 4: unavailable", after: 24 * time.Hour},
		"something is away, without retries": {play: "u", policy: RetryPolicy{MaxRetries: -1}, want: "dead 1: unavailable", after: 24 * time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, Rules{Retry: tt.policy})
				f.witnessed, f.handlers["a"] = false, strings.Repeat(tt.play, many)
				began := time.Now()
				task := &f.arrive("a")[0].Tasks[0]
				outcome, uncounted := "", 0
				for outcome == "" {
					if tt.others > 0 && time.Since(began) > tt.others {
						f.witnessed = true
					}
					if tt.here > 0 && time.Since(began) > tt.here {
						f.attempts.Breakers.Succeeded("ACTED", nil, time.Now())
					}
					o := f.attempts.Try(task, task.Retry.Over(f.processor.Rules.Retry), nil)
					if o.Result == Dead {
						outcome = fmt.Sprintf("dead %d: %s", o.Attempt, o.Class)
						break
					}
					require.Equal(t, Again, o.Result)
					task.NoteFailure(o)
					if o.Uncounted {
						uncounted++
						require.LessOrEqual(t, o.Wait, 37*time.Second)
					}
					if o.Kept {
						require.Contains(t, strings.Join(f.attempts.Breakers.Reasons(), ""), "an event of action ACTED fails and is tried again without using up attempts")
						require.Contains(t, o.Message(), "no other event of the action has succeeded")
					}
					time.Sleep(o.Wait)
				}
				require.Equal(t, tt.want, outcome)
				require.InDelta(t, tt.after.Seconds(), time.Since(began).Seconds(), tt.after.Seconds()/4+5*60*btof(tt.after > 10*time.Minute))
				require.Less(t, uncounted, 13_000)
			})
		})
	}
}

// Events succeed between two attempts of an event, again and again, and never between the next two. So it may be one
// outage after the other. The event survives as many of them as it has retries.
func TestOutagesInARow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, Rules{})
		f.handlers["a"] = strings.Repeat("-", 1000)
		var succeeded time.Time
		f.attempts.Witness = func(_ context.Context, _ string, ago time.Duration) (bool, error) {
			return time.Since(succeeded) < ago, nil
		}
		task := &f.arrive("a")[0].Tasks[0]
		try := func() Outcome {
			o := f.attempts.Try(task, f.processor.Rules.Retry, nil)
			if o.Result == Again {
				task.NoteFailure(o)
			}
			return o
		}
		outage := func() {
			t.Helper()
			for began := time.Now(); time.Since(began) < 10*time.Minute; {
				o := try()
				require.Equal(t, Again, o.Result, "attempt %d", o.Attempt)
				time.Sleep(o.Wait)
			}
		}
		for n := range f.processor.Rules.Retry.MaxRetries {
			outage()
			require.Equal(t, n+2, task.Meta.Attempt, "one attempt for each outage")
			succeeded = time.Now()
			time.Sleep(time.Second)
		}
		require.Equal(t, Dead, try().Result)
	})
}

// The waits of an event that fails alone double, up to 30 s or MaxRetryWait. Other processes are asked once for each
// failure after the first one, and not where an event of this process has succeeded.
func TestWaitsOfALoneEvent(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		policy RetryPolicy
		waits  []float64 // seconds
	}{
		{waits: []float64{1, 2, 4, 8, 16, 30, 30}},
		{policy: RetryPolicy{MaxRetryWait: 5 * time.Second}, waits: []float64{1, 2, 4, 5, 5}},
		{policy: RetryPolicy{RetryWait: 40 * time.Second}, waits: []float64{40, 40, 40}},
	} {
		synctest.Test(t, func(t *testing.T) {
			f := newFixture(t, Rules{Retry: tt.policy})
			f.witnessed, f.handlers["a"] = false, strings.Repeat("-", 100)
			task := &f.arrive("a")[0].Tasks[0]
			try := func() Outcome {
				o := f.attempts.Try(task, f.processor.Rules.Retry, nil)
				require.Equal(t, Again, o.Result)
				task.NoteFailure(o)
				return o
			}
			for n, want := range tt.waits {
				o := try()
				require.Equal(t, []any{n > 0, min(n+1, 2), n}, []any{o.Kept, o.Attempt, len(f.asked)})
				require.InDelta(t, want, o.Wait.Seconds(), want/5)
				time.Sleep(time.Duration(want * float64(time.Second)))
			}
			f.attempts.Breakers.Succeeded("ACTED", nil, time.Now())
			require.False(t, try().Kept)
			require.Equal(t, []any{3, len(tt.waits) - 1}, []any{task.Meta.Attempt, len(f.asked)})
		})
	}
}

// Only a failure that counts moves the time after which another event must succeed. Without one it is the time of the
// first failure. An event whose attempts were all lost with their processes is not DEAD at its first failure.
func TestFailuresThatDoNotCount(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, Rules{})
		f.witnessed, f.handlers["a"] = false, "--"
		task := &f.arrive("a")[0].Tasks[0]
		task.Meta.Attempt = 4
		first := time.Now()
		o := f.attempts.Try(task, f.processor.Rules.Retry, nil)
		require.Equal(t, []any{Again, true}, []any{o.Result, o.Kept})
		require.Empty(t, f.asked)
		task.NoteFailure(o)
		time.Sleep(time.Second)
		task.NoteFailure(Outcome{Result: Again, Uncounted: true})
		require.Equal(t, []any{4, first, first}, []any{task.Meta.Attempt, task.FirstFailed, task.witnessAfter()})
		time.Sleep(time.Second)
		task.NoteFailure(Outcome{Result: Again})
		require.Equal(t, []any{5, first, first.Add(2 * time.Second)}, []any{task.Meta.Attempt, task.FirstFailed, task.witnessAfter()})
		f.witnessed = true
		require.Equal(t, Dead, f.attempts.Try(task, f.processor.Rules.Retry, nil).Result)
	})
}

func btof(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// Functions of the host that end their goroutine do not end the worker: handlers, codecs and
// hooks. What they leave undone is the event's failure, or nothing.
func TestAttemptsOutliveGoexit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		log := new(testenv.Buffer)
		exit := func() { runtime.Goexit() }
		f := newFixture(t, Rules{
			Retry: RetryPolicy{MaxRetries: 1, RetriesFor: func(error) int { exit(); return 9 }}, Log: slog.New(slog.NewTextHandler(log, nil)),
			Hooks: Hooks{
				Handled:      func(*envelope.Received, string, time.Duration) { exit() },
				Repeated:     func(*envelope.Received, string) { exit() },
				DeadLettered: func(*envelope.Received, string, string, error) { exit() },
				Unknown:      func(*envelope.Received) { exit() },
				Failed:       func(*envelope.Received, string, error, bool) { exit() },
				Conflicted:   func(*envelope.Received, string, error) { exit() },
			},
		})
		f.handlers["a"], f.handlers["b"], f.handlers["d"] = "-", "xx", "4"
		var outcomes []string
		for _, it := range f.arrive("a", "b", "d", "a") {
			_, got := f.play(&it.Tasks[0])
			outcomes = append(outcomes, got)
		}
		f.attempts.ReportUnknown(&f.arrive("c")[0].Meta, "")
		require.Equal(t, []string{"again 1, done 2", "again 1, dead 2: goexit", "done 1", "done 1"}, outcomes)
		require.Equal(t, []string{"a1: rolled back", "a2: committed", "b1: rolled back", "b2: rolled back", "d1: rolled back", "d1: committed", ": committed"}, f.log)
		for _, hook := range []string{"Handled", "Repeated", "Failed", "Conflicted", "DeadLettered", "Unknown"} {
			require.Contains(t, log.String(), "Hooks."+hook)
		}
		require.Contains(t, log.String(), "RetriesFor")
	})
}

// Slots are given back once, by the caller or by the goroutine that gives the call up. The slots of a later call stay.
func TestHeldSlots(t *testing.T) {
	t.Parallel()
	calls := CallSlots{Calls: NewSlots(1)}
	var held HeldSlots
	held.Release()
	require.True(t, held.Take(t.Context(), calls, false))
	first := held.Call()
	require.Len(t, calls.Calls.slots, 1)
	held.GiveUp(first)
	held.GiveUp(first)
	held.Release()
	require.Empty(t, calls.Calls.slots)
	require.True(t, held.Take(t.Context(), calls, false))
	held.GiveUp(first)
	require.Len(t, calls.Calls.slots, 1, "the slot of the second call")
	held.Release()
	require.Empty(t, calls.Calls.slots)
}
