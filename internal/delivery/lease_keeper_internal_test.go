package delivery

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/internal/wakeup"
)

// If the consumer of an event is gone, hooks get the record that brought the event. For an event from
// outbox there is no record.
func TestHooksOfGoneDeliveries(t *testing.T) {
	t.Parallel()
	var seen []envelope.Received
	var retries []bool
	note := func(m *envelope.Received, action string, err error, retry bool) {
		require.Equal(t, "COUNTED", action)
		require.ErrorIs(t, err, errGone)
		seen, retries = append(seen, *m), append(retries, retry)
	}
	cfg := &Rules{Rules: &handling.Rules{Hooks: handling.Hooks{Failed: note}}}
	of := Expired{ID: 7, EventID: "1", Type: "test.sale.made.v1", Action: "COUNTED", Stream: "sales", Attempt: 2, RecordKey: "k", Position: 5, Partition: 3}
	parked, dead := of, of
	parked.FromKafka, dead.Dead = true, true
	(&leaseKeeper{cfg: cfg}).notify([]Expired{parked, of, dead})
	require.Equal(t, []bool{true, true, false}, retries)
	for i, m := range seen {
		require.Equal(t, "1", m.ID)
		require.Equal(t, "test.sale.made.v1", m.Type)
		require.Equal(t, 2, m.Attempt)
		require.Equal(t, "sales", m.Topic())
		require.Equal(t, "k", string(m.Origin.Key))
		if i < 1 {
			require.Equal(t, &envelope.Place{Topic: "sales", Partition: 3, Offset: 5, Key: []byte("k")}, m.Kafka)
		} else {
			require.Nil(t, m.Kafka)
		}
	}
}

// A lane that failed to promote the followers of its last transaction may have nothing more to promote. The
// leaseKeeper promotes them, and then the outage is over.
func TestRepairedHeadsEndOutage(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Migrated(t)
	log := slog.New(slog.DiscardHandler)
	outages := outage.NewLogs(log)
	outages.Report(outagePromoting, time.Now(), errors.New("the connection is gone"))
	require.True(t, outages.Failing())
	k := &leaseKeeper{store: NewStore(db, schema, "mail", "a", time.Minute), outages: outages, log: log}
	require.NoError(t, k.repairHeads(t.Context()))
	require.False(t, outages.Failing())
}

// newOutageKeeper returns a keeper without deliveries, and what it says of outages.
func newOutageKeeper(t *testing.T) (k *leaseKeeper, log *testenv.Buffer) {
	db, schema := testenv.Migrated(t)
	log = new(testenv.Buffer)
	logger := slog.New(slog.NewTextHandler(log, nil))
	store, member := NewStore(db, schema, "mail", "a", time.Minute), wakeup.Of(db, "m").Join(nil, nil, logger)
	t.Cleanup(member.Close)
	return &leaseKeeper{
		cfg: &Rules{Rules: &handling.Rules{Schema: schema}, Lease: time.Minute}, store: store, claimed: newClaimedSet(), outages: outage.NewLogs(logger), log: logger,
		members: &members{store: store, routes: []string{}, every: time.Minute, member: member},
	}, log
}

// Where there is nothing to renew, nothing is asked, and no outage ends. It ends when PostgreSQL takes something else.
func TestRenewingNothingEndsNoOutage(t *testing.T) {
	t.Parallel()
	k, log := newOutageKeeper(t)
	k.outages.Report(outageRenewing, time.Now(), errors.New("the connection is gone"))
	require.NoError(t, k.tryRenew(t.Context()))
	require.True(t, k.outages.Failing())
	require.NotContains(t, log.String(), "works again")
	k.tryTakeOver(t.Context(), &takeOverRound{announced: true})
	require.False(t, k.outages.Failing())
	require.Contains(t, log.String(), "renewing deliveries works again")
}

// The round behind one that has failed takes nothing over, and ends no outage. Nor does a round that repairs nothing,
// after one that has failed to.
func TestSkippedTakeOverEndsNoOutage(t *testing.T) {
	t.Parallel()
	for name, round := range map[string]takeOverRound{
		"take over": {n: 1, announced: true, answers: answering{since: time.Now().Add(-time.Hour)}},
		"repair":    {n: 0, announced: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k, log := newOutageKeeper(t)
			rename := func(from, to string) {
				_, err := k.store.db.Exec(t.Context(), `ALTER TABLE "`+k.cfg.Schema+`".`+from+` RENAME TO `+to)
				require.NoError(t, err)
			}
			rename("event_delivery", "elsewhere")
			for range 3 {
				k.tryTakeOver(t.Context(), &round)
				require.True(t, k.outages.Failing())
				round.n++
			}
			require.NotContains(t, log.String(), "works again")
			rename("elsewhere", "event_delivery")
			round.answers.since = time.Now().Add(-time.Hour)
			k.tryTakeOver(t.Context(), &round)
			require.Empty(t, k.outages.Current())
			require.Equal(t, 1, strings.Count(log.String(), "works again"))
		})
	}
}

