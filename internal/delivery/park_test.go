package delivery_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// received returns the n-th event of a key. Each key has its own partition. Events of the empty key have no
// order.
func received(key string, n int) delivery.Received {
	id := fmt.Sprintf("%s-%d", key, n)
	r := delivery.Received{
		Subject:  delivery.Subject{Action: action, Digest: [16]byte(digest(id))},
		Stream:   stream,
		Offset:   int64(n),
		EventID:  uuid.New(),
		RecordID: id, Type: "a.order.sent.v1", Source: "/test", AggregateID: key, ContentType: "application/json", PartitionKey: key,
		Payload: []byte(`{"n": 1}`), Record: []byte("rest"), OccurredAt: time.Now(), RecordedAt: time.Now(), MaxAttempts: 3,
		Note: delivery.Note{AggregateType: "a.order.sent.v1", AggregateID: id, WithSource: "beside " + id, Source: "/test"},
	}
	if key != "" {
		r.Key = delivery.KeyOf(group, action, stream, key)
	}
	return r
}

// failed returns an event whose first attempt has failed.
func failed(key string, n int) delivery.Received {
	r := received(key, n)
	r.Attempt, r.Code, r.Message = 1, "handler", "no"
	return r
}

func (f *tableFixture) park(s *delivery.Store, rows ...delivery.Received) (became []delivery.Status) {
	parked, err := s.Park(f.t.Context(), rows)
	require.NoError(f.t, err)
	for _, p := range parked {
		became = append(became, p.Status)
	}
	return became
}

func (f *tableFixture) blocked(s *delivery.Store, events ...delivery.Received) []int {
	found, err := s.Blocked(f.t.Context(), subjects(events))
	require.NoError(f.t, err)
	return found
}

func subjects(events []delivery.Received) (all []delivery.Subject) {
	for _, e := range events {
		all = append(all, e.Subject)
	}
	return all
}

// note inserts the note that an event is handled.
func (f *tableFixture) note(e delivery.Received) {
	f.exec(`INSERT INTO {schema}.event_handled (consumer_group, aggregate_type, aggregate_id, action, event_source) VALUES ($1, $2, $3, $4, $5)`,
		group, e.Note.AggregateType, e.Note.AggregateID, e.Action, e.Note.Source)
}

func (f *tableFixture) claim(s *delivery.Store) []delivery.Delivery {
	claimed, err := s.Claim(f.t.Context(), pairs, 10, 10, false, room)
	require.NoError(f.t, err)
	return claimed
}

// A failed event blocks its key until it is done. The events that were parked behind it block the key too.
func TestParkedEvents(t *testing.T) {
	t.Parallel()
	f, ctx := newTable(t), t.Context()
	s := f.store("a", time.Minute).ForRecords()
	require.Empty(t, f.blocked(s, received("k", 1), received("", 1)))

	require.Equal(t, []delivery.Status{delivery.Pending}, f.park(s, failed("k", 1)))
	require.Equal(t, []int{0, 1}, f.blocked(s, received("k", 1), received("k", 2), received("other", 1), received("", 2)))
	require.Equal(t, []delivery.Status{"", delivery.Parked, delivery.Parked, delivery.Pending}, f.park(s, received("k", 1), received("k", 2), received("k", 3), received("", 1)))
	require.Equal(t, []int{0}, f.blocked(s, received("", 1), received("", 2)), "without a key, only an event itself")
	require.Equal(t, []delivery.Status{"", ""}, f.park(s, received("k", 2), received("", 1)), "they come again")

	claimed := f.claim(s)
	require.Len(t, claimed, 2, "what has failed is tried alone")
	first := claimed[0]
	require.True(t, first.FromKafka)
	require.Equal(t, []any{"k-1", "k", "rest", `{"n": 1}`, 2, "handler", "no", int64(1)}, []any{first.EventID, first.PartitionKey, string(first.Record), string(first.Payload), first.Attempt,
		first.LastCode, first.LastMessage, first.Position})
	_, err := s.Finish(ctx, claimed)
	require.NoError(t, err)
	require.Equal(t, []int{0, 1}, f.blocked(s, received("k", 2), received("k", 4), received("", 1)), "k-2 is the head now")
	w := f.store("w", time.Minute)
	claimed = f.claim(w)
	require.Len(t, claimed, 2, "a worker claims the rows of consumers")
	_, err = w.Finish(ctx, claimed)
	require.NoError(t, err)
	require.Empty(t, f.blocked(s, received("k", 3), received("k", 4)))
}

