package faults

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"
)

// sqlForeignEvent is what a writer in another language sends.
const sqlForeignEvent = `
INSERT INTO outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, occurred_at)
VALUES (gen_random_uuid(), 'test.fault.happened.v1', 'elsewhere', 'Fault', 'key', jsonb_build_object('id', $1::text, 'key', 'key'), 'application/json', $2, now())`

// Writers do not wait for the disk, and PostgreSQL crashes as soon as Kafka has their
// events. It has them still: an event is durable before any relay can see it.
func TestAsynchronousCommit(t *testing.T) {
	testenv.Long(t)
	// Not parallel: the server must be killed before it flushes its WAL by itself, after 10 s.
	for name, write := range map[string]func(*site, pgx.Tx, []oracle.Event) error{
		"a row": func(s *site, tx pgx.Tx, events []oracle.Event) error {
			return s.record(context.Background(), tx, events[0])
		},
		"COPY": func(s *site, tx pgx.Tx, events []oracle.Event) error {
			return s.record(context.Background(), tx, events...)
		},
		"a writer in another language": func(s *site, tx pgx.Tx, events []oracle.Event) error {
			_, err := tx.Exec(context.Background(), sqlForeignEvent, events[0].ID, s.topic)
			return err
		},
		"after a savepoint was rolled back": func(s *site, tx pgx.Tx, events []oracle.Event) error {
			sub, err := tx.Begin(context.Background())
			if err == nil {
				err = s.record(context.Background(), sub, events...)
			}
			if err == nil {
				err = sub.Rollback(context.Background())
			}
			if err == nil {
				err = s.record(context.Background(), tx, events[0])
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			s.relay(t, slog.DiscardHandler)
			s.requireArrival(t, s.commit(t, "on", 1))
			s.flush(t)
			events := make([]oracle.Event, 600) // more than COPY needs
			for i := range events {
				events[i] = oracle.Event{ID: uuid.NewString(), Key: "key"}
			}
			require.NoError(t, pgx.BeginFunc(t.Context(), s.db, func(tx pgx.Tx) error {
				if _, err := tx.Exec(t.Context(), `SET LOCAL synchronous_commit = off`); err != nil {
					return err
				}
				return write(s, tx, events)
			}))
			s.requireArrival(t, events[:1])
			reunite := s.keepApart(t)
			require.NoError(t, s.server.Kill())
			require.NoError(t, s.server.Restart(context.Background()))
			reunite()
			var kept int
			require.Eventually(t, func() bool {
				return s.db.QueryRow(context.Background(), `SELECT count(*) FROM outbox WHERE payload->>'id' = $1`, events[0].ID).Scan(&kept) == nil
			}, testenv.Patience, 10*time.Millisecond)
			require.Equal(t, 1, kept, "Kafka has an event that PostgreSQL does not have")
		})
	}
}

// The lease of a relay whose role does not wait for the disk survives a crash: its epoch
// must not be given out again.
func TestLeaseIsDurable(t *testing.T) {
	// Not parallel, as above.
	s := newSite(t)
	s.flush(t)
	cfg := s.poolConfig(t)
	cfg.ConnConfig.RuntimeParams["synchronous_commit"] = "off"
	db := openPool(t, cfg)
	leading := make(chan struct{}, 1)
	relay, err := outbox.NewRelay(db, testenv.KafkaOpts(s.brokers), outbox.RelayConfig{Logger: slog.New(slog.DiscardHandler),
		Hooks: outbox.RelayHooks{Leading: func(now bool) {
			if now {
				leading <- struct{}{}
			}
		}}})
	require.NoError(t, err)
	stop := testenv.Run(t, relay.Run)
	<-leading
	require.NoError(t, s.server.Kill())
	stop()
	require.NoError(t, s.server.Restart(context.Background()))
	var epoch int64
	require.Eventually(t, func() bool {
		return s.db.QueryRow(context.Background(), `SELECT coalesce(max(epoch), 0) FROM outbox_lease`).Scan(&epoch) == nil
	}, testenv.Patience, 10*time.Millisecond)
	require.EqualValues(t, 1, epoch)
}

// The group's offset in Kafka says that events are handled, so the effects of their handlers must
// be durable by then, also if the consumer's role does not wait for the disk: the events are not
// handled again.
func TestHandledIsDurable(t *testing.T) {
	testenv.Long(t)
	// Not parallel, as above.
	s := newSite(t)
	_, err := s.db.Exec(t.Context(), `CREATE TABLE effects (action text, event text)`)
	require.NoError(t, err)
	s.relay(t, slog.DiscardHandler)
	events := s.commit(t, "on", 50)
	s.requireArrival(t, events)
	s.flush(t)
	cfg := s.poolConfig(t)
	cfg.ConnConfig.RuntimeParams["synchronous_commit"] = "off"
	registry, err := outbox.NewRegistry("faults", outbox.Event("test.fault.happened.v1", "Key", oracle.Event.Aggregate).Topic(s.topic))
	require.NoError(t, err)
	var handled sync.WaitGroup
	handled.Add(2 * len(events))
	effect := func(action string) func(context.Context, pgx.Tx, oracle.Event, outbox.Metadata) error {
		return func(ctx context.Context, tx pgx.Tx, e oracle.Event, _ outbox.Metadata) error {
			defer handled.Done()
			_, err := tx.Exec(ctx, `INSERT INTO effects VALUES ($1, $2)`, action, e.ID)
			return err
		}
	}
	group := uuid.NewString()
	consumer, err := outbox.NewConsumer(openPool(t, cfg), testenv.KafkaOpts(s.brokers), registry, group, outbox.ConsumerConfig{
		HandlerConfig: outbox.HandlerConfig{Logger: slog.New(slog.DiscardHandler), From: outbox.FromStart},
	}, outbox.Handle("ONE", effect("ONE")), outbox.Handle("OTHER", effect("OTHER")))
	require.NoError(t, err)
	stop := testenv.Run(t, consumer.Run)
	handled.Wait()
	stop()
	require.EqualValues(t, len(events), s.committed(t, group))

	s.killServer(t)
	kept := 0
	require.Eventually(t, func() bool {
		return s.db.QueryRow(context.Background(), `SELECT count(*) FROM effects`).Scan(&kept) == nil
	}, testenv.Patience, 10*time.Millisecond)
	require.Equal(t, 2*len(events), kept)
}

// committed returns how far a group has come in the topic, over all partitions.
func (s *site) committed(t *testing.T, group string) (records int64) {
	t.Helper()
	ends, err := oracle.Ends(t.Context(), s.brokers, s.topic)
	require.NoError(t, err)
	topic := kmsg.NewOffsetFetchRequestTopic()
	topic.Topic = s.topic
	topic.Partitions = slices.Collect(maps.Keys(ends))
	request := kmsg.NewPtrOffsetFetchRequest()
	request.Group = group
	request.Topics = append(request.Topics, topic)
	client, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...), kgo.MaxVersions(kversion.V2_8_0())) // later ones ask for several groups
	require.NoError(t, err)
	defer client.Close()
	response, err := request.RequestWith(t.Context(), client)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.ErrorCode))
	for _, p := range response.Topics[0].Partitions {
		require.NoError(t, kerr.ErrorForCode(p.ErrorCode))
		records += max(p.Offset, 0)
	}
	return records
}
