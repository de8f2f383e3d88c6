package itest

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A key with many events goes on directly after one of its events has failed once, in the order of the key. All its
// later events used to be parked as well, because they arrived before those in front of them were handled.
func TestHotKeyCatchesUp(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	const events, most = 20_000, 10_000
	h := s.handler("Handle", "COUNTED", func(_ context.Context, _ pgx.Tx, e sale, m outbox.Metadata) error {
		if e.Amount == 1 && m.Attempt == 1 {
			return errPlay
		}
		return nil
	})
	var sales []*kgo.Record
	for n := range events {
		sales = append(sales, s.sale("hot", n+1))
	}
	s.send(t, sales...)
	began := time.Now()
	testenv.Run(t, s.groupConsumer(t, s.group, s.config(t), h).Run)
	require.Eventually(t, func() bool { return s.number(t, `SELECT count(*)::int FROM {s}.journal`) >= events }, testenv.Patience, 100*time.Millisecond)
	require.Equal(t, upToN(events), s.journal(t, "COUNTED", "hot"))
	parked := s.number(t, `SELECT count(*)::int FROM {s}.event_delivery`)
	t.Log(events, "events took", time.Since(began), "and", parked, "of them were parked")
	require.Less(t, parked, most)
}

// The partition of a key with many parked events does not wait for them if that takes long: another key of it goes on.
func TestSlowHotKeyHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	const events = 3_000
	h := s.handler("Handle", "COUNTED", func(_ context.Context, _ pgx.Tx, e sale, m outbox.Metadata) error {
		switch {
		case e.Product != "hot":
		case e.Amount == 1 && m.Attempt == 1:
			return errPlay
		default:
			time.Sleep(50 * time.Millisecond)
		}
		return nil
	})
	var sales []*kgo.Record
	for n := range events {
		sales = append(sales, s.sale("hot", n+1))
	}
	s.send(t, sales...)
	testenv.Run(t, s.groupConsumer(t, s.group, s.config(t), h).Run)
	require.Eventually(t, func() bool {
		return s.number(t, `SELECT count(*)::int FROM {s}.event_delivery WHERE status = 'PARKED'`) > 1000
	}, testenv.Patience, 10*time.Millisecond)
	began := time.Now()
	s.send(t, s.sale("other", 1))
	s.awaitJournal(t, "COUNTED", "other", 1)
	t.Log("another key took", time.Since(began))
	require.Less(t, time.Since(began), 15*time.Second)
}
