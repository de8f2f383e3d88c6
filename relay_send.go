package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// checkKafkaOpts refuses options that the relay's promises cannot live with.
func checkKafkaOpts(opts []kgo.Opt) error {
	client, err := kgo.NewClient(opts...)
	if err != nil {
		return fmt.Errorf("kafka options: %w", err)
	}
	defer client.Close()
	var errs []error
	refuse := func(set bool, option, why string) {
		if set {
			errs = append(errs, fmt.Errorf("kafka option %s: %s", option, why))
		}
	}
	isSet := func(option any) bool { set, _ := client.OptValue(option).(bool); return set }
	named := func(option any) bool { name, _ := client.OptValue(option).(string); return name != "" }
	const notConsumer = "a relay does not consume"
	refuse(named(kgo.ConsumerGroup), "ConsumerGroup", notConsumer)
	refuse(named(kgo.ShareGroup), "ShareGroup", notConsumer)
	refuse(named(kgo.InstanceID), "InstanceID", notConsumer)
	refuse(len(client.GetConsumeTopics()) > 0, "ConsumeTopics or ConsumePartitions", notConsumer)
	refuse(named(kgo.TransactionalID), "TransactionalID", "it belongs to the relay")
	refuse(isSet(kgo.DisableIdempotentWrite), "DisableIdempotentWrite", "retries would repeat and reorder records")
	refuse(isSet(kgo.ManualFlushing), "ManualFlushing", "nobody would flush")
	return errors.Join(errs...)
}

// producer hands events to Kafka. It belongs to one goroutine.
type producer struct {
	opts  []kgo.Opt
	cfg   RelayConfig
	lease *lease
	log   *slog.Logger
	kafka trouble

	client *kgo.Client // nil until needed, and after a send without an answer

	named, derived map[string]string // topics, by their name in the row or by the event type
}

func newProducer(opts []kgo.Opt, cfg RelayConfig, l *lease, log *slog.Logger) *producer {
	return &producer{
		opts: opts, cfg: cfg, lease: l, log: log, kafka: trouble{log: log, what: "Kafka"},
		named: map[string]string{}, derived: map[string]string{},
	}
}

// producerOpts are the host's options with what the promises need.
func producerOpts(host []kgo.Opt, cfg RelayConfig) []kgo.Opt {
	return append(append([]kgo.Opt(nil), host...),
		kgo.RequiredAcks(kgo.AllISRAcks()),
		// With idempotence alone, a record whose request was sent and never
		// answered would neither fail nor time out.
		kgo.RecordDeliveryTimeout(cfg.DeliveryTimeout),
		kgo.AllowIdempotentProduceCancellation(),
		// Batches come full: there is no company to wait for.
		kgo.ProducerLinger(0),
	)
}

// close throws the client away with everything that it still buffers; no
// record leaves afterwards.
func (p *producer) close() {
	if p.client != nil {
		p.client.Close()
		p.client = nil
	}
}

// deliver hands a batch to Kafka and repeats what fails for want of Kafka until
// it is there. It returns how many events from the start of the batch were
// decided, each sent or refused, and the refused ones among them. That is all of
// them unless stop was cancelled while Kafka was away (no error) or the lease
// was lost.
func (p *producer) deliver(stop, held context.Context, batch []envelope) (decided int, refused []refusal, err error) {
	d := delivery{producer: p, held: held, batch: batch, left: make([]int, len(batch))}
	for i := range batch {
		d.left[i] = i
	}
	err = d.sendTogether()
	for err == nil && len(d.left) > 0 && stop.Err() == nil {
		if d.down {
			sleep(stop, p.kafka.backoff())
		}
		if d.suspicious {
			err = d.sendAlone()
		} else {
			err = d.sendTogether()
		}
	}
	decided = len(batch)
	if len(d.left) > 0 {
		decided = d.left[0]
	}
	for _, r := range d.refused {
		if decided == len(batch) || r.id < batch[decided].id {
			refused = append(refused, r)
		}
	}
	return decided, refused, err
}

// delivery is one batch on its way.
type delivery struct {
	*producer
	held       context.Context
	batch      []envelope
	left       []int // undecided events, by their index in batch
	refused    []refusal
	suspicious bool // Kafka refused something among left, and may not mean all of it
	down       bool // the last send failed for want of Kafka
}

// sendTogether sends all undecided events at once. A refusal names whatever the
// client had put into the same request, good events too, so that nothing but
// what is refused alone is blamed.
func (d *delivery) sendTogether() error {
	errs, err := d.produce(d.held, d.batch, d.left)
	if err != nil {
		return err
	}
	d.down = false
	left := d.left[:0]
	for n, i := range d.left {
		switch class := refusalClass(errs[n]); {
		case errs[n] == nil:
		case class == invalidEvent: // ours to know, whatever else was sent
			d.refuse(i, class, errs[n])
		default:
			d.suspicious = d.suspicious || class != ""
			d.down = d.down || class == ""
			left = append(left, i)
			if class == "" {
				d.away(i, errs[n])
			}
		}
	}
	d.left = left
	if !d.down {
		d.kafka.report(nil)
	}
	return nil
}

