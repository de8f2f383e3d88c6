package itest

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// awaitHealth waits until a relay is as it should be: live, ready, and at work if there are no reasons.
func awaitHealth(t *testing.T, r *outbox.Relay, live, ready bool, reasons ...string) (h outbox.RelayHealth) {
	t.Helper()
	require.Eventually(t, func() bool {
		h = r.Health()
		all := strings.Join(h.Reasons, "\n")
		for _, reason := range reasons {
			if !strings.Contains(all, reason) {
				return false
			}
		}
		return h.Live == live && h.Ready == ready && (len(h.Reasons) == 0) == h.Works && h.Works == (len(reasons) == 0)
	}, testenv.Patience, 5*time.Millisecond, "not %v, %v, %v", live, ready, reasons)
	return h
}

// Of two processes one leads and one stands by, and both do their part.
func TestHealthOfLeaderAndStandby(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	leader, standby := h.relay(t, quick), h.relay(t, quick)
	awaitHealth(t, leader, true, false, "it does not run")
	stop := testenv.Run(t, leader.Run)
	require.Eventually(t, func() bool { return leader.Health().Leading }, testenv.Patience, 5*time.Millisecond)
	testenv.Run(t, standby.Run)
	awaitHealth(t, leader, true, true)
	require.False(t, awaitHealth(t, standby, true, true).Leading)
	stop()
	require.False(t, awaitHealth(t, leader, true, false, "it does not run").Leading)
	require.Eventually(t, func() bool { return standby.Health().Leading }, testenv.Patience, 5*time.Millisecond)
	awaitHealth(t, standby, true, true)
}

// A relay that needs an operator is not live: a restart reports the error again, at least.
func TestHealthOfARelayThatHasEnded(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	_, err := h.db.Exec(background, h.sql(`DROP TABLE {s}.outbox_lease`))
	require.NoError(t, err)
	r := h.relay(t, quick)
	require.ErrorIs(t, r.Run(background), outbox.ErrNotMigrated)
	awaitHealth(t, r, false, false, "Run has ended: the tables are missing or of an earlier release")
}

// In an outage of Kafka a relay is ready and does not work, also with nothing to send. No new start mends it.
func TestHealthWithoutKafka(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	open := h.unreachableRelay(t, outbox.RelayConfig{PollInterval: 10 * time.Millisecond, Breaker: outbox.BreakerConfig{OpenFor: time.Hour}})
	began := time.Now()
	stop := testenv.Run(t, open.Run)
	health := awaitHealth(t, open, true, true, "Kafka has been failing for")
	require.Len(t, health.Outages, 1)
	require.Equal(t, []string{"Kafka", "unreachable"}, []string{health.Outages[0].What, health.Outages[0].Class})
	require.WithinRange(t, health.Outages[0].Since, began, time.Now())
	require.False(t, health.Answered)
	h.commit(t, numbered("a", 1, 10)...)
	require.Equal(t, outbox.BreakerOpen, awaitHealth(t, open, true, true, "the circuit breaker is open", "Kafka has been failing for").Breaker)
	require.Equal(t, health.Outages[0].Since, open.Health().Outages[0].Since, "it is the same outage")
	stop()

	closed := h.unreachableRelay(t, outbox.RelayConfig{PollInterval: 10 * time.Millisecond, Breaker: outbox.BreakerConfig{Window: 10_000}})
	testenv.Run(t, closed.Run)
	awaitHealth(t, closed, true, true, "nothing has moved for", "Kafka has been failing for")
}

// A standby that cannot see whether a relay leads reports that.
func TestHealthWithoutPostgres(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	var down atomic.Bool
	db := testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) {
			if down.Load() {
				return false, errors.New("unplugged")
			}
			return true, nil
		}
	})
	testenv.Run(t, h.relay(t, quick).Run)
	require.Eventually(t, func() bool { return h.relayStatus(t, "default").Holder != "" }, testenv.Patience, 5*time.Millisecond)
	standby, err := outbox.NewRelay(db, testenv.KafkaOpts(h.brokers), outbox.RelayConfig{Schema: h.schema, PollInterval: 10 * time.Millisecond,
		DeliveryTimeout: time.Second, Lease: 1600 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	testenv.Run(t, standby.Run)
	awaitHealth(t, standby, true, true)
	down.Store(true)
	awaitHealth(t, standby, true, true, "no relay is seen to hold the lease", "PostgreSQL has been failing for", "unplugged")
	down.Store(false)
	awaitHealth(t, standby, true, true)
}
