package oracle

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// Reader reads a topic from its beginning and keeps all events. [Follow] returns one. It
// is safe for concurrent use.
type Reader struct {
	client *kgo.Client
	decode func(*kgo.Record) (Event, error)
	stop   context.CancelFunc
	done   chan struct{} // closed once nothing reads any more

	mu      sync.Mutex
	arrived []Event
	places  []Place // of arrived
	seen    map[string]struct{}
	ends    map[int32]int64 // next offset to read, by partition
	err     error
}

// Follow reads topic until the reader is closed. decode returns the event of a record. Nil means
// that the record's value is the event as JSON, and that the first 8 KiB of fillers are enough.
// opts are extra options that the brokers need, such as credentials.
func Follow(brokers []string, topic string, decode func(*kgo.Record) (Event, error), opts ...kgo.Opt) (*Reader, error) {
	client, err := kgo.NewClient(append(opts[:len(opts):len(opts)], kgo.SeedBrokers(brokers...), kgo.ConsumeTopics(topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.MetadataMinAge(100*time.Millisecond), kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.KeepControlRecords())...) // the topic may not be there yet
	if err != nil {
		return nil, fmt.Errorf("oracle: follow %s: %w", topic, err)
	}
	if decode == nil {
		decode = decodeValue
	}
	ctx, stop := context.WithCancel(context.Background())
	r := &Reader{client: client, decode: decode, stop: stop, done: make(chan struct{}), seen: map[string]struct{}{}, ends: map[int32]int64{}}
	go r.poll(ctx)
	return r, nil
}

// Place is where a record is, and its times.
type Place struct {
	Topic     string
	Partition int32
	Offset    int64
	Sent      time.Time // when the producer was given the record
	Producer  int64     // the id that Kafka gave to the client that sent it
	Expires   time.Time // of its event; zero: never
}

// Close ends the reading. Without Kafka that takes seconds. What has arrived stays.
func (r *Reader) Close() {
	r.stop()
	<-r.done
}

// maxFiller is how much a reader keeps of an event's filler.
const maxFiller = 8 << 10

func decodeValue(r *kgo.Record) (e Event, err error) {
	err = json.Unmarshal(r.Value, &e)
	if len(e.Filler) > maxFiller {
		e.Filler = strings.Clone(e.Filler[:maxFiller])
	}
	return e, err
}

func (r *Reader) poll(ctx context.Context) {
	defer close(r.done)
	defer r.client.Close()
	for {
		fetches := r.client.PollFetches(ctx)
		if ctx.Err() != nil {
			return
		}
		r.mu.Lock()
		fetches.EachRecord(r.take)
		r.mu.Unlock()
	}
}

// take is called under mu.
func (r *Reader) take(record *kgo.Record) {
	r.ends[record.Partition] = record.Offset + 1
	if record.Attrs.IsControl() { // the end of a transaction
		return
	}
	e, err := r.decode(record)
	if err != nil && r.err == nil {
		r.err = fmt.Errorf("oracle: record %s/%d/%d: %w", record.Topic, record.Partition, record.Offset, err)
	}
	r.arrived, r.places = append(r.arrived, e), append(r.places, placeOf(record))
	r.seen[e.ID] = struct{}{}
}

func placeOf(r *kgo.Record) Place {
	p := Place{Topic: r.Topic, Partition: r.Partition, Offset: r.Offset, Sent: r.Timestamp, Producer: r.ProducerID}
	for _, h := range r.Headers {
		if h.Key == "ce_expirytime" {
			p.Expires, _ = time.Parse(time.RFC3339, string(h.Value))
		}
	}
	return p
}

// Arrived returns what has arrived so far, repeats included, and the first
// record that could not be decoded.
func (r *Reader) Arrived() ([]Event, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.arrived[:len(r.arrived):len(r.arrived)], r.err
}

// Places returns where the records are whose events [Reader.Arrived] returns, at least these.
func (r *Reader) Places() []Place {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.places[:len(r.places):len(r.places)]
}

// Has reports whether an event has arrived.
func (r *Reader) Has(id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.seen[id]
	return ok
}

// Missing returns how many of the committed events have not arrived.
func (r *Reader) Missing(committed map[string]struct{}) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	missing := 0
	for id := range committed {
		if _, ok := r.seen[id]; !ok {
			missing++
		}
	}
	return missing
}

// CaughtUp reports whether everything up to these offsets has been read.
func (r *Reader) CaughtUp(ends map[int32]int64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for partition, end := range ends {
		if r.ends[partition] < end {
			return false
		}
	}
	return true
}

// Ends returns the offset behind the last record of each partition of a topic.
// opts are as for [Follow].
func Ends(ctx context.Context, brokers []string, topic string, opts ...kgo.Opt) (map[int32]int64, error) {
	client, err := kgo.NewClient(append(opts[:len(opts):len(opts)], kgo.SeedBrokers(brokers...))...)
	if err != nil {
		return nil, fmt.Errorf("oracle: ends of %s: %w", topic, err)
	}
	defer client.Close()
	describe := kmsg.NewPtrMetadataRequest()
	describe.Topics = []kmsg.MetadataRequestTopic{{Topic: kmsg.StringPtr(topic)}}
	meta, err := describe.RequestWith(ctx, client)
	if err != nil {
		return nil, fmt.Errorf("oracle: ends of %s: %w", topic, err)
	}
	list := kmsg.NewListOffsetsRequestTopic()
	list.Topic = topic
	for _, p := range meta.Topics[0].Partitions {
		partition := kmsg.NewListOffsetsRequestTopicPartition()
		partition.Partition, partition.Timestamp = p.Partition, -1 // the latest
		list.Partitions = append(list.Partitions, partition)
	}
	request := kmsg.NewPtrListOffsetsRequest()
	request.ReplicaID = -1
	request.Topics = []kmsg.ListOffsetsRequestTopic{list}
	ends := map[int32]int64{}
	for _, shard := range client.RequestSharded(ctx, request) {
		if shard.Err != nil {
			return nil, fmt.Errorf("oracle: ends of %s: %w", topic, shard.Err)
		}
		for _, t := range shard.Resp.(*kmsg.ListOffsetsResponse).Topics {
			for _, p := range t.Partitions {
				if err := kerr.ErrorForCode(p.ErrorCode); err != nil {
					return nil, fmt.Errorf("oracle: ends of %s/%d: %w", topic, p.Partition, err)
				}
				ends[p.Partition] = p.Offset
			}
		}
	}
	return ends, nil
}
