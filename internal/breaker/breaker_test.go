package breaker

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

var defaults = Rules{Window: 10, FailureRate: 0.5, OpenFor: 30 * time.Second, Trials: 3}

// with returns the defaults with a change.
func with(change func(*Rules)) Rules {
	rules := defaults
	change(&rules)
	return rules
}

// many is more calls than a breaker takes trials: a closed one grants them all.
const many = 100

var breakerTests = []struct {
	name string
	// + a call that succeeds, - one that fails, x one that is cancelled (each only
	// if it is allowed), ( a call that begins, ) its failure, . ten seconds pass
	play  string
	want  State
	calls int // that would be allowed now, of many
}{
	{"nothing was called", "", Closed, many},
	{"too few calls to judge", "----", Closed, many},
	{"five calls are enough", "-----", Open, 0},
	{"half of the calls fail", "+++---", Open, 0},
	{"less than half of the calls fail", "+++--", Closed, many},
	{"a success is the fifth call", "---++", Open, 0},
	{"a success is the fifth call, failures are few", "--+++", Closed, many},
	{"ten good calls bear four failures", "++++++++++----", Closed, many},
	{"ten good calls do not bear five failures", "++++++++++-----", Open, 0},
	{"failures older than ten calls do not count", "--++++++++++----", Closed, many},
	{"failures among the last ten calls do", "++--++++++++---", Closed, many},
	{"the window moves one call at a time", "--++++++--+++++++++++-----", Open, 0},
	{"cancelled calls do not count as successes", "xxxxx----xxxxx-", Open, 0},
	{"cancelled calls do not count as failures", "xxxxxxxxxx", Closed, many},
	{"time alone forgets nothing", "----......-", Open, 0},

	{"still open after 20 s", "-----..", Open, 0},
	{"half-open after 30 s", "-----...", HalfOpen, 3},
	{"half-open as long as nobody calls", "-----....................", HalfOpen, 3},
	{"calls while it is open are refused", "-----.++++..", HalfOpen, 3},
	{"refused calls do not prolong it", "-----.--.--.", HalfOpen, 3},

	{"one trial leaves two", "-----...+", HalfOpen, 2},
	{"two good trials do not close it", "-----...++", HalfOpen, 1},
	{"three good trials close it", "-----...+++", Closed, many},
	{"one bad trial opens it again", "-----...-", Open, 0},
	{"the third trial is bad", "-----...++-", Open, 0},
	{"a bad trial opens it for another 30 s", "-----...-..", Open, 0},
	{"half-open again", "-----...-...", HalfOpen, 3},
	{"closed at the second attempt", "-----...-...+++", Closed, many},
	{"a cancelled trial is given back", "-----...xxxx", HalfOpen, 3},
	{"cancelled trials among good ones", "-----...+xx+x", HalfOpen, 1},
	{"cancelled trials do not help to close it", "-----...++xx+", Closed, many},
	{"trials without an outcome are all taken", "-----...(((+++", HalfOpen, 0},
	{"time gives no trial back", "-----...(((......", HalfOpen, 0},

	{"closed anew, it has forgotten the failures", "-----...+++----", Closed, many},
	{"closed anew, it has forgotten the trials", "-----...+++--+-", Closed, many},
	{"closed anew, it judges anew", "-----...+++-----", Open, 0},

	{"calls that were begun before it opened fail later", "(((((-----)))))..", Open, 0},
	{"late failures do not prolong it", "(((-----.).).).", HalfOpen, 3},
	{"late failures are no trials", "(((-----...)))", HalfOpen, 3},
	{"late failures do not count once it is closed", "(((((-----...+++)))))", Closed, many},
	{"late trials do not count once it is closed", "-----...((-...+++))---", Closed, many},
	{"late trials do not take up new ones", "-----...((-...)", HalfOpen, 3},
}

func TestBreaker(t *testing.T) {
	t.Parallel()
	for _, test := range breakerTests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := New(defaults, func(_, _ State, _ float64) {})
				play(b, test.play)
				require.Equal(t, test.want, b.State(), "%s", b.State())
				require.Equal(t, test.calls, b.Allow(many).Granted)
			})
		})
	}
}

// play makes calls, one by one, as breakerTests writes them.
func play(b *Breaker, calls string) {
	var begun []*Permit
	for _, c := range calls {
		switch c {
		case '.':
			time.Sleep(10 * time.Second)
		case '(':
			begun = append(begun, b.Allow(1))
		case ')':
			begun[0].Report(Failed)
			begun = begun[1:]
		default:
			b.Allow(1).Report(outcomes[c])
		}
	}
}

