package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/lease"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
)

// Kafka, topics and partitions fail and recover at random, records are rejected, answers
// come late or get lost, and the relay stops and loses its lease at any moment. By the history of what
// Kafka accepted:
//
//   - no event is lost, and none is decided about twice;
//   - the first arrivals of each key are in order;
//   - what Kafka has accepted, and has said so, is not sent again after a stop;
//   - no event is sent again while its answer is waited for elsewhere;
//   - after a stop no event is pending in front of one that was sent.
func TestDeliverAtRandom(t *testing.T) {
	t.Parallel()
	seeds := 400
	if testing.Short() {
		seeds = 40
	}
	for seed := range seeds {
		synctest.Test(t, func(t *testing.T) { newChaos(t, uint64(seed)).run() })
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

const (
	chaosEvents     = 120
	chaosBatch      = 15
	chaosTopics     = 3
	chaosPartitions = 3
	chaosKeys       = 5 // of each partition
	chaosRetries    = 3 // before an event is dead
	chaosCalm       = 150
)

// chaosEvent is an event and its history.
type chaosEvent struct {
	at       kafka.Partition
	key      string
	poison   bool // Kafka rejects it
	large    bool // it is sent alone
	invalid  bool // it cannot become a record
	accepted int  // how often Kafka has accepted it
	repeats  bool // it may be sent again: its answer got lost, or the lease
	decided  bool // the cursor has passed it
	dead     bool
}

// chaos is a relay and its Kafka. It is a [Sender].
type chaos struct {
	t      *testing.T
	rng    *rand.Rand
	events []chaosEvent
	batch  []envelope.Event // all events
	cursor int              // events that were decided about
	rows   []chaosRow       // of outbox_failed, in the order of events
	parked *Parking

	sends     int // calls of produce; after chaosCalm nothing fails any more
	down      bool
	bad       map[string]error // topics and partitions
	inBatch   []int            // what was accepted in this delivery
	stop      func()
	stopAfter int // calls of produce
	lastFirst map[string]int

	registry   *BadPartitions
	unanswered *Unanswered
	flying     []int // events that were sent and not answered, in the order in which they were sent
}

type chaosRow struct {
	event   int
	key     string
	retries int
}

func newChaos(t *testing.T, seed uint64) *chaos {
	c := &chaos{t: t, parked: NewParking(false), rng: rand.New(rand.NewPCG(seed, 13)), bad: map[string]error{}, lastFirst: map[string]int{}}
	for i := range chaosEvents {
		at := kafka.Partition{Topic: fmt.Sprintf("topic-%d", c.rng.IntN(chaosTopics)), Number: int32(c.rng.IntN(chaosPartitions))}
		key := fmt.Sprintf("%d-%d", at.Number, c.rng.IntN(chaosKeys))
		c.events = append(c.events, chaosEvent{at: at, key: at.Topic + "/" + key, poison: c.often(0.03), large: c.often(0.05), invalid: c.often(0.02)})
		c.batch = append(c.batch, envelope.Event{ID: int64(i + 1), EventID: fmt.Appendf(nil, "%d", i), PartitionKey: []byte(key), Topic: []byte(at.Topic)})
	}
	return c
}

func (c *chaos) often(rate float64) bool { return c.rng.Float64() < rate }

// run relays until nothing is left to do.
func (c *chaos) run() {
	for n := 0; c.cursor < len(c.events) || len(c.rows) > 0; n++ {
		require.Less(c.t, n, 100*chaosEvents, "it does not end")
		c.lead()
	}
	for i, e := range c.events {
		require.True(c.t, e.accepted > 0 || e.dead, "event %d is lost", i)
		require.False(c.t, e.accepted > 0 && e.dead, "event %d is dead, and was sent", i)
	}
}

// lead relays until the next stop, or until the lease is lost.
func (c *chaos) lead() {
	stop, cancel := context.WithCancel(c.t.Context())
	defer cancel()
	c.stop, c.stopAfter = cancel, c.rng.IntN(20)
	if c.calm() {
		c.stopAfter = -1
	}
	deliverer := c.deliverer()
	c.parked.reset()
	require.NoError(c.t, c.parked.Recount(c.keys))
	defer c.land(true)
	for stop.Err() == nil && (c.cursor < len(c.events) || len(c.rows) > 0) {
		if c.often(0.1) && !c.calm() {
			time.AfterFunc(time.Duration(c.rng.IntN(300))*time.Millisecond, cancel)
		}
		if c.cursor < len(c.events) && !c.send(stop, deliverer) || c.often(0.5) && !c.retry(stop, deliverer) {
			c.land(true)
			for _, ref := range c.unanswered.Accepted() {
				c.events[ref.ID-1].repeats = true // the lease is lost
			}
			return
		}
	}
	c.land(true) // the producers are closed
	c.parked.mu.Lock()
	defer c.parked.mu.Unlock()
	c.removeAnswered()
}

// land lets answers come late: of some partitions, or of all. A partition has accepted the first of its records.
func (c *chaos) land(all bool) {
	var left []int
	accepts := map[kafka.Partition]int{} // how many more; -1: no answer comes
	for _, event := range c.flying {
		at := c.events[event].at
		if _, drawn := accepts[at]; !drawn {
			accepts[at] = c.rng.IntN(4)
			if !all && !c.often(0.2) {
				accepts[at] = -1
			}
		}
		e := &c.batch[event]
		switch {
		case accepts[at] < 0:
			left = append(left, event)
		case accepts[at] > 0 && !c.events[event].poison:
			accepts[at]--
			c.accept(event)
			c.registry.Accept(at, time.Now())
			c.unanswered.accept(e, SentTo{})
		default:
			accepts[at] = 0
			c.registry.Fail(at, time.Now(), "unavailable", kgo.ErrRecordTimeout)
			c.unanswered.forget(e)
		}
	}
	c.flying = left
}

// saveAnswered removes the rows of events that were accepted late.
func (c *chaos) removeAnswered() {
	var removed []eventRef
	for _, ref := range c.unanswered.Accepted() {
		if n := len(c.rows); n > 0 {
			c.remove(int(ref.ID) - 1)
			if len(c.rows) < n {
				removed = append(removed, ref)
			}
		}
	}
	c.unanswered.Remove(removed)
}

// keys returns the keys with rows, all on one page.
func (c *chaos) keys(after string) (keys []cursor.KeyRows, err error) {
	rows := map[string]int{}
	for _, row := range c.rows {
		rows[row.key]++
	}
	for key, n := range rows {
		if after == "" {
			keys = append(keys, cursor.KeyRows{Key: key, Rows: n})
		}
	}
	return keys, nil
}

// send is a batch of the session. It returns false if the lease was lost.
func (c *chaos) send(stop context.Context, deliverer *Deliverer) bool {
	c.inBatch = nil
	batch := c.batch[c.cursor:min(len(c.batch), c.cursor+1+c.rng.IntN(chaosBatch))]
	outcomes, err := deliverer.Deliver(stop, c.t.Context(), batch, c.parked)
	require.Len(c.t, outcomes, len(batch))
	s := &Session{SessionParts: SessionParts{Deliverer: deliverer, Rules: Rules{RetryWait: time.Second, MaxRetryWait: time.Minute}}}
	decided, failures := s.Failures(batch, outcomes)
	if err != nil {
		require.ErrorIs(c.t, err, lease.ErrLeaseLost)
		c.mayRepeat(c.inBatch)
		return false
	}
	require.True(c.t, decided == len(batch) || stop.Err() != nil, "it gave up without a stop")
	for n, o := range outcomes {
		require.False(c.t, n >= decided && o.Kind == OutcomeSent, "%s: sent behind an event that is pending", outcomeSymbols(outcomes))
		require.False(c.t, o.Kind == OutcomeSent && c.events[c.cursor+n].accepted == 0, "it was not sent")
	}
	c.parked.mu.Lock()
	defer c.parked.mu.Unlock()
	c.parked.assign(failures)
	for _, f := range failures {
		c.rows = append(c.rows, chaosRow{event: int(f.Event.ID) - 1, key: f.Key})
	}
	c.parked.rowsWritten(failures)
	for range decided {
		require.False(c.t, c.events[c.cursor].decided, "decided about twice")
		c.events[c.cursor].decided = true
		c.cursor++
	}
	return true
}

// retry sends the first events of all keys, and what is behind those that got through. It
// returns false if the lease was lost.
func (c *chaos) retry(stop context.Context, deliverer *Deliverer) bool {
	c.parked.mu.Lock()
	c.removeAnswered()
	c.parked.mu.Unlock()
	var heads []chaosRow
	seen := map[string]bool{}
	for _, row := range c.rows {
		if !seen[row.key] {
			heads = append(heads, row)
		}
		seen[row.key] = true
	}
	if len(heads) == 0 {
		return true
	}
	sent, ok := c.attempt(stop, deliverer.attempt, heads)
	if ok {
		one := c.rng.IntN(len(heads))
		if c.firstOf(heads[one].key) == heads[one].event {
			var probed []string
			probed, ok = c.attempt(stop, deliverer.probe, heads[one:one+1])
			sent = append(sent, probed...)
		}
	}
	for _, key := range sent {
		var behind []chaosRow
		for _, row := range c.rows {
			if row.key == key {
				behind = append(behind, row)
			}
		}
		if ok && len(behind) > 0 {
			_, ok = c.attempt(stop, deliverer.attempt, behind)
		}
	}
	return ok
}

// attempt returns the keys of which all rows were sent. It returns false if the lease was
// lost.
func (c *chaos) attempt(stop context.Context, attempt func(stop, held context.Context, batch []envelope.Event) ([]Outcome, error), rows []chaosRow) (sent []string, ok bool) {
	c.inBatch = nil
	events := make([]cursor.FailedRow, len(rows))
	batch := make([]envelope.Event, len(rows))
	for n, row := range rows {
		batch[n] = c.batch[row.event]
		events[n] = cursor.FailedRow{Event: batch[n], Key: row.key}
	}
	outcomes, err := attempt(stop, c.t.Context(), batch)
	if err != nil {
		require.ErrorIs(c.t, err, lease.ErrLeaseLost)
		c.mayRepeat(c.inBatch)
		return nil, false
	}
	c.parked.mu.Lock()
	defer c.parked.mu.Unlock()
	for n, o := range outcomes {
		row := c.rowOf(rows[n].event)
		switch o.Kind {
		case OutcomeRejected:
			if row.retries++; row.retries >= chaosRetries {
				c.events[row.event].dead = true
				c.remove(row.event)
			}
		case OutcomeSent:
			require.NotZero(c.t, c.events[row.event].accepted, "it was not sent")
			c.remove(row.event)
		case OutcomeUnavailable, OutcomePending, OutcomeBlocked, OutcomeParked, OutcomeExpired:
		}
	}
	return sentKeys(events, outcomes), true
}

// firstOf returns the first event of a key that has a row, or -1.
func (c *chaos) firstOf(key string) int {
	for _, row := range c.rows {
		if row.key == key {
			return row.event
		}
	}
	return -1
}

func (c *chaos) rowOf(event int) *chaosRow {
	for n := range c.rows {
		if c.rows[n].event == event {
			return &c.rows[n]
		}
	}
	require.Fail(c.t, "no row", "of event %d", event)
	return nil
}

func (c *chaos) remove(event int) {
	for n, row := range c.rows {
		if row.event == event {
			c.rows = append(c.rows[:n:n], c.rows[n+1:]...)
			c.parked.rowRemoved(row.key)
			return
		}
	}
}

func (c *chaos) mayRepeat(events []int) {
	for _, i := range events {
		c.events[i].repeats = true
	}
}

func (c *chaos) deliverer() *Deliverer {
	log := slog.New(slog.DiscardHandler)
	c.registry = NewBadPartitions(outage.NewLogs(log))
	c.unanswered = NewUnanswered(c.registry, func() {})
	return &Deliverer{DeliveryParts{
		Sender: c, Unanswered: c.unanswered, Breaker: breaker.New(someRules, func(_, _ breaker.State, _ float64) {}), Log: log, OnSend: func() {},
		KafkaOutage: outage.NewLog(log, "Kafka"), Bad: c.registry, OnRecovered: func() {},
	}}
}

func (c *chaos) topic(e *envelope.Event) (string, error) { return string(e.Topic), nil }

func (c *chaos) prepare(context.Context, []string) {}

func (c *chaos) works(context.Context, string) bool { return false }

// partition knows the partition most times.
func (c *chaos) partition(e *envelope.Event) kafka.Partition {
	at := c.events[e.ID-1].at
	if c.often(0.2) {
		return at.WholeTopic()
	}
	return at
}

func (c *chaos) calm() bool { return c.sends > chaosCalm }

// change lets something fail or recover.
func (c *chaos) change() {
	if c.sends++; c.calm() {
		c.down, c.bad = false, nil
		return
	}
	switch at := (kafka.Partition{Topic: fmt.Sprintf("topic-%d", c.rng.IntN(chaosTopics)), Number: int32(c.rng.IntN(chaosPartitions))}); c.rng.IntN(12) {
	case 0:
		c.down = true
	case 1, 2:
		c.down = false
	case 3:
		c.bad[at.Topic] = kerr.UnknownTopicOrPartition
	case 4:
		c.bad[at.Name()] = kgo.ErrRecordTimeout
	case 5:
		c.bad[at.Name()] = fmt.Errorf("%w: %w", kafka.ErrNoLeader, kgo.ErrRecordTimeout)
	case 6, 7, 8:
		clear(c.bad)
	}
}

// produce implements [Sender]. Records of a partition are accepted up to the first that
// fails.
func (c *chaos) produce(stop, _ context.Context, batch []envelope.Event, which []int) (sendResult, error) {
	require.IsIncreasing(c.t, append([]int{-1}, which...))
	time.Sleep(time.Duration(c.rng.IntN(20)) * time.Millisecond)
	c.change()
	c.land(false)
	switch {
	case c.calm():
	case len(which) == 0:
		return sendResult{}, nil
	case c.often(0.02):
		return sendResult{}, lease.ErrLeaseLost
	case c.often(0.05): // the breaker permits nothing
		return sendResult{}, nil
	case c.often(0.1): // or less
		which = which[:1+c.rng.IntN(len(which))]
	}
	if c.stopAfter--; c.stopAfter == 0 {
		c.stop()
	}
	sent := sendResult{records: make([]kgo.Record, len(which)), errs: make([]error, len(which)), works: !c.down}
	c.fail(batch, which, sent, stop.Err() != nil)
	return sent, nil
}

// fail decides about the records of a send.
func (c *chaos) fail(batch []envelope.Event, which []int, sent sendResult, stopping bool) {
	failed := map[kafka.Partition]error{} // what is behind it is not accepted
	waits := map[string]error{}           // keys of which an event was not sent
	for n, i := range which {
		event := int(batch[i].ID) - 1
		e, err := &c.events[event], &sent.errs[n]
		require.NotContains(c.t, c.flying, event, "its answer is not known")
		sent.records[n] = kgo.Record{Topic: e.at.Topic, Partition: e.at.Number}
		switch behind := failed[e.at] != nil; {
		case waits[e.key] != nil:
			*err = waits[e.key]
		case e.invalid:
			*err, waits[e.key] = &envelope.FieldError{Field: "Type", Err: check.ErrEmpty}, errBlocked
		case e.large && len(which) > 1:
			*err, waits[e.key] = errSendAlone, errSendAlone
		case behind:
			if *err = failed[e.at]; errors.Is(*err, errUnanswered) {
				c.fly(&batch[i], event)
			}
		default:
			*err = c.failure(e, stopping)
			if !c.down && !stopping && !e.poison && kafka.IsOutage(*err) && c.often(0.4) {
				*err = errUnanswered
				failed[e.at] = *err
				c.fly(&batch[i], event)
				continue
			}
			failed[e.at] = *err
			if lost := errors.Is(*err, kgo.ErrRecordTimeout) && !e.poison && c.often(0.1); *err == nil || lost {
				e.repeats = e.repeats || lost // the answer is
				c.accept(event)
			}
		}
	}
}

// fly lets the answer of an event come later.
func (c *chaos) fly(e *envelope.Event, event int) {
	c.flying = append(c.flying, event)
	c.unanswered.add(e, c.events[event].at)
}

// Failure returns why Kafka does not accept an event, or nil.
func (c *chaos) failure(e *chaosEvent, stopping bool) error {
	switch {
	case stopping && c.often(0.5):
		return errStopping
	case c.down:
		return kgo.ErrRecordTimeout
	case c.bad[e.at.Topic] != nil:
		return c.bad[e.at.Topic]
	case c.bad[e.at.Name()] != nil:
		return c.bad[e.at.Name()]
	case e.poison:
		return kerr.InvalidRecord
	}
	return nil
}

// accept writes an event down in the history.
func (c *chaos) accept(event int) {
	e := &c.events[event]
	require.False(c.t, e.dead, "event %d is dead", event)
	require.False(c.t, e.accepted > 0 && !e.repeats, "event %d is sent again", event)
	if e.accepted == 0 {
		last, ok := c.lastFirst[e.key]
		require.False(c.t, ok && last > event, "event %d of %s arrives behind %d", event, e.key, last)
		c.lastFirst[e.key] = event
	}
	e.accepted++
	c.inBatch = append(c.inBatch, event)
}
