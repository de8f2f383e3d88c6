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
	cfg := &delivery.Rules{Rules: c.Rules.Rules, Concurrency: lanes, MaxPoll: c.Rules.MaxPoll, PollInterval: parkedPoll, Lease: parkedLease}
	return delivery.NewRun(delivery.Parts{
		Rules: cfg, Db: c.db, Processor: c.Processor, Slots: c.slots, Pauses: c.pauses,
		// Outages of its own: workers may report one of event_handled only, and a poll of deliveries would end it.
		Outages: outage.NewLogs(c.Processor.Log.With("of", "parked events")),
		Read:    c.readDelivery, DeadLetter: c.sendDeadLetter, Records: true, Pairs: delivery.PairsOf(c.Processor.Routes), Breakers: c.breakers,
	})
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
func (c *Consumer) sendDeadLetter(ctx context.Context, d *delivery.Delivery, o handling.Outcome) (topic string, err error) {
	r, _, err := recordOfDelivery(d)
	if err != nil {
		return "", err
	}
	if o.Action == "" {
		o.Action = replayOf(r).action
	}
	sender := deadLetters{c.Rules, c.produce}
	topic = sender.topicOf(r)
	began := time.Now()
	bounded, cancel := context.WithTimeout(ctx, deadLetterDelivery)
	defer cancel()
	err = sender.send(bounded, r, o)
	if ctx.Err() == nil {
		c.outages.Report(outageDeadLetters+topic, began, err)
	}
	return topic, err
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

// readDelivery decodes the record of a parked event. It implements Read of [delivery.Parts].
func (c *Consumer) readDelivery(d *delivery.Delivery, about *envelope.Received) (m *envelope.Message, action string, err error) {
	r, topicID, err := recordOfDelivery(d)
	if err != nil {
		return nil, "", err
	}
	about.Headers = envelope.PlainHeaders(headersOf(r))
	id, stream := about.Origin.DeliveryID, about.Origin.Stream
	*about.Origin = originOf(r, topicID)
	about.Origin.DeliveryID, about.Origin.Stream = id, stream
	action = d.Action
	if action == "" {
		action = replayOf(r).action
	}
	err = handling.Guard(func() (err error) {
		m, err = c.reader.decode(r)
		return err
	})
	return m, action, err
}

// parkedRecord is the JSON of event_delivery.record: parts of a record that have no column.
type parkedRecord struct {
	Key     []byte         `json:"key"` // null for none
	Headers []parkedHeader `json:"headers,omitempty"`
	Time    int64          `json:"time"` // in Unix milliseconds
	Epoch   int32          `json:"epoch"`
	TopicID []byte         `json:"topic_id,omitempty"`
	NoValue bool           `json:"no_value,omitempty"` // it is a tombstone
}

type parkedHeader struct {
	Name  []byte `json:"name"` // any bytes: producers choose names
	Value []byte `json:"value"`
}

// parkedRecordOf returns event_delivery.record for a record.
func parkedRecordOf(r *kgo.Record, topicID kafka.TopicID) []byte {
	p := parkedRecord{Key: r.Key, Time: r.Timestamp.UnixMilli(), Epoch: r.LeaderEpoch, NoValue: r.Value == nil}
	if topicID != (kafka.TopicID{}) {
		p.TopicID = topicID[:]
	}
	for _, h := range r.Headers {
		p.Headers = append(p.Headers, parkedHeader{[]byte(h.Key), h.Value})
	}
	text, err := json.Marshal(p)
	if err != nil {
		panic(err) // bytes and numbers always marshal
	}
	return text
}

// recordOfDelivery returns the record that was parked as a delivery.
func recordOfDelivery(d *delivery.Delivery) (r *kgo.Record, topicID kafka.TopicID, err error) {
	var p parkedRecord
	if err := json.Unmarshal(d.Record, &p); err != nil {
		return nil, topicID, fmt.Errorf("event_delivery.record of delivery %d: %w", d.ID, err)
	}
	copy(topicID[:], p.TopicID)
	r = &kgo.Record{
		Topic: d.Stream, Partition: d.Partition, Offset: d.Position, Key: p.Key, Value: d.Payload, Timestamp: time.UnixMilli(p.Time), LeaderEpoch: p.Epoch,
	}
	if p.NoValue {
		r.Value = nil
	}
	for _, h := range p.Headers {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: string(h.Name), Value: h.Value})
	}
	return r, topicID, nil
}
