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

	"github.com/stretchr/testify/require"
)

// many is more calls than a breaker takes trials: a closed one grants them all.
const many = 100

var breakerTests = []struct {
	name string
	// + a call that succeeds, - one that fails, x one that is cancelled (each only
	// if it is allowed), ( a call that begins, ) its failure, . ten seconds pass
	play  string
	want  breakerState
	calls int // that would be allowed now, of many
}{
	{"nothing was called", "", stateClosed, many},
	{"too few calls to judge", "----", stateClosed, many},
	{"five calls are enough", "-----", stateOpen, 0},
	{"half of the calls fail", "+++---", stateOpen, 0},
	{"less than half of the calls fail", "+++--", stateClosed, many},
	{"a success is the fifth call", "---++", stateOpen, 0},
	{"a success is the fifth call, failures are few", "--+++", stateClosed, many},
	{"ten good calls bear four failures", "++++++++++----", stateClosed, many},
	{"ten good calls do not bear five failures", "++++++++++-----", stateOpen, 0},
	{"failures older than ten calls do not count", "--++++++++++----", stateClosed, many},
	{"failures among the last ten calls do", "++--++++++++---", stateClosed, many},
	{"the window moves one call at a time", "--++++++--+++++++++++-----", stateOpen, 0},
	{"cancelled calls do not count as successes", "xxxxx----xxxxx-", stateOpen, 0},
	{"cancelled calls do not count as failures", "xxxxxxxxxx", stateClosed, many},
	{"time alone forgets nothing", "----......-", stateOpen, 0},

	{"still open after 20 s", "-----..", stateOpen, 0},
	{"half-open after 30 s", "-----...", stateHalfOpen, 3},
	{"half-open as long as nobody calls", "-----....................", stateHalfOpen, 3},
	{"calls while it is open are refused", "-----.++++..", stateHalfOpen, 3},
	{"refused calls do not prolong it", "-----.--.--.", stateHalfOpen, 3},

	{"one trial leaves two", "-----...+", stateHalfOpen, 2},
	{"two good trials do not close it", "-----...++", stateHalfOpen, 1},
	{"three good trials close it", "-----...+++", stateClosed, many},
	{"one bad trial opens it again", "-----...-", stateOpen, 0},
	{"the third trial is bad", "-----...++-", stateOpen, 0},
	{"a bad trial opens it for another 30 s", "-----...-..", stateOpen, 0},
	{"half-open again", "-----...-...", stateHalfOpen, 3},
	{"closed at the second attempt", "-----...-...+++", stateClosed, many},
	{"a cancelled trial is given back", "-----...xxxx", stateHalfOpen, 3},
	{"cancelled trials among good ones", "-----...+xx+x", stateHalfOpen, 1},
	{"cancelled trials do not help to close it", "-----...++xx+", stateClosed, many},
	{"trials without an outcome are all taken", "-----...(((+++", stateHalfOpen, 0},
	{"time gives no trial back", "-----...(((......", stateHalfOpen, 0},

	{"closed anew, it has forgotten the failures", "-----...+++----", stateClosed, many},
	{"closed anew, it has forgotten the trials", "-----...+++--+-", stateClosed, many},
	{"closed anew, it judges anew", "-----...+++-----", stateOpen, 0},

	{"calls that were begun before it opened fail later", "(((((-----)))))..", stateOpen, 0},
	{"late failures do not prolong it", "(((-----.).).).", stateHalfOpen, 3},
	{"late failures are no trials", "(((-----...)))", stateHalfOpen, 3},
	{"late failures do not count once it is closed", "(((((-----...+++)))))", stateClosed, many},
	{"late trials do not count once it is closed", "-----...((-...+++))---", stateClosed, many},
	{"late trials do not take up new ones", "-----...((-...)", stateHalfOpen, 3},
}

func TestBreaker(t *testing.T) {
	t.Parallel()
	for _, test := range breakerTests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBreaker(breakerRules(BreakerConfig{}.withDefaults()), func(_, _ breakerState, _ float64) {})
				play(b, test.play)
				require.Equal(t, test.want, b.state(), "%s", b.state())
				require.Equal(t, test.calls, b.allow(many).granted)
			})
		})
	}
}

// play makes calls, one by one, as breakerTests writes them.
func play(b *breaker, calls string) {
	var begun []*permit
	for _, c := range calls {
		switch c {
		case '.':
			time.Sleep(10 * time.Second)
		case '(':
			begun = append(begun, b.allow(1))
		case ')':
			begun[0].report(callFailed)
			begun = begun[1:]
		default:
			b.allow(1).report(outcomes[c])
		}
	}
}