// sendAlone sends the undecided events one by one in their order, up to the
// first that fails for want of Kafka.
func (d *delivery) sendAlone() error {
	d.down = false
	for len(d.left) > 0 {
		errs, err := d.produce(d.held, d.batch, d.left[:1])
		if err != nil {
			return err
		}
		switch class := refusalClass(errs[0]); {
		case errs[0] == nil:
		case class == "":
			d.down = true
			d.away(d.left[0], errs[0])
			return nil
		default:
			d.refuse(d.left[0], class, errs[0])
		}
		d.kafka.report(nil)
		d.left = d.left[1:]
	}
	d.suspicious = false
	return nil
}

// away notes that an event failed for want of Kafka.
func (d *delivery) away(i int, err error) {
	e := &d.batch[i]
	topic, _ := e.destination() // it has one, or it would not have been sent
	d.kafka.report(err, "topic", topic, "id", e.id, "event_id", string(e.eventID))
}

func (d *delivery) refuse(i int, class string, err error) {
	e := &d.batch[i]
	d.log.Warn("outbox: event refused", "id", e.id, "event_id", string(e.eventID), "type", string(e.eventType),
		"key", string(e.key()), "class", class, "error", err)
	d.refused = append(d.refused, refusal{id: e.id, class: class, err: err})
}

// produce sends the events of batch that which names, and returns the outcome
// of each. An outcome is known when produce returns: nothing of it is on its way
// any more. The error is the loss of the lease.
func (p *producer) produce(held context.Context, batch []envelope, which []int) ([]error, error) {
	if !p.lease.held() {
		return nil, errLeaseLost
	}
	if p.client == nil {
		client, err := kgo.NewClient(p.opts...)
		if err != nil { // NewRelay has validated these options
			return nil, fmt.Errorf("make Kafka client: %w", err)
		}
		p.client = client
	}
	errs := make([]error, len(which))
	records := p.records(batch, which, errs)
	sent := newAcks(records, errs)
	promise := sent.promise
	for i := range records {
		if errs[i] == nil {
			p.client.Produce(held, &records[i], promise)
		}
	}
	timeout := time.NewTimer(p.cfg.SendTimeout)
	defer timeout.Stop()
	select {
	case <-sent.all:
		return errs, nil
	case <-held.Done():
	case <-timeout.C:
	}
	// Without its client no record can leave any more, and each callback comes.
	p.close()
	<-sent.all
	if err := context.Cause(held); err != nil {
		return nil, err
	}
	return errs, nil
}

// records builds the Kafka records of events. Where that fails, errs says why.
func (p *producer) records(batch []envelope, which []int, errs []error) []kgo.Record {
	records := make([]kgo.Record, len(which))
	headers := make([]kgo.RecordHeader, 0, len(which)*recordHeaders)
	add := func(name string, value []byte) { headers = append(headers, kgo.RecordHeader{Key: name, Value: value}) }
	for n, i := range which {
		e, r := &batch[i], &records[n]
		if r.Topic, errs[n] = p.topic(e); errs[n] != nil {
			continue
		}
		first := len(headers)
		if r.Value, errs[n] = e.record(p.cfg.Mode, add); errs[n] != nil {
			continue
		}
		r.Key, r.Headers = e.key(), headers[first:len(headers):len(headers)]
	}
	return records
}

// topic returns the event's destination. Events that go to the same place share
// the string.
func (p *producer) topic(e *envelope) (string, error) {
	const maxTopics = 10_000 // far more than a service has
	known, name := p.named, e.topic
	if name == nil {
		known, name = p.derived, e.eventType
	}
	if topic, ok := known[string(name)]; ok {
		return topic, nil
	}
	topic, err := e.destination()
	if err == nil && len(known) < maxTopics {
		known[string(name)] = topic
	}
	return topic, err
}

// acks collects the outcomes of records. The client calls promise from its own
// goroutine, one record after another.
type acks struct {
	records []kgo.Record
	errs    []error
	all     chan struct{} // closed when every outcome is in

	mu     sync.Mutex
	failed map[*kgo.Record]error
	open   int
}

// newAcks expects one outcome for each record without an error.
func newAcks(records []kgo.Record, errs []error) *acks {
	a := &acks{records: records, errs: errs, all: make(chan struct{})}
	for _, err := range errs {
		if err == nil {
			a.open++
		}
	}
	if a.open == 0 {
		close(a.all)
	}
	return a
}

func (a *acks) promise(r *kgo.Record, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err != nil {
		if a.failed == nil {
			a.failed = make(map[*kgo.Record]error)
		}
		a.failed[r] = err
	}
	if a.open--; a.open > 0 {
		return
	}
	for i := range a.records {
		if err := a.failed[&a.records[i]]; err != nil {
			a.errs[i] = err
		}
	}
	close(a.all)
}

// invalidEvent is the class of rows that cannot be made into a record at all.
const invalidEvent = "invalid_event"

// refusalClass names the refusals: errors that the event itself is to blame for
// and that no waiting mends. Every other error returns "" and is taken for
// trouble with the infrastructure; were the list open, an hour of lapsed
// credentials would condemn the backlog, and a host whose clock is an hour ahead
// whatever it sends (Kafka calls that an invalid timestamp).
func refusalClass(err error) string {
	if err == nil {
		return ""
	}
	var field *FieldError
	switch {
	case errors.As(err, &field):
		return invalidEvent
	case errors.Is(err, kerr.MessageTooLarge), errors.Is(err, kerr.RecordListTooLarge):
		return "message_too_large"
	case errors.Is(err, kerr.InvalidRecord):
		return "invalid_record"
	case errors.Is(err, kerr.PolicyViolation):
		return "policy_violation"
	}
	return ""
}
