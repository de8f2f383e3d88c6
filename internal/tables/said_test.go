package tables_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/testenv"
)

// What a leader has said counts only while it holds the lease under which it said that.
func TestSaidByTheLeader(t *testing.T) {
	t.Parallel()
	d, ctx := testenv.NewTables(t), context.Background()
	since := time.Date(2026, 11, 27, 12, 3, 0, 0, time.UTC)
	state := outage.State{
		Epoch: 7, Reasons: []string{"the circuit breaker is open"}, Breakers: []outage.Breaker{{State: "open", Since: since}},
		Outages: []outage.Outage{{What: "Kafka", Class: "unreachable", Since: since, Err: "refused"}},
	}
	d.Exec(t, `INSERT INTO {schema}.outbox_lease (name, holder, epoch, expires_at, state, state_at, kafka_at)
		VALUES ('default', 'host/1/a', 7, now() + interval '1 minute', '`+state.JSON()+`', now(), now())`)
	said := func() *tables.Said {
		all, err := tables.Relays(ctx, d.DB, pg.InSchema(tables.SQLRelays, d.Schema))
		require.NoError(t, err)
		require.Len(t, all, 1)
		return all[0].Said
	}
	s := said()
	require.NotNil(t, s)
	require.Equal(t, state, s.State)
	require.WithinDuration(t, s.Now, s.At, time.Minute)
	require.WithinDuration(t, s.Now, s.KafkaAt, time.Minute)
	for _, unknown := range []string{
		`epoch = 8`, // another process leads
		`expires_at = now()`,
		`holder = 'outbox cut', expires_at = 'infinity'`,
		`state = '{}'`,
		`state = '[7]'`,
		`state = '"7"'`,
		`state = '{"epoch": "7"}'`,
		`state = '{"epoch": 7, "works": [], "outages": "x"}'`, // rows may be written by hand
		`state = '{"epoch": 7, "outages": [{"since": "yesterday"}]}'`,
	} {
		d.Exec(t, `UPDATE {schema}.outbox_lease SET `+unknown)
		require.Nil(t, said(), unknown)
		d.Exec(t, `UPDATE {schema}.outbox_lease SET holder = 'host/1/a', epoch = 7, expires_at = now() + interval '1 minute', state = '`+state.JSON()+`'`)
		require.NotNil(t, said())
	}
}

// Times that a process has said by its own clock are read by that of the database, from which ages are told. A row of
// an earlier release does not say what its clock showed.
func TestSaidByAnotherClock(t *testing.T) {
	t.Parallel()
	d, ctx := testenv.NewTables(t), context.Background()
	since := time.Now().Add(-time.Minute).UTC()
	state := outage.State{Epoch: 7, Breakers: []outage.Breaker{{State: "open", Since: since}}, Outages: []outage.Outage{{What: "Kafka", Class: "unreachable", Since: since}}}
	read := func(state string) (all []outage.State) {
		d.Exec(t, `DELETE FROM {schema}.outbox_lease`)
		d.Exec(t, `DELETE FROM {schema}.event_member`)
		d.Exec(t, `INSERT INTO {schema}.outbox_lease (name, holder, epoch, expires_at, state, state_at)
			VALUES ('default', 'host/1/a', 7, now() + interval '1 minute', $1::text::jsonb, now() - interval '1 hour')`, state)
		d.Exec(t, `INSERT INTO {schema}.event_member (consumer_group, member, from_kafka, renewed_at, renewed_every, routes, works, reasons, skipped, state)
			VALUES ('g', 'a', true, now() - interval '1 hour', '1 day', '{}', false, '{}', '{}', $1::text::jsonb)`, state)
		relays, err := tables.Relays(ctx, d.DB, pg.InSchema(tables.SQLRelays, d.Schema))
		require.NoError(t, err)
		members, err := tables.NewGroupReader(d.DB, d.Schema).Members(ctx, "g")
		require.NoError(t, err)
		return []outage.State{relays[0].Said.State, members[0].State}
	}
	for _, said := range read(state.JSON()) {
		require.WithinDuration(t, since.Add(-time.Hour), said.Breakers[0].Since, testenv.Patience)
		require.WithinDuration(t, since.Add(-time.Hour), said.Outages[0].Since, testenv.Patience)
	}
	state.At = time.Time{}
	earlier, err := json.Marshal(state)
	require.NoError(t, err)
	for _, said := range read(string(earlier)) {
		require.Equal(t, since, said.Breakers[0].Since)
		require.Equal(t, since, said.Outages[0].Since)
	}
}
