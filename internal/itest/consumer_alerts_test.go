package itest

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// owe inserts a delivery of a group, recorded an hour ago, and returns its id.
func (h *relayFixture) owe(t *testing.T, group, status string) (id int64) {
	t.Helper()
	require.NoError(t, h.db.QueryRow(background, h.sql(`
		INSERT INTO {s}.event_delivery (consumer_group, action, stream, position, status, attempt_count, max_attempts, next_retry_at, created_at, updated_at, processed_at,
		       last_error_code, last_error_message, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, recorded_at)
		SELECT $1, 'COUNTED', 't', 1, $2::text, 4, 4, now(), now(), now(), CASE $2::text WHEN 'DEAD' THEN now() END,
		       'refused', 'not today', gen_random_uuid(), $3, 's', 'Product', 'p', '{}', 'application/json', now(), now() - interval '1 h'
		RETURNING id`), group, status, saleType).Scan(&id))
	return id
}

// resolveAll resolves what is dead, and ends the rest.
func (h *relayFixture) resolveAll(t *testing.T) {
	t.Helper()
	_, err := h.db.Exec(background, h.sql(`UPDATE {s}.event_delivery SET resolved_at = CASE status WHEN 'DEAD' THEN now() END,
		status = CASE status WHEN 'DEAD' THEN 'DEAD' ELSE 'DONE' END`))
	require.NoError(t, err)
}

// leads returns whether a process has a lease.
func (h *relayFixture) leads(t *testing.T, name string) bool {
	t.Helper()
	var held int
	require.NoError(t, h.db.QueryRow(background, h.sql(`SELECT count(*) FROM {s}.outbox_lease WHERE name = $1 AND expires_at > clock_timestamp()`), name).Scan(&held))
	return held == 1
}

// oneBy returns which of two mailboxes gets the alert to a dead delivery, when all that happened is over. The other
// gets nothing.
func oneBy(t *testing.T, h *relayFixture, group string, boxes [2]*mailbox) (first int) {
	t.Helper()
	for _, box := range boxes {
		box.clear()
	}
	id := h.owe(t, group, "DEAD")
	h.owe(t, group, "PENDING")
	require.Eventually(t, func() bool { return len(boxes[0].deaths())+len(boxes[1].deaths()) > 0 }, testenv.Patience, 5*time.Millisecond)
	if len(boxes[0].deaths()) == 0 {
		first = 1
	}
	box := boxes[first]
	a := box.await(t, outbox.AlertDeadDeliveries, false)
	require.Equal(t, []any{group, id, "COUNTED"}, []any{a.Group, a.Dead[0].ID, a.Dead[0].Action})
	require.Contains(t, a.String(), "consumer group "+group+": 1 delivery given up; 1 are dead")
	a = box.await(t, outbox.AlertStale, false)
	require.Contains(t, a.String(), "consumer group "+group+": 1 events are not handled")
	h.resolveAll(t)
	box.await(t, outbox.AlertManyDead, true)
	box.await(t, outbox.AlertStale, true)
	require.Equal(t, map[int64]int{id: 1}, box.deaths())
	require.ElementsMatch(t, []string{"stale_events", "many_dead", "stale_events!", "many_dead!"}, strings.Fields(box.received(outbox.AlertManyDead, outbox.AlertStale)))
	require.Empty(t, boxes[1-first].received(outbox.AlertManyDead, outbox.AlertStale, outbox.AlertDeadDeliveries))
	return first
}

