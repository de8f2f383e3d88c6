package faults

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/faults/internal/proxy"
	"github.com/outboxgo/outbox/internal/oracle"
)

// exactlyDisturbances are those of TestFaults where relays send exactly once. Kafka is killed more often, transactions
// are disturbed when they end, and no partition is blocked, because a transaction is committed in all of its
// partitions or not at all.
func exactlyDisturbances() []disturbance {
	all := slices.DeleteFunc(disturbances(), func(d disturbance) bool { return d.kind == "partitions" })
	for i := range all {
		if all[i].kind == "crash Kafka" {
			all[i].times = 6
		}
	}
	cut := func(what string, answered bool) disturbance {
		return disturbance{
			what: what, kind: what, times: 2, min: time.Second, max: 2 * lease, outage: true,
			begin: func(s *suite, _ *testing.T, p step) { s.cutAtEnds(p, answered) },
			end:   func(s *suite, _ *testing.T, _ step) { s.toKafka.Set(proxy.Fault{}) },
		}
	}
	return append(all,
		cut("cut the way to Kafka of half of the commits", false),
		cut("cut the way to Kafka in front of the answers to half of the commits", true),
		disturbance{
			what: "kill the leader while it commits, and let the commit arrive later", kind: "kill at commit", times: 6, min: 10 * time.Millisecond, max: lease,
			begin: (*suite).killAtEnd, end: (*suite).releaseEnd,
		})
}

// cutAtEnds cuts the connections of half of the requests that end transactions.
func (s *suite) cutAtEnds(p step, answered bool) {
	var mu sync.Mutex
	rng := rand.New(rand.NewPCG(p.chance, 0))
	s.toKafka.Set(proxy.Fault{Requests: &proxy.Requests{Answered: answered, Cut: func(key int16) bool {
		mu.Lock()
		defer mu.Unlock()
		return key == endTxn && rng.IntN(2) == 0
	}}})
}

var endTxn = kmsg.NewPtrEndTxnRequest().Key()

// killAtEnd kills the leader when it ends a transaction. Its request is held until releaseEnd.
func (s *suite) killAtEnd(t *testing.T, p step) {
	t.Helper()
	ending, release := make(chan struct{}), make(chan struct{})
	var began atomic.Bool
	s.toKafka.Set(proxy.Fault{Requests: &proxy.Requests{Cut: func(key int16) bool {
		if key == endTxn && began.CompareAndSwap(false, true) {
			close(ending)
			<-release
		}
		return false
	}}})
	s.releaseCommit = sync.OnceFunc(func() { close(release) })
	t.Cleanup(s.releaseCommit)
	select {
	case <-ending:
	case <-time.After(stall):
		require.Failf(t, "no end of a transaction", "no relay has ended one for %v", stall)
	}
	s.kill(s.leader(p))
	s.replace(t)
}

func (s *suite) releaseEnd(*testing.T, step) {
	s.releaseCommit()
	s.toKafka.Set(proxy.Fault{})
}

// commitAsync lets half of the transactions commit without waiting for the disk, so that a crash of PostgreSQL forgets
// some that were visible.
func commitAsync(ctx context.Context, tx pgx.Tx, first oracle.Event) error {
	if first.ID[len(first.ID)-1]%2 == 0 {
		return nil
	}
	return setCommit(ctx, tx, "off")
}