var outcomes = map[rune]Outcome{'+': Succeeded, '-': Failed, 'x': Cancelled}

// Whatever happens, the breaker is where a model of it is that keeps all
// outcomes and knows no shortcut.
func TestBreakerModel(t *testing.T) {
	t.Parallel()
	for seed := range uint64(100) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 0))
			cfg := Rules{
				Window: 1 + random.IntN(11), FailureRate: float64(1+random.IntN(10)) / 10, OpenFor: 30 * time.Second, Trials: 1 + random.IntN(4),
			}
			b, m := New(cfg, func(_, _ State, _ float64) {}), &breakerModel{cfg: cfg}
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
	cfg      Rules
	state    State
	outcomes string // since the last change of state
	open     int    // in tens of seconds
}

func (m *breakerModel) play(call rune) {
	switch {
	case call == '.' && m.state == Open:
		if m.open++; m.open == 3 {
			m.change(HalfOpen)
		}
	case call == '.' || call == 'x' || m.state == Open:
	case m.state == HalfOpen && call == '-':
		m.change(Open)
	case m.state == HalfOpen:
		if m.outcomes += "+"; len(m.outcomes) == m.cfg.Trials {
			m.change(Closed)
		}
	default:
		m.outcomes += string(call)
		last := m.outcomes[max(0, len(m.outcomes)-m.cfg.Window):]
		failed := strings.Count(last, "-")
		if 2*len(last) >= m.cfg.Window && float64(failed)/float64(len(last)) >= m.cfg.FailureRate {
			m.change(Open)
		}
	}
}

func (m *breakerModel) change(to State) { m.state, m.outcomes, m.open = to, "", 0 }

// A batch asks once; what it has not begun when the breaker opens must wait.
func TestBreakerBatch(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := New(defaults, func(_, _ State, _ float64) {})
		batch := b.Allow(5000)
		require.Equal(t, 5000, batch.Granted)
		for range 4 {
			batch.Report(Failed)
		}
		require.True(t, batch.Holds())
		batch.Report(Failed)
		require.Equal(t, Open, b.State())
		require.False(t, batch.Holds())
		require.Zero(t, b.Allow(5000).Granted)

		time.Sleep(b.Wait())
		trials := b.Allow(5000)
		require.Equal(t, 3, trials.Granted)
		require.True(t, trials.Holds())
		for range 1000 { // the batch goes on failing
			batch.Report(Failed)
		}
		batch.Release()
		require.Equal(t, HalfOpen, b.State())
		require.Zero(t, b.Allow(1).Granted, "release gave back what others have")

		trials.Report(Succeeded)
		trials.Release()
		trials.Release()
		trials.Report(Failed)
		require.Equal(t, 2, b.Allow(5000).Granted)
	})
}

// A breaker ignores outcomes of more calls than it has granted.
func TestBreakerTooManyOutcomes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := New(defaults, func(_, _ State, _ float64) {})
		for _, n := range []int{0, -1} {
			none := b.Allow(n)
			require.Zero(t, none.Granted)
			for range many {
				none.Report(Failed)
			}
			require.Equal(t, Closed, b.State())
		}
		play(b, "-----...")
		require.Zero(t, b.Allow(0).Granted)
		trial := b.Allow(1)
		require.Equal(t, 1, trial.Granted)
		for range many {
			trial.Report(Succeeded)
			trial.Report(Cancelled)
		}
		require.Equal(t, 2, b.Allow(many).Granted)
	})
}

func TestBreakerWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := New(defaults, func(_, _ State, _ float64) {})
		require.Zero(t, b.Wait())
		play(b, "-----.")
		require.Equal(t, 20*time.Second, b.Wait())
		time.Sleep(b.Wait() - 1)
		require.Equal(t, Open, b.State())
		require.Zero(t, b.Allow(1).Granted)
		time.Sleep(b.Wait())
		require.Equal(t, 1, b.Allow(1).Granted, "not half-open after the time that it said to wait")
		require.Zero(t, b.Wait())
	})
	synctest.Test(t, func(t *testing.T) {
		b := New(with(func(r *Rules) { r.OpenFor = 1 }), func(_, _ State, _ float64) {})
		play(b, "-----.")
		require.Equal(t, HalfOpen, b.State(), "gobreaker takes no Timeout for a minute")
	})
}

