package itest

import (
	"log/slog"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/internal/wait"
)

// failOnDelete makes PostgreSQL fail when rows of outbox_failed are removed: with a
// serialization failure, a cancelled statement, and twice with a connection that dies. A
// sequence counts the rows, because a rollback does not set it back.
const failOnDelete = `
CREATE SEQUENCE {s}.deletions;
CREATE FUNCTION {s}.fail_on_delete() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    CASE nextval('{s}.deletions')
        WHEN 1 THEN RAISE EXCEPTION 'fault' USING ERRCODE = 'serialization_failure';
        WHEN 2 THEN PERFORM pg_terminate_backend(pg_backend_pid());
        WHEN 103 THEN RAISE EXCEPTION 'fault' USING ERRCODE = 'query_canceled';
        WHEN 204 THEN PERFORM pg_terminate_backend(pg_backend_pid());
        ELSE
    END CASE;
    RETURN OLD;
END $$;
CREATE TRIGGER fail_on_delete BEFORE DELETE ON {s}.outbox_failed FOR EACH ROW EXECUTE FUNCTION {s}.fail_on_delete()`

// Kafka has accepted what waited, and PostgreSQL does not take note of it at first. Nothing
// is sent again, and later events of the keys follow.
func TestResultsOfRetriesAreKept(t *testing.T) {
	t.Parallel()
	h, _ := newPlacesFixture(t)
	missing := h.missing(t)
	testenv.Run(t, h.plainRelay(t, outbox.RelayConfig{RetryInterval: time.Second}).Run)
	h.commit(t, numbered("first", 1, 1)...)
	first, second := keyed("key", 300), keyed("key", 300)
	missing.commit(t, first...)
	h.awaitStatuses(t, map[string]int{"waiting": 300})
	h.exec(t, failOnDelete)
	testenv.CreateTopic(t, missing.brokers, missing.topic, 3)
	there := missing.follow(t)
	requireArrival(t, there, first...)
	for i := range second {
		second[i].Version = 2
	}
	missing.commit(t, second...)
	requireArrival(t, there, second...)
	h.awaitStatuses(t, map[string]int{})
	missing.requireOnce(t, there, append(first, second...)...)
}

// holdUp keeps the records of a topic from being sent until it is closed.
type holdUp struct {
	topic  string
	probed chan struct{} // gets a signal when there is one
	until  chan struct{}
}

func (h holdUp) OnProduceRecordBuffered(r *kgo.Record) {
	if r.Topic == h.topic {
		wait.Signal(h.probed)
		<-h.until
	}
}

// A probe may take as long as a delivery. What an operator retries does not wait for it.
func TestProbesDelayNoOperator(t *testing.T) {
	t.Parallel()
	h, reader := newPlacesFixture(t)
	blocked := h.elsewhere(t, "blocked-"+uuid.NewString())
	testenv.CreateTopic(t, h.brokers, blocked.topic, 1)
	blocked.fail(t, numbered("blocked", 1, 1)...)
	h.exec(t, `UPDATE {s}.outbox_failed SET place = topic || '/0', error_class = 'unavailable', last_error = 'no replicas'`)
	retried := numbered("retried", 1, 1)
	h.fail(t, retried...)
	h.exec(t, `UPDATE {s}.outbox_failed SET status = 'dead' WHERE place = ''`)

	hook := holdUp{blocked.topic, make(chan struct{}, 1), make(chan struct{})}
	relay, err := outbox.NewRelay(h.db, []kgo.Opt{kgo.SeedBrokers(h.brokers...), kgo.WithHooks(hook)},
		outbox.RelayConfig{Schema: h.schema, RetryInterval: 100 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	testenv.Run(t, relay.Run)
	t.Cleanup(func() { close(hook.until) })
	<-hook.probed
	h.exec(t, `UPDATE {s}.outbox_failed SET status = 'parked' WHERE status = 'dead'`)
	requireArrivalWithin(t, 5*time.Second, reader, retried...)
	h.awaitStatuses(t, map[string]int{"waiting": 1})
}

// Events wait for a partition to which their keys do not go any more, because the number of
// partitions has changed. Once a probe shows that, all of them are sent.
func TestMovedKeysAreReleased(t *testing.T) {
	t.Parallel()
	h, reader := newPlacesFixture(t)
	first, second := keyed("key", 100), keyed("key", 100)
	for i := range second {
		second[i].Version = 2
	}
	h.fail(t, append(first, second...)...)
	h.exec(t, `UPDATE {s}.outbox_failed SET place = topic || '/7', error_class = 'unavailable', last_error = 'no replicas' WHERE status = 'waiting'`)
	testenv.Run(t, h.plainRelay(t, outbox.RelayConfig{RetryInterval: time.Second}).Run)
	requireArrivalWithin(t, 20*time.Second, reader, append(first, second...)...)
	h.awaitStatuses(t, map[string]int{})
	for i := range first {
		requireInOrder(t, reader, []oracle.Event{first[i], second[i]})
	}
}
