package relay

import (
	"context"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/tables"
)

// Work of many steps is no hang as long as the steps end: otherwise the lease would be given up before anything is
// recorded, and the next leader would begin the same work.

// rejectingSender is a fakeSender for a topic that rejects batches. A single event takes a second.
type rejectingSender struct {
	*fakeSender
	single func()
}

func (s *rejectingSender) produce(_, _ context.Context, batch []envelope.Event, which []int) (sent sendResult, err error) {
	if len(which) == 1 {
		time.Sleep(time.Second)
		s.single()
	}
	for _, i := range which {
		at := s.partition(&batch[i])
		sent.records = append(sent.records, kgo.Record{Topic: at.Topic, Partition: at.Number})
		if err = nil; len(which) > 1 {
			err = kerr.MessageTooLarge
		}
		sent.errs = append(sent.errs, err)
	}
	return sent, nil
}

func TestSendingOneByOneIsNoHang(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const events = 200
		health := runningHealth()
		singles := 0
		s := &rejectingSender{fakeSender: newFakeSender(t, ""), single: func() {
			singles++
			require.False(t, health.hangs(), "at event %d", singles)
		}}
		d := s.deliverer(nil)
		d.Parts.Sender, d.Parts.OnSend = s, health.Progressed
		outcomes, err := d.Deliver(t.Context(), t.Context(), envelopesOf(strings.Repeat("a", events)), NewParking(false))
		require.NoError(t, err)
		require.Equal(t, strings.Repeat("+", events), outcomeSymbols(outcomes))
		require.Equal(t, events, singles)
	})
}

// runningHealth is the health of a relay that has just begun to lead.
func runningHealth() *healthState {
	rules := rulesWith(5000)
	s := newHealthState(rules, breaker.New(rules.Breaker, func(breaker.State, breaker.State, float64) {}))
	s.runBegan()
	s.setLeading(true)
	return s
}

// slowKeys is a fakeStore with very many parked keys. Each page of them takes long.
type slowKeys struct {
	*fakeStore
	pages int
	read  func()
}

func (s *slowKeys) Keys(statement lease.StatementContext, _ *[]string) func(after string) ([]cursor.KeyRows, error) {
	page := 0
	return func(string) ([]cursor.KeyRows, error) {
		ctx, cancel := statement()
		defer cancel()
		if page++; page > s.pages {
			return nil, ctx.Err()
		}
		time.Sleep(20 * time.Second)
		s.read()
		return []cursor.KeyRows{{Key: strings.Repeat("k", page), Rows: 1}}, ctx.Err()
	}
}

func (s *slowKeys) BadPartitions(ctx context.Context) ([]cursor.BadPartition, error) {
	return nil, ctx.Err()
}

func TestLoadingManyKeysIsNoHang(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		held, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		f := newFakeStore(t, 0, nil)
		health, read := runningHealth(), 0
		s := f.session(held, rulesWith(5000))
		s.Health = health
		s.Failed = &slowKeys{fakeStore: f, pages: 10, read: func() {
			read++
			require.False(t, health.hangs(), "at page %d", read)
		}}
		require.NoError(t, s.Load())
		require.Equal(t, 10, read, "the keys are read once, although that takes longer than a statement may")
		require.True(t, f.parked.waits("k"))
	})
}

// slowWindow is a fakeStore whose statements are all cancelled late.
type slowWindow struct {
	*fakeStore
	read func()
}

func (s *slowWindow) Fetch(context.Context, cursor.Position, []int64) ([]envelope.Event, int64, error) {
	time.Sleep(29 * time.Second)
	s.read()
	return nil, 0, &pgconn.PgError{Code: "57014"}
}

func (s *slowWindow) FetchBare(_ context.Context, _ cursor.Position, _ int64, headers bool) (envelope.Event, error) {
	_, _, err := s.Fetch(context.Background(), cursor.Position{}, nil)
	if headers {
		return envelope.Event{}, err
	}
	return envelope.Event{ID: 1}, nil
}

func TestReadingAnUnreadableRowIsNoHang(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFakeStore(t, 0, nil)
		health := runningHealth()
		s := f.session(t.Context(), rulesWith(5000))
		s.Health = health
		s.Window = NewWindowReader(&slowWindow{f, func() { require.False(t, health.hangs()) }}, 5000)
		s.Window.IDs.Add(1)
		batch, err := s.take()
		require.NoError(t, err)
		require.Len(t, batch, 1)
		require.IsType(t, (*envelope.UnreadableError)(nil), batch[0].Unreadable)
	})
}

func TestSlowHooksAreNoHang(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFakeStore(t, 0, nil)
		health, calls := runningHealth(), 0
		s := f.session(t.Context(), rulesWith(5000))
		s.Health = health
		s.Hooks.Rejected = func(tables.Event) {
			time.Sleep(time.Second)
			calls++
			require.False(t, health.hangs(), "at event %d", calls)
		}
		batch := make([]envelope.Event, 200)
		_, failures := s.Failures(batch, slices.Repeat([]Outcome{{Kind: OutcomeRejected, Class: invalidEvent, Err: errDown}}, len(batch)))
		s.notifyRejected(failures)
		require.Equal(t, len(batch), calls)
	})
}
