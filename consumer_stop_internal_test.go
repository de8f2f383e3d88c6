package outbox

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// slowWorkerFixture has a handler that takes a second for each event, unless its context
// ends.
func slowWorkerFixture(t *testing.T, cfg ConsumerConfig) *workerFixture {
	var s *workerFixture
	s = newWorkerFixture(t, cfg, Handle("SLOW", func(ctx context.Context, _ pgx.Tx, e played, _ Metadata) error {
		select {
		case <-time.After(time.Second):
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
		s := slowWorkerFixture(t, ConsumerConfig{})
		go s.worker.run()
		s.worker.add(s.arrive(manyNames(100)...))
		time.Sleep(2500 * time.Millisecond)
		began := time.Now()
		s.worker.finish()
		<-s.worker.ended
		require.Equal(t, 500*time.Millisecond, time.Since(began))
		require.Equal(t, []string{"e00 e01 e02: committed"}, s.log)
		require.Len(t, s.noted, 3)
		next, _ := s.worker.uncommitted()
		require.EqualValues(t, 3, next.Offset)
	})
}

// A batch that would take longer than MaxPollInterval is committed in parts, and no
// handler runs twice.
func TestBatchLongerThanMaxPollInterval(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := slowWorkerFixture(t, ConsumerConfig{HeartbeatInterval: time.Second, SessionTimeout: 6 * time.Second, MaxPollInterval: 10 * time.Second})
		began := time.Now()
		s.worker.handle(s.arrive(manyNames(13)...))
		require.Equal(t, 13*time.Second, time.Since(began))
		require.Equal(t, []string{"e00 e01 e02 e03 e04 e05: committed", "e06 e07 e08 e09 e10 e11: committed", "e12: committed"}, s.log)
		require.Len(t, s.noted, 13)
	})
}
