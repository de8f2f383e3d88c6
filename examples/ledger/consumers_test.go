package main

import (
	"testing"

	"github.com/google/uuid"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxtest"
	"github.com/outboxgo/outbox/outboxtopics"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// deliverTo returns a function that delivers events to a group, without Kafka.
func (f *fixture) deliverTo(t *testing.T, group string, handlers ...outbox.Handler) func(*kgo.Record) error {
	t.Helper()
	f.kafka = []kgo.Opt{kgo.SeedBrokers("127.0.0.1:1")}
	c, err := f.consumer(group, handlers...)
	require.NoError(t, err)
	return func(r *kgo.Record) error { return c.Deliver(t.Context(), r) }
}

// records returns what Kafka gets of two deposits and the reversal of the first.
func (f *fixture) records(t *testing.T) (records []*kgo.Record) {
	t.Helper()
	id, err := f.deposit(t.Context(), uuid.New(), "account-1", 50)
	require.NoError(t, err)
	_, err = f.deposit(t.Context(), uuid.New(), "account-1", 30)
	require.NoError(t, err)
	_, err = f.reverse(t.Context(), uuid.New(), id, "a mistake")
	require.NoError(t, err)
	posted, reversed := f.recorded(t)
	for _, e := range []outbox.DomainEvent{posted[0], posted[1], reversed[0]} {
		records = append(records, outboxtest.NewRecord(t.Context(), t, f.app.events, e))
	}
	for _, r := range records {
		require.Equal(t, "account-1", string(r.Key))
	}
	return records
}

// A transaction is in the feed once, whether its record comes twice or the event has another id the second time. An
// event that is early is refused until the one before it is there.
func TestAuditFeed(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	deliver, records := f.deliverTo(t, auditGroup, auditHandlers()...), f.records(t)
	require.NoError(t, deliver(records[0]))
	require.ErrorIs(t, deliver(records[2]), errEarly)
	posted, _ := f.recorded(t)
	for _, r := range []*kgo.Record{records[0], records[1], records[1], outboxtest.NewRecord(t.Context(), t, f.app.events, posted[1]), records[2], records[0]} {
		require.NoError(t, deliver(r))
	}
	var a auditor
	require.NoError(t, a.read(t.Context(), f.db))
	require.Equal(t, 3, a.rows)
	require.Zero(t, a.gaps()+a.repeats+a.late+a.wrongBalance+a.unbalanced)

	for _, sql := range []string{`UPDATE audit_feed SET sequence = 9`, `DELETE FROM audit_feed`, `TRUNCATE audit_feed`} {
		_, err := f.db.Exec(t.Context(), sql)
		require.ErrorContains(t, err, "append-only", sql)
	}
}

// The read model shows the newest state, whatever comes twice or late.
func TestPortfolioView(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	deliver, records := f.deliverTo(t, viewGroup, view{f.db}.handlers()...), f.records(t)
	for _, i := range []int{0, 2, 1, 0, 2} {
		require.NoError(t, deliver(records[i]))
	}
	var got Balance
	require.NoError(t, f.db.QueryRow(t.Context(), `SELECT balance, sequence FROM portfolio_view`).Scan(&got.Amount, &got.Version))
	require.Equal(t, Balance{30, 3}, got)
}

// A reader of a later version's events ignores what it does not know.
func TestUnknownMembersAreIgnored(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	deliver, records := f.deliverTo(t, auditGroup, auditHandlers()...), f.records(t)
	records[0].Value = append([]byte(`{"branch": {"city": "Busan"}, `), records[0].Value[1:]...)
	require.NoError(t, deliver(records[0]))
	var a auditor
	require.NoError(t, a.read(t.Context(), f.db))
	require.Equal(t, 1, a.rows)
}

// Posting does not need Kafka. Events that were posted during the outage arrive later.
func TestKafkaIsAwayAtTheCommit(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.records(t) // with an address without a broker
	f.kafka = testenv.KafkaOpts(testenv.Brokers(t))
	_, err := outboxtopics.Ensure(t.Context(), f.kafka, f.app.events, outboxtopics.Config{ReplicationFactor: -1})
	require.NoError(t, err)
	outboxtest.Drain(t.Context(), t, f.db, f.kafka, outbox.RelayConfig{Schema: f.schema})
	got, err := f.readKafka(t.Context())
	require.NoError(t, err)
	require.Equal(t, sent{3, 3}, got)
}
