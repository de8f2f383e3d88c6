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

// parkedLanes is how many parked events with a transaction a consumer handles at the same time, and how many without
// one: unless most events fail, there are few.
const parkedLanes = 4

// parkedPoll is after which time a consumer sees parked events that are due and that another process has parked, which is
// gone. Its own it knows.
const parkedPoll = 2 * time.Second

// parkedLease is for how long a parked event stays with a process that does not renew it.
const parkedLease = 30 * time.Second

// NewRun returns what handles the parked events of the group in this process, whoever has parked them.
func (c *Consumer) newDeliveryRun() *delivery.Run {
	lanes := parkedLanes
	if c.Rules.Concurrency > 0 {
		lanes = min(lanes, c.Rules.Concurrency)
	}
	cfg := &delivery.Rules{Rules: c.Rules.Rules, Concurrency: lanes, MaxPoll: c.Rules.MaxPoll, PollInterval: parkedPoll, Lease: parkedLease}
	return delivery.NewRun(delivery.Parts{
		Rules: cfg, Db: c.db, Processor: c.Processor, Slots: c.slots, Pauses: c.pauses,
		// An outage that others report may be one of event_handled only, which the next look at deliveries does not end.
		Outages: outage.NewLogs(c.Processor.Log.With("of", "parked events")),
		Read:    c.readDelivery, DeadLetter: c.sendDeadLetter, Records: true, Pairs: delivery.PairsOf(c.Processor.Routes, true), Breakers: c.breakers,
	})
}

// startParked begins to handle parked events, and returns what workers park events with. End waits until that
// has ended with ctx, or with an error that needs an operator, with which it calls failed. Without PostgreSQL there is nothing to do.
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

// sendDeadLetter implements [sendDeadLetter].
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

// produce sends a record with the client of the membership, and waits for the answer.
func (c *Consumer) produce(ctx context.Context, r *kgo.Record) error {
	m := c.current.Load()
	if m == nil {
		return errNoMember
	}
	return m.produce(ctx, r)
}

// readDelivery implements [readDelivery] for what was parked.
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

// parkedRecord is what event_delivery.record has of a record.
type parkedRecord struct {
	Key     []byte         `json:"key"` // null for none
	Headers []parkedHeader `json:"headers,omitempty"`
	Time    int64          `json:"time"` // in Unix milliseconds
	Epoch   int32          `json:"epoch"`
	TopicID []byte         `json:"topic_id,omitempty"`
	NoValue bool           `json:"no_value,omitempty"` // it is a tombstone
}

type parkedHeader struct {
	Name  []byte `json:"name"` // as any producer may have written it
	Value []byte `json:"value"`
}

// parkedRecordOf returns event_delivery.record.
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
		panic(err) // of bytes and numbers there is none
	}
	return text
}

// recordOfDelivery returns the record that a delivery was made of.
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
