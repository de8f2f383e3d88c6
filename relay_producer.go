package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/tables"
)

// producerConfig is what a producer takes from the relay's configuration.
type producerConfig struct {
	opts        []kgo.Opt
	mode        Mode
	sendTimeout time.Duration
	// oncePerPartition counts the failures of a partition once for the breaker, also
	// where no other partition works. The retrier sets it: a batch that it sends may
	// consist of events of one unavailable partition only.
	oncePerPartition bool
}

// producer hands events to Kafka. It belongs to one goroutine.
type producer struct {
	cfg     producerConfig
	lease   *lease
	breaker *breaker // shared by all producers of a relay

	client *kgo.Client // nil until needed, after a send without an answer, and after a final error
	limits kafka.Limits

	named, derived map[string]string // topics, by their name in the row or by the event type
}

func newProducer(cfg producerConfig, l *lease, b *breaker) *producer {
	return &producer{cfg: cfg, lease: l, breaker: b, named: map[string]string{}, derived: map[string]string{}}
}

// connect makes a client if there is none.
func (p *producer) connect() error {
	if p.client != nil {
		return nil
	}
	client, err := kafka.NewClient(p.cfg.opts)
	if err != nil { // NewRelay has validated these options
		return fmt.Errorf("make Kafka client: %w", err)
	}
	p.client = client
	p.limits.ReadClient(client)
	return nil
}

// answers reports whether any broker answers.
func (p *producer) answers(ctx context.Context) bool {
	if p.connect() != nil {
		return false // the next send returns the error
	}
	ctx, cancel := context.WithTimeout(ctx, kafka.AnswerTimeout)
	defer cancel()
	return p.client.Ping(ctx) == nil
}

// close closes the client and drops all records that it still buffers. No record
// leaves afterwards.
func (p *producer) close() {
	if p.client != nil {
		p.client.Close()
		p.client = nil
	}
}

// produce implements [sender]. If the breaker permits fewer calls, or a batch of the
// topic holds fewer records, it takes only the first of the events.
func (p *producer) produce(held context.Context, batch []envelope, which []int) ([]kgo.Record, []error, error) {
	if !p.lease.held() {
		return nil, nil, errLeaseLost
	}
	permit := p.breaker.allow(len(which))
	defer permit.release()
	which = which[:permit.granted]
	if len(which) == 0 {
		return nil, nil, nil
	}
	if err := p.connect(); err != nil {
		return nil, nil, err
	}
	errs := make([]error, len(which))
	records := p.records(batch, which, errs)
	if len(records) > 1 {
		p.limits.Learn(held, p.client, records)
		p.sendAloneLater(records, errs)
		fit := p.limits.Fitting(records, errs)
		records, errs = records[:fit], errs[:fit]
	}
	return p.send(held, permit, records, errs)
}

// send hands records without an error to the client and waits until the outcome of
// each is known. It stops early if the breaker opens meanwhile.
func (p *producer) send(held context.Context, permit *permit, records []kgo.Record, errs []error) ([]kgo.Record, []error, error) {
	acks := newAcks(permit, records, errs, p.cfg.oncePerPartition)
	promise := acks.promise
	n := 0
	for ; n < len(records) && permit.holds(); n++ {
		if errs[n] == nil {
			p.client.Produce(held, &records[n], promise)
		}
	}
	acks.handedOver(errs[n:])
	errs = errs[:n]
	timeout := time.NewTimer(p.cfg.sendTimeout)
	defer timeout.Stop()
	select {
	case <-acks.all:
		acks.collect(errs)
		kafka.MarkLeaderless(held, p.client, records[:n], errs)
		if slices.ContainsFunc(errs, kafka.IsFinal) {
			p.close()
		}
	case <-held.Done():
		p.abandon(acks)
		return nil, nil, context.Cause(held)
	case <-timeout.C:
		p.abandon(acks)
		acks.collect(errs)
	}
	if held.Err() == nil { // failures that we caused ourselves say nothing about Kafka
		acks.reportFailures(errs)
	}
	return records, errs, nil
}

// abandon ends a send without waiting for Kafka. Once the client is closed no record
// can leave any more, and the client calls back for each record.
func (p *producer) abandon(acks *acks) {
	p.close()
	<-acks.all
}

// records builds the Kafka records of events. Where that fails, errs says why, and
// later events of the same key get errBlocked.
func (p *producer) records(batch []envelope, which []int, errs []error) []kgo.Record {
	records := make([]kgo.Record, len(which))
	headers := make([]kgo.RecordHeader, 0, len(which)*recordHeaders)
	var bad []string // keys of events that cannot be sent; few, if any
	add := func(name string, value []byte) { headers = append(headers, kgo.RecordHeader{Key: name, Value: value}) }
	for n, i := range which {
		e, r := &batch[i], &records[n]
		r.Partition = kafka.Unassigned
		if r.Topic, errs[n] = p.topic(e); errs[n] != nil {
			continue
		}
		first := len(headers)
		if r.Value, errs[n] = e.record(p.cfg.mode, add); errs[n] != nil {
			bad = append(bad, tables.ParkingKey(r.Topic, e.key()))
			continue
		}
		r.Key, r.Headers = e.key(), headers[first:len(headers):len(headers)]
		if len(bad) > 0 && slices.Contains(bad, tables.ParkingKey(r.Topic, r.Key)) {
			errs[n] = errBlocked
		}
	}
	return records
}

var (
	// errBlocked is the error of an event that was not sent because an earlier event of
	// its key cannot be sent.
	errBlocked = errors.New("waits behind another event of its key")
	// errSendAlone is the error of an event that was not sent because it must not share
	// a batch with other events.
	errSendAlone = errors.New("has to be sent alone")
)

// sendAloneLater marks the records that may be too large for their topic with
// errSendAlone, and the later records of their keys. If Kafka rejected such a record
// in a batch, it would reject the other records of the batch with it, and later events
// of the key could already have been accepted in another batch.
func (p *producer) sendAloneLater(records []kgo.Record, errs []error) {
	var keys []string // few, if any
	for i := range records {
		r := &records[i]
		switch {
		case errs[i] != nil:
		case len(keys) > 0 && slices.Contains(keys, tables.ParkingKey(r.Topic, r.Key)):
			errs[i] = errSendAlone
		case p.limits.Exceeds(r):
			errs[i] = errSendAlone
			keys = append(keys, tables.ParkingKey(r.Topic, r.Key))
		}
	}
}

// topic returns the topic of an event. Events of one topic share the string.
func (p *producer) topic(e *envelope) (string, error) {
	known, name := p.named, e.topic
	if name == nil {
		known, name = p.derived, e.eventType
	}
	if topic, ok := known[string(name)]; ok {
		return topic, nil
	}
	topic, err := e.destination()
	if err == nil && len(known) < kafka.MaxTopics {
		known[string(name)] = topic
	}
	return topic, err
}