var outcomes = map[rune]callResult{'+': callSucceeded, '-': callFailed, 'x': callCancelled}

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
			b, m := newBreaker(breakerRules(cfg), func(_, _ breakerState, _ float64) {}), &breakerModel{cfg: cfg}
			weights := []string{"++++++++++++++-x.", "+++-", "---+.", "+-x."}
			var played strings.Builder
			for range 200 {
				calls := weights[random.IntN(len(weights))]
				for range random.IntN(30) {
					call := rune(calls[random.IntN(len(calls))])
					played.WriteRune(call)
					play(b, string(call))
					m.play(call)
					require.Equal(t, m.state, b.state(), "seed %d, %+v: %s", seed, cfg, &played)
				}
			}
		})
	}
}

// breakerModel is a breaker of one caller.
type breakerModel struct {
	cfg      BreakerConfig
	state    breakerState
	outcomes string // since the last change of state
	open     int    // in tens of seconds
}

func (m *breakerModel) play(call rune) {
	switch {
	case call == '.' && m.state == stateOpen:
		if m.open++; m.open == 3 {
			m.change(stateHalfOpen)
		}
	case call == '.' || call == 'x' || m.state == stateOpen:
	case m.state == stateHalfOpen && call == '-':
		m.change(stateOpen)
	case m.state == stateHalfOpen:
		if m.outcomes += "+"; len(m.outcomes) == m.cfg.Trials {
			m.change(stateClosed)
		}
	default:
		m.outcomes += string(call)
		last := m.outcomes[max(0, len(m.outcomes)-m.cfg.Window):]
		failed := strings.Count(last, "-")
		if len(last) >= m.cfg.MinCalls && float64(failed)/float64(len(last)) >= m.cfg.FailureRate {
			m.change(stateOpen)
		}
	}
}

func (m *breakerModel) change(to breakerState) { m.state, m.outcomes, m.open = to, "", 0 }

// A batch asks once; what it has not begun when the breaker opens must wait.
func TestBreakerBatch(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBreaker(breakerRules(BreakerConfig{}.withDefaults()), func(_, _ breakerState, _ float64) {})
		batch := b.allow(5000)
		require.Equal(t, 5000, batch.granted)
		for range 4 {
			batch.report(callFailed)
		}
		require.True(t, batch.holds())
		batch.report(callFailed)
		require.Equal(t, stateOpen, b.state())
		require.False(t, batch.holds())
		require.Zero(t, b.allow(5000).granted)

		time.Sleep(b.wait())
		trials := b.allow(5000)
		require.Equal(t, 3, trials.granted)
		require.True(t, trials.holds())
		for range 1000 { // the batch goes on failing
			batch.report(callFailed)
		}
		batch.release()
		require.Equal(t, stateHalfOpen, b.state())
		require.Zero(t, b.allow(1).granted, "release gave back what others have")

		trials.report(callSucceeded)
		trials.release()
		trials.release()
		trials.report(callFailed)
		require.Equal(t, 2, b.allow(5000).granted)
	})
}

// Nobody can close a breaker with more outcomes than calls.
func TestBreakerTooManyOutcomes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBreaker(breakerRules(BreakerConfig{}.withDefaults()), func(_, _ breakerState, _ float64) {})
		for _, n := range []int{0, -1} {
			none := b.allow(n)
			require.Zero(t, none.granted)
			for range many {
				none.report(callFailed)
			}
			require.Equal(t, stateClosed, b.state())
		}
		play(b, "-----...")
		require.Zero(t, b.allow(0).granted)
		trial := b.allow(1)
		require.Equal(t, 1, trial.granted)
		for range many {
			trial.report(callSucceeded)
			trial.report(callCancelled)
		}
		require.Equal(t, 2, b.allow(many).granted)
	})
}

func TestBreakerWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBreaker(breakerRules(BreakerConfig{}.withDefaults()), func(_, _ breakerState, _ float64) {})
		require.Zero(t, b.wait())
		play(b, "-----.")
		require.Equal(t, 20*time.Second, b.wait())
		time.Sleep(b.wait() - 1)
		require.Equal(t, stateOpen, b.state())
		require.Zero(t, b.allow(1).granted)
		time.Sleep(b.wait())
		require.Equal(t, 1, b.allow(1).granted, "not half-open after the time that it said to wait")
		require.Zero(t, b.wait())
	})
	synctest.Test(t, func(t *testing.T) {
		b := newBreaker(breakerRules(BreakerConfig{OpenFor: 1}.withDefaults()), func(_, _ breakerState, _ float64) {})
		play(b, "-----.")
		require.Equal(t, stateHalfOpen, b.state(), "gobreaker takes no Timeout for a minute")
	})
}