// Where only consumers run, one member of a group alerts, and another one once it is gone. A worker goes first.
func TestMembersAlertWithoutRelay(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	group := "alerts-" + s.topic
	alerts := func(box *mailbox) outbox.HandlerConfig {
		return outbox.HandlerConfig{
			Schema: s.schema, Logger: slog.New(slog.DiscardHandler),
			Alerts: outbox.AlertConfig{Alerter: box, Interval: 20 * time.Millisecond, DeadThreshold: 1, StaleAfter: time.Minute, StalePending: 1},
		}
	}
	var boxes [2]*mailbox
	var pools [2]*pgxpool.Pool
	var stops [2]func()
	for i := range boxes {
		boxes[i], pools[i] = &mailbox{}, testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.Database = s.db.Config().ConnConfig.Database })
		c, err := outbox.NewConsumer(pools[i], append(testenv.KafkaOpts(s.brokers), kgo.SessionTimeout(6*time.Second)), s.events, group, outbox.ConsumerConfig{
			HandlerConfig: alerts(boxes[i]),
		}, outbox.Handle("COUNTED", s.count))
		require.NoError(t, err)
		stops[i] = testenv.Run(t, c.Run)
	}
	require.Eventually(t, func() bool { return s.leads(t, "consumer:"+group) }, testenv.Patience, 5*time.Millisecond)
	first := oneBy(t, s.relayFixture, group, boxes)
	inspector, err := outboxops.NewInspector(s.db, outboxops.InspectorConfig{Schema: s.schema})
	require.NoError(t, err)
	relays, err := inspector.Relays(background)
	require.NoError(t, err)
	require.Empty(t, relays, "a group of consumers is no relay")
	deliveries, err := outboxops.NewDeliveries(s.db, outboxops.DeliveriesConfig{Schema: s.schema})
	require.NoError(t, err)
	groups, err := deliveries.Groups(background)
	require.NoError(t, err)
	require.Empty(t, groups, "nor one of workers")

	pools[first].Close() // it cannot release the lease any more
	stops[first]()
	require.Equal(t, 1-first, oneBy(t, s.relayFixture, group, boxes))

	box := &mailbox{}
	w, err := outbox.NewWorker(s.db, s.events, group, outbox.WorkerConfig{HandlerConfig: alerts(box), Lease: time.Second}, outbox.HandleNoTx("SHOWN",
		func(context.Context, sale, outbox.Metadata) error { return nil }))
	require.NoError(t, err)
	testenv.Run(t, w.Run)
	require.Eventually(t, func() bool { return s.leads(t, "worker:"+group) }, testenv.Patience, 5*time.Millisecond)
	require.True(t, s.leads(t, "consumer:"+group), "both have theirs")
	for worker := false; !worker; { // a look that the member began before may alert once more
		box.clear()
		id := s.owe(t, group, "DEAD")
		require.Eventually(t, func() bool { return box.deaths()[id]+boxes[1-first].deaths()[id] > 0 }, testenv.Patience, 5*time.Millisecond)
		worker = box.deaths()[id] > 0
		s.resolveAll(t)
		if worker {
			box.await(t, outbox.AlertManyDead, true)
		}
	}
	require.Zero(t, oneBy(t, s.relayFixture, group, [2]*mailbox{box, boxes[1-first]}))
}

// What a consumer cannot alert of without rights, or without a database, is no reason not to handle events.
func TestAlertsNeedRightsAndDatabase(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	r := newRoles(t, s.relayFixture)
	group := "mute-" + s.topic
	role := "outbox_consumer" + r.suffix
	for _, sql := range []string{`GRANT SELECT, INSERT, UPDATE ON {s}.counts TO `, `REVOKE ALL ON {s}.outbox_lease FROM `} {
		_, err := s.db.Exec(background, s.sql(sql)+role)
		require.NoError(t, err)
	}
	r.giveGroup(t, "consumer", group)
	var log testenv.Buffer
	c, err := outbox.NewConsumer(r.as(t, "consumer"), testenv.KafkaOpts(s.brokers), s.events, group, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Logger: slog.New(slog.NewTextHandler(&log, nil)), From: outbox.FromStart}}, outbox.Handle("COUNTED", s.count))
	require.NoError(t, err)
	s.sendTo(t, 1, 10)
	testenv.Run(t, c.Run)
	require.Eventually(t, func() bool { return s.counts(t)["p-0"] == 10 && c.Health().Works }, testenv.Patience, 10*time.Millisecond)
	require.Contains(t, log.String(), "the lease for alerts fails")

	_, err = outbox.NewConsumer(nil, []kgo.Opt{kgo.SeedBrokers("localhost:9")}, s.events, group, outbox.ConsumerConfig{
		HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Alerts: outbox.AlertConfig{Alerter: &mailbox{}}},
	}, outbox.HandleNoTx("SHOWN", func(context.Context, sale, outbox.Metadata) error { return nil }))
	require.ErrorContains(t, err, "field Alerts")
	_, err = outbox.NewConsumer(s.db, testenv.KafkaOpts(s.brokers), s.events, group, outbox.ConsumerConfig{
		HandlerConfig: outbox.HandlerConfig{Alerts: outbox.AlertConfig{StalePending: -1}},
	}, outbox.Handle("COUNTED", func(context.Context, pgx.Tx, sale, outbox.Metadata) error { return nil }))
	require.ErrorContains(t, err, "StalePending")
}