// While no statement waits for a lock, no holder is looked for. An outage of the look ends when PostgreSQL answers.
func TestLookForNoHolderEndsNoOutage(t *testing.T) {
	t.Parallel()
	k, log := newOutageKeeper(t)
	k.outages.Report(outageHolders, time.Now(), errors.New("too many connections"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	k.lookForHolders(ctx, time.Minute)
	require.True(t, k.outages.Failing())
	db := k.store.db
	k.store.db = testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.ConnConfig.DialFunc = func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("unplugged") }
	})
	k.lookForHolders(t.Context(), time.Minute)
	require.True(t, k.outages.Failing())
	require.NotContains(t, log.String(), "works again")
	k.store.db = db
	k.lookForHolders(t.Context(), time.Minute)
	require.False(t, k.outages.Failing())
}

// A process without deliveries notices an outage of PostgreSQL by its own row, and says so once.
func TestMemberNoticesOutages(t *testing.T) {
	t.Parallel()
	k, log := newOutageKeeper(t)
	rename := func(from, to string) {
		_, err := k.store.db.Exec(t.Context(), `ALTER TABLE "`+k.cfg.Schema+`".`+from+` RENAME TO `+to)
		require.NoError(t, err)
	}
	rename("event_member", "elsewhere")
	for range 2 {
		k.tryTakeOver(t.Context(), &takeOverRound{announced: true})
		require.Len(t, k.outages.Current(), 1)
		require.Equal(t, OutageMember, k.outages.Current()[0].Name)
	}
	rename("elsewhere", "event_member")
	k.tryTakeOver(t.Context(), &takeOverRound{announced: true})
	require.Empty(t, k.outages.Current())
	require.Equal(t, 1, strings.Count(log.String(), "works again"))
}

// Very many deliveries of other processes are counted up to a limit. The log does not show that as an exact number, nor
// the last lease of those that were read as the last of all.
func TestManyDeliveriesOfOthersAreNoExactNumber(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Migrated(t)
	_, err := db.Exec(t.Context(), pg.InSchema(`
		INSERT INTO {schema}.event_delivery (position, order_key, attempt_count, max_attempts, next_retry_at, created_at, updated_at, occurred_at, recorded_at, locked_by, locked_until,
		       event_id, status, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, payload)
		SELECT n, n, 0, 3, now(), now(), now(), now(), now(), CASE WHEN n <= 5 THEN 'me/1' ELSE 'other/1' END, now() + CASE WHEN n <= $1::int THEN '1 s' ELSE '20 s' END::interval,
		       gen_random_uuid(), 'PROCESSING', 'g', 'a', 's', 't', '/s', 't', 'k', 'application/json', '{}'
		  FROM generate_series(1, $1 + 10) AS n`, schema), maxCounted)
	require.NoError(t, err)
	said := func() string {
		var text strings.Builder
		k := &leaseKeeper{cfg: &Rules{Lease: 30 * time.Second}, store: NewStore(db, schema, "g", "me", 30*time.Second), log: slog.New(slog.NewTextHandler(&text, nil))}
		require.NoError(t, k.announceOthers(t.Context()))
		return text.String()
	}
	require.Contains(t, said(), "deliveries=9995 more=true at_most=40s")
	_, err = db.Exec(t.Context(), pg.InSchema(`DELETE FROM {schema}.event_delivery WHERE position > 8`, schema))
	require.NoError(t, err)
	require.Contains(t, said(), "deliveries=3 more=false at_most=25s")
}

// A step of the take-over loop that fails each time keeps no other step from its work: without confirm, other processes
// would take the handlers of this one for gone.
func TestStepsDoNotDependOnEachOther(t *testing.T) {
	t.Parallel()
	k, _ := newOutageKeeper(t)
	k.cfg.RetryDeadAfter = map[string]time.Duration{"x": time.Hour}
	k.store.sqlRetryable = `SELECT 1/0 WHERE $1::text <> $2::text[]::text AND $3::interval[] IS NOT NULL AND $4::int > 0 AND $5::bool IS NOT NULL`
	confirmed := 0
	k.confirm = func(context.Context) error { confirmed++; return nil }
	round := takeOverRound{clockChecks: 1}
	for range 2 {
		require.ErrorContains(t, k.takeOverOnce(t.Context(), &round), "division by zero")
	}
	require.Equal(t, 1, confirmed)
	require.Zero(t, round.clockChecks)
}
