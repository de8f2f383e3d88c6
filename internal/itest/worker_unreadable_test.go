package itest

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A row that PostgreSQL cannot print is DEAD, and holds up no others: neither when its delivery is made, nor
// when it is claimed.
func TestWorkerUnreadableRow(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	f := newWorkerFixture(t)
	f.commit(step{"a", 1}, step{"bad", 1}, step{"b", 1}, step{"headers", 1}, step{"c", 1})
	testenv.AllowUnprintable(t, f.db, f.schema)
	testenv.UpdateEvents(t, f.db, `UPDATE "`+f.schema+`".outbox SET payload = $1::text::jsonb WHERE aggregate_id = 'bad'`, testenv.Unprintable)
	testenv.UpdateEvents(t, f.db, `UPDATE "`+f.schema+`".outbox SET headers = $1::text::jsonb WHERE aggregate_id = 'headers'`, testenv.Unprintable)
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 50 * time.Millisecond}
	f.start(cfg, f.effects("COUNTED", nil))
	dead := `SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD' AND last_error_code = 'undecodable' AND last_error_message LIKE '%54000%' AND attempt_count = `
	require.Eventually(t, func() bool { return f.count(dead+`1`) == 2 }, slowPrint, 10*time.Millisecond)
	f.await(3)

	f.exec(`UPDATE {schema}.event_delivery SET status = 'PENDING' WHERE status = 'DEAD' AND aggregate_id = 'bad'`)
	f.commit(step{"d", 1})
	f.await(4)
	require.Eventually(t, func() bool { return f.count(dead+`2`) == 1 && f.count(dead+`1`) == 1 }, slowPrint, 10*time.Millisecond)
}

// An event that is larger than any payload may be is DEAD unread, with its size. The others go on.
func TestWorkerHugeRow(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	f := newWorkerFixture(t)
	f.commit(step{"a", 1}, step{"huge", 1}, step{"b", 1})
	testenv.UpdateEvents(t, f.db, f.sql(`UPDATE {schema}.outbox SET payload = payload || jsonb_build_object('x', (SELECT jsonb_agg(1e131071) FROM generate_series(1, 900)))
		WHERE aggregate_id = 'huge'`))
	size := f.count(`SELECT size FROM {schema}.outbox WHERE aggregate_id = 'huge'`)
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 50 * time.Millisecond}
	f.start(cfg, f.effects("COUNTED", nil))
	f.await(2)
	f.eventually(fmt.Sprintf(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD' AND last_error_code = 'undecodable'
		AND last_error_message LIKE '%%the event has %d bytes as printed, at most %d are read'`, size, 101<<20), 1)
}
