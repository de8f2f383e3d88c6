package delivery

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/pg"
)

// begin makes the items of a batch.
func (l *lane) begin(batch []Delivery) {
	origins := make([]envelope.Origin, len(batch))
	l.items, l.waiting, l.dropped = make([]laneItem, len(batch)), map[Key]bool{}, map[Key]bool{}
	if !l.tx {
		l.progress.start(batch)
	}
	for i := range l.items {
		it := &l.items[i]
		it.Delivery = batch[i]
		it.Meta = ReceivedOf(&it.Delivery, &origins[i])
	}
}

// ReceivedOf returns the metadata that a delivery's row has of its event. It fills of, to which the
// metadata points.
func ReceivedOf(d *Delivery, of *envelope.Origin) envelope.Received {
	*of = envelope.Origin{Key: []byte(d.recordKey()), DeliveryID: d.ID, Stream: d.Stream}
	m := envelope.Received{ID: d.EventID, Source: d.Source, Type: d.Type, Subject: d.AggregateID, Attempt: d.Attempt, Origin: of}
	if d.FromKafka {
		of.Record = envelope.Place{Topic: d.Stream, Partition: d.Partition, Offset: d.Position, Key: of.Key}
		m.Kafka = &of.Record
	}
	return m
}

// maxReadBytes bounds the payloads of bare deliveries that a lane reads before it handles them.
const maxReadBytes = 8 << 20

// readSome decodes the events of the first items, and returns their number. Each has HandlerTimeout,
// because codecs may do I/O. One that is big is not decoded, see takeLarge.
func (l *lane) readSome(items []laneItem) (n int) {
	bytes, decoded := 0, 0
	for n < min(len(items), l.most) && (n == 0 || l.mayContinue()) {
		it := &items[n]
		if it.Bare {
			if bytes += it.Size; bytes > maxReadBytes && n > 0 {
				break
			}
			it.big = it.Size > maxReadBytes && !l.takeLarge(it)
		}
		if n++; it.Bare || it.Suspect || it.ValueIn != "" {
			if decoded += l.decode(items[decoded : n-1]); decoded < n-1 {
				return decoded
			}
			l.readAlone(items[decoded:n])
			decoded = n
		}
	}
	return decoded + l.decode(items[decoded:n])
}

// readAlone reads the payload of an item, if it was claimed without, and decodes the event.
func (l *lane) readAlone(one []laneItem) {
	it := &one[0]
	if it.read || it.big || it.Suspect && !it.hasNoAttemptLeft() && !l.beginSuspect(it) { // decoding may end the process, too
		return
	}
	if err := l.readMissing(it); err != nil {
		l.noteRead(it, err)
		return
	}
	l.decode(one)
}

// A large delivery has more than maxReadBytes. Decoded, it may need twice its size, and 8 of 40 MB in as many lanes
// needed 345 MB.
const (
	// maxLargeBytes bounds the large deliveries that the lanes of a process have in memory together. One that is larger
	// is alone there.
	maxLargeBytes = 64 << 20
	// largeWait is how long a lane waits for the others. After that its delivery waits for largePause, so that the lane
	// can have others: the call for a large event may take long.
	largeWait  = 200 * time.Millisecond
	largePause = time.Second
)

// takeLarge waits until the large deliveries of other lanes leave room for one more, and reports whether they did.
func (l *lane) takeLarge(it *laneItem) bool {
	if it.isTooLarge() { // it is not read
		return true
	}
	bytes := int64(min(it.Size, maxLargeBytes))
	ctx, cancel := context.WithTimeout(l.ctx, largeWait)
	defer cancel()
	defer context.AfterFunc(l.stopping, cancel)()
	if l.allLarge.Acquire(ctx, bytes) != nil {
		return false
	}
	l.large = bytes
	return true
}

// releaseLarge gives back what takeLarge has taken.
func (l *lane) releaseLarge() {
	if l.large > 0 {
		l.allLarge.Release(l.large)
		l.large = 0
	}
}

// isTooLarge reports whether the event of a delivery is not read at all.
func (d *Delivery) isTooLarge() bool { return !d.FromKafka && d.Size > check.MaxEventBytes }

// noteRead notes that the event of an item was read, or why it cannot be.
func (l *lane) noteRead(it *laneItem, err error) {
	it.read = true
	switch {
	case errors.Is(err, ErrLost):
		l.lose(it.Ref)
	case err != nil && l.mayContinue():
		it.Class, it.Err = handling.ClassUndecodable, err
	}
}

// readMissing reads the payload of an item that was claimed without it. That may take long, and is no call of the host:
// the time of a codec begins after it, and none is taken for one that hangs.
func (l *lane) readMissing(it *laneItem) error {
	if it.ValueIn != "" {
		return strippedError(it.ValueIn)
	}
	if !it.Bare {
		return nil
	}
	l.reading.Begin(handling.Call{Context: l.ctx, Action: it.Action, Events: 1})
	defer l.reading.End()
	return l.readPayload(&it.Delivery)
}

// decode decodes the events of the first items, and returns their number. Decoders are the host's code, so they may
// panic or end their goroutine, which all items share.
func (l *lane) decode(items []laneItem) (n int) {
	for n < len(items) && (n == 0 || l.mayContinue()) {
		err := contain.Do(func() error {
			for began := n; n < len(items) && (n == began || l.mayContinue()); n++ {
				if it := &items[n]; !it.read {
					l.noteRead(it, l.decodeOne(it))
				}
			}
			return nil
		})
		if err != nil { // of the item that has ended the goroutine
			l.noteRead(&items[n], err)
			n++
		}
	}
	return n
}

