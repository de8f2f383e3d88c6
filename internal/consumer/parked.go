package consumer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/outboxgo/outbox/internal/delivery"

	"github.com/outboxgo/outbox/internal/handling"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
)

// parkedLanes is the number of parked events that are handled at the same time, with a transaction and
// without one each. There are few, unless most events fail.
const parkedLanes = 4

// spareAfter is how long the call of a lane may take before a spare lane replaces it. There are at most maxSpare.
const (
	spareAfter = 250 * time.Millisecond
	maxSpare   = 12
)

// parkedPoll is how often event_delivery is polled for due events of other processes. The consumer
// knows without polling when its own are due.
const parkedPoll = 2 * time.Second

// parkedLease is how long a parked event stays claimed by a process that does not renew its lease.
const parkedLease = 30 * time.Second

// newDeliveryRun returns the engine that handles parked events of the group, of all processes.
func (c *Consumer) newDeliveryRun() *delivery.Run {
	lanes := parkedLanes
	if c.Rules.Concurrency > 0 {
		lanes = min(lanes, c.Rules.Concurrency)
	}
	cfg := &delivery.Rules{
		Rules: c.Rules.Rules, Concurrency: lanes, Spare: c.spareLanes(lanes), SpareAfter: spareAfter,
		MaxPoll: c.Rules.MaxPoll, PollInterval: parkedPoll, Lease: parkedLease,
	}
	return delivery.NewRun(delivery.Parts{
		Report: c.report, Others: c.othersWaiting,
		Rules: cfg, Db: c.db, Processor: c.Processor, Slots: c.slots, Pauses: c.pauses,
		// Outages of its own: workers may report one of event_handled only, and a poll of deliveries would end it.
		Outages: outage.NewLogs(c.Processor.Log.With("of", "parked events")),
		Read:    c.readDelivery, DeadLetter: c.sendDeadLetter, Records: true, Pairs: delivery.PairsOf(c.Processor.Routes), Breakers: c.breakers,
	})
}

// spareLanes returns the numbers of further lanes for parked events, with a transaction and without one. They replace
// lanes whose handlers hang. Half of the slots are not for parked events.
func (c *Consumer) spareLanes(lanes int) (spare [2]int) {
	spare = [2]int{min(maxSpare, c.slots.Most()/2-lanes), maxSpare}
	if c.Rules.Concurrency > 0 {
		spare[1] = min(maxSpare, c.Rules.Concurrency/2-lanes)
	}
	return [2]int{max(0, spare[0]), max(0, spare[1])}
}

// startParked handles parked events in the background until ctx ends, and returns the parking of the
// workers. If an operator has to act, it calls failed. end waits and returns the error. Without
// PostgreSQL it does nothing.
func (c *Consumer) startParked(ctx context.Context, failed func()) (p *consumerParking, end func() error, err error) {
	if c.handled == nil {
		return nil, func() error { return nil }, nil
	}
	run := c.newDeliveryRun()
	if err := run.Prepare(ctx, func(context.Context) error { return nil }); err != nil || ctx.Err() != nil {
		return nil, nil, err
	}
	c.parked.Store(run)
	ended := make(chan error, 1)
	go func() {
		err := run.Run(ctx)
		if err != nil {
			failed()
		}
		ended <- err
	}()
	end = func() error {
		defer c.parked.Store(nil)
		return <-ended
	}
	return &consumerParking{store: run.Store, breakers: c.breakers, session: run.Session, group: c.Rules.Group, dueAt: run.Dispatcher.RetryAt}, end, nil
}

// sendDeadLetter sends the dead letter of a parked event. It implements DeadLetter of [delivery.Parts].
func (c *Consumer) sendDeadLetter(ctx context.Context, d *delivery.Delivery, o handling.Outcome) (topic, place string, err error) {
	r := deadRecordOf(d)
	if d.Action == "" { // whatever action has failed: a replay is for all that the record is for
		o.Action = replayOf(r).action
	}
	sender := deadLetters{c.Rules, c.produce}
	topic = sender.topicOf(r)
	began := time.Now()
	place, err = c.gates.send(ctx, topic, d, func(ctx context.Context) (string, error) {
		place, err := sender.send(ctx, r, o)
		if err == nil { // perhaps too late for this call: the next one sends nothing
			c.outages.Report(outageDeadLetters+topic, began, nil)
		}
		return place, err
	})
	if err != nil && ctx.Err() == nil && !errors.Is(err, delivery.ErrNotTried) {
		c.outages.Report(outageDeadLetters+topic, began, err)
	}
	return topic, place, err
}