// A handled event gets no row, for each form of the idempotency key of its action and each place of its
// note.
func TestHandledEventsAreNotParked(t *testing.T) {
	t.Parallel()
	f := newTable(t)
	s := f.store("a", time.Minute).ForRecords()
	of := func(source string, change func(*delivery.Note)) delivery.Received {
		r := received("k", 1)
		r.Note.Source = source
		if change != nil {
			change(&r.Note)
		}
		return r
	}
	f.note(received("k", 1))
	for name, e := range map[string]delivery.Received{
		"by its own note": of("/test", nil), "by a key of the host": of("", nil),
		"beside that of another source": of("/third", func(n *delivery.Note) { n.AggregateID, n.WithSource = "else", n.AggregateID }),
	} {
		require.Equal(t, []delivery.Status{""}, f.park(s, e), name)
	}
	require.Equal(t, []delivery.Status{delivery.Pending}, f.park(s, of("/other", nil)), "the event of another source")
}

// A dead event stays dead. It is not handled when it comes again, and blocks its key only while it is held.
func TestDeadEventIsNotParkedAgain(t *testing.T) {
	t.Parallel()
	for _, held := range []bool{false, true} {
		t.Run(fmt.Sprint("held ", held), func(t *testing.T) {
			t.Parallel()
			f, ctx := newTable(t), t.Context()
			s := f.store("a", time.Minute).ForRecords()
			f.park(s, failed("k", 1), received("k", 2))
			_, err := s.Fail(ctx, delivery.Failure{Of: f.claim(s)[0], Code: "handler", Message: "no", Dead: true, Held: held}, nil)
			require.NoError(t, err)
			require.Equal(t, []delivery.Status{""}, f.park(s, received("k", 1)))
			want := map[bool]string{false: "k PENDING 0", true: "k PARKED 0"}[held]
			require.Equal(t, []string{"k DEAD 2", want}, f.rows())
			if !held {
				_, err = s.Finish(ctx, f.claim(s))
				require.NoError(t, err)
				require.Equal(t, []int{0}, f.blocked(s, received("k", 1), received("k", 3)))
			} else {
				require.Equal(t, []int{0, 1}, f.blocked(s, received("k", 1), received("k", 3)))
			}
			f.exec(`SELECT {schema}.outbox_requeue_deliveries(ARRAY(SELECT id FROM {schema}.event_delivery WHERE status = 'DEAD'), 'kim', 'again')`)
			require.Equal(t, []int{0, 1}, f.blocked(s, received("k", 1), received("k", 3)))
			var outboxID *int64
			require.NoError(t, f.db.QueryRow(ctx, pg.InSchema(`SELECT outbox_id FROM {schema}.outbox_audit`, f.schema)).Scan(&outboxID))
			require.Nil(t, outboxID, "its position is no id of outbox")
		})
	}
}

// The dead letter of a record must be sent before its row is DEAD. This holds even if the worker was lost
// in each attempt.
func TestRecordOfLostWorkerDoesNotDie(t *testing.T) {
	t.Parallel()
	f, ctx := newTable(t), t.Context()
	s := f.store("a", time.Millisecond).ForRecords()
	last := failed("k", 1)
	last.MaxAttempts = 1
	f.park(s, last)
	require.Len(t, f.claim(s), 1)
	var expired []delivery.Expired
	require.Eventually(t, func() bool { // a round trip may be shorter than the lease
		var err error
		expired, err = s.TakeOver(ctx, 10, false)
		require.NoError(t, err)
		return len(expired) > 0
	}, testenv.Patience, time.Millisecond)
	require.Len(t, expired, 1)
	require.False(t, expired[0].Dead)
	claimed, err := s.Claim(ctx, pairs, 10, 10, true, room)
	require.NoError(t, err)
	require.Len(t, claimed, 1)
	require.Greater(t, claimed[0].Attempt, claimed[0].MaxAttempts)
}

