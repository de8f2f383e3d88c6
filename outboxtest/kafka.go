package outboxtest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Kafka starts a fake broker that lives as long as the test, and returns the
// options to reach it, for relays, consumers and clients. It has the topics that are
// named and no others (name dead-letter topics as well); if none is named, topics
// come into being when they are needed. Each has one partition, so that what was
// sent in order arrives in order.
func Kafka(t CleanupT, topics ...string) []kgo.Opt {
	t.Helper()
	setup := []kfake.Opt{kfake.NumBrokers(1), kfake.DefaultNumPartitions(1)}
	// A client that looks for a missing topic looks again soon.
	opts := []kgo.Opt{kgo.MetadataMinAge(20 * time.Millisecond)}
	if len(topics) > 0 {
		setup = append(setup, kfake.SeedTopics(1, topics...))
	} else {
		setup = append(setup, kfake.AllowAutoTopicCreation())
		opts = append(opts, kgo.AllowAutoTopicCreation())
	}
	cluster, err := kfake.NewCluster(setup...)
	if err != nil {
		t.Fatalf("outboxtest: start a fake Kafka: %v", err)
		return nil
	}
	t.Cleanup(cluster.Close)
	return slices.Clip(append(opts, kgo.SeedBrokers(cluster.ListenAddrs()...))) // two may append to it
}

// Records returns the records of a topic, of any broker, from the first one on. It
// waits until there are n, until the deadline of ctx or for 30 s if it has none; the
// test fails if they do not come, and if there are more. With 0 the topic must be
// empty, or not there: call it after [Drain].
func Records(ctx context.Context, t T, kafka []kgo.Opt, topic string, n int) []*kgo.Record {
	t.Helper()
	ctx, cancel := patiently(ctx)
	defer cancel()
	records, err := read(ctx, kafka, topic, n)
	if err != nil {
		t.Fatalf("outboxtest: %v", err)
		return nil
	}
	return records
}

func read(ctx context.Context, kafka []kgo.Opt, topic string, n int) ([]*kgo.Record, error) {
	client, err := kgo.NewClient(append(slices.Clip(kafka), kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.KeepControlRecords())...)
	if err != nil {
		return nil, fmt.Errorf("kafka options: %w", err)
	}
	defer client.Close()
	r := reader{client: client, topic: topic, next: map[int32]int64{}}
	for {
		err := r.readToEnd(ctx)
		if err == nil && len(r.records) >= n || !pause(ctx) {
			return r.records, r.check(n, err)
		}
	}
}

// reader reads a topic.
type reader struct {
	client  *kgo.Client
	topic   string
	next    map[int32]int64 // offset, by partition
	records []*kgo.Record
}

// readToEnd reads what the topic holds now. A topic that is not there holds
// nothing.
func (r *reader) readToEnd(ctx context.Context) error {
	ends, err := r.list(ctx, kadm.NewClient(r.client).ListCommittedOffsets)
	if errors.Is(err, kerr.UnknownTopicOrPartition) {
		return nil
	}
	if err != nil {
		return err
	}
	starts, err := r.list(ctx, kadm.NewClient(r.client).ListStartOffsets)
	if err != nil {
		return err
	}
	for partition, start := range starts {
		if _, known := r.next[partition]; !known {
			r.next[partition] = start.Offset
			r.client.AddConsumePartitions(map[string]map[int32]kgo.Offset{r.topic: {partition: kgo.NewOffset().At(start.Offset)}})
		}
	}
	for r.isBehind(ends) {
		fetches := r.client.PollFetches(ctx)
		fetches.EachRecord(r.take)
		if err := fetches.Err(); err != nil {
			return fmt.Errorf("read topic %s: %w", r.topic, err)
		}
	}
	return nil
}

type listOffsets = func(context.Context, ...string) (kadm.ListedOffsets, error)

// list returns offsets by partition.
func (r *reader) list(ctx context.Context, ask listOffsets) (map[int32]kadm.ListedOffset, error) {
	listed, err := ask(ctx, r.topic)
	if err == nil {
		err = listed.Error()
	}
	if err != nil {
		return nil, fmt.Errorf("offsets of topic %s: %w", r.topic, err)
	}
	return listed[r.topic], nil
}

func (r *reader) isBehind(ends map[int32]kadm.ListedOffset) bool {
	for partition, end := range ends {
		if r.next[partition] < end.Offset {
			return true
		}
	}
	return false
}

// take keeps a record. The marks of transactions only say how far the topic goes.
func (r *reader) take(record *kgo.Record) {
	r.next[record.Partition] = record.Offset + 1
	if !record.Attrs.IsControl() {
		r.records = append(r.records, record)
	}
}

// check returns an error unless exactly n records were read; err is the reason why no
// more were read.
func (r *reader) check(n int, err error) error {
	if len(r.records) == n {
		return err
	}
	lines := make([]string, len(r.records))
	for i, record := range r.records {
		lines[i] = fmt.Sprintf("partition %d, offset %d, key %q: %s", record.Partition, record.Offset, cut(string(record.Key)), cut(string(record.Value)))
	}
	says := fmt.Errorf("topic %s has %d records, want %d:\n%s", r.topic, len(lines), n, list(lines))
	return errors.Join(says, err)
}
