package outbox_test

import (
	"testing"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
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
