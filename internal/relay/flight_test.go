package relay

import (
	"bytes"
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/testenv"
)

// silentKafka has a topic with two partitions, each on a broker of its own. The second broker answers no produce
// request until it is released.
type silentKafka struct {
	*Producer
	held    context.Context
	lose    context.CancelCauseFunc
	events  []envelope.Event
	cluster *kfake.Cluster
	silent  atomic.Bool
	release func() // has the second broker answer; at the latest when the test ends, also if it fails
}

func newSilentKafka(t *testing.T) *silentKafka {
	released := make(chan struct{})
	s := &silentKafka{release: sync.OnceFunc(func() { close(released) })}
	s.silent.Store(true)
	cluster, err := kfake.NewCluster(kfake.NumBrokers(2), kfake.SleepOutOfOrder(), kfake.SeedTopics(2, "silent"))
	require.NoError(t, err)
	s.cluster = cluster
	t.Cleanup(cluster.Close)
	var asleep sync.WaitGroup // the cluster leaves a goroutine behind if it is closed beside a request that sleeps
	t.Cleanup(asleep.Wait)
	t.Cleanup(s.release)
	require.NoError(t, cluster.MoveTopicPartition("silent", 0, 0))
	require.NoError(t, cluster.MoveTopicPartition("silent", 1, 1))
	cluster.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		if cluster.CurrentNode() == 1 && s.silent.Load() {
			asleep.Add(1)
			defer asleep.Done()
			cluster.SleepControl(func() { <-released })
		}
		return nil, nil, false
	})
	s.held, s.lose = context.WithCancelCause(context.Background())
	t.Cleanup(func() { s.lose(nil) })
	leads := lease.Leadership{Lease: &lease.Lease{}, Held: s.held, Lose: s.lose, StatementTimeout: time.Minute}
	until := time.Now().Add(time.Hour)
	leads.Lease.Until.Store(&until)
	bad := NewBadPartitions(outage.NewLogs(slog.New(slog.DiscardHandler)))
	opts, err := ProducerOpts([]kgo.Opt{kgo.SeedBrokers(cluster.ListenAddrs()...)}, 10*time.Second)
	require.NoError(t, err)
	s.Producer = NewProducer(ProducerConfig{
		Opts: opts, SendTimeout: 15 * time.Second, Unanswered: NewUnanswered(bad, func() {}),
	}, leads, nil)
	t.Cleanup(s.Close)
	partitioner := kgo.StickyKeyPartitioner(nil).ForTopic("silent")
	for id := int64(1); len(s.events) < 4; id++ { // two for each partition, in turn
		key := []byte{byte('a' + id)}
		if at := partitioner.Partition(&kgo.Record{Key: key}, 2); at == len(s.events)%2 {
			s.events = append(s.events, envelope.Event{
				ID: id, EventID: key, PartitionKey: key, Topic: []byte("silent"), EventType: []byte("test.v1"), Payload: []byte("{}"), IsJSON: true,
				ContentType: []byte("application/json"), Source: []byte("test"), AggregateType: []byte("test"), AggregateID: key, OccurredAt: []byte("2026-01-02T03:04:05.000000Z"),
			})
		}
	}
	return s
}

// A send to a partition that does not answer is detached, and others are sent meanwhile. The events of the silent one
// are known to be accepted when the answer comes.
func TestSilentPartitionIsDetached(t *testing.T) {
	t.Parallel()
	s := newSilentKafka(t)
	ctx := s.held
	sent, err := s.produce(ctx, ctx, s.events, []int{0, 1})
	require.NoError(t, err)
	require.True(t, sent.works)
	require.NoError(t, sent.errs[0])
	require.ErrorIs(t, sent.errs[1], errUnanswered)
	require.Equal(t, kafka.Partition{Topic: "silent", Number: 1}, kafka.PartitionOf(&sent.records[1]))
	_, waits := s.cfg.Unanswered.find(&s.events[1])
	require.True(t, waits)
	require.Empty(t, s.cfg.Unanswered.Accepted())
	records := s.detached[0].records
	require.Empty(t, records[0].Value, "the client keeps it, and needs it no longer")
	require.NotEmpty(t, records[1].Value)

	sent, err = s.produce(ctx, ctx, s.events, []int{2})
	require.NoError(t, err)
	require.Equal(t, []error{nil}, sent.errs)

	s.silent.Store(false)
	s.release()
	require.Eventually(t, func() bool { return len(s.cfg.Unanswered.Accepted()) == 1 }, testenv.Patience, 5*time.Millisecond)
	require.Equal(t, refOf(&s.events[1]), s.cfg.Unanswered.Accepted()[0])
	sent, err = s.produce(ctx, ctx, s.events, []int{3})
	require.NoError(t, err)
	require.Equal(t, []error{nil}, sent.errs)
}

