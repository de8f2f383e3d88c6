package delivery

import (
	"context"
	"errors"
	"time"

	"github.com/outboxgo/outbox/internal/envelope"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/pg"
)

// begin makes items of a batch.
func (l *lane) begin(batch []Delivery) {
	origins := make([]envelope.Origin, len(batch))
	l.work = make([]laneItem, len(batch))
	l.progress.start(batch)
	for i, d := range batch {
		l.work[i].Delivery = d
		l.work[i].Meta = ReceivedOf(&d, &origins[i])
	}
}

// ReceivedOf returns what handlers are told of a delivery, with an origin that it fills.
func ReceivedOf(d *Delivery, of *envelope.Origin) envelope.Received {
	*of = envelope.Origin{Key: []byte(d.RecordKey()), DeliveryID: d.ID, Stream: d.Stream}
	m := envelope.Received{ID: d.EventID, Source: d.Source, Type: d.Type, Subject: d.AggregateID, Attempt: d.Attempt, Origin: of}
	if d.FromKafka {
		of.Record = envelope.Place{Topic: d.Stream, Partition: d.Partition, Offset: d.Position, Key: of.Key}
		m.Kafka = &of.Record
	}
	return m
}

// maxReadBytes bounds what a lane reads that came without its payload, until it has handled that.
const maxReadBytes = 8 << 20

// readSome decodes the events of the first items, and returns how many these are. Codecs may do I/O, so each has as
// long as a handler.
func (l *lane) readSome(items []laneItem) (n int) {
	bytes := 0
	for n < min(len(items), l.most) && (n == 0 || l.mayGoOn()) {
		it := &items[n]
		if it.Bare {
			if bytes += it.Size; bytes > maxReadBytes && n > 0 {
				break
			}
		}
		if !it.read {
			l.read(it)
		}
		n++
	}
	return n
}

// read decodes an event. Decoders are the host's, and may end their goroutine.
func (l *lane) read(it *laneItem) {
	ctx, cancel := context.WithTimeout(l.held, l.cfg.HandlerTimeout)
	defer cancel()
	l.activity.Begin(handling.Call{Context: ctx, Function: "codec or upcaster", Action: it.Action, Type: it.Type, ID: it.EventID,
		AggregateType: it.AggregateType, AggregateID: it.AggregateID, Events: 1, Place: handling.PlaceOf(it.Meta.Origin)})
	defer l.activity.End()
	it.read = true
	err := contain.Do(func() error {
		if it.Bare {
			if err := l.print(&it.Delivery); err != nil {
				return err
			}
		}
		if it.isSpent() {
			return nil
		}
		m, action, err := l.event(&it.Delivery, &it.Meta)
		if err != nil || m == nil {
			return err
		}
		l.own.Resolve(ctx, &it.Item, m, action)
		return nil
	})
	switch {
	case errors.Is(err, ErrLost):
		l.lose(it.Ref)
	case err != nil && l.mayGoOn():
		it.Class, it.Err = handling.ClassUndecodable, err
	}
}

// Printing 1 GB, which PostgreSQL refuses in the end, takes many seconds, and a role may have a shorter
// statement_timeout.
const (
	printTimeout = time.Minute
	printTries   = 3
)

// print reads payload and headers of a delivery that came without. The error is that of an event which PostgreSQL
// cannot print, or with the work on the batch, which has ended then.
func (l *lane) print(d *Delivery) error {
	for try := 1; ; {
		began := time.Now()
		ctx, cancel := context.WithTimeout(l.held, printTimeout)
		err := l.store.Print(ctx, d)
		tooLong := pg.IsCancelled(err) || ctx.Err() != nil
		cancel()
		switch {
		case err == nil, pg.IsUnreadable(err), errors.Is(err, ErrLost), !l.mayGoOn():
			return err
		case !tooLong:
			l.awaitPostgres(began, err)
		case try == printTries:
			return err
		default:
			try++
		}
	}
}

// ReadOutboxDelivery implements [readDelivery] for events of outbox.
func ReadOutboxDelivery(d *Delivery, about *envelope.Received) (m *envelope.Message, action string, err error) {
	m, err = ReadOutboxEvent(d, about)
	return m, d.Action, err
}

// ReadOutboxEvent returns an event of outbox as it would arrive in a record, and adds the
// headers of that to the metadata.
func ReadOutboxEvent(d *Delivery, about *envelope.Received) (*envelope.Message, error) {
	e := envelope.Event{
		EventID: []byte(d.EventID), EventType: []byte(d.Type), Source: []byte(d.Source), AggregateType: []byte(d.AggregateType),
		AggregateID: []byte(d.AggregateID), Payload: d.Payload, ContentType: []byte(d.ContentType), Headers: d.Headers,
	}
	if check.Time(d.OccurredAt) == nil {
		e.OccurredAt = envelope.AppendTime(nil, d.OccurredAt)
	}
	type header struct {
		name  string
		value []byte
	}
	headers := make([]header, 0, envelope.RecordHeaders)
	value, err := e.Record(envelope.RecordForm{}, func(name string, value []byte) { headers = append(headers, header{name, value}) })
	if err != nil {
		return nil, err
	}
	all := func(yield func(string, []byte) bool) {
		for _, h := range headers {
			if !yield(h.name, h.value) {
				return
			}
		}
	}
	about.Headers = envelope.PlainHeaders(all)
	return envelope.DecodeRecord(value, all)
}
