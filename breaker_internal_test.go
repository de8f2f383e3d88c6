package outbox

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	breakers "github.com/outboxgo/outbox/internal/breaker"

	"github.com/stretchr/testify/require"
)

// many is more calls than a breaker takes trials: a closed one grants them all.
const many = 100

var breakerTests = []struct {
	name string
	// + a call that succeeds, - one that fails, x one that is cancelled (each only
	// if it is allowed), ( a call that begins, ) its failure, . ten seconds pass
	play  string
	want  breakers.State
	calls int // that would be allowed now, of many
}{
	{"nothing was called", "", breakers.Closed, many},
	{"too few calls to judge", "----", breakers.Closed, many},
	{"five calls are enough", "-----", breakers.Open, 0},
	{"half of the calls fail", "+++---", breakers.Open, 0},
	{"less than half of the calls fail", "+++--", breakers.Closed, many},
	{"a success is the fifth call", "---++", breakers.Open, 0},
	{"a success is the fifth call, failures are few", "--+++", breakers.Closed, many},
	{"ten good calls bear four failures", "++++++++++----", breakers.Closed, many},
	{"ten good calls do not bear five failures", "++++++++++-----", breakers.Open, 0},
	{"failures older than ten calls do not count", "--++++++++++----", breakers.Closed, many},
	{"failures among the last ten calls do", "++--++++++++---", breakers.Closed, many},
	{"the window moves one call at a time", "--++++++--+++++++++++-----", breakers.Open, 0},
	{"cancelled calls do not count as successes", "xxxxx----xxxxx-", breakers.Open, 0},
	{"cancelled calls do not count as failures", "xxxxxxxxxx", breakers.Closed, many},
	{"time alone forgets nothing", "----......-", breakers.Open, 0},

	{"still open after 20 s", "-----..", breakers.Open, 0},
	{"half-open after 30 s", "-----...", breakers.HalfOpen, 3},
	{"half-open as long as nobody calls", "-----....................", breakers.HalfOpen, 3},
	{"calls while it is open are refused", "-----.++++..", breakers.HalfOpen, 3},
	{"refused calls do not prolong it", "-----.--.--.", breakers.HalfOpen, 3},

	{"one trial leaves two", "-----...+", breakers.HalfOpen, 2},
	{"two good trials do not close it", "-----...++", breakers.HalfOpen, 1},
	{"three good trials close it", "-----...+++", breakers.Closed, many},
	{"one bad trial opens it again", "-----...-", breakers.Open, 0},
	{"the third trial is bad", "-----...++-", breakers.Open, 0},
	{"a bad trial opens it for another 30 s", "-----...-..", breakers.Open, 0},
	{"half-open again", "-----...-...", breakers.HalfOpen, 3},
	{"closed at the second attempt", "-----...-...+++", breakers.Closed, many},
	{"a cancelled trial is given back", "-----...xxxx", breakers.HalfOpen, 3},
	{"cancelled trials among good ones", "-----...+xx+x", breakers.HalfOpen, 1},
	{"cancelled trials do not help to close it", "-----...++xx+", breakers.Closed, many},
	{"trials without an outcome are all taken", "-----...(((+++", breakers.HalfOpen, 0},
	{"time gives no trial back", "-----...(((......", breakers.HalfOpen, 0},

	{"closed anew, it has forgotten the failures", "-----...+++----", breakers.Closed, many},
	{"closed anew, it has forgotten the trials", "-----...+++--+-", breakers.Closed, many},
	{"closed anew, it judges anew", "-----...+++-----", breakers.Open, 0},

	{"calls that were begun before it opened fail later", "(((((-----)))))..", breakers.Open, 0},
	{"late failures do not prolong it", "(((-----.).).).", breakers.HalfOpen, 3},
	{"late failures are no trials", "(((-----...)))", breakers.HalfOpen, 3},
	{"late failures do not count once it is closed", "(((((-----...+++)))))", breakers.Closed, many},
	{"late trials do not count once it is closed", "-----...((-...+++))---", breakers.Closed, many},
	{"late trials do not take up new ones", "-----...((-...)", breakers.HalfOpen, 3},
}

func TestBreaker(t *testing.T) {
	t.Parallel()
	for _, test := range breakerTests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := breakers.New(breakers.Rules(BreakerConfig{}.withDefaults()), func(_, _ breakers.State, _ float64) {})
				play(b, test.play)
				require.Equal(t, test.want, b.State(), "%s", b.State())
				require.Equal(t, test.calls, b.Allow(many).Granted)
			})
		})
	}
}

