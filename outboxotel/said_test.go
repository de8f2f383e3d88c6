package outboxotel_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxotel"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdk "go.opentelemetry.io/otel/sdk/trace"
)

// lead writes the row of a process that leads a relay, and what it has said of itself.
func (s *scene) lead(t testing.TB, relay, expires, state string) {
	t.Helper()
	s.exec(t, `INSERT INTO {schema}.outbox_lease (name, holder, epoch, expires_at, state, state_at)
		VALUES ($1, 'there/1/x', 7, now() + $2::text::interval, $3::text::jsonb, now())
		ON CONFLICT ON CONSTRAINT outbox_lease_pkey DO UPDATE SET expires_at = excluded.expires_at, state = excluded.state`, relay, expires, state)
}

// member writes the row of a process of a group. renewed is what it renews its row in.
func (s *scene) member(t testing.TB, group, name, renewed, state string) {
	t.Helper()
	s.exec(t, `INSERT INTO {schema}.event_member (consumer_group, member, from_kafka, renewed_at, renewed_every, routes, works, reasons, skipped, state)
		VALUES ($1, $2, true, now(), $3::text::interval, '{}', $4::text::jsonb @> '{"works": true}', '{}', '{}', $4::text::jsonb)`, group, name, renewed, state)
}

// valuesOf returns the values of attributes, sorted by name, without that of the test.
func valuesOf(set attribute.Set) string {
	var all []string
	for _, a := range set.ToSlice() {
		if a.Key != "test" {
			all = append(all, a.Value.String())
		}
	}
	return strings.Join(all, " ")
}

// series returns the points of a gauge, sorted: attributes and numbers that are not 0, or attributes of ages.
func (m metrics) series(name string) (all []string) {
	var sets []string
	switch data := m[name].Data.(type) {
	case metricdata.Gauge[int64]:
		for _, p := range data.DataPoints {
			if p.Value != 0 {
				sets = append(sets, fmt.Sprint(valuesOf(p.Attributes), " ", p.Value))
			}
		}
	case metricdata.Gauge[float64]:
		for _, p := range data.DataPoints {
			sets = append(sets, valuesOf(p.Attributes))
		}
	}
	slices.Sort(sets)
	return sets
}

// A process that has lost the lease with an open breaker, or that stands by, exports what the leader says. Of what it
// does not say, nothing is known.
func TestSaidByTheLeader(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	s.watch(t)
	hooks := s.tel.Relay(outbox.RelayConfig{}).Hooks
	hooks.Leading(true)
	if hooks.Breaker != nil {
		hooks.Breaker(outbox.BreakerClosed, outbox.BreakerOpen, 1)
	}
	hooks.Leading(false)
	s.lead(t, "default", "1 hour", `{"epoch": 7, "works": true}`)
	s.lead(t, "gone", "-1 s", `{"epoch": 7, "works": true}`)
	s.lead(t, "ill", "1 hour", `{"epoch": 7, "breakers": [{"state": "half-open", "since": "2026-11-27T12:03:00Z"}], "outages": [
		{"what": "Kafka", "class": "unreachable", "since": "2020-01-01T00:00:00Z", "error": "dial tcp"},
		{"what": "PostgreSQL, for retries,", "class": "locked", "since": "2026-11-27T12:02:00Z", "error": "canceled"}]}`)
	m := s.collect(t)
	require.Equal(t, []string{"default closed 1", "gone unknown 1", "ill half-open 1"}, m.series("outbox.relay.breaker.state"))
	require.Equal(t, []string{"default works 1", "gone unknown 1", "ill not_working 1"}, m.series("outbox.relay.state"))
	require.Equal(t, []string{"locked PostgreSQL, for retries ill", "unreachable Kafka ill"}, m.series("outbox.outage.age"))
	const year = 365 * 24 * 60 * 60
	require.Greater(t, m.value("outbox.outage.age", "outbox.outage", "Kafka", "error.type", "unreachable"), 5.0*year)
	s.lead(t, "default", "1 hour", `{"epoch": 6, "works": true}`)
	s.lead(t, "ill", "1 hour", `{"epoch": 7, "works": true}`)
	m = s.collect(t)
	require.Equal(t, []string{"default unknown 1", "gone unknown 1", "ill closed 1"}, m.series("outbox.relay.breaker.state"))
	require.NotContains(t, m, "outbox.outage.age", "it is over")
	require.Empty(t, unboundedAttributes(m))
}

