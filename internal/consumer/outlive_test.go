package consumer

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/starts"
	"github.com/outboxgo/outbox/internal/testenv"
)

// Functions of the host that end their goroutine do not end the worker: handlers, codecs and
// hooks. What they leave undone is the event's failure, or nothing.
func TestPartitionWorkerOutlivesGoexit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		log := new(testenv.Buffer)
		exit := func() { runtime.Goexit() }
		s := newPartitionFixture(t, Rules{Rules: &handling.Rules{
			Retry: handling.RetryPolicy{MaxRetries: 1, RetriesFor: func(error) int { exit(); return 9 }},
			Log:   slog.New(slog.NewTextHandler(log, nil)),
			Hooks: handling.Hooks{
				Handled:      func(*envelope.Received, string, time.Duration) { exit() },
				Repeated:     func(*envelope.Received, string) { exit() },
				Failed:       func(*envelope.Received, string, error, bool) { exit() },
				Conflicted:   func(*envelope.Received, string, error) { exit() },
				DeadLettered: func(*envelope.Received, string, string, error) { exit() },
				Unknown:      func(*envelope.Received) { exit() },
			},
		}})
		s.handlers["a"], s.handlers["b"], s.handlers["d"] = "-", "xx", "4"
		decode := s.worker.reader.decode
		s.worker.reader.decode = func(r *kgo.Record) (*envelope.Message, error) {
			if r.Offset == 2 {
				exit()
			}
			return decode(r)
		}
		s.worker.handle(s.arrive("a", "b", "c", "d"))
		require.Equal(t, []string{"a1: rolled back", "a2: committed", "b1: rolled back", "b2: rolled back", "dead letter b after 2: goexit",
			"dead letter c after 0: undecodable", "d1: rolled back", "d1: committed"}, s.log)
		for _, hook := range []string{"Handled", "Failed", "Conflicted", "DeadLettered"} {
			require.Contains(t, log.String(), "Hooks."+hook)
		}
	})
}

// A worker that has ended although its partition is assigned is reported: only a restart of the process helps.
func TestHealthReportsEndedWorker(t *testing.T) {
	t.Parallel()
	s := newPartitionFixture(t, Rules{DeadLetterTopic: func(string) string { runtime.Goexit(); return "" }})
	s.worker.begin(starts.Beginning{})
	s.handlers["a"] = "p"
	var reasons []string
	health := func() bool {
		return s.worker.reportHealth(func(reason string, args ...any) { reasons = append(reasons, fmt.Sprintf(reason, args...)) })
	}
	require.True(t, health())
	go s.worker.run()
	s.worker.add(s.arrive("a"))
	<-s.worker.ended
	require.False(t, health())
	require.Equal(t, []string{"the goroutine of " + s.worker.partition.Name() + " has ended, although the partition is assigned"}, reasons)
	s.worker.finish()
	require.True(t, health(), "it was to end")
}

// Records that need no transaction say nothing about PostgreSQL: an outage that others have
// found goes on, in the log and for probes.
func TestRecordsWithoutTransaction(t *testing.T) {
	t.Parallel()
	s := newPartitionFixture(t, Rules{}, handleNoTx("SEEN", func(context.Context, played, envelope.Received) error { return nil }))
	s.worker.limits.slots.Transactions = handling.NewSlots(1)
	require.True(t, s.worker.limits.slots.Transactions.Take(t.Context()), "transactions of others have all slots")
	s.worker.outages.Report(handling.OutagePostgres, time.Now(), errPlayed)
	s.worker.handle(s.arrive("a"))
	require.True(t, s.worker.outages.Failing())
	next, _ := s.worker.uncommitted()
	require.EqualValues(t, 1, next.Offset)
}
