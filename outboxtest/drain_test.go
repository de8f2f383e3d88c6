package outboxtest_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxtest"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

func (h *schemaFixture) drain(t outboxtest.T, kafka []kgo.Opt, cfg outbox.RelayConfig) {
	ctx, cancel := context.WithTimeout(background, testenv.Patience)
	defer cancel()
	cfg.Schema = h.schema
	outboxtest.Drain(ctx, t, h.db, kafka, cfg)
}

// impossible puts an event into outbox that no recorder would: it is refused
// without a question to Kafka.
func (h *schemaFixture) impossible(t testing.TB) {
	t.Helper()
	h.exec(t, `INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
		VALUES (gen_random_uuid(), 'nonsense', 's', 'a', 'impossible', '{}', 'application/json', now())`)
}

func TestDrain(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	kafka := outboxtest.Kafka(t, "order-events", "product-events")
	h.drain(t, kafka, outbox.RelayConfig{})
	require.Empty(t, outboxtest.Records(background, t, kafka, "order-events", 0), "there was nothing to send")

	open := h.begin(t)
	h.record(t, open, orderPlaced{ID: "open", At: noon})
	h.commit(t, orderPlaced{ID: "1", At: noon}, productLiked{"1", noon}, orderPlaced{ID: "2", At: noon})
	h.drain(t, kafka, outbox.RelayConfig{BatchSize: 1})
	orders := outboxtest.Records(background, t, kafka, "order-events", 2)
	require.Equal(t, "1", string(orders[0].Key))
	require.Equal(t, "2", string(orders[1].Key))
	require.JSONEq(t, `{"id": "1", "cents": 0, "at": "2026-02-03T12:00:00Z"}`, string(orders[0].Value))
	outboxtest.Records(background, t, kafka, "product-events", 1)

	h.commit(t, orderPlaced{ID: "3", At: noon})
	h.drain(t, kafka, outbox.RelayConfig{})
	require.Equal(t, "3", string(outboxtest.Records(background, t, kafka, "order-events", 3)[2].Key))
	h.drain(t, kafka, outbox.RelayConfig{Name: "audit"})
	outboxtest.Records(background, t, kafka, "order-events", 6)
}

// delay records an event for a moment from now in a transaction of its own, and waits for that moment.
func (h *schemaFixture) delay(t testing.TB, event outbox.DomainEvent) {
	t.Helper()
	h.commit(t, outbox.With(event, outbox.EventOptions{NotBefore: time.Now().Add(50 * time.Millisecond)}))
	require.Eventually(t, func() (due bool) {
		require.NoError(t, h.db.QueryRow(background, "SELECT count(*) = 1 FROM "+h.table("outbox_delayed")+" WHERE due_at < now()").Scan(&due))
		return due
	}, testenv.Patience, 10*time.Millisecond)
}

// A delayed event that is due is sent too, and one that outbox refuses is not passed over.
func TestDrainSendsDelayedEvents(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	kafka := outboxtest.Kafka(t, "order-events")
	h.commit(t, outbox.With(orderPlaced{ID: "later", At: noon}, outbox.EventOptions{NotBefore: time.Now().Add(time.Hour)}))
	h.drain(t, kafka, outbox.RelayConfig{})
	outboxtest.Records(background, t, kafka, "order-events", 0)
	h.exec(t, "DELETE FROM {s}.outbox_delayed")

	h.delay(t, orderPlaced{ID: "due", At: noon})
	h.drain(t, kafka, outbox.RelayConfig{})
	require.Equal(t, "due", string(outboxtest.Records(background, t, kafka, "order-events", 1)[0].Key))

	h.delay(t, orderPlaced{ID: "refused", At: noon})
	h.exec(t, "ALTER TABLE {s}.outbox ADD CONSTRAINT refused CHECK (aggregate_id <> 'refused')")
	ctx, cancel := context.WithTimeout(background, testenv.Patience)
	defer cancel()
	for range 2 { // when it is refused, and later
		says := failure(t, func(f *fakeT) { outboxtest.Drain(ctx, f, h.db, kafka, outbox.RelayConfig{Schema: h.schema}) })
		require.Regexp(t, `not sent:\n  \d+ acme.order.placed.v1 of refused: dead, rejected by outbox: 23514: `, says)
	}
}

