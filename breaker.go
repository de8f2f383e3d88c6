package outbox

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/outboxgo/outbox/internal/breaker"

	"github.com/outboxgo/outbox/internal/check"
)

// BreakerConfig tunes the circuit breaker of a [Relay], which sends nothing for a while when Kafka fails. A rejected
// event is no failure. The zero value is ready for production.
type BreakerConfig struct {
	// Window is how many of the last sends count, at most 10,000. The breaker does not open before half of the window
	// is filled. Zero means 10.
	Window int
	// FailureRate is the share of failures that opens the breaker, above 0 and at most 1. Zero means 0.5.
	FailureRate float64
	// OpenFor is the longest time that an open breaker sends nothing. Two successful probes in a row end it earlier.
	// Then the breaker allows three trial sends (or Window, if less), and closes if all succeed. Zero means 30 s.
	OpenFor time.Duration
}

const (
	defaultWindow      = 10
	defaultFailureRate = 0.5
	defaultOpenFor     = 30 * time.Second
	maxTrials          = 3
	maxBreakerCalls    = 10_000
)

func (c BreakerConfig) withDefaults() BreakerConfig {
	c.Window = cmp.Or(c.Window, defaultWindow)
	c.FailureRate = cmp.Or(c.FailureRate, defaultFailureRate)
	c.OpenFor = cmp.Or(c.OpenFor, defaultOpenFor)
	return c
}

// rules returns the configuration as the engine takes it.
func (c BreakerConfig) rules() breaker.Rules {
	return breaker.Rules{Window: c.Window, FailureRate: c.FailureRate, OpenFor: c.OpenFor, Trials: min(c.Window, maxTrials)}
}

// validate checks a configuration with its defaults.
func (c BreakerConfig) validate() error {
	errs := []error{
		check.NotNegative("Breaker.Window", c.Window),
		check.NotAbove("Breaker.Window", c.Window, maxBreakerCalls),
		check.NotNegative("Breaker.OpenFor", c.OpenFor),
	}
	if !(c.FailureRate > 0 && c.FailureRate <= 1) { // nor NaN
		errs = append(errs, fmt.Errorf("field Breaker.FailureRate is %v: must be above 0 and at most 1", c.FailureRate))
	}
	return errors.Join(errs...)
}

// BreakerState is the state of a circuit breaker.
type BreakerState int

const (
	// BreakerClosed lets everything through.
	BreakerClosed BreakerState = iota
	// BreakerHalfOpen lets trial calls through.
	BreakerHalfOpen
	// BreakerOpen lets nothing through.
	BreakerOpen
)

// String returns closed, half-open or open.
func (s BreakerState) String() string { return breaker.State(s).String() }
