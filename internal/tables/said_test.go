package tables_test

import (
	"context"
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
