package delivery

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pauses"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// slowFixture is a dispatcher of the actions SLOW and QUICK whose lanes do not run.
type slowFixture struct {
	*testing.T
	db     *pgxpool.Pool
	schema string
	d      *Dispatcher
	k      *LaneKind
}

func newSlowFixture(t *testing.T, lanes int) *slowFixture {
	db, schema := testenv.Migrated(t)
	log := slog.New(slog.DiscardHandler)
	rules := &Rules{
		Rules:       &handling.Rules{Schema: schema, Group: "g", HandlerTimeout: time.Minute, StopTimeout: time.Minute, Log: log},
		Concurrency: lanes, MaxPoll: 100, PollInterval: time.Hour, Lease: time.Minute,
	}
	var pairs [2][]Claimable
	for _, action := range []string{"QUICK", "SLOW"} {
		pairs[0] = append(pairs[0], Claimable{Pair{action, "s"}, []string{"t"}})
	}
	r := NewRun(Parts{
		Rules: rules, Db: db, Processor: handling.NewProcessor(*rules.Rules, handling.Routes{}, nil), Pauses: pauses.NewSet(),
		Outages: outage.NewLogs(log), Pairs: pairs,
	})
	r.makeLanes()
	f := &slowFixture{t, db, schema, r.Dispatcher, r.Dispatcher.Kinds[0]}
	f.k.pace["SLOW"] = 2 * slowAction
	return f
}

// insert inserts due rows of an action, each with a key of its own.
func (f *slowFixture) insert(action string, rows int) {
	f.Helper()
	const sql = `
		INSERT INTO {schema}.event_delivery (position, attempt_count, max_attempts, next_retry_at, created_at, updated_at, occurred_at, recorded_at,
		       event_id, status, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, payload)
		SELECT n, 0, 3, now(), now(), now(), now(), now(), gen_random_uuid(), 'PENDING', 'g', $1, 's', 't', '/s', 't', 'k', 'application/json', '{}'
		  FROM generate_series(1, $2::int) AS n`
	_, err := f.db.Exec(f.Context(), pg.InSchema(sql, f.schema), action, rows)
	require.NoError(f, err)
}

// poll polls until there is nothing more to claim at once. It returns whether a claim was sent to PostgreSQL.
func (f *slowFixture) poll() (claimed bool) {
	f.Helper()
	for {
		more, err := f.d.poll(f.Context())
		require.NoError(f, err)
		claimed = claimed || f.d.answered
		if !more {
			return claimed
		}
	}
}

// lanesOf returns the lanes that begin with a batch of an action.
func (f *slowFixture) lanesOf(action string) (lanes []*lane) {
	for _, l := range f.k.lanes {
		l.queue.mu.Lock()
		if len(l.queue.batches) > 0 && l.queue.batches[0][0].Action == action {
			lanes = append(lanes, l)
		}
		l.queue.mu.Unlock()
	}
	return lanes
}

// end ends the first batch of a lane.
func (f *slowFixture) end(l *lane, took time.Duration) {
	batch, _ := l.queue.next()
	for _, d := range batch {
		f.d.Claimed.remove(d.Ref)
	}
	f.k.noteHandled(l, len(batch), len(batch), took, f.d.cfg.MaxPoll)
}

// An action that is slow gets its share of the lanes while another one has more due rows than all lanes take, and gives
// the other lanes to it.
func TestSlowActionHasItsShareDuringBacklog(t *testing.T) {
	t.Parallel()
	for lanes, share := range map[int]int{4: 2, 2: 1} {
		f := newSlowFixture(t, lanes)
		f.insert("QUICK", 5000)
		f.insert("SLOW", 20)
		f.d.SignalDue()
		for range 8 {
			f.poll()
			require.Len(t, f.lanesOf("SLOW"), share)
			require.Len(t, f.lanesOf("QUICK"), lanes-share)
			for _, l := range f.lanesOf("QUICK") {
				f.end(l, time.Second)
			}
		}
		f.end(f.lanesOf("SLOW")[0], 2*slowAction)
		f.poll()
		require.Len(t, f.lanesOf("SLOW"), share)
	}
}