// deadRecordOf returns the record of a parked event that is dead. If the row has no readable record, its columns name
// the place and the key, and nothing else is known.
func deadRecordOf(d *delivery.Delivery) *kgo.Record {
	missing := &omission{Cause: fmt.Sprintf("PostgreSQL cannot read the row %d of event_delivery", d.ID)}
	if !d.Bare {
		r, _, err := recordOfDelivery(d)
		if err == nil {
			return r
		}
		missing.Cause = err.Error()
	}
	r := &kgo.Record{Topic: d.Stream, Partition: d.Partition, Offset: d.Position, Key: []byte(d.PartitionKey)}
	missing.attach(r)
	return r
}

var errNoMember = errors.New("this process is no member of the group at the moment")

// produce sends a record with the client of the current membership and waits for Kafka.
func (c *Consumer) produce(ctx context.Context, r *kgo.Record) error {
	m := c.current.Load()
	if m == nil {
		return errNoMember
	}
	return m.produce(ctx, r)
}

// readDelivery decodes the record of a parked event, or an event of outbox that the workers of the group had before it
// was moved to Kafka. It implements Read of [delivery.Parts].
func (c *Consumer) readDelivery(d *delivery.Delivery, about *envelope.Received) (m *envelope.Message, action string, err error) {
	if !d.FromKafka {
		return delivery.ReadOutboxDelivery(d, about)
	}
	r, topicID, err := recordOfDelivery(d)
	if err != nil {
		return nil, "", err
	}
	about.Headers = envelope.PlainHeaders(kafka.Headers(r))
	id, stream := about.Origin.DeliveryID, about.Origin.Stream
	*about.Origin = originOf(r, topicID)
	about.Origin.DeliveryID, about.Origin.Stream = id, stream
	action = d.Action
	if action == "" {
		action = replayOf(r).action
	}
	m, err = c.reader.decodeRecord(r, about)
	return m, action, err
}

// parkedRecordOf returns event_delivery.record for a record.
func parkedRecordOf(r *kgo.Record, topicID kafka.TopicID) []byte {
	p := delivery.Record{Key: r.Key, Time: r.Timestamp.UnixMilli(), Epoch: r.LeaderEpoch, NoValue: r.Value == nil}
	if missing := omissionOf(r); missing != nil {
		p.Missing = missing.json()
	}
	if topicID != (kafka.TopicID{}) {
		p.TopicID = topicID[:]
	}
	for _, h := range r.Headers {
		p.Headers = append(p.Headers, delivery.RecordHeader{Name: []byte(h.Key), Value: h.Value})
	}
	text, err := json.Marshal(p)
	if err != nil {
		panic(err) // bytes and numbers always marshal
	}
	return text
}

// recordOfDelivery returns the record that was parked as a delivery.
func recordOfDelivery(d *delivery.Delivery) (r *kgo.Record, topicID kafka.TopicID, err error) {
	p, err := delivery.RecordOf(d)
	if err != nil {
		return nil, topicID, err
	}
	copy(topicID[:], p.TopicID)
	r = &kgo.Record{
		Topic: d.Stream, Partition: d.Partition, Offset: d.Position, Key: p.Key, Value: d.Payload, Timestamp: time.UnixMilli(p.Time), LeaderEpoch: p.Epoch,
	}
	if p.NoValue {
		r.Value = nil
	}
	if p.Missing != nil {
		missing := new(omission)
		if err := json.Unmarshal(p.Missing, missing); err != nil {
			return nil, topicID, fmt.Errorf("event_delivery.record of delivery %d: %w", d.ID, err)
		}
		missing.attach(r)
	}
	for _, h := range p.Headers {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: string(h.Name), Value: h.Value})
	}
	return r, topicID, nil
}
