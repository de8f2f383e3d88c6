package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
)

// producer hands events to Kafka. It belongs to one goroutine.
type producer struct {
	opts        []kgo.Opt
	cfg         RelayConfig
	lease       *lease
	log         *slog.Logger
	kafkaOutage *outage.Log

	breaker *breaker     // these two are of all producers of a relay
	outages *outage.Logs // topics that are missing or not ours to write, partitions that take nothing
	sparing bool         // of failures that the breaker hears of: one for each partition

	turn   func()      // told of each send; may be nil
	client *kgo.Client // nil until needed, after a send without an answer, and when it is at its end

	named, derived map[string]string // topics, by their name in the row or by the event type
	limits         kafka.Limits
}

func newProducer(r *Relay, l *lease, kafkaOutage *outage.Log) *producer {
	return &producer{
		opts: r.opts, cfg: r.cfg, lease: l, log: r.log, kafkaOutage: kafkaOutage, breaker: r.breaker, outages: r.outages,
		named: map[string]string{}, derived: map[string]string{},
	}
}

// connect makes a client if there is none.
func (p *producer) connect() error {
	if p.client != nil {
		return nil
	}
	client, err := kafka.NewClient(p.opts)
	if err != nil { // NewRelay has validated these options
		return fmt.Errorf("make Kafka client: %w", err)
	}
	p.client = client
	p.limits.ReadClient(client)
	return nil
}

// answers reports whether any broker does.
func (p *producer) answers(ctx context.Context) bool {
	if p.connect() != nil {
		return false // and the next send says why
	}
	ctx, cancel := context.WithTimeout(ctx, kafka.AnswerTimeout)
	defer cancel()
	return p.client.Ping(ctx) == nil
}

// close throws the client away with everything that it still buffers; no
// record leaves afterwards.
func (p *producer) close() {
	if p.client != nil {
		p.client.Close()
		p.client = nil
	}
}

// produce sends the events of batch that which names, as far as the breaker
// permits and as they fit into a batch of their topic, and returns the record and
// the outcome of each that it took. An
// outcome is known when produce returns: nothing of it is on its way any more. Of
// several events, those that may be too large for their topic are put off
// (errAlone). The error is the loss of the lease.
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
		p.putOff(records, errs)
		fit := p.limits.Fitting(records, errs)
		records, errs = records[:fit], errs[:fit]
	}
	acks := newAcks(permit, records, errs, p.sparing)
	promise := acks.promise
	n := 0
	for ; n < len(records) && permit.holds(); n++ { // if the breaker opens, the rest is not attempted
		if errs[n] == nil {
			p.client.Produce(held, &records[n], promise)
		}
	}
	acks.sent(errs[n:])
	errs = errs[:n]
	timeout := time.NewTimer(p.cfg.SendTimeout)
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
	if held.Err() == nil { // what was ended by us says nothing about Kafka
		acks.tell(errs)
	}
	return records, errs, nil
}

// abandon ends a send without its answers. Without its client no record can
// leave any more, and each callback comes.
func (p *producer) abandon(acks *acks) {
	p.close()
	<-acks.all
}

// records builds the Kafka records of events. Where that fails, errs says why,
// and later events of the same key are left out with errBehind.
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
		if r.Value, errs[n] = e.record(p.cfg.Mode, add); errs[n] != nil {
			bad = append(bad, parkingKey(r.Topic, e.key()))
			continue
		}
		r.Key, r.Headers = e.key(), headers[first:len(headers):len(headers)]
		if len(bad) > 0 && slices.Contains(bad, parkingKey(r.Topic, r.Key)) {
			errs[n] = errBehind
		}
	}
	return records
}

var (
	// errBehind is the outcome of an event that was not sent because an earlier one
	// of its key cannot be.
	errBehind = errors.New("waits behind another event of its key")
	// errAlone is the outcome of an event that was not sent in company.
	errAlone = errors.New("has to be sent alone")
)

// putOff takes out the records that may be too large for their topic, and those
// behind them: a refusal would condemn their company, and the later events of
// their key would be there already.
func (p *producer) putOff(records []kgo.Record, errs []error) {
	var keys []string // few, if any
	for i := range records {
		r := &records[i]
		switch {
		case errs[i] != nil:
		case len(keys) > 0 && slices.Contains(keys, parkingKey(r.Topic, r.Key)):
			errs[i] = errAlone
		case p.limits.Exceeds(r):
			errs[i] = errAlone
			keys = append(keys, parkingKey(r.Topic, r.Key))
		}
	}
}

// topic returns the event's destination. Events that go to the same place share
// the string.
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

// invalidEvent is the class of rows that cannot be made into a record at all.
const invalidEvent = "invalid_event"

// rejectionClass names the error of an event that was rejected for what it is: a row
// that cannot be made into a record, or one of [kafka.RejectionClass]. It returns ""
// for every other error.
func rejectionClass(err error) string {
	var field *FieldError
	if errors.As(err, &field) {
		return invalidEvent
	}
	return kafka.RejectionClass(err)
}