// An event that expires while its send is prepared is not sent.
func TestExpiresBeforeItIsSent(t *testing.T) {
	t.Parallel()
	s := newSilentKafka(t)
	s.release()
	s.cluster.ControlKey(int16(kmsg.Metadata), func(kmsg.Request) (kmsg.Response, error, bool) {
		s.cluster.KeepControl()
		for !s.events[0].HasExpired() {
			time.Sleep(time.Millisecond)
		}
		return nil, nil, false
	})
	s.events[0].Expiry = envelope.NewExpiry(time.Now().Add(200*time.Millisecond), time.Now())
	sent, err := s.produce(s.held, s.held, s.events, []int{0, 2})
	require.NoError(t, err)
	require.Len(t, sent.errs, 1)
	require.ErrorIs(t, sent.errs[0], errExpired)
	require.False(t, concernKafka(sent.errs))
	sent, err = s.produce(s.held, s.held, s.events, []int{2})
	require.NoError(t, err)
	require.Equal(t, []error{nil}, sent.errs)
	require.Zero(t, sent.records[0].Offset, "it is the first one of its partition")
}

// A new client that has written its records waits for their partition no longer than one that has sent before. It is
// tried three times, because a machine that is busy may be slow for once.
func TestNewClientDetachesSilentPartition(t *testing.T) {
	t.Parallel()
	best := time.Hour
	for range 3 {
		s := newSilentKafka(t)
		began := time.Now()
		sent, err := s.produce(s.held, s.held, s.events, []int{1})
		require.NoError(t, err)
		require.ErrorIs(t, sent.errs[0], errUnanswered)
		best = min(best, time.Since(began))
		s.release()
	}
	require.Less(t, best, freshPatience/2, "the shortest of three")
}

// Kafka as a whole does not work when the partition is found silent, and works again soon. The partition is found
// silent then, and does not hold up others for the whole time of a send.
func TestSilentPartitionIsDetachedBehindAnOutage(t *testing.T) {
	t.Parallel()
	s := newSilentKafka(t)
	defer s.release()
	var asked atomic.Int64
	const first, failing = 1, 4 // questions: that of the client, and those to all brokers, which are seeds, too
	s.cluster.ControlKey(int16(kmsg.InitProducerID), func(r kmsg.Request) (kmsg.Response, error, bool) {
		s.cluster.KeepControl()
		if n := asked.Add(1); n <= first || n > first+failing {
			return nil, nil, false
		}
		response := r.ResponseKind().(*kmsg.InitProducerIDResponse)
		response.ErrorCode = kerr.CoordinatorNotAvailable.Code
		return response, nil, true
	})
	began := time.Now()
	sent, err := s.produce(s.held, s.held, s.events, []int{1})
	require.NoError(t, err)
	require.ErrorIs(t, sent.errs[0], errUnanswered)
	require.Less(t, time.Since(began), s.cfg.SendTimeout/2)
	require.Greater(t, asked.Load(), int64(first+failing), "Kafka has failed, and works")
	took := time.Since(began)

	asked.Store(0) // it fails again, and the next partition is found silent sooner
	began = time.Now()
	sent, err = s.produce(s.held, s.held, s.events, []int{3})
	require.NoError(t, err)
	require.ErrorIs(t, sent.errs[0], errUnanswered)
	require.Greater(t, asked.Load(), int64(first+failing))
	require.Less(t, time.Since(began), took*3/4)
}