// Members of groups are counted by what they say of themselves, and so are breakers of actions. What a member has said
// that does not renew its row is unknown.
func TestSaidByMembers(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	s.watch(t)
	open := `{"works": true, "breakers": [{"action": "CHARGE", "state": "open", "since": "2026-11-27T12:03:00Z"}]}`
	s.member(t, "stats", "a", "1 hour", `{"works": true}`)
	s.member(t, "stats", "b", "1 hour", open)
	s.member(t, "stats", "c", "1 hour", strings.Replace(open, "open", "half-open", 1))
	s.member(t, "stats", "d", "1 hour", strings.Replace(open, `true`, `false, "outages": [{"what": "fetching", "class": "no_answer", "since": "2020-01-01T00:00:00Z"}]`, 1))
	s.member(t, "stats", "e", "0 s", strings.Replace(open, `true`, `true, "outages": [{"what": "PostgreSQL", "class": "locked", "since": "2020-01-01T00:00:00Z"}]`, 1))
	s.member(t, "mails", "f", "1 hour", `{"works": true, "outages": "none"}`) // as nobody writes it
	m := s.collect(t)
	require.Equal(t, []string{"mails works 1", "stats not_working 1", "stats unknown 1", "stats works 3"}, m.series("outbox.group.members"))
	require.Equal(t, []string{"stats CHARGE half-open 1", "stats CHARGE open 2"}, m.series("outbox.group.breakers"))
	require.Equal(t, []string{"no_answer stats fetching"}, m.series("outbox.outage.age"))
	s.exec(t, `DELETE FROM {schema}.event_member`)
	m = s.collect(t)
	require.Empty(t, m.series("outbox.group.breakers"))
	require.Len(t, m["outbox.group.breakers"].Data.(metricdata.Gauge[int64]).DataPoints, 2, "0 is reported for a while")
	require.Len(t, m["outbox.group.members"].Data.(metricdata.Gauge[int64]).DataPoints, 6)
	require.Empty(t, unboundedAttributes(m))
}

// Nothing is watched twice, after Close, or if it is nil; the error names the argument.
func TestWatchRejects(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	mail := outbox.HandleNoTx("MAIL", func(context.Context, placed, outbox.Metadata) error { return nil })
	a, b := s.consumer(t, outbox.ConsumerConfig{}, mail), s.consumer(t, outbox.ConsumerConfig{}, mail)
	rejected := func(want error, text string, err error) {
		t.Helper()
		require.ErrorIs(t, err, want)
		require.ErrorContains(t, err, text)
	}
	rejected(outbox.ErrNilArgument, "argument db must not be nil", s.tel.WatchDatabase(nil, ""))
	rejected(outbox.ErrMalformed, "field Schema is malformed", s.tel.WatchDatabase(s.db, "$user"))
	require.NoError(t, s.tel.WatchDatabase(s.db, s.schema))
	rejected(outbox.ErrDuplicate, "argument db is registered already", s.tel.WatchDatabase(s.db, s.schema))
	rejected(outbox.ErrDuplicate, "argument db is registered already", s.tel.WatchDatabase(s.db, "another"))

	rejected(outbox.ErrNilArgument, "argument consumers[1] must not be nil", s.tel.WatchConsumers(a, nil))
	rejected(outbox.ErrDuplicate, "argument consumers[1], of group "+s.orders, s.tel.WatchConsumers(a, a))
	require.NoError(t, s.tel.WatchConsumers(a), "the calls before have added nothing")
	rejected(outbox.ErrDuplicate, "argument consumers[1], of group "+s.orders, s.tel.WatchConsumers(b, a))
	require.NoError(t, s.tel.WatchConsumers())
	require.NoError(t, s.tel.WatchConsumers(b))
	require.NoError(t, s.tel.Close())
	rejected(outboxotel.ErrClosed, "closed", s.tel.WatchDatabase(s.db, s.schema))
	rejected(outboxotel.ErrClosed, "closed", s.tel.WatchConsumers())
}
