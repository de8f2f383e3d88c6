package show

import (
	"context"
	"fmt"
	"os"
	"sync/atomic"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// ReadTopics reads topics from their starts to their present ends, and passes each record to each.
func ReadTopics(ctx context.Context, kafka []kgo.Opt, topics []string, each func(*kgo.Record)) error {
	client, err := kgo.NewClient(append(kafka, kgo.ConsumeTopics(topics...), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))...)
	if err != nil {
		return err
	}
	defer client.Close()
	unread, err := unreadOf(ctx, kadm.NewClient(client), topics)
	if err != nil {
		return err
	}
	for left(unread) > 0 {
		fetches := client.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			return fmt.Errorf("read topics: %w", err)
		}
		fetches.EachRecord(func(r *kgo.Record) {
			if last, ok := unread[r.Topic][r.Partition]; ok && r.Offset >= last {
				delete(unread[r.Topic], r.Partition)
			}
			each(r)
		})
	}
	return nil
}

// unreadOf returns the offset of the last record of each partition that has any, by topic.
func unreadOf(ctx context.Context, admin *kadm.Client, topics []string) (map[string]map[int32]int64, error) {
	starts, err := admin.ListStartOffsets(ctx, topics...)
	if err != nil {
		return nil, fmt.Errorf("ask for the starts of topics: %w", err)
	}
	ends, err := admin.ListEndOffsets(ctx, topics...)
	if err != nil {
		return nil, fmt.Errorf("ask for the ends of topics: %w", err)
	}
	unread := map[string]map[int32]int64{}
	ends.Each(func(end kadm.ListedOffset) {
		if unread[end.Topic] == nil {
			unread[end.Topic] = map[int32]int64{}
		}
		if start, ok := starts.Lookup(end.Topic, end.Partition); ok && start.Offset < end.Offset {
			unread[end.Topic][end.Partition] = end.Offset - 1
		}
	})
	return unread, nil
}

// left is how many partitions are not read to their end.
func left(unread map[string]map[int32]int64) (n int) {
	for _, partitions := range unread {
		n += len(partitions)
	}
	return n
}

// CrashAfter is for a relay. It kills the process when Kafka has acknowledged so many records, which is the worst
// moment: the relay has not written down that they were sent.
func CrashAfter(records int64) kgo.Opt { return kgo.WithHooks(&crash{after: records}) }

type crash struct {
	after        int64
	acknowledged atomic.Int64
}

// OnProduceRecordUnbuffered makes it a kgo.HookProduceRecordUnbuffered.
func (c *crash) OnProduceRecordUnbuffered(_ *kgo.Record, err error) {
	if err == nil && c.acknowledged.Add(1) == c.after {
		if self, err := os.FindProcess(os.Getpid()); err == nil {
			_ = self.Kill() // nothing comes after it
		}
	}
}
