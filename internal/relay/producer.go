package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/lease"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/trace"
	"github.com/outboxgo/outbox/internal/wait"
)

// ProducerConfig is what a producer takes from the relay.
type ProducerConfig struct {
	Opts           []kgo.Opt
	Form           envelope.RecordForm
	SendTimeout    time.Duration
	PassFailedKeys bool
	Unanswered     *Unanswered     // shared by all producers of a relay
	OnSent         func(SentBatch) // called for events that were accepted late; may be nil
}

// Producer sends events to Kafka. It belongs to one goroutine.
type Producer struct {
	cfg     ProducerConfig
	lease   *lease.Lease
	breaker *breaker.Breaker // shared by all producers of a relay that it is to stop
	group   *contain.Group   // waits for the answers of detached

	client    *kgo.Client   // nil until needed, after a send without an answer, and after a final error
	detached  []*flight     // whose answers are waited for elsewhere
	suspected time.Time     // when a partition was suspected last
	down      bool          // Kafka did not work after the last send
	usual     time.Duration // what sends have taken lately, on average
	inFlight  *kafka.InFlight
	buffer    kafka.Buffer
	limits    kafka.Limits
	topics    *kafka.Topics // as the client has them
	loaded    kafka.Loaded  // by the client

	named, derived map[string]string // topics, by their name in the row or by the event type
}

// NewProducer returns a producer that sends under a lease, as long as a breaker permits it.
func NewProducer(cfg ProducerConfig, leads lease.Leadership, b *breaker.Breaker) *Producer {
	return &Producer{
		cfg: cfg, lease: leads.Lease, breaker: b, group: leads.NewGroup(), usual: firstUsual, named: map[string]string{}, derived: map[string]string{},
	}
}

// connect makes a client if there is none.
func (p *Producer) connect() error {
	if p.client != nil {
		return nil
	}
	inFlight := new(kafka.InFlight)
	client, err := kafka.NewClient(append(slices.Clone(p.cfg.Opts), kgo.WithHooks(inFlight)))
	if err != nil { // NewRelay has validated these options
		return fmt.Errorf("make Kafka client: %w", err)
	}
	p.inFlight = inFlight
	p.use(client)
	return nil
}

// use sends with a client.
func (p *Producer) use(client *kgo.Client) {
	p.client = client
	p.limits.ReadClient(client)
	p.topics = kafka.TopicsOf(client)
	p.buffer = kafka.BufferOf(client)
	p.loaded = kafka.Loaded{}
}

// Close closes the client, and the clients whose answers are waited for elsewhere, after the grace time of a stop. They
// drop all records that they still buffer. No record leaves afterwards.
func (p *Producer) Close() {
	for _, f := range p.detached {
		f.stop()
	}
	p.closeClient()
	p.group.Wait()
}

func (p *Producer) closeClient() {
	if p.client != nil {
		p.client.Close()
		p.client = nil
	}
}

// When a relay is told to stop, records that the client has not written yet are dropped
// after stopGrace. If no request has been in flight for stopQuiet then, the client is
// closed: it may be waiting for a topic or a partition, and would not notice until later.
const (
	stopGrace = 250 * time.Millisecond
	stopQuiet = 600 * time.Millisecond
)

// withGrace returns a context that ends with held, or stopGrace after stop.
func withGrace(stop, held context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(held)
	unregister := context.AfterFunc(stop, func() {
		wait.Sleep(ctx, stopGrace)
		cancel()
	})
	return ctx, func() { unregister(); cancel() }
}

// produce implements [Sender]. If the breaker permits fewer calls, a batch of the
// topic holds fewer records, or the client has no room for more, it takes only the first of the events.
func (p *Producer) produce(stop, held context.Context, batch []envelope.Event, which []int) (sendResult, error) {
	var step trace.Step
	if trace.On {
		step = trace.Begin("send", "epoch", p.lease.Epoch)
	}
	p.lease.AwaitSure(stop, held)
	if !p.lease.Held() {
		return sendResult{}, lease.ErrLeaseLost
	}
	permit := p.breaker.Allow(len(which))
	defer permit.Release()
	which = which[:permit.Granted]
	if len(which) == 0 {
		return sendResult{}, nil
	}
	if err := p.connect(); err != nil {
		return sendResult{}, err
	}
	f := newFlight(stop, held)
	defer func() {
		if !f.detached {
			f.end()
		}
	}()
	errs := make([]error, len(which))
	records := p.records(batch, which, errs)
	p.checkTopics(f.grace, records, errs)
	if len(records) > 1 {
		p.limits.Learn(f.grace, p.client, records)
		p.sendAloneLater(records, errs)
		fit := p.limits.Fitting(records, errs)
		records, errs = records[:fit], errs[:fit]
	}
	fit := p.buffer.Fitting(records, errs)
	records, errs = records[:fit], errs[:fit]
	f.acks = newAcks(permit, records, errs)
	f.exceeds = p.limits.OfClient()
	f.step = step
	return p.send(stop, held, f, batch, which)
}