// Several members of a group believe that they own the same partition. They still handle the events of each
// key in order, each once. They check for blocked keys, handle free events, check again, and park events
// that fail or are blocked. Lanes handle parked rows meanwhile. Any transaction may be lost at any time.
func TestMembersKeepOrder(t *testing.T) {
	t.Parallel()
	for _, isolation := range []string{"read committed", "repeatable read", "serializable"} {
		t.Run(isolation, func(t *testing.T) {
			t.Parallel()
			f := newTable(t)
			f.exec(`CREATE TABLE {schema}.effects (id bigserial, key text, n int)`)
			const events, keys = 40, 3
			h := &parkHistory{tableFixture: f, isolation: isolation, events: events, keys: keys}
			var members sync.WaitGroup
			for i := range 3 {
				members.Go(func() { h.member(f.store(fmt.Sprint("m", i), time.Minute).ForRecords()) })
			}
			ctx, cancel := context.WithCancel(t.Context())
			var lanes sync.WaitGroup
			for i := range 2 {
				lanes.Go(func() { h.lane(ctx, f.store(fmt.Sprint("l", i), time.Minute).ForRecords()) })
			}
			members.Wait()
			require.Eventually(t, func() bool {
				return h.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status NOT IN ('DONE', 'DEAD')`) == 0
			}, time.Minute, 10*time.Millisecond)
			cancel()
			lanes.Wait()
			require.Zero(t, h.count(`SELECT count(*) FROM {schema}.effects AS a JOIN {schema}.effects AS b ON a.key = b.key AND a.id < b.id AND a.n >= b.n`), "out of order, or twice")
			require.Zero(t, h.count(`SELECT count(*) FROM {schema}.effects AS e JOIN {schema}.event_delivery AS d ON d.aggregate_id = e.key AND d.position = e.n AND d.status = 'DEAD'`),
				"given up, and handled nevertheless")
			require.Equal(t, events*keys, h.count(`SELECT (SELECT count(*) FROM {schema}.effects) + (SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD')`))
			t.Logf("%d rows were parked", h.count(`SELECT count(*) FROM {schema}.event_delivery`))
		})
	}
}

type parkHistory struct {
	*tableFixture
	isolation    string
	events, keys int
}

func (h *parkHistory) count(sql string) (n int) {
	require.NoError(h.t, h.db.QueryRow(context.Background(), pg.InSchema(sql, h.schema)).Scan(&n))
	return n
}

var (
	errHandler = errors.New("the handler has failed")
	errBlocked = errors.New("blocked")
)

// member handles the events of all keys, in batches.
func (h *parkHistory) member(s *delivery.Store) {
	for n := 0; n < h.events; {
		time.Sleep(rand.N(40 * time.Millisecond)) // some keys become free
		var batch []delivery.Received
		for ; n < h.events && len(batch) < h.keys; n++ {
			for k := range h.keys {
				batch = append(batch, received(fmt.Sprint("k", k), n))
			}
		}
		for len(batch) > 0 {
			batch = h.step(s, batch)
		}
	}
}

// step handles or parks the events of a batch as far as possible, and returns the rest.
func (h *parkHistory) step(s *delivery.Store, batch []delivery.Received) []delivery.Received {
	blocked := h.blocked(s, batch...)
	var behind, rest []delivery.Received
	for i, e := range batch {
		if slices.Contains(blocked, i) {
			behind = append(behind, e)
		} else {
			rest = append(rest, e)
		}
	}
	h.park(s, behind...)
	if len(rest) == 0 {
		return nil
	}
	e := rest[0]
	if rand.N(15) == 0 {
		time.Sleep(rand.N(1500 * time.Millisecond)) // frozen: it goes on with its old knowledge
	}
	switch err := h.handle(s, e); {
	case err == nil:
		return rest[1:]
	case errors.Is(err, errHandler):
		e.Attempt, e.Code, e.Message = 1, "handler", err.Error()
		time.Sleep(rand.N(3 * time.Millisecond))
		h.park(s, e)
		return rest[1:]
	}
	return rest
}

// handle handles an event as a consumer does, with its note, its effect and the second check for blocked
// keys.
func (h *parkHistory) handle(s *delivery.Store, e delivery.Received) error {
	return pgx.BeginTxFunc(context.Background(), h.db, pgx.TxOptions{IsoLevel: pgx.TxIsoLevel(h.isolation)}, func(tx pgx.Tx) error {
		fresh, err := h.effect(tx, e.Note, e.AggregateID, int(e.Offset))
		if err != nil || !fresh {
			return err
		}
		blocked, err := s.BlockedIn(context.Background(), tx, []delivery.Subject{e.Subject})
		if err == nil && len(blocked) > 0 {
			return errBlocked
		}
		return err
	})
}

func (h *parkHistory) effect(tx pgx.Tx, note delivery.Note, key string, n int) (fresh bool, err error) {
	ctx := context.Background()
	tag, err := tx.Exec(ctx, pg.InSchema(`INSERT INTO {schema}.event_handled (consumer_group, aggregate_type, aggregate_id, action, event_source) VALUES ($1, $2, $3, $4, $5)
		ON CONFLICT DO NOTHING`, h.schema), group, note.AggregateType, note.AggregateID, action, note.Source)
	if err != nil || tag.RowsAffected() == 0 {
		return false, err
	}
	_, err = tx.Exec(ctx, pg.InSchema(`INSERT INTO {schema}.effects (key, n) VALUES ($1, $2)`, h.schema), key, n)
	if err == nil && rand.N(4) == 0 {
		err = errHandler
	}
	return true, err
}

// lane handles parked rows.
func (h *parkHistory) lane(ctx context.Context, s *delivery.Store) {
	for ctx.Err() == nil {
		claimed, err := s.Claim(context.Background(), pairs, 3, 3, false, room)
		require.NoError(h.t, err)
		lost := map[delivery.Key]bool{}
		for i, d := range claimed {
			if lost[d.Key] {
				continue
			}
			err := pgx.BeginFunc(context.Background(), h.db, func(tx pgx.Tx) error {
				if _, err := h.effect(tx, delivery.Note{AggregateType: d.Type, AggregateID: d.EventID, Source: d.Source}, d.AggregateID, int(d.Position)); err != nil {
					return err
				}
				_, err := s.FinishIn(context.Background(), tx, claimed[i:i+1])
				return err
			})
			if err == nil {
				continue
			}
			require.ErrorIs(h.t, err, errHandler)
			lost[d.Key] = true
			var behind []delivery.Delivery
			for _, other := range claimed[i+1:] {
				if other.Key == d.Key {
					behind = append(behind, other)
				}
			}
			_, err = s.Fail(context.Background(), delivery.Failure{Of: d, Code: "handler", MaxAttempts: 100, Dead: rand.N(2) == 0}, behind)
			require.NoError(h.t, err)
		}
		time.Sleep(time.Millisecond)
	}
}

func digest(id string) []byte {
	sum := sha256.Sum256([]byte(id))
	return sum[:16]
}

// If the consumer of a parked event is gone, the record that brought the event is known. An event of outbox
// has no record.
func TestExpiredSayTheirRecord(t *testing.T) {
	t.Parallel()
	f := newTable(t)
	gone := f.store("a", time.Millisecond)
	outboxID := f.record("l")
	f.insert(gone, delivery.Processing, outboxID, "l")
	e := failed("k", 5)
	e.Partition = 3
	f.park(gone, e)
	require.Len(t, f.claim(f.store("a", time.Millisecond).ForRecords()), 1)
	var expired []delivery.Expired
	require.Eventually(t, func() bool {
		found, err := f.store("b", time.Millisecond).TakeOver(t.Context(), 10, false)
		require.NoError(t, err)
		expired = append(expired, found...)
		return len(expired) == 2
	}, testenv.Patience, time.Millisecond)
	slices.SortFunc(expired, func(a, b delivery.Expired) int { return int(a.ID - b.ID) })
	require.Equal(t, []any{"l", false, outboxID[0]}, []any{expired[0].RecordKey, expired[0].FromKafka, expired[0].Position})
	require.Equal(t, []any{"k", true, int64(5), int32(3), 2}, []any{expired[1].RecordKey, expired[1].FromKafka, expired[1].Position, expired[1].Partition, expired[1].Attempt})
}