// A stop finishes what is in flight: the answer that comes meanwhile is known.
func TestStopAwaitsDetachedSends(t *testing.T) {
	t.Parallel()
	s := newSilentKafka(t)
	sent, err := s.produce(s.held, s.held, s.events, []int{0, 1})
	require.NoError(t, err)
	require.ErrorIs(t, sent.errs[1], errUnanswered)
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		s.Close()
	}()
	<-s.detached[0].grace.Done()
	s.silent.Store(false)
	s.release()
	<-closed
	require.Equal(t, []eventRef{refOf(&s.events[1])}, s.cfg.Unanswered.Accepted())
}

// Losing the lease ends what is in flight, and the event may be sent again.
func TestLostLeaseEndsDetachedSends(t *testing.T) {
	t.Parallel()
	s := newSilentKafka(t)
	sent, err := s.produce(s.held, s.held, s.events, []int{0, 1})
	require.NoError(t, err)
	require.ErrorIs(t, sent.errs[1], errUnanswered)
	s.lose(lease.ErrLeaseLost)
	s.Close()
	_, waits := s.cfg.Unanswered.find(&s.events[1])
	require.False(t, waits)
	s.release()
}

// A partition that has not answered in the time of a send is said to have timed out, and not that its client was
// closed.
func TestDetachedSendTimesOut(t *testing.T) {
	t.Parallel()
	s := newSilentKafka(t)
	s.cfg.SendTimeout = 5 * time.Second // longer than a send waits before it is detached
	sent, err := s.produce(s.held, s.held, s.events, []int{0, 1})
	require.NoError(t, err)
	require.ErrorIs(t, sent.errs[1], errUnanswered)
	require.Eventually(t, func() bool {
		_, waits := s.cfg.Unanswered.find(&s.events[1])
		return !waits
	}, testenv.Patience, 5*time.Millisecond)
	all := s.cfg.Unanswered.bad.All()
	require.Len(t, all, 1)
	require.EqualError(t, all[0].Err, "no answer within 5s: "+kgo.ErrRecordTimeout.Error())
	s.release()
}

// An event that the client rejects never reaches Kafka, and is no answer of Kafka.
func TestClientRejectsAnEvent(t *testing.T) {
	t.Parallel()
	s := newSilentKafka(t)
	s.events[0].Payload = append(append([]byte{'"'}, bytes.Repeat([]byte("x"), 2_000_000)...), '"')
	sent, err := s.produce(s.held, s.held, s.events, []int{0})
	require.NoError(t, err)
	require.Equal(t, "message_too_large", RejectionClass(sent.errs[0]))
	require.ErrorIs(t, sent.errs[0], errByClient)
	require.False(t, isAnswer(sent.errs[0]))
	s.cluster.ControlKey(int16(kmsg.Produce), func(r kmsg.Request) (kmsg.Response, error, bool) {
		answer := r.ResponseKind().(*kmsg.ProduceResponse)
		for _, topic := range r.(*kmsg.ProduceRequest).Topics {
			rejected := kmsg.ProduceResponseTopic{Topic: topic.Topic, TopicID: topic.TopicID}
			for _, p := range topic.Partitions {
				rejected.Partitions = append(rejected.Partitions, kmsg.ProduceResponseTopicPartition{Partition: p.Partition, ErrorCode: kerr.MessageTooLarge.Code})
			}
			answer.Topics = append(answer.Topics, rejected)
		}
		return answer, nil, true
	})
	s.events[0].Payload = []byte("{}")
	sent, err = s.produce(s.held, s.held, s.events, []int{0})
	require.NoError(t, err)
	require.Equal(t, "message_too_large", RejectionClass(sent.errs[0]))
	require.True(t, isAnswer(sent.errs[0]), "%v", sent.errs[0])
}
