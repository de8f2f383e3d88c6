package outbox

import (
	"fmt"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/wait"
)

// ConsumerHealth reports the state of a consumer in this process.
type ConsumerHealth struct {
	// Group is the consumer group.
	Group string
	// Live is false if only a restart of the process can help: Run has returned an
	// error.
	Live bool
	// Ready is false if this process does not handle events: see Reasons.
	Ready bool
	// Partitions is how many partitions the group has assigned to it. A member of a
	// group that has more members than partitions holds none, and is ready.
	Partitions int
	// Reasons say why the consumer is not live or not ready.
	Reasons []string
}

// Health reports the state of the consumer without I/O. It is live, but not ready,
// before Run is called and after a clean stop; and while PostgreSQL, fetching from
// Kafka, committing offsets or a dead-letter topic fails, because no restart brings
// these back. An outage ends with the next try that succeeds, or if nothing was tried
// for MaxPollInterval, for example because the partition is with another member.
//
// The package outboxhttp serves this to probes.
func (c *Consumer) Health() ConsumerHealth {
	h := ConsumerHealth{Group: c.cfg.Group, Live: true, Ready: true}
	if m := c.current.Load(); m != nil {
		h.Partitions = len(m.all())
	}
	notReady := func(reason string, args ...any) {
		h.Ready, h.Reasons = false, append(h.Reasons, fmt.Sprintf(reason, args...))
	}
	switch running, since, err := c.state.get(); {
	case err != nil:
		h.Live = false
		notReady("Run has ended: %v", err)
	case !running:
		notReady("it does not run")
	default:
		for _, o := range c.outages.Current() {
			if c.stillTried(o.Outage, since) {
				notReady("%s fails since %v: %v", o.Name, time.Since(o.Since).Round(time.Second), o.Err)
			}
		}
	}
	return h
}

// stillTried reports whether an outage is one of this Run, which began at running,
// and something still waits for its end. Every try ends within MaxPollInterval, or, of a
// dead letter, within deadLetterDelivery, and the next one follows within maxOutagePause.
func (c *Consumer) stillTried(o outage.Outage, running time.Time) bool {
	return !o.Last.Before(running) && time.Since(o.Last) <= max(c.cfg.MaxPollInterval, deadLetterDelivery)+maxOutagePause
}

// runState is what Run records for [Consumer.Health].
type runState struct {
	mu      sync.Mutex
	running bool
	began   time.Time
	err     error // with which the last Run has returned
}

func (s *runState) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running, s.began, s.err = true, time.Now(), nil
}

func (s *runState) end(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running, s.err = false, err
}

func (s *runState) get() (running bool, began time.Time, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.running, s.began, s.err
}

// maxOutagePause is longer than any pause between two tries, see [wait.Backoff].
const maxOutagePause = 2 * wait.MaxBackoff
