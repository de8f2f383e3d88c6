package itest

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// Without a relay, one worker of the database alerts to all groups. Where a relay leads, that does.
func TestWorkersAlertWithoutRelay(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	box := map[string]*mailbox{"mails": {}, "stats": {}}
	alerts := func(box *mailbox) outbox.AlertConfig {
		return outbox.AlertConfig{Alerter: box, Interval: 20 * time.Millisecond, DeadThreshold: 3, ReportInterval: 50 * time.Millisecond, StaleAfter: time.Second, StalePending: 3}
	}
	gaveUp := outbox.Handle("COUNTED", func(context.Context, pgx.Tx, step, outbox.Metadata) error { return outbox.Permanent(errTest) })
	holds := outbox.HandleNoTx("MAILED", func(ctx context.Context, _ step, _ outbox.Metadata) error {
		<-ctx.Done()
		return context.Cause(ctx)
	})
	run := func(group string, h outbox.Handler) {
		quiet := outbox.HandlerConfig{From: outbox.FromStart, Alerts: alerts(box[group]), Logger: slog.New(slog.DiscardHandler)}
		testenv.Run(t, f.worker(f.db, group, outbox.WorkerConfig{Lease: time.Second, HandlerConfig: quiet}, h).Run)
	}
	run("mails", holds)
	require.Eventually(t, func() bool {
		return f.count(`SELECT count(*) FROM {schema}.outbox_lease WHERE name = 'worker:mails' AND expires_at > now()`) == 1
	}, testenv.Patience, 5*time.Millisecond)
	run("stats", gaveUp)
	for n := range 3 {
		f.commit(step{fmt.Sprint("a", n), 1})
	}
	require.Eventually(t, func() bool { return len(box["mails"].deaths()) == 3 }, testenv.Patience, 5*time.Millisecond)
	a := box["mails"].await(t, outbox.AlertDeadDeliveries, false)
	require.Equal(t, "stats", a.Group)
	require.Equal(t, []string{"stats", "COUNTED", "bank.account.stepped.v1", "Account"}, []string{a.Dead[0].Group, a.Dead[0].Action, a.Dead[0].Type, a.Dead[0].AggregateType})
	require.ErrorContains(t, a.Dead[0].Err, errTest.Error())
	require.Regexp(t, "^consumer group stats: [123] deliver(y|ies) given up; [123] are dead$", a.String())
	a = box["mails"].await(t, outbox.AlertManyDead, false)
	require.Contains(t, a.String(), "3 dead events and deliveries wait for a decision: 3 dead bank.account.stepped.v1 ")
	require.Contains(t, a.String(), " for stats COUNTED")
	require.Contains(t, box["mails"].await(t, outbox.AlertReport, false).String(), " for stats COUNTED")
	a = box["mails"].await(t, outbox.AlertStale, false)
	require.Contains(t, a.String(), "consumer group mails: 3 events are not handled, the oldest for ")
	require.Contains(t, a.String(), ": 3 waiting bank.account.stepped.v1 for mails MAILED")
	require.Empty(t, box["stats"].alerts)

	relay := &mailbox{}
	r, err := outbox.NewRelay(f.db, testenv.KafkaOpts(testenv.Brokers(t)), outbox.RelayConfig{Schema: f.schema, Alerts: alerts(relay), Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	testenv.Run(t, r.Run)
	require.Len(t, relay.await(t, outbox.AlertManyDead, false).Counts, 1)
	require.Equal(t, "mails", relay.await(t, outbox.AlertStale, false).Group)
	f.commit(step{"b", 1})
	require.Eventually(t, func() bool { return len(relay.deaths()) == 1 }, testenv.Patience, 5*time.Millisecond)
	require.Len(t, box["mails"].deaths(), 3)
}
