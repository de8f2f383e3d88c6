package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// partitions is what new topics get.
const partitions = 3

// eventID names an event in the journal and in Kafka: an order has at most one
// event of a type.
type eventID struct {
	order     int64
	eventType string
}

// correlationID is how an order travels; orderOf reads it back.
func correlationID(runID string, order int64) string { return runID + "/" + number(order) }

func orderOf(correlationID, runID string) (order int64, ours bool) {
	n, ours := strings.CutPrefix(correlationID, runID+"/")
	if !ours {
		return 0, false
	}
	order, _ = strconv.ParseInt(n, 10, 64) // 0 is no order: an event that never committed
	return order, true
}

// arrival is an event as it came in.
type arrival struct {
	id eventID
	at time.Time
}

// position is a partition of a topic.
type position struct {
	topic     string
	partition int32
}

// reader reads the shop's topics with a plain Kafka client. The topics keep the
// names of the convention, as they would in production, and so may hold events
// of other runs: reading begins where they ended before the first order, and
// what carries another run's correlation id is passed over.
type reader struct {
	client *kgo.Client
	topics []string
	runID  string
	start  time.Time // that the times of printed lines count from

	stands chan struct{} // closed when it stands at the ends

	mu       sync.Mutex
	arrivals []arrival // repeats included
	seen     map[eventID]bool
	next     map[position]int64 // offset to read next
}

// newReader returns a reader that does not stand yet.
func newReader(brokers []string, events *outbox.Registry, runID string) (*reader, error) {
	topics, err := topicsOf(events)
	if err != nil {
		return nil, err
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...))
	if err != nil {
		return nil, fmt.Errorf("make Kafka client: %w", err)
	}
	return &reader{
		client: client, topics: topics, runID: runID, start: time.Now(),
		stands: make(chan struct{}), seen: map[eventID]bool{}, next: map[position]int64{},
	}, nil
}

// stand makes the topics that are not there, and begins to read at their ends, as soon as Kafka
// answers. Nothing of this run may be sent before.
func (r *reader) stand(ctx context.Context, out *console) error {
	for tries := 0; ctx.Err() == nil; tries++ {
		try, cancel := context.WithTimeout(ctx, 3*time.Second)
		err := r.standAtEnds(try)
		cancel()
		var answer *kerr.Error
		switch {
		case err == nil:
			close(r.stands)
			return nil
		case errors.As(err, &answer):
			return err
		case tries == 0 && ctx.Err() == nil:
			out.note("Kafka does not answer yet: what the shop sells is sent when it does")
		}
		show.Pause(ctx, 200*time.Millisecond)
	}
	return nil
}

// topicsOf asks the registry where events go.
func topicsOf(events *outbox.Registry) (topics []string, err error) {
	for _, eventType := range events.Types() {
		topic, err := events.Topic(eventType)
		if err != nil {
			return nil, err
		}
		topics = append(topics, topic)
	}
	return topics, nil
}

// awaitStands waits until r stands at the ends. After Ctrl-C it waits for Kafka as long as patience lasts.
func (r *reader) awaitStands(ctx, life context.Context, patience time.Duration) error {
	waiting, giveUp := context.WithCancel(life)
	defer giveUp()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(patience, giveUp) })()
	select {
	case <-r.stands:
		return nil
	case <-waiting.Done():
	}
	if life.Err() != nil {
		return context.Cause(life)
	}
	return fmt.Errorf("no answer of Kafka: %w", ctx.Err())
}

// standAtEnds makes the topics and begins to consume each at its end. Offsets are
// read here and not left to the client: "the end" of a client is the end at the
// time when it gets round to asking, and by then events may have arrived.
func (r *reader) standAtEnds(ctx context.Context) error {
	admin := kadm.NewClient(r.client)
	const brokerDefault = -1
	made, err := admin.CreateTopics(ctx, partitions, brokerDefault, nil, r.topics...)
	if err != nil {
		return fmt.Errorf("make topics: %w", err)
	}
	for _, topic := range made.Sorted() {
		if topic.Err != nil && !errors.Is(topic.Err, kerr.TopicAlreadyExists) {
			return fmt.Errorf("make topic %s: %w", topic.Topic, topic.Err)
		}
	}
	ends, err := r.ends(ctx)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	ends.Each(func(end kadm.ListedOffset) { r.next[position{end.Topic, end.Partition}] = end.Offset })
	r.client.AddConsumePartitions(ends.KOffsets())
	return nil
}