// Another relay holds the lease and does the work.
func TestDrainBesideAnotherRelay(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	kafka := outboxtest.Kafka(t, "order-events")
	theirs := make(chan struct{}, 100)
	relay, err := outbox.NewRelay(h.db, kafka, outbox.RelayConfig{
		Schema: h.schema, PollInterval: 10 * time.Millisecond, Logger: slog.New(slog.DiscardHandler),
	})
	require.NoError(t, err)
	testenv.Run(t, relay.Run)
	require.Eventually(t, func() bool {
		var held bool
		err := h.db.QueryRow(background, `SELECT EXISTS (SELECT FROM `+h.table("outbox_lease")+` WHERE expires_at > now())`).Scan(&held)
		return err == nil && held
	}, testenv.Patience, time.Millisecond)
	for range 20 {
		h.commit(t, orderPlaced{ID: "1", At: noon})
	}
	h.drain(t, append(kafka, kgo.ClientID("ours"), kgo.WithHooks(onProduce(func() { theirs <- struct{}{} }))), outbox.RelayConfig{})
	require.Empty(t, theirs, "the standby has sent events")
	outboxtest.Records(background, t, kafka, "order-events", 20)
}

// Events that fail at first are awaited.
func TestDrainWaitsForRetries(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	kafka := outboxtest.Kafka(t, "order-events")
	h.impossible(t)
	h.commit(t, orderPlaced{ID: "1", At: noon})
	mended := make(chan struct{})
	go func() {
		defer close(mended)
		for h.db.QueryRow(background, `UPDATE `+h.table("outbox_failed")+` SET topic = 'order-events' WHERE status = 'failed' RETURNING 1`).Scan(new(int)) != nil {
			<-time.After(5 * time.Millisecond)
		}
	}()
	h.drain(t, kafka, outbox.RelayConfig{})
	<-mended
	outboxtest.Records(background, t, kafka, "order-events", 2)
}

var drainFailures = []struct {
	name string
	make func(t *testing.T, h *schemaFixture) []kgo.Opt
	cfg  outbox.RelayConfig
	says []string
}{
	{"a topic is missing", func(t *testing.T, h *schemaFixture) []kgo.Opt {
		h.commit(t, orderPlaced{ID: "1", At: noon}, productLiked{"7", noon}, orderPlaced{ID: "1", At: noon})
		return outboxtest.Kafka(t, "product-events")
	}, outbox.RelayConfig{}, []string{
		"not sent:\n  1 acme.order.placed.v1 of 1: waiting, unknown_topic: UNKNOWN_TOPIC_OR_PARTITION", "\n  3 acme.order.placed.v1 of 1: parked, unknown_topic: ",
		"the relay warned:\n", "topic order-events fails",
	}},
	{"an event is refused", func(t *testing.T, h *schemaFixture) []kgo.Opt {
		h.impossible(t)
		h.commit(t, orderPlaced{ID: "1", At: noon})
		return outboxtest.Kafka(t, "order-events")
	}, outbox.RelayConfig{}, []string{"not sent:\n  1 nonsense of impossible: failed", ", invalid_event: ", "event rejected"}},
	{"Kafka is away", func(t *testing.T, h *schemaFixture) []kgo.Opt {
		h.commit(t, orderPlaced{ID: "1", At: noon})
		return []kgo.Opt{kgo.SeedBrokers("127.0.0.1:1")}
	}, outbox.RelayConfig{DeliveryTimeout: time.Second, Lease: 2 * time.Second}, []string{
		"not sent:\n  1 acme.order.placed.v1 of 1: not attempted\n", "the relay warned:\n", "Kafka fails",
	}},
	{"a standby waits for a lease that nobody gave up", func(t *testing.T, h *schemaFixture) []kgo.Opt {
		h.commit(t, orderPlaced{ID: "1", At: noon})
		h.exec(t, `INSERT INTO {s}.outbox_lease VALUES ('default', 'a process that was killed', 1, now() + interval '1 hour')`)
		return outboxtest.Kafka(t)
	}, outbox.RelayConfig{}, []string{"not sent:\n  1 acme.order.placed.v1 of 1: not attempted\n"}},
}