// A single lane alternates between a slow action and another one.
func TestSingleLaneAlternates(t *testing.T) {
	t.Parallel()
	f := newSlowFixture(t, 1)
	f.insert("QUICK", 5000)
	f.insert("SLOW", 20)
	f.d.SignalDue()
	had := map[string]int{}
	for range 8 {
		f.poll()
		for _, action := range []string{"QUICK", "SLOW"} {
			for _, l := range f.lanesOf(action) {
				had[action]++
				f.end(l, time.Second)
			}
		}
	}
	require.GreaterOrEqual(t, had["SLOW"], 3)
	require.GreaterOrEqual(t, had["QUICK"], 3)
}

// Several slow actions keep one lane free for the others.
func TestSlowActionsTogetherKeepOneLaneFree(t *testing.T) {
	t.Parallel()
	f := newSlowFixture(t, 4)
	f.k.pace["QUICK"] = 2 * slowAction
	f.insert("QUICK", 50)
	f.insert("SLOW", 50)
	f.d.SignalDue()
	f.poll()
	require.Len(t, append(f.lanesOf("SLOW"), f.lanesOf("QUICK")...), 3)
	require.NotEmpty(t, f.lanesOf("SLOW"))
	require.NotEmpty(t, f.lanesOf("QUICK"))
}

// While a slow action has its share of the lanes, a wake-up sends no claim to PostgreSQL. The end of one of its lanes
// has its rows claimed.
func TestSlowActionAtItsShareCostsNoClaims(t *testing.T) {
	t.Parallel()
	f := newSlowFixture(t, 4)
	f.insert("SLOW", 20)
	f.d.SignalDue()
	require.True(t, f.poll())
	const share = 3 // all but one
	require.Len(t, f.lanesOf("SLOW"), share)
	claims := 0
	for range 10 {
		if f.poll() {
			claims++
		}
	}
	require.Zero(t, claims)
	f.end(f.lanesOf("SLOW")[0], 2*slowAction)
	require.Len(t, f.lanesOf("SLOW"), share-1)
	require.True(t, f.poll())
	require.Len(t, f.lanesOf("SLOW"), share)
	require.False(t, f.poll())

	require.True(t, f.k.AwaitsShare("SLOW"), "a new row waits for a lane of its action")
	require.False(t, f.poll())
	require.False(t, f.k.AwaitsShare("QUICK"))
	f.end(f.lanesOf("SLOW")[0], 2*slowAction)
	require.True(t, f.poll())
}

// The pace of an action is how long its handler takes. Waits for PostgreSQL and batches of other actions do not count.
func TestPaceIsOfCalls(t *testing.T) {
	t.Parallel()
	f := newSlowFixture(t, 1)
	clear(f.k.pace)
	l := f.k.lanes[0]
	f.k.enqueue([]Delivery{{Ref: Ref{ID: 1}, Action: "QUICK"}})
	f.k.enqueue([]Delivery{{Ref: Ref{ID: 2}, Action: "SLOW"}})
	f.end(l, time.Minute) // an outage of PostgreSQL
	require.False(t, f.k.IsSlow("QUICK"))
	require.False(t, f.k.IsSlow("SLOW"))
	f.k.noteCall(handling.Call{Action: "SLOW", Events: 2}, 3*slowAction)
	f.k.noteCall(handling.Call{Action: "QUICK", Events: 4}, 3*slowAction)
	f.k.noteCall(handling.Call{Function: "a hook", Action: "QUICK", Events: 1}, 3*slowAction)
	require.True(t, f.k.IsSlow("SLOW"))
	require.False(t, f.k.IsSlow("QUICK"))
	l.activity.Begin(handling.Call{Context: context.Background(), Action: "SLOW", Events: 1})
	before := f.k.pace["SLOW"]
	l.activity.End()
	require.Less(t, f.k.pace["SLOW"], before, "the lane notes its calls")
}