func TestBreakerIsTriedNow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := New(defaults, func(_, _ State, _ float64) {})
		b.TryNow()
		require.Equal(t, Closed, b.State())
		late := b.Allow(1)
		play(b, "-----.")
		late.Report(Failed)
		require.Equal(t, Open, b.State(), "gobreaker has made it half-open")
		b.TryNow()
		require.Equal(t, HalfOpen, b.State())
		require.Zero(t, b.Wait())
		b.Allow(1).Report(Failed)
		require.Equal(t, Open, b.State())
		require.Equal(t, defaults.OpenFor, b.Wait())
	})
}

// changed is called once for each change, in order, and may ask for the state: gobreaker
// calls its own function under its lock, where asking for the state would hang.
func TestBreakerChanged(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var changes []string
		var b *Breaker
		notifying := false
		b = New(defaults, func(from, to State, failureRate float64) {
			if to == Open {
				require.InDelta(t, 0.5, failureRate, 0.001, "5 of 10")
			}
			require.False(t, notifying, "called for a change before it had returned from the last one")
			notifying = true
			defer func() { notifying = false }()
			changes = append(changes, fmt.Sprintf("%s to %s", from, to))
			require.Equal(t, to, b.State())
			if to == HalfOpen { // the next change comes while changed is running
				play(b, "+++")
				require.Equal(t, Closed, b.State())
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
		now, changes := Closed, map[State]int{}
		b := New(with(func(r *Rules) { r.OpenFor = time.Second }), func(from, to State, _ float64) {
			require.Equal(t, now, from)
			now = to
			changes[to]++
		})
		var mu sync.Mutex
		onTrial := map[uint64]int{} // calls, by generation
		trial := func(p *Permit, calls int) {
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
							p.Report(Failed)
							continue
						default:
							p.Report(Succeeded)
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
		for _, state := range []State{Closed, HalfOpen, Open} {
			require.Greater(t, changes[state], 10, "%s", state)
		}
		t.Log(changes)
	})
}

// 0.07 * 100 is 7.000000000000001 in floating point.
func TestBreakerExactRate(t *testing.T) {
	t.Parallel()
	b := New(with(func(r *Rules) { r.Window, r.FailureRate = 100, 0.07 }), func(_, _ State, _ float64) {})
	play(b, strings.Repeat("+", 93)+strings.Repeat("-", 6))
	require.Equal(t, Closed, b.State())
	play(b, "-")
	require.Equal(t, Open, b.State())
}

func TestBreakerAllocs(t *testing.T) {
	// Not parallel: it counts allocations.
	b := New(defaults, func(_, _ State, _ float64) {})
	for _, o := range []Outcome{Succeeded, Cancelled, Failed} { // it opens, and hears of it again and again
		p := b.Allow(100_000)
		require.Zero(t, testing.AllocsPerRun(1000, func() { p.Report(o) }), "outcome %d", o)
	}
}

// What the breaker costs an event.
func BenchmarkBreaker(b *testing.B) {
	for _, batch := range []int{1, 100, 5000} {
		b.Run(fmt.Sprintf("batch=%d", batch), func(b *testing.B) {
			b.ReportAllocs()
			breaker := New(defaults, func(_, _ State, _ float64) {})
			for calls := b.N; calls > 0; calls -= batch {
				p := breaker.Allow(min(batch, calls))
				for range p.Granted {
					if p.Holds() {
						p.Report(Succeeded)
					}
				}
				p.Release()
			}
		})
	}
	b.Run("unsettled", func(b *testing.B) { // one in four fails
		b.ReportAllocs()
		breaker := New(defaults, func(_, _ State, _ float64) {})
		p := breaker.Allow(b.N)
		for n := range b.N {
			if n%4 == 3 {
				p.Report(Failed)
			} else {
				p.Report(Succeeded)
			}
		}
		require.Equal(b, Closed, breaker.State())
	})
	b.Run("outage", func(b *testing.B) { // the rest of a batch fails after it opened
		b.ReportAllocs()
		p := New(defaults, func(_, _ State, _ float64) {}).Allow(b.N)
		for range b.N {
			p.Report(Failed)
		}
	})
	b.Run("parallel", func(b *testing.B) {
		b.ReportAllocs()
		breaker := New(defaults, func(_, _ State, _ float64) {})
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				breaker.Allow(1).Report(Succeeded)
			}
		})
	})
}