// play makes calls, one by one, as breakerTests writes them.
func play(b *breakers.Breaker, calls string) {
	var begun []*breakers.Permit
	for _, c := range calls {
		switch c {
		case '.':
			time.Sleep(10 * time.Second)
		case '(':
			begun = append(begun, b.Allow(1))
		case ')':
			begun[0].Report(breakers.Failed)
			begun = begun[1:]
		default:
			b.Allow(1).Report(outcomes[c])
		}
	}
}

var outcomes = map[rune]breakers.Outcome{'+': breakers.Succeeded, '-': breakers.Failed, 'x': breakers.Cancelled}

// Whatever happens, the breaker is where a model of it is that keeps all
// outcomes and knows no shortcut.
func TestBreakerModel(t *testing.T) {
	t.Parallel()
	for seed := range uint64(100) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 0))
			cfg := BreakerConfig{
				Window: 4 + random.IntN(8), MinCalls: 1 + random.IntN(4),
				FailureRate: float64(1+random.IntN(10)) / 10, Trials: 1 + random.IntN(4),
			}.withDefaults()
			b, m := breakers.New(breakers.Rules(cfg), func(_, _ breakers.State, _ float64) {}), &breakerModel{cfg: cfg}
			weights := []string{"++++++++++++++-x.", "+++-", "---+.", "+-x."}
			var played strings.Builder
			for range 200 {
				calls := weights[random.IntN(len(weights))]
				for range random.IntN(30) {
					call := rune(calls[random.IntN(len(calls))])
					played.WriteRune(call)
					play(b, string(call))
					m.play(call)
					require.Equal(t, m.state, b.State(), "seed %d, %+v: %s", seed, cfg, &played)
				}
			}
		})
	}
}

// breakerModel is a breaker of one caller.
type breakerModel struct {
	cfg      BreakerConfig
	state    breakers.State
	outcomes string // since the last change of state
	open     int    // in tens of seconds
}

func (m *breakerModel) play(call rune) {
	switch {
	case call == '.' && m.state == breakers.Open:
		if m.open++; m.open == 3 {
			m.change(breakers.HalfOpen)
		}
	case call == '.' || call == 'x' || m.state == breakers.Open:
	case m.state == breakers.HalfOpen && call == '-':
		m.change(breakers.Open)
	case m.state == breakers.HalfOpen:
		if m.outcomes += "+"; len(m.outcomes) == m.cfg.Trials {
			m.change(breakers.Closed)
		}
	default:
		m.outcomes += string(call)
		last := m.outcomes[max(0, len(m.outcomes)-m.cfg.Window):]
		failed := strings.Count(last, "-")
		if len(last) >= m.cfg.MinCalls && float64(failed)/float64(len(last)) >= m.cfg.FailureRate {
			m.change(breakers.Open)
		}
	}
}

func (m *breakerModel) change(to breakers.State) { m.state, m.outcomes, m.open = to, "", 0 }

// A batch asks once; what it has not begun when the breaker opens must wait.
func TestBreakerBatch(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := breakers.New(breakers.Rules(BreakerConfig{}.withDefaults()), func(_, _ breakers.State, _ float64) {})
		batch := b.Allow(5000)
		require.Equal(t, 5000, batch.Granted)
		for range 4 {
			batch.Report(breakers.Failed)
		}
		require.True(t, batch.Holds())
		batch.Report(breakers.Failed)
		require.Equal(t, breakers.Open, b.State())
		require.False(t, batch.Holds())
		require.Zero(t, b.Allow(5000).Granted)

		time.Sleep(b.Wait())
		trials := b.Allow(5000)
		require.Equal(t, 3, trials.Granted)
		require.True(t, trials.Holds())
		for range 1000 { // the batch goes on failing
			batch.Report(breakers.Failed)
		}
		batch.Release()
		require.Equal(t, breakers.HalfOpen, b.State())
		require.Zero(t, b.Allow(1).Granted, "release gave back what others have")

		trials.Report(breakers.Succeeded)
		trials.Release()
		trials.Release()
		trials.Report(breakers.Failed)
		require.Equal(t, 2, b.Allow(5000).Granted)
	})
}

// Nobody can close a breaker with more outcomes than calls.
func TestBreakerTooManyOutcomes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := breakers.New(breakers.Rules(BreakerConfig{}.withDefaults()), func(_, _ breakers.State, _ float64) {})
		for _, n := range []int{0, -1} {
			none := b.Allow(n)
			require.Zero(t, none.Granted)
			for range many {
				none.Report(breakers.Failed)
			}
			require.Equal(t, breakers.Closed, b.State())
		}
		play(b, "-----...")
		require.Zero(t, b.Allow(0).Granted)
		trial := b.Allow(1)
		require.Equal(t, 1, trial.Granted)
		for range many {
			trial.Report(breakers.Succeeded)
			trial.Report(breakers.Cancelled)
		}
		require.Equal(t, 2, b.Allow(many).Granted)
	})
}

func TestBreakerWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := breakers.New(breakers.Rules(BreakerConfig{}.withDefaults()), func(_, _ breakers.State, _ float64) {})
		require.Zero(t, b.Wait())
		play(b, "-----.")
		require.Equal(t, 20*time.Second, b.Wait())
		time.Sleep(b.Wait() - 1)
		require.Equal(t, breakers.Open, b.State())
		require.Zero(t, b.Allow(1).Granted)
		time.Sleep(b.Wait())
		require.Equal(t, 1, b.Allow(1).Granted, "not half-open after the time that it said to wait")
		require.Zero(t, b.Wait())
	})
	synctest.Test(t, func(t *testing.T) {
		b := breakers.New(breakers.Rules(BreakerConfig{OpenFor: 1}.withDefaults()), func(_, _ breakers.State, _ float64) {})
		play(b, "-----.")
		require.Equal(t, breakers.HalfOpen, b.State(), "gobreaker takes no Timeout for a minute")
	})
}

// changed is called once for each change, in order, and may ask for the state: gobreaker
// calls its own function under its lock, where asking for the state would hang.
func TestBreakerChanged(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var changes []string
		var b *breakers.Breaker
		notifying := false
		b = breakers.New(breakers.Rules(BreakerConfig{}.withDefaults()), func(from, to breakers.State, failureRate float64) {
			if to == breakers.Open {
				require.InDelta(t, 0.5, failureRate, 0.001, "5 of 10")
			}
			require.False(t, notifying, "called for a change before it had returned from the last one")
			notifying = true
			defer func() { notifying = false }()
			changes = append(changes, fmt.Sprintf("%s to %s", from, to))
			require.Equal(t, to, b.State())
			if to == breakers.HalfOpen { // the next change comes while changed is running
				play(b, "+++")
				require.Equal(t, breakers.Closed, b.State())
			}
		})
		play(b, "+++++-----")
		require.Equal(t, []string{"closed to open"}, changes)
		play(b, "...")
		b.Wait()
		require.Equal(t, []string{"closed to open", "open to half-open", "half-open to closed"}, changes)
	})
}

// Any number of goroutines call: never more than three are on trial, and the
// changes make a chain.
func TestBreakerRace(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		now, changes := breakers.Closed, map[breakers.State]int{}
		b := breakers.New(breakers.Rules(BreakerConfig{OpenFor: time.Second}.withDefaults()), func(from, to breakers.State, _ float64) {
			require.Equal(t, now, from)
			now = to
			changes[to]++
		})
		var mu sync.Mutex
		onTrial := map[uint64]int{} // calls, by generation
		trial := func(p *breakers.Permit, calls int) {
			mu.Lock()
			defer mu.Unlock()
			if p.Trial {
				onTrial[p.Generation] += calls
				require.LessOrEqual(t, onTrial[p.Generation], 3)
			}
		}
		var callers sync.WaitGroup
		for seed := range uint64(50) {
			callers.Go(func() {
				random := rand.New(rand.NewPCG(seed, 1))
				for range 500 {
					p := b.Allow(random.IntN(20))
					trial(p, p.Granted)
					bad := random.IntN(3) == 0
					for n := range p.Granted {
						time.Sleep(time.Duration(random.IntN(5)) * time.Millisecond)
						switch {
						case random.IntN(20) == 0 || !p.Holds():
							trial(p, n-p.Granted)
						case bad:
							p.Report(breakers.Failed)
							continue
						default:
							p.Report(breakers.Succeeded)
							continue
						}
						p.Release()
						break
					}
					time.Sleep(min(b.Wait(), time.Duration(random.IntN(2000))*time.Millisecond))
				}
			})
		}
		callers.Wait()
		require.Equal(t, now, b.State())
		for _, state := range []breakers.State{breakers.Closed, breakers.HalfOpen, breakers.Open} {
			require.Greater(t, changes[state], 10, "%s", state)
		}
		t.Log(changes)
	})
}