// changed is called once for each change, in order, and may ask for the state: gobreaker
// calls its own function under its lock, where asking for the state would hang.
func TestBreakerChanged(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var changes []string
		var b *breaker
		notifying := false
		b = newBreaker(breakerRules(BreakerConfig{}.withDefaults()), func(from, to breakerState, failureRate float64) {
			if to == stateOpen {
				require.InDelta(t, 0.5, failureRate, 0.001, "5 of 10")
			}
			require.False(t, notifying, "called for a change before it had returned from the last one")
			notifying = true
			defer func() { notifying = false }()
			changes = append(changes, fmt.Sprintf("%s to %s", from, to))
			require.Equal(t, to, b.state())
			if to == stateHalfOpen { // the next change comes while changed is running
				play(b, "+++")
				require.Equal(t, stateClosed, b.state())
			}
		})
		play(b, "+++++-----")
		require.Equal(t, []string{"closed to open"}, changes)
		play(b, "...")
		b.wait()
		require.Equal(t, []string{"closed to open", "open to half-open", "half-open to closed"}, changes)
	})
}

// Any number of goroutines call: never more than three are on trial, and the
// changes make a chain.
func TestBreakerRace(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		now, changes := stateClosed, map[breakerState]int{}
		b := newBreaker(breakerRules(BreakerConfig{OpenFor: time.Second}.withDefaults()), func(from, to breakerState, _ float64) {
			require.Equal(t, now, from)
			now = to
			changes[to]++
		})
		var mu sync.Mutex
		onTrial := map[uint64]int{} // calls, by generation
		trial := func(p *permit, calls int) {
			mu.Lock()
			defer mu.Unlock()
			if p.trial {
				onTrial[p.generation] += calls
				require.LessOrEqual(t, onTrial[p.generation], 3)
			}
		}
		var callers sync.WaitGroup
		for seed := range uint64(50) {
			callers.Go(func() {
				random := rand.New(rand.NewPCG(seed, 1))
				for range 500 {
					p := b.allow(random.IntN(20))
					trial(p, p.granted)
					bad := random.IntN(3) == 0
					for n := range p.granted {
						time.Sleep(time.Duration(random.IntN(5)) * time.Millisecond)
						switch {
						case random.IntN(20) == 0 || !p.holds():
							trial(p, n-p.granted)
						case bad:
							p.report(callFailed)
							continue
						default:
							p.report(callSucceeded)
							continue
						}
						p.release()
						break
					}
					time.Sleep(min(b.wait(), time.Duration(random.IntN(2000))*time.Millisecond))
				}
			})
		}
		callers.Wait()
		require.Equal(t, now, b.state())
		for _, state := range []breakerState{stateClosed, stateHalfOpen, stateOpen} {
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
	b := newBreaker(breakerRules(BreakerConfig{Window: 100, MinCalls: 100, FailureRate: 0.07}.withDefaults()), func(_, _ breakerState, _ float64) {})
	play(b, strings.Repeat("-", 7)+strings.Repeat("+", 92))
	require.Equal(t, stateClosed, b.state())
	play(b, "+")
	require.Equal(t, stateOpen, b.state())
}

func TestBreakerAllocs(t *testing.T) {
	// Not parallel: it counts allocations.
	b := newBreaker(breakerRules(BreakerConfig{}.withDefaults()), func(_, _ breakerState, _ float64) {})
	for _, o := range []callResult{callSucceeded, callCancelled, callFailed} { // it opens, and hears of it again and again
		p := b.allow(100_000)
		require.Zero(t, testing.AllocsPerRun(1000, func() { p.report(o) }), "outcome %d", o)
	}
}

// What the breaker costs an event.
func BenchmarkBreaker(b *testing.B) {
	for _, batch := range []int{1, 100, 5000} {
		b.Run(fmt.Sprintf("batch=%d", batch), func(b *testing.B) {
			b.ReportAllocs()
			breaker := newBreaker(breakerRules(BreakerConfig{}.withDefaults()), func(_, _ breakerState, _ float64) {})
			for calls := b.N; calls > 0; calls -= batch {
				p := breaker.allow(min(batch, calls))
				for range p.granted {
					if p.holds() {
						p.report(callSucceeded)
					}
				}
				p.release()
			}
		})
	}
	b.Run("unsettled", func(b *testing.B) { // one in four fails
		b.ReportAllocs()
		breaker := newBreaker(breakerRules(BreakerConfig{}.withDefaults()), func(_, _ breakerState, _ float64) {})
		p := breaker.allow(b.N)
		for n := range b.N {
			if n%4 == 3 {
				p.report(callFailed)
			} else {
				p.report(callSucceeded)
			}
		}
		require.Equal(b, stateClosed, breaker.state())
	})
	b.Run("outage", func(b *testing.B) { // the rest of a batch fails after it opened
		b.ReportAllocs()
		p := newBreaker(breakerRules(BreakerConfig{}.withDefaults()), func(_, _ breakerState, _ float64) {}).allow(b.N)
		for range b.N {
			p.report(callFailed)
		}
	})
	b.Run("parallel", func(b *testing.B) {
		b.ReportAllocs()
		breaker := newBreaker(breakerRules(BreakerConfig{}.withDefaults()), func(_, _ breakerState, _ float64) {})
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				breaker.allow(1).report(callSucceeded)
			}
		})
	})
}