// checkTopics gives the records of topics that are missing or denied an error. The client
// would wait for such a topic, and with it all that is sent at the same time.
func (p *Producer) checkTopics(ctx context.Context, records []kgo.Record, errs []error) {
	bad := p.topics.Learn(ctx, func(yield func(string) bool) {
		for i := range records {
			if errs[i] == nil && !yield(records[i].Topic) {
				return
			}
		}
	})
	if len(bad) == 0 {
		return
	}
	for i := range records {
		if errs[i] == nil {
			errs[i] = bad[records[i].Topic]
		}
	}
}

// prepare implements [Sender].
func (p *Producer) prepare(ctx context.Context, topics []string) {
	if len(topics) > 0 && p.connect() == nil { // without a client, the next send returns the error
		p.topics.Refresh(ctx, topics)
	}
}

// send passes records without an error to the client and waits until the outcome of each is known, or is waited for
// elsewhere. It stops early if the breaker opens meanwhile, or if stop ends.
func (p *Producer) send(stop, held context.Context, f *flight, batch []envelope.Event, which []int) (sendResult, error) {
	acks := f.acks
	fresh := !p.inFlight.HasWritten()
	p.launch(stop, held, f, batch, which)
	known, silent, causes := p.awaitAnswers(f)
	if known && !fresh && !p.down {
		p.usual += (min(time.Since(f.began), time.Second) - p.usual) / 8
	}
	if silent {
		p.down, p.suspected = false, time.Now()
		known, sent := p.detach(f, batch, which, causes)
		known.reportFailures(true)
		known.explain(causes, nil)
		known.collect(sent.errs)
		return sent, nil
	}
	if !known {
		f.abandon()
		p.client = nil
	}
	f.flushed()
	p.loaded.Note(f.client, f.fresh)
	acks.raise()
	if !known && held.Err() != nil {
		return sendResult{}, context.Cause(held)
	}
	sent := sendResult{records: acks.records[:acks.handed], errs: acks.errs[:acks.handed], works: true}
	if !known {
		acks.timedOut(p.cfg.SendTimeout)
	}
	if len(acks.failed) > 0 && f.grace.Err() == nil {
		sent.works = p.explain(f.grace, acks)
	}
	if f.grace.Err() == nil {
		acks.reportFailures(sent.works)
	} else { // failures that we caused ourselves say nothing about Kafka
		sent.works = true
		acks.dropped()
	}
	acks.collect(sent.errs)
	if concernKafka(sent.errs) {
		p.down = !sent.works
	}
	return sent, nil
}

// launch passes records without an error to the client, and lets it send them.
func (p *Producer) launch(stop, held context.Context, f *flight, batch []envelope.Event, which []int) {
	bounded, endBounded := context.WithTimeout(held, p.cfg.SendTimeout)
	f.client, f.inFlight, f.bounded, f.began = p.client, p.inFlight, bounded, time.Now()
	f.end = func() { f.stop(); endBounded() }
	n := p.handOver(stop, held, f.grace, f.acks, func(n int) bool { return batch[which[n]].HasExpired() })
	f.fresh = p.loaded.Missing(f.records[:n], f.errs[:n])
	f.handedOver(n)
	if trace.On { // before any of them leaves
		f.step.End("ids", idsOf(n, func(i int) *envelope.Event { return &batch[which[i]] }))
	}
	f.flushed = p.flush(f)
}

// maxDetached is how many clients may wait for partitions that do not answer.
const maxDetached = 16

// awaitAnswers waits for the outcomes.
func (p *Producer) awaitAnswers(f *flight) (known, silent bool, causes map[kafka.Partition]error) {
	p.detached = slices.DeleteFunc(p.detached, (*flight).ended)
	if len(p.detached) >= maxDetached {
		p.detached[0].end() // it has waited longest
	}
	elect := electing
	if time.Since(p.suspected) < electingOnce {
		elect = 0
	}
	return f.awaitAnswers(max(patience, usualTimes*p.usual), max(alonePatience, 2*usualTimes*p.usual), elect, p.down)
}

