package itest

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxhttp"
	"github.com/outboxgo/outbox/outboxops"
)

// A death is logged once, by the process in which the event dies, with the event's trace id and aggregate, whatever the
// error was. The row has the aggregate, too. A relay in the same service adds no line.
func TestDeathIsLoggedOnceAndInFull(t *testing.T) {
	t.Parallel()
	for name, err := range map[string]error{"permanent": outbox.Permanent(errPlay), "after its retries": errPlay} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newParkingFixture(t, 1)
			var out testenv.Buffer
			log := slog.New(outboxhttp.LogTrace(slog.NewTextHandler(&out, nil)))
			alerts := outbox.AlertConfig{Interval: 20 * time.Millisecond, DeadThreshold: 1}
			testenv.Run(t, s.relay(t, outbox.RelayConfig{Schema: s.schema, Logger: log, Alerts: alerts}).Run)
			require.Eventually(t, func() bool { return s.leads(t, "default") }, testenv.Patience, 10*time.Millisecond)

			cfg := s.config(t)
			cfg.Logger, cfg.Alerts = log, alerts
			cfg.Retry.MaxRetries = 1
			cfg.Retry.MaxOutage = -1
			var mu sync.Mutex
			var dead []outbox.Metadata
			cfg.Hooks.DeadLettered = func(m outbox.Metadata, _, _ string, _ error) {
				mu.Lock()
				defer mu.Unlock()
				dead = append(dead, m)
			}
			testenv.Run(t, s.groupConsumer(t, s.group, cfg, s.handler("Handle", "COUNTED", func(context.Context, pgx.Tx, sale, outbox.Metadata) error { return err })).Run)
			r := s.saleRecord(uuid.NewString(), oneSale)
			for key, value := range map[string]string{"ce_subject": "p-42", "ce_aggregatetype": "Product", "ce_traceid": "trace-4711", "ce_time": "2026-01-02T03:04:05Z", "note": "kept"} {
				r.Headers = append(r.Headers, kgo.RecordHeader{Key: key, Value: []byte(value)})
			}
			s.send(t, r)
			s.awaitStatuses(t, "COUNTED", "DEAD 1")
			require.Eventually(t, func() bool { return strings.Contains(out.String(), "wait for a decision") }, testenv.Patience, 10*time.Millisecond)

			var lines []string
			for line := range strings.Lines(out.String()) {
				if strings.Contains(line, "is dead") {
					lines = append(lines, line)
				}
			}
			require.Len(t, lines, 1)
			for _, part := range []string{"outbox: event is dead, an operator has to decide", " trace_id=trace-4711 ", " aggregate_type=Product ", " aggregate_id=p-42 "} {
				require.Contains(t, lines[0], part)
			}
			mu.Lock()
			defer mu.Unlock()
			require.Len(t, dead, 1)
			require.Equal(t, []any{"trace-4711", "kept", 2026}, []any{dead[0].Extensions["traceid"], dead[0].Header("note"), dead[0].Time.Year()})
			failures, err := s.failures(t).List(background, outboxops.FailureFilter{AggregateType: "Product", AggregateID: "p-42"}, outboxops.FailurePage{})
			require.NoError(t, err)
			require.Len(t, failures, 1)
		})
	}
}

// A dead-letter topic that is deleted and created again gets the dead letters that come after that, with a database and
// without one. The client of the consumer keeps to the topic id that it saw first.
func TestDeadLetterTopicCreatedAgain(t *testing.T) {
	t.Parallel()
	for name, plain := range map[string]bool{"with a database": false, "without one": true} {
		t.Run(name, func(t *testing.T) { t.Parallel(); testDeadLetterTopicCreatedAgain(t, plain) })
	}
}

func testDeadLetterTopicCreatedAgain(t *testing.T, plain bool) {
	s := newStartFixture(t, 1)
	db, cfg := s.db, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Logger: slog.New(slog.NewTextHandler(s.log, nil))}}
	if plain {
		db = nil
	} else {
		cfg.Schema = s.schema
	}
	c, err := outbox.NewConsumer(db, []kgo.Opt{kgo.SeedBrokers(s.brokers...), kgo.MetadataMinAge(100 * time.Millisecond)}, s.events, s.group, cfg,
		outbox.HandleNoTx("SEEN", func(context.Context, sale, outbox.Metadata) error { return outbox.Permanent(errPlay) }))
	require.NoError(t, err)
	testenv.Run(t, c.Run)
	for n := range 2 {
		if n > 0 {
			s.delete(t, s.topic+".dlq")
			testenv.CreateTopic(t, s.brokers, s.topic+".dlq", 1)
		}
		ids, dead := s.put(t, 0, 3), []string(nil)
		for _, r := range s.deadLetters(t, 3) {
			dead = append(dead, deadLetterHeaders(r)["ce_id"])
		}
		require.ElementsMatch(t, ids, dead)
		require.Eventually(t, func() bool { return s.committed(t, s.group, 0) == int64(3*(n+1)) }, testenv.Patience, 10*time.Millisecond)
	}
	if !plain {
		rows := &parkingFixture{consumerFixture: s.consumerFixture}
		require.Eventually(t, func() bool {
			return rows.number(t, `SELECT count(*)::int FROM {s}.event_delivery WHERE status = 'DEAD' AND NOT dead_letter_owed`) == 6
		},
			testenv.Patience, 10*time.Millisecond)
	}
}