// decodeOne decodes the event of an item, unless it has no attempt left and may end the process.
func (l *lane) decodeOne(it *laneItem) error {
	if it.hasNoAttemptLeft() && !it.mayDecodeAgain() {
		return nil
	}
	ctx, cancel := context.WithTimeout(l.ctx, l.cfg.HandlerTimeout)
	defer cancel()
	l.activity.Begin(handling.Call{Context: ctx, Function: "codec or upcaster", Action: it.Action, Type: it.Type, ID: it.EventID,
		AggregateType: it.AggregateType, AggregateID: it.AggregateID, Events: 1, Place: handling.PlaceOf(it.Meta.Origin)})
	defer l.activity.End()
	m, action, err := l.readEvent(&it.Delivery, &it.Meta)
	if err != nil || m == nil {
		return err
	}
	if it.hasNoAttemptLeft() && l.knowsTypeNow(it, m.Type) {
		it.MaxAttempts = it.Attempt
	}
	if it.hasNoAttemptLeft() { // the lines and hooks about its death name the event as those before did
		return l.finishing.Describe(&it.Meta, m)
	}
	l.finishing.Resolve(ctx, &it.Item, m, action)
	return nil
}

// mayDecodeAgain reports whether the event of a delivery without an attempt left was decoded in its last attempt.
// Otherwise the event may have ended its process, or have kept the decoder for long.
func (it *laneItem) mayDecodeAgain() bool {
	return it.LastCode != codeStale && it.LastCode != handling.ClassUndecodable
}

// PostgreSQL needs many seconds to print 1 GB, which it refuses in the end. A role may have a shorter
// statement_timeout.
const (
	readPayloadTimeout = time.Minute
	readPayloadTries   = 3
)

// readPayload reads payload and headers of a bare delivery. It retries during an outage of PostgreSQL. The
// error is ErrLost, or says that PostgreSQL cannot print the event, or comes from the end of the batch.
func (l *lane) readPayload(d *Delivery) error {
	if d.isTooLarge() {
		return fmt.Errorf("the event has %d bytes as printed, at most %d are read", d.Size, check.MaxEventBytes)
	}
	for try := 1; ; {
		began := time.Now()
		ctx, cancel := context.WithTimeout(l.ctx, readPayloadTimeout)
		err := l.store.readPayload(ctx, d)
		tooLong := pg.IsCancelled(err) || ctx.Err() != nil
		cancel()
		switch {
		case err == nil, pg.IsUnreadable(err), errors.Is(err, ErrLost), !l.mayContinue():
			return err
		case !tooLong:
			l.awaitPostgres(began, err)
		case try == readPayloadTries:
			return err
		default:
			try++
		}
	}
}

// ReadOutboxDelivery is the readDelivery of workers: for events of outbox, and for those that consumers have parked.
func ReadOutboxDelivery(d *Delivery, about *envelope.Received) (m *envelope.Message, action string, err error) {
	if d.FromKafka {
		return readRecord(d, about)
	}
	m, err = ReadOutboxEvent(d, about)
	return m, d.Action, err
}

// ReadOutboxEvent returns an event of outbox as its Kafka record would bring it, and adds the headers of
// that record to the metadata.
func ReadOutboxEvent(d *Delivery, about *envelope.Received) (*envelope.Message, error) {
	if m := plainMessage(d); m != nil {
		about.Tombstone = m.Data == nil
		return m, nil
	}
	return messageOfRecord(d, about)
}

func messageOfRecord(d *Delivery, about *envelope.Received) (*envelope.Message, error) {
	e := envelope.Event{
		EventID: []byte(d.EventID), EventType: []byte(d.Type), Source: []byte(d.Source),
		AggregateType: []byte(d.AggregateType), AggregateID: []byte(d.AggregateID),
		Payload: d.Payload, ContentType: []byte(d.ContentType), Headers: d.Headers,
	}
	if check.Time(d.OccurredAt) == nil {
		e.OccurredAt = envelope.AppendTime(nil, d.OccurredAt)
	}
	type header struct {
		name  string
		value []byte
	}
	headers := make([]header, 0, envelope.RecordHeaders)
	value, err := e.Record(envelope.RecordForm{}, func(name string, value []byte) {
		headers = append(headers, header{name, value})
	})
	if err != nil {
		return nil, err
	}
	about.Tombstone = value == nil
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

// plainMessage returns the event of a row that has no headers and every attribute: without them, the names and values
// of the record's headers need not be made and read again. It returns nil for other rows.
func plainMessage(d *Delivery) *envelope.Message {
	if d.Headers != nil || check.Time(d.OccurredAt) != nil || envelope.SaysWhole(d.ContentType) {
		return nil
	}
	for _, text := range [...]string{d.EventID, d.Type, d.Source, d.AggregateID} {
		if check.Text(text, math.MaxInt) != nil {
			return nil
		}
	}
	for _, text := range [...]string{d.AggregateType, d.ContentType} { // they may be empty
		if text != "" && check.Text(text, math.MaxInt) != nil {
			return nil
		}
	}
	data := d.Payload
	if data == nil && d.ContentType != "" {
		data = []byte{}
	}
	return &envelope.Message{
		ID: d.EventID, Source: d.Source, Type: d.Type, Subject: d.AggregateID, ContentType: d.ContentType,
		Time: d.OccurredAt.UTC().Truncate(time.Microsecond), Extensions: map[string]string{"aggregatetype": d.AggregateType}, Data: data,
	}
}