// explain reports whether Kafka works as a whole although records have failed, and adds
// to their errors what it says about their topics and partitions, or which brokers do not answer.
func (p *Producer) explain(ctx context.Context, acks *acks) bool {
	for r, err := range acks.failed {
		p.topics.Forget(r.Topic)
		if kafka.IsFinal(err) {
			p.closeClient()
		}
	}
	topics := acks.outages()
	if len(topics) == 0 {
		return true
	}
	if p.connect() != nil {
		return false // the next send returns the error
	}
	causes, fails := kafka.Explain(ctx, p.client, topics)
	acks.explain(causes, fails)
	return fails == nil
}

// handOver passes records without an error to the client, up to the first whose event has expired while the send was
// prepared. It returns the number of records that have an error or an outcome to come.
func (p *Producer) handOver(stop, held, grace context.Context, acks *acks, expired func(n int) bool) (n int) {
	promise := acks.promise
	for ; n < len(acks.records) && acks.permit.Holds() && stop.Err() == nil && p.lease.Sure(); n++ {
		r := &acks.records[n]
		if acks.errs[n] != nil {
			continue
		}
		if expired(n) {
			acks.reject(n, errExpired)
			return n + 1
		}
		// The client checks this context before it writes a batch. The other context ends requests
		// in flight, too.
		r.Context = grace //nolint:fatcontext // each record has a context of its own
		p.client.Produce(held, r, promise)
	}
	return n
}

// flush lets the client send the records that it was given; before, it sends none. Otherwise Kafka
// could reject a request while the client gets later records: the client then fails all that it has
// of the partition, and sends the later records, before events of their key that were rejected. For the
// same reason it waits until the client has the partitions of all topics, see [kafka.Loaded]. The
// client must not be given more records before await has returned. await returns when the outcome
// of every record is known, or when the client is closed.
func (p *Producer) flush(f *flight) (await func()) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		kafka.AwaitLoaded(f.all, f.client, f.fresh)
		_ = f.client.Flush(context.Background()) // its only error is that of the context
	}()
	return func() { <-ended }
}

// records builds the Kafka records of events. Where that fails, errs says why, and
// later events of the same key get errBlocked.
func (p *Producer) records(batch []envelope.Event, which []int, errs []error) []kgo.Record {
	records := make([]kgo.Record, len(which))
	headers := make([]kgo.RecordHeader, 0, len(which)*envelope.RecordHeaders)
	var bad []string // keys of events that cannot be sent; few, if any
	add := func(name string, value []byte) { headers = append(headers, kgo.RecordHeader{Key: name, Value: value}) }
	for n, i := range which {
		e, r := &batch[i], &records[n]
		r.Partition = kafka.Unassigned
		if r.Topic, errs[n] = p.topic(e); errs[n] != nil {
			continue
		}
		first := len(headers)
		if r.Value, errs[n] = e.Record(p.cfg.Form, add); errs[n] != nil {
			if !p.cfg.PassFailedKeys {
				bad = append(bad, tables.ParkingKey(r.Topic, e.Key()))
			}
			continue
		}
		r.Key, r.Headers = e.Key(), headers[first:len(headers):len(headers)]
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
	// errExpired is the error of an event that was not sent because it has expired in the meantime.
	errExpired = errors.New("has expired")
	// errStopping is the error of an event that was not sent because the relay stops.
	errStopping = errors.New("the relay was stopped before it was sent")
)

// sendAloneLater marks the records that may be too large for their topic with errSendAlone, and the
// later records of their keys. If Kafka rejected such a record in a batch, it would reject the
// whole batch. Later events of the key could already have been accepted in another batch.
func (p *Producer) sendAloneLater(records []kgo.Record, errs []error) {
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

// works implements [Sender].
func (p *Producer) works(ctx context.Context, topic string) bool {
	if p.connect() != nil {
		return false
	}
	_, fails := kafka.Explain(ctx, p.client, []string{topic})
	return fails == nil
}

// partition implements [Sender].
func (p *Producer) partition(e *envelope.Event) kafka.Partition {
	topic, err := p.topic(e)
	if err != nil || p.topics == nil {
		return kafka.Partition{Topic: topic, Number: kafka.Unassigned}
	}
	return p.topics.Partition(topic, e.Key())
}

// topic returns the topic of an event. Events of one topic share the string.
func (p *Producer) topic(e *envelope.Event) (string, error) {
	known, name := p.named, e.Topic
	if name == nil {
		known, name = p.derived, e.EventType
	}
	if topic, ok := known[string(name)]; ok {
		return topic, nil
	}
	topic, err := e.Destination()
	if err == nil && len(known) < kafka.MaxTopics {
		known[string(name)] = topic
	}
	return topic, err
}