func TestBreakerConfig(t *testing.T) {
	t.Parallel()
	require.Equal(t, BreakerConfig{Window: 10, MinCalls: 5, FailureRate: 0.5, OpenFor: 30 * time.Second, Trials: 3},
		BreakerConfig{}.withDefaults())
	errorOf := func(c BreakerConfig) error { return c.withDefaults().validate(c) }
	require.NoError(t, errorOf(BreakerConfig{}))
	require.NoError(t, errorOf(BreakerConfig{Window: 1, MinCalls: 1, FailureRate: 1, OpenFor: 1, Trials: 1}))

	err := errorOf(BreakerConfig{Window: -1, MinCalls: -2, FailureRate: -0.1, OpenFor: -1, Trials: -1})
	for _, field := range []string{"Window", "MinCalls", "FailureRate", "OpenFor", "Trials"} {
		require.ErrorContains(t, err, "field Breaker."+field+" is -")
	}
	require.ErrorContains(t, errorOf(BreakerConfig{Window: 4}), "field Breaker.Window is 4: must not be below Breaker.MinCalls, 5 by default")
	require.ErrorContains(t, errorOf(BreakerConfig{Window: 4, MinCalls: 6}), "field Breaker.MinCalls is 6: must not be above Breaker.Window, 4")
	require.ErrorContains(t, errorOf(BreakerConfig{MinCalls: 11}), "field Breaker.MinCalls is 11: must not be above Breaker.Window, 10 by default")
	require.ErrorContains(t, errorOf(BreakerConfig{Window: 10_001}), "field Breaker.Window is 10001: at most 10000")
	require.ErrorContains(t, errorOf(BreakerConfig{Trials: 10_001}), "field Breaker.Trials is 10001: at most 10000")
	require.ErrorContains(t, BreakerConfig{}.validate(BreakerConfig{}), "field Breaker.FailureRate is 0")
	for _, rate := range []float64{1.01, math.NaN(), math.Inf(1)} {
		require.ErrorContains(t, errorOf(BreakerConfig{FailureRate: rate}), "field Breaker.FailureRate is ")
	}
}

// 0.07 * 100 is 7.000000000000001 in floating point.
func TestBreakerExactRate(t *testing.T) {
	t.Parallel()
	b := breakers.New(breakers.Rules(BreakerConfig{Window: 100, MinCalls: 100, FailureRate: 0.07}.withDefaults()), func(_, _ breakers.State, _ float64) {})
	play(b, strings.Repeat("-", 7)+strings.Repeat("+", 92))
	require.Equal(t, breakers.Closed, b.State())
	play(b, "+")
	require.Equal(t, breakers.Open, b.State())
}

func TestBreakerAllocs(t *testing.T) {
	// Not parallel: it counts allocations.
	b := breakers.New(breakers.Rules(BreakerConfig{}.withDefaults()), func(_, _ breakers.State, _ float64) {})
	for _, o := range []breakers.Outcome{breakers.Succeeded, breakers.Cancelled, breakers.Failed} { // it opens, and hears of it again and again
		p := b.Allow(100_000)
		require.Zero(t, testing.AllocsPerRun(1000, func() { p.Report(o) }), "outcome %d", o)
	}
}

// What the breaker costs an event.
func BenchmarkBreaker(b *testing.B) {
	for _, batch := range []int{1, 100, 5000} {
		b.Run(fmt.Sprintf("batch=%d", batch), func(b *testing.B) {
			b.ReportAllocs()
			breaker := breakers.New(breakers.Rules(BreakerConfig{}.withDefaults()), func(_, _ breakers.State, _ float64) {})
			for calls := b.N; calls > 0; calls -= batch {
				p := breaker.Allow(min(batch, calls))
				for range p.Granted {
					if p.Holds() {
						p.Report(breakers.Succeeded)
					}
				}
				p.Release()
			}
		})
	}
	b.Run("unsettled", func(b *testing.B) { // one in four fails
		b.ReportAllocs()
		breaker := breakers.New(breakers.Rules(BreakerConfig{}.withDefaults()), func(_, _ breakers.State, _ float64) {})
		p := breaker.Allow(b.N)
		for n := range b.N {
			if n%4 == 3 {
				p.Report(breakers.Failed)
			} else {
				p.Report(breakers.Succeeded)
			}
		}
		require.Equal(b, breakers.Closed, breaker.State())
	})
	b.Run("outage", func(b *testing.B) { // the rest of a batch fails after it opened
		b.ReportAllocs()
		p := breakers.New(breakers.Rules(BreakerConfig{}.withDefaults()), func(_, _ breakers.State, _ float64) {}).Allow(b.N)
		for range b.N {
			p.Report(breakers.Failed)
		}
	})
	b.Run("parallel", func(b *testing.B) {
		b.ReportAllocs()
		breaker := breakers.New(breakers.Rules(BreakerConfig{}.withDefaults()), func(_, _ breakers.State, _ float64) {})
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				breaker.Allow(1).Report(breakers.Succeeded)
			}
		})
	})
}