func TestDrainFails(t *testing.T) {
	// Not parallel: Drain has three seconds to find out what is wrong.
	for _, tt := range drainFailures {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			h := newSchemaFixture(t)
			kafka := tt.make(t, h)
			ctx, cancel := context.WithTimeout(background, 3*time.Second)
			defer cancel()
			tt.cfg.Schema = h.schema
			says := failure(t, func(f *fakeT) { outboxtest.Drain(ctx, f, h.db, kafka, tt.cfg) })
			require.ErrorIs(t, ctx.Err(), context.DeadlineExceeded, "it waited")
			for _, want := range tt.says {
				require.Contains(t, says, want)
			}
		})
	}
}

// Nothing is waited for that will not come.
func TestDrainFailsAtOnce(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	kafka := outboxtest.Kafka(t)
	ctx, cancel := context.WithTimeout(background, testenv.Patience)
	defer cancel()
	drain := func(cfg outbox.RelayConfig) string {
		return failure(t, func(f *fakeT) { outboxtest.Drain(ctx, f, h.db, kafka, cfg) })
	}
	require.Contains(t, drain(outbox.RelayConfig{BatchSize: -1}), "BatchSize")
	require.Contains(t, drain(outbox.RelayConfig{Schema: "nowhere"}), `"nowhere.outbox`)

	h.impossible(t)
	h.commit(t, orderPlaced{ID: "1", At: noon})
	says := drain(outbox.RelayConfig{Schema: h.schema, Retry: outbox.RetryPolicy{MaxRetries: 1}})
	require.Contains(t, says, "not sent:\n  1 nonsense of impossible: dead after 1 retries, invalid_event: ")
	require.Contains(t, says, "event is dead")
	h.exec(t, `UPDATE {s}.outbox_failed SET status = 'resolved'`)
	h.drain(t, kafka, outbox.RelayConfig{})

	h.exec(t, `UPDATE {s}.outbox_cursor SET system_identifier = 1, highest_id = 1000`)
	require.Contains(t, drain(outbox.RelayConfig{Schema: h.schema}), outbox.ErrSequenceBehind.Error())
	require.NoError(t, ctx.Err())
}

// What was sent elsewhere is sent here as well once the relay has found its place.
func TestDrainAfterRestore(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	kafka := outboxtest.Kafka(t)
	h.commit(t, orderPlaced{ID: "1", At: noon})
	h.drain(t, kafka, outbox.RelayConfig{})
	h.commit(t, orderPlaced{ID: "2", At: noon})
	// Elsewhere ids were higher: its snapshot calls all of ours visible.
	h.exec(t, `UPDATE {s}.outbox_cursor SET system_identifier = 1, snapshot = '99999999999:99999999999:', window_snapshot = NULL`)
	h.drain(t, kafka, outbox.RelayConfig{})
	var here bool
	require.NoError(t, h.db.QueryRow(background, `SELECT c.system_identifier = s.system_identifier
		FROM pg_control_system() s, `+h.table("outbox_cursor")+` c ORDER BY c.id DESC LIMIT 1`).Scan(&here))
	require.True(t, here, "nothing was decided before")
}

func TestDrainUnderContext(t *testing.T) {
	// Not parallel: Drain has two seconds to find out what is wrong.
	h := newSchemaFixture(t)
	h.commit(t, orderPlaced{ID: "1", At: noon})
	ctx, cancel := context.WithCancel(background)
	cancel()
	says := failure(t, func(f *fakeT) { outboxtest.Drain(ctx, f, h.db, nil, outbox.RelayConfig{Schema: h.schema}) })
	require.Contains(t, says, context.Canceled.Error())

	log := new(testenv.Buffer)
	ctx, cancel = context.WithTimeout(background, 2*time.Second)
	defer cancel()
	says = failure(t, func(f *fakeT) {
		outboxtest.Drain(ctx, f, h.db, outboxtest.Kafka(t, "elsewhere"), outbox.RelayConfig{Schema: h.schema, Logger: slog.New(slog.NewTextHandler(log, nil))})
	})
	require.NotContains(t, says, "the relay warned", "its own logger has it")
	require.Contains(t, log.String(), "topic order-events fails")
}
