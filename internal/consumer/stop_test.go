package consumer

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
)

// slowWorkerFixture has a handler that takes so long for each event, and for those of the
// name long an hour, unless its context ends.
func slowWorkerFixture(t *testing.T, cfg Rules, takes time.Duration) *partitionFixture {
	var s *partitionFixture
	s = newPartitionFixture(t, cfg, handle("SLOW", func(ctx context.Context, _ pgx.Tx, e played, _ envelope.Received) error {
		if e.Name == "long" {
			takes = time.Hour
		}
		select {
		case <-time.After(takes):
			s.current = append(s.current, e.Name)
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}))
	return s
}

func manyNames(n int) (names []string) {
	for i := range n {
		names = append(names, fmt.Sprintf("e%02d", i))
	}
	return names
}

// A stop within a batch keeps what is done: between two events the transaction commits,
// without the notes of the rest.
func TestStopWithinBatch(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := slowWorkerFixture(t, Rules{}, 100*time.Millisecond)
		go s.worker.run()
		s.worker.add(s.arrive(manyNames(100)...))
		time.Sleep(250 * time.Millisecond)
		began := time.Now()
		s.worker.finish()
		<-s.worker.ended
		require.Equal(t, 50*time.Millisecond, time.Since(began))
		require.Equal(t, []string{"e00 e01 e02: committed"}, s.log)
		require.Len(t, s.noted, 3)
		next, _ := s.worker.uncommitted()
		require.EqualValues(t, 3, next.Offset)
	})
}

// A handler that does not end before a stop takes little of what is finished with it,
// because transactions of slow handlers are short.
func TestStopInLongHandler(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := slowWorkerFixture(t, Rules{}, time.Second)
		go s.worker.run()
		s.worker.add(s.arrive(append(manyNames(10), "long", "never")...))
		time.Sleep(12 * time.Second)
		new(membership).finish([]*partitionWorker{s.worker}, 3*time.Second, abandonGrace)
		require.Len(t, s.noted, 10)
		next, _ := s.worker.uncommitted()
		require.EqualValues(t, 10, next.Offset)
	})
}

// A batch of slow handlers is committed in parts, also where MaxPollInterval is shorter than all
// of it, and no handler runs twice. After the first of them, only so many notes are made as
// handlers come to; and more again once they are fast.
func TestTransactionsAreShort(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := slowWorkerFixture(t, Rules{HeartbeatInterval: time.Millisecond, SessionTimeout: time.Second, MaxPollInterval: 3 * time.Second}, 300*time.Millisecond)
		began := time.Now()
		s.worker.handle(s.arrive(manyNames(13)...))
		require.Equal(t, 13*300*time.Millisecond, time.Since(began))
		require.Equal(t, []string{"e00 e01 e02 e03: committed", "e04 e05 e06 e07: committed", "e08 e09 e10 e11: committed", "e12: committed"}, s.log)
		require.Len(t, s.noted, 13)
		require.Equal(t, 8, s.worker.batch, "the last took less than a second")
	})
	synctest.Test(t, func(t *testing.T) {
		s := newPartitionFixture(t, Rules{MaxPoll: 10})
		s.worker.batch = 1
		s.worker.handle(s.arrive(manyNames(13)...))
		require.Equal(t, []string{"e001: committed", "e011 e021: committed", "e031 e041 e051 e061: committed", "e071 e081 e091 e101 e111 e121: committed"}, s.log)
		require.Equal(t, 10, s.worker.batch)
	})
}

// The start offset of a partition is not committed if the partition was revoked during the search
// for it. The commit would set back the member that has the partition now.
func TestStartOfGivenUpPartition(t *testing.T) {
	t.Parallel()
	at := kafka.Partition{Topic: "t"}
	m := &membership{workers: map[kafka.Partition]*partitionWorker{}}
	require.ErrorIs(t, m.commitStarts(t.Context(), map[kafka.Partition]kgo.EpochOffset{at: {Offset: 3}}), errRevoked)
	m.workers[at] = new(partitionWorker)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, m.commitStarts(ctx, map[kafka.Partition]kgo.EpochOffset{at: {Offset: 3}}), errRevoked)
}

// A group of the protocol of KIP-848 knows nothing of the request with which a member of another one leaves.
func TestLeaveGroupOfEitherProtocol(t *testing.T) {
	t.Parallel()
	for name, protocol := range map[string][]kgo.Opt{"classic": nil, "KIP-848": {kgo.ServerSideBalancer()}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "sales"))
			require.NoError(t, err)
			t.Cleanup(cluster.Close)
			brokers := kgo.SeedBrokers(cluster.ListenAddrs()...)
			newClient := func(opts ...kgo.Opt) *kgo.Client {
				client, err := kgo.NewClient(append(opts, brokers)...)
				require.NoError(t, err)
				t.Cleanup(client.Close)
				return client
			}
			member := newClient(append(protocol, kgo.ConsumerGroup("g"), kgo.ConsumeTopics("sales"))...)
			other := newClient()
			require.Eventually(t, func() bool {
				_, generation := member.GroupMetadata()
				return generation > 0 && errors.Is(kafka.CheckGroupIsEmpty(t.Context(), other, "g"), kerr.NonEmptyGroup)
			}, testenv.Patience, 10*time.Millisecond)
			id, _ := member.GroupMetadata()
			require.NoError(t, leaveGroupAs(t.Context(), []kgo.Opt{brokers}, "g", id))
			require.NoError(t, kafka.CheckGroupIsEmpty(t.Context(), other, "g"))
			require.ErrorIs(t, leaveGroupAs(t.Context(), []kgo.Opt{brokers}, "g", "another"), kerr.UnknownMemberID)
		})
	}
}
