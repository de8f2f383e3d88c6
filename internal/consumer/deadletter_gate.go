package consumer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/kafka"
)

// deadLetterTry is how long a lane waits until Kafka has acknowledged the dead letter of a parked event.
const deadLetterTry = 2 * time.Second

// maxAccepted bounds the dead letters that are remembered because Kafka has acknowledged them too late, and acceptedFor
// how long.
const (
	maxAccepted = 1_000
	acceptedFor = 2 * longestWait
)

// The wait of a delivery whose dead letter Kafka does not have is untriedWait if it was not tried. Otherwise it is
// deadLetterDelivery, because the dead letter may arrive until then. If many deliveries wait for a topic, the waits
// become longer, so that one delivery becomes due in each waitStep. They end after longestWait. An operator who has
// repaired a topic can expect its dead letters in that time.
const (
	untriedWait = 15 * time.Second
	waitStep    = 50 * time.Millisecond
	longestWait = 5 * time.Minute
)

// deadLetterGates keeps dead-letter topics that take nothing from holding the lanes of parked events: while a topic
// takes nothing, one dead letter at a time is tried. The zero value is ready, and safe for concurrent use.
type deadLetterGates struct {
	mu     sync.Mutex
	topics map[string]*deadLetterGate
}

// deadLetterGate is the state of one dead-letter topic. The lock of [deadLetterGates] guards it.
type deadLetterGate struct {
	closed   bool               // the topic has not taken the last dead letter
	sending  map[int64]bool     // the deliveries whose dead letters Kafka has not answered
	accepted map[int64]accepted // deliveries whose dead letters Kafka has acknowledged too late
	lastDue  time.Time          // when the delivery with the longest wait becomes due
}

// accepted is a dead letter that Kafka has acknowledged too late.
type accepted struct {
	place string    // see deadLetters.send
	at    time.Time // when its delivery was given back
}

// gateOf returns the gate of a topic. The caller holds mu.
func (g *deadLetterGates) gateOf(topic string) *deadLetterGate {
	if g.topics == nil {
		g.topics = map[string]*deadLetterGate{}
	}
	if g.topics[topic] == nil {
		g.topics[topic] = &deadLetterGate{sending: map[int64]bool{}, accepted: map[int64]accepted{}}
	}
	return g.topics[topic]
}

// send sends the dead letter of a delivery with produce, and waits for deadLetterTry. It returns
// [delivery.ErrNotTried] if the topic takes nothing and another dead letter is being tried. A dead letter without an
// answer is not sent again until it has one. If Kafka acknowledges it too late, the next call returns nil. An error has
// the wait until the next call, see [handling.WaitOf]. The place is that of produce.
func (g *deadLetterGates) send(ctx context.Context, topic string, d *delivery.Delivery, produce produceFunc) (place string, err error) {
	place, accepted, err := g.enter(topic, d)
	switch {
	case accepted:
		return place, nil
	case err != nil:
		return "", g.later(topic, err, untriedWait)
	}
	if place, err = g.try(ctx, topic, d.ID, produce); err != nil {
		return "", g.later(topic, err, deadLetterDelivery)
	}
	return place, nil
}

// produceFunc sends a dead letter as deadLetters.send does.
type produceFunc = func(context.Context) (place string, err error)

// try is send of a dead letter that has entered. If ctx ends, the try ends with it.
func (g *deadLetterGates) try(ctx context.Context, topic string, id int64, produce produceFunc) (place string, err error) {
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), deadLetterDelivery)
	type result struct {
		place string
		err   error
	}
	answer := make(chan result, 1)
	var givenBack time.Time // guarded by mu
	go func() {
		defer cancel()
		place, err := produce(bounded)
		g.mu.Lock()
		defer g.mu.Unlock()
		g.gateOf(topic).note(id, err, accepted{place, givenBack})
		answer <- result{place, err}
	}()
	timer := time.NewTimer(deadLetterTry)
	defer timer.Stop()
	late := false
	select {
	case a := <-answer:
		return a.place, a.err
	case <-timer.C:
		late = true
	case <-ctx.Done():
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case a := <-answer:
		return a.place, a.err
	default:
	}
	givenBack = time.Now()
	if !late {
		cancel()
		return "", ctx.Err()
	}
	g.gateOf(topic).closed = true
	return "", fmt.Errorf("no answer within %v", deadLetterTry)
}

// enter reports whether Kafka has the dead letter of a delivery. Otherwise the caller sends it, or gets the error.
func (g *deadLetterGates) enter(topic string, d *delivery.Delivery) (place string, accepted bool, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	gate := g.gateOf(topic)
	if place, accepted = gate.takeAccepted(d); accepted {
		return place, true, nil
	}
	if gate.sending[d.ID] || gate.closed && len(gate.sending) > 0 {
		return "", false, delivery.ErrNotTried
	}
	gate.sending[d.ID] = true
	return "", false, nil
}

// takeAccepted reports whether Kafka has acknowledged the dead letter of a delivery too late, and forgets that. A
// delivery that was given back has failed before that. One that was requeued since then has another death.
func (g *deadLetterGate) takeAccepted(d *delivery.Delivery) (place string, ok bool) {
	a, ok := g.accepted[d.ID]
	delete(g.accepted, d.ID)
	failed := d.FirstFailed
	return a.place, ok && time.Since(a.at) < acceptedFor && !failed.IsZero() && failed.Before(a.at.Add(deadLetterDelivery/2))
}

// later adds the wait until the next try to an error.
func (g *deadLetterGates) later(topic string, err error, least time.Duration) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	gate, now := g.gateOf(topic), time.Now()
	wait := min(max(least, gate.lastDue.Add(waitStep).Sub(now)), longestWait)
	gate.lastDue = now.Add(wait)
	return handling.RetryAfter(err, wait)
}

// note notes the answer of Kafka to a dead letter. The time of late is not zero if its delivery was given back before.
func (g *deadLetterGate) note(id int64, err error, late accepted) {
	delete(g.sending, id)
	saysNothing := kafka.RejectionClass(err) != "" || errors.Is(err, errNoMember) || errors.Is(err, context.Canceled)
	if !saysNothing { // about the topic
		if g.closed && err == nil {
			g.lastDue = time.Time{}
		}
		g.closed = err != nil
	}
	if err == nil && !late.at.IsZero() {
		maps.DeleteFunc(g.accepted, func(_ int64, a accepted) bool { return time.Since(a.at) >= acceptedFor })
		if len(g.accepted) >= maxAccepted {
			clear(g.accepted)
		}
		g.accepted[id] = late
	}
}
