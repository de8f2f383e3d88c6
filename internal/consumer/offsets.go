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
	"github.com/outboxgo/outbox/internal/starts"
	"github.com/outboxgo/outbox/internal/wait"
)

// rejectedTopics are the topics of a commit whose offsets Kafka has refused, with the reason: the
// topic was deleted, or the client may not read it any more.
type rejectedTopics map[string]error

// commitOffsets commits offsets and waits for the answer. The caller holds committing.
func (m *membership) commitOffsets(ctx context.Context, offsets map[string]map[int32]kgo.EpochOffset) (rejected rejectedTopics, err error) {
	ctx, cancel := context.WithTimeout(ctx, commitTimeout)
	defer cancel()
	ctx = kgo.PreCommitFnContext(ctx, m.beforeCommit)
	m.client.CommitOffsetsSync(ctx, offsets, func(_ *kgo.Client, request *kmsg.OffsetCommitRequest, response *kmsg.OffsetCommitResponse, cerr error) {
		if err = cerr; err == nil { // else the response may be nil
			rejected, err = commitResult(request, response)
		}
	})
	return rejected, err
}

// commitResult reads the answer to a commit. The error is the first one that concerns all topics.
func commitResult(request *kmsg.OffsetCommitRequest, response *kmsg.OffsetCommitResponse) (rejected rejectedTopics, err error) {
	names := map[kafka.TopicID]string{} // newer brokers answer with ids only
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

// reportRejected reports an outage for each rejected topic, and the end of one for each other topic.
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

// beforeCommit checks a commit, and names the topics of its offsets. The client has put in the ids of the topics that
// it has read.
func (m *membership) beforeCommit(commit *kmsg.OffsetCommitRequest) error {
	if err := m.checkMember(commit); err != nil {
		return err
	}
	m.starts.NameTopics(commit)
	return nil
}

// checkMember refuses a commit under another member id than that of the assignment. Kafka has then
// expelled this member, and the client has joined again under a new id. Other members may have
// committed later offsets of its partitions. Kafka would accept the commit, because it does not check
// to which member a partition is assigned.
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

// ends returns the committed offsets and the ends of the assigned partitions. It returns those ends that it gets with
// the errors of the others.
func (m *membership) ends(ctx context.Context) (committed, ends map[kafka.Partition]int64, err error) {
	committed, wanted := map[kafka.Partition]int64{}, map[kafka.Partition]int64{}
	for _, w := range m.all() {
		if at := w.committedOffset(); at != starts.None {
			committed[w.partition], wanted[w.partition] = at, kafka.EndOffset
		}
	}
	ends, err = kafka.ListOffsets(ctx, m.client, kafka.Uncommitted, wanted)
	return committed, ends, err
}

func (m *membership) lags(ctx context.Context) ([]partitionLag, error) {
	committed, ends, err := m.ends(ctx)
	if err != nil {
		return nil, err
	}
	lags := make([]partitionLag, 0, len(ends))
	for at, end := range ends {
		lags = append(lags, partitionLag{Topic: at.Topic, Partition: at.Number, Next: committed[at], End: end})
	}
	slices.SortFunc(lags, func(a, b partitionLag) int {
		return cmp.Or(cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition))
	})
	return lags, nil
}

const (
	// commitPause is the shortest time between two commits. After a crash, the events of this time
	// arrive again; those in event_handled are skipped.
	commitPause   = 100 * time.Millisecond
	commitTimeout = 5 * time.Second
	// commitRetry is when refused offsets of a topic are committed again, unless another commit
	// includes them earlier.
	commitRetry = 10 * time.Second
)

// keepCommitting commits offsets on request until ctx is cancelled. A failed commit is tried again.
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

// commitAll commits the offsets of all partitions that are not being revoked.
func (m *membership) commitAll(ctx context.Context) error {
	m.committing.Lock()
	defer m.committing.Unlock()
	return m.commit(ctx, m.all())
}

// uncommitted returns the offsets of workers that are to be committed, by topic and by worker. Those of topics that are
// gone wait until their topics are there again.
func (m *membership) uncommitted(workers []*partitionWorker) (offsets map[string]map[int32]kgo.EpochOffset, covered map[*partitionWorker]kgo.EpochOffset) {
	offsets, covered = map[string]map[int32]kgo.EpochOffset{}, map[*partitionWorker]kgo.EpochOffset{}
	for _, w := range workers {
		if next, ok := w.uncommitted(); ok && m.starts.MayCommit(w.partition.Topic) {
			put(offsets, w.partition.Topic, w.partition.Number, next)
			covered[w] = next
		}
	}
	return offsets, covered
}

// commit commits the offsets of workers. The caller holds committing.
func (m *membership) commit(ctx context.Context, workers []*partitionWorker) error {
	offsets, covered := m.uncommitted(workers)
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

// noteCommitted notes the committed offsets. Refused ones are part of the next commit.
func (m *membership) noteCommitted(began time.Time, covered map[*partitionWorker]kgo.EpochOffset, rejected rejectedTopics) {
	m.reportRejected(began, covered, rejected)
	for w, next := range covered {
		if rejected[w.partition.Topic] == nil {
			w.committed(next)
			m.starts.Committed(w.partition, next.Offset)
		}
	}
}

// isRebalance reports whether a commit failed because the group is rebalancing. Offsets of partitions
// that stay assigned are committed afterwards.
func isRebalance(err error) bool {
	return errors.Is(err, kerr.RebalanceInProgress) || errors.Is(err, kerr.IllegalGeneration) || errors.Is(err, kerr.UnknownMemberID) ||
		errors.Is(err, kerr.StaleMemberEpoch) || errors.Is(err, kerr.FencedMemberEpoch) || errors.Is(err, errExpelled)
}
