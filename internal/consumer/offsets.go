package consumer

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/wait"
)

// rejectedTopics are topics whose offsets Kafka has not taken, although it has taken those of
// others: it does not know them any more, or the rights to them have lapsed.
type rejectedTopics map[string]error

// commitOffsets commits and waits for the answer. The caller holds committing.
func (m *membership) commitOffsets(ctx context.Context, offsets map[string]map[int32]kgo.EpochOffset) (rejected rejectedTopics, err error) {
	ctx, cancel := context.WithTimeout(ctx, commitTimeout)
	defer cancel()
	ctx = kgo.PreCommitFnContext(ctx, m.checkMember)
	m.client.CommitOffsetsSync(ctx, offsets, func(_ *kgo.Client, request *kmsg.OffsetCommitRequest, response *kmsg.OffsetCommitResponse, cerr error) {
		if err = cerr; err == nil { // else the response may be nil
			rejected, err = commitResult(request, response)
		}
	})
	return rejected, err
}

// commitResult reads the answer to a commit. The error is the first one that is not about a
// single topic.
func commitResult(request *kmsg.OffsetCommitRequest, response *kmsg.OffsetCommitResponse) (rejected rejectedTopics, err error) {
	names := map[kafka.TopicID]string{} // newer brokers answer without names
	for _, t := range request.Topics {
		names[t.TopicID] = t.Topic
	}
	rejected = rejectedTopics{}
	for _, t := range response.Topics {
		for _, p := range t.Partitions {
			switch failed := kerr.ErrorForCode(p.ErrorCode); {
			case failed == nil:
			case kafka.IsTopicOutage(failed):
				rejected[cmp.Or(t.Topic, names[t.TopicID])] = failed
			default:
				err = cmp.Or(err, failed)
			}
		}
	}
	return rejected, err
}

// reportRejected logs topics whose offsets Kafka has not taken, and ends the outage of those
// whose offsets it has.
func (m *membership) reportRejected(began time.Time, offsets map[*partitionWorker]kgo.EpochOffset, rejected rejectedTopics) {
	if len(rejected) == 0 && !m.outages.Failing() {
		return
	}
	for topic, err := range rejected {
		if isGone(err) {
			m.starts.Missing(topic, err)
		} else {
			m.outages.Report(outageCommittingTopic+topic, began, err)
		}
	}
	for w := range offsets {
		if rejected[w.partition.Topic] == nil {
			m.outages.Report(outageCommittingTopic+w.partition.Topic, began, nil)
		}
	}
}

// isGone reports whether Kafka does not know a topic.
func isGone(err error) bool {
	return errors.Is(err, kerr.UnknownTopicOrPartition) || kafka.IsReplaced(err)
}

var errExpelled = errors.New("the group has expelled this member")

// checkMember refuses a commit that would set an offset back. A member that Kafka
// expelled comes back under another member id and learns only then that its partitions
// are assigned to others. These may be further on, and Kafka does not check on a commit
// whose the partitions are.
func (m *membership) checkMember(commit *kmsg.OffsetCommitRequest) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if commit.MemberID != m.member {
		return errExpelled
	}
	return nil
}

// put sets the value of a partition.
func put[V any](m map[string]map[int32]V, topic string, number int32, v V) {
	if m[topic] == nil {
		m[topic] = map[int32]V{}
	}
	m[topic][number] = v
}

func (m *membership) lags(ctx context.Context) ([]partitionLag, error) {
	committed, wanted := m.client.CommittedOffsets(), map[kafka.Partition]int64{}
	for _, w := range m.all() {
		if _, ok := committed[w.partition.Topic][w.partition.Number]; ok {
			wanted[w.partition] = kafka.EndOffset
		}
	}
	ends, err := kafka.ListOffsets(ctx, m.client, kafka.Uncommitted, wanted)
	if err != nil {
		return nil, err
	}
	lags := make([]partitionLag, 0, len(ends))
	for at, end := range ends {
		lags = append(lags, partitionLag{Topic: at.Topic, Partition: at.Number, Next: committed[at.Topic][at.Number].Offset, End: end})
	}
	slices.SortFunc(lags, func(a, b partitionLag) int {
		return cmp.Or(cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition))
	})
	return lags, nil
}

const (
	// commitPause keeps busy partitions from committing all the time. After a crash
	// that much arrives again, and what is noted in event_handled is skipped.
	commitPause   = 100 * time.Millisecond
	commitTimeout = 5 * time.Second
	// commitRetry is after which time offsets of a topic that Kafka has refused are tried
	// again, unless there is something else to commit before.
	commitRetry = 10 * time.Second
)

// keepCommitting commits what is handled until ctx is cancelled. A commit that failed
// is tried again.
func (m *membership) keepCommitting(ctx context.Context) {
	for ctx.Err() == nil {
		wait.Await(ctx, ctx, m.commitRequests, commitRetry)
		if ctx.Err() != nil {
			return
		}
		if m.commitAll(context.Background()) != nil {
			m.requestCommit()
		}
		wait.Sleep(ctx, commitPause)
	}
}

// commitAll commits for the partitions that are not being revoked.
func (m *membership) commitAll(ctx context.Context) error {
	m.committing.Lock()
	defer m.committing.Unlock()
	return m.commit(ctx, m.all())
}

// uncommitted returns how far workers have come, where Kafka does not know yet.
func uncommitted(workers []*partitionWorker) (offsets map[string]map[int32]kgo.EpochOffset, covered map[*partitionWorker]kgo.EpochOffset) {
	offsets, covered = map[string]map[int32]kgo.EpochOffset{}, map[*partitionWorker]kgo.EpochOffset{}
	for _, w := range workers {
		if next, ok := w.uncommitted(); ok {
			put(offsets, w.partition.Topic, w.partition.Number, next)
			covered[w] = next
		}
	}
	return offsets, covered
}

// commit commits how far workers have come. The caller holds committing.
func (m *membership) commit(ctx context.Context, workers []*partitionWorker) error {
	offsets, covered := uncommitted(workers)
	if len(offsets) == 0 {
		return nil
	}
	began := time.Now()
	rejected, err := m.commitOffsets(ctx, offsets)
	if err != nil {
		if !isRebalance(err) {
			m.outages.Report(outageCommitting, began, err)
		}
		return err
	}
	m.outages.Report(outageCommitting, began, nil)
	m.noteCommitted(began, covered, rejected)
	return nil
}

// noteCommitted notes what Kafka knows. What it has refused is committed with what follows.
func (m *membership) noteCommitted(began time.Time, covered map[*partitionWorker]kgo.EpochOffset, rejected rejectedTopics) {
	m.reportRejected(began, covered, rejected)
	for w, next := range covered {
		if rejected[w.partition.Topic] == nil {
			w.committed(next)
			m.starts.Committed(w.partition, next.Offset)
		}
	}
}

// isRebalance reports whether a commit failed because the group is rebalancing. The
// partitions that stay are committed afterwards.
func isRebalance(err error) bool {
	return errors.Is(err, kerr.RebalanceInProgress) || errors.Is(err, kerr.IllegalGeneration) || errors.Is(err, kerr.UnknownMemberID) ||
		errors.Is(err, errExpelled)
}
