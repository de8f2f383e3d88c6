package relay

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A pooler may send the statement that looks at the lease to a standby that is behind: there the lease is free, and it
// cannot be taken. A process that stands by pauses between two tries all the same.
func TestStandbyPausesBesideAStaleLease(t *testing.T) {
	t.Parallel()
	d := testenv.NewTables(t)
	_, err := lease.NewStore(d.DB, d.Schema, "default", time.Minute).Acquire(t.Context())
	require.NoError(t, err)
	log := slog.New(slog.DiscardHandler)
	leases := lease.NewStore(d.DB, d.Schema, "default", time.Minute)
	leases.Peek = pg.InSchema(`
		WITH looks AS MATERIALIZED (SELECT nextval('{schema}.outbox_id_seq') AS n)
		SELECT holder, epoch, lasts, lasts, expires_at, true, lasts, false FROM looks, {schema}.outbox_lease WHERE n < 0 AND name = $1::text AND holder = $2::text`, d.Schema)
	rules := rulesWith(1)
	rules.PollInterval, rules.Schema = time.Hour, d.Schema
	r := &Relay{leases: leases, rules: rules, log: log, postgresOutage: outage.NewLog(log, "PostgreSQL"), lockOutage: outage.NewLog(log, "lock")}
	r.health = newHealthState(rules, nil)
	ctx, stop := context.WithTimeout(t.Context(), time.Second)
	defer stop()
	l, err := r.standBy(ctx)
	require.NoError(t, err)
	require.Nil(t, l)
	require.Equal(t, 1, d.Count(t, "outbox_id_seq WHERE last_value <= 3"))
}