// ends returns where the topics end. A broker may need a moment before it knows
// the leaders of new topics.
func (r *reader) ends(ctx context.Context) (ends kadm.ListedOffsets, err error) {
	for range 50 {
		ends, err = kadm.NewClient(r.client).ListEndOffsets(ctx, r.topics...)
		if err == nil {
			err = ends.Error()
		}
		if err == nil || ctx.Err() != nil {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	if err != nil {
		return nil, fmt.Errorf("find the ends of the topics: %w", err)
	}
	return ends, nil
}

func (r *reader) close() { r.client.Close() }

// read takes in and prints what arrives until ctx ends.
func (r *reader) read(ctx context.Context, out *console) {
	progress := progress{out: out, last: time.Now()}
	for fetches := r.client.PollFetches(ctx); ctx.Err() == nil; fetches = r.client.PollFetches(ctx) {
		now := time.Now()
		fetches.EachError(func(topic string, partition int32, err error) {
			out.note("reading %s/%d: %v", topic, partition, err)
		})
		fetches.EachRecord(func(record *kgo.Record) {
			if r.take(record, now) {
				progress.arrived(record, now.Sub(r.start))
			}
		})
		progress.tick(now, now.Sub(r.start))
	}
}

// take notes a record, and reports whether it belongs to this run.
func (r *reader) take(record *kgo.Record, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.next[position{record.Topic, record.Partition}] = record.Offset + 1
	order, ours := orderOf(header(record, "ce_correlationid"), r.runID)
	if ours {
		id := eventID{order, header(record, "ce_type")}
		r.arrivals = append(r.arrivals, arrival{id, now})
		r.seen[id] = true
	}
	return ours
}

func header(record *kgo.Record, name string) string {
	for _, h := range record.Headers {
		if h.Key == name {
			return string(h.Value)
		}
	}
	return ""
}

// missing returns how many events of the journal have not arrived.
func (r *reader) missing(journal []line) (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range journal {
		if !r.seen[l.id] {
			n++
		}
	}
	return n
}

// finish reads on to the present ends of the topics, so that no repeat, and
// nothing that should not be there, is overlooked.
func (r *reader) finish(life context.Context, patience time.Duration) error {
	ends, err := r.ends(life)
	if err != nil {
		return err
	}
	for deadline := time.Now().Add(patience); !r.reached(ends); time.Sleep(10 * time.Millisecond) {
		if life.Err() != nil {
			return context.Cause(life)
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("did not reach the ends of the topics within %v", patience)
		}
	}
	return nil
}

func (r *reader) reached(ends kadm.ListedOffsets) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	reached := true
	ends.Each(func(end kadm.ListedOffset) {
		reached = reached && r.next[position{end.Topic, end.Partition}] >= end.Offset
	})
	return reached
}

// received returns what has arrived, in its order for each partition.
func (r *reader) received() []arrival {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.arrivals[:len(r.arrivals):len(r.arrivals)]
}

// progress prints the first events and then one line per second. It belongs to
// the reading goroutine.
type progress struct {
	out   *console
	total int

	last      time.Time // when the last line was printed
	lastTotal int
}

// shownEvents is how many events get a line of their own.
const shownEvents = 10

func (p *progress) arrived(record *kgo.Record, since time.Duration) {
	if p.total++; p.total <= shownEvents {
		p.out.event(since, record.Topic, string(record.Key), string(record.Value))
		p.lastTotal = p.total
	}
}

func (p *progress) tick(now time.Time, since time.Duration) {
	took := now.Sub(p.last)
	if p.total < shownEvents || took < time.Second {
		return
	}
	if p.total > p.lastTotal {
		p.out.rate(since, p.total, float64(p.total-p.lastTotal)/took.Seconds())
	}
	p.last, p.lastTotal = now, p.total
}
