package outboxops_test

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// timelineOf returns a line for each entry of a timeline, in the order of time.
func timelineOf(t *testing.T, i *outboxops.Inspector, id string) (lines []string, whole outboxops.Timeline) {
	t.Helper()
	whole, err := i.Timeline(background, id)
	require.NoError(t, err)
	require.Empty(t, whole.NotSearched)
	var last time.Time
	for n, e := range whole.Entries {
		if e.At.IsZero() {
			for _, later := range whole.Entries[n:] {
				require.Zero(t, later.At, "what has no time comes last")
			}
		} else {
			require.False(t, e.At.Before(last), "%v", whole.Entries)
			last = e.At
		}
		lines = append(lines, strings.Join(strings.Fields(e.Table+": "+e.What+" "+e.Err+" "+e.Failure.String()), " "))
	}
	return lines, whole
}

// The timeline has what each table knows of an event: a real relay has sent it, a group has handled it, is dead with
// it, or waits for it, and operators have acted. Without its row in outbox the rest is still found, by each of its ids.
func TestTimeline(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	i := f.inspector(t)
	sent := append(numbered("a", 1, 1), numbered("b", 1, 1)...)
	reader := f.follow(t)
	f.commit(t, sent...)
	stop := testenv.Run(t, f.relay(t, quick).Run)
	requireArrival(t, reader, sent...)
	stop()
	f.exec(t, `INSERT INTO {schema}.event_delivery (position, attempt_count, max_attempts, next_retry_at, last_attempt_at, created_at, updated_at, processed_at, failed_at, occurred_at, recorded_at,
			event_id, status, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, last_error_code, last_error_message, payload, held, dead_letter_owed,
			record_partition, record_digest, record)
		SELECT CASE WHEN letter THEN 7 ELSE o.id END, n, 10, now(), now() + n * interval '1 h', now() + n * interval '1 min', now() + n * interval '2 h', CASE WHEN status <> 'PENDING' THEN now() + n * interval '2 h' END, now() + n * interval '4 min',
			occurred_at, created_at, event_id, status, 'stats', 'A' || n, 'things', event_type, source, aggregate_type, aggregate_id, content_type, 'timeout', 'too slow', payload, letter, letter,
			CASE WHEN letter THEN 3 END, CASE WHEN letter THEN '\x01'::bytea END, CASE WHEN letter THEN '\x7b7d'::bytea END
		  FROM {schema}.outbox AS o, (VALUES (1, 'DONE', false), (2, 'DEAD', true), (3, 'PENDING', false)) AS d (n, status, letter) WHERE o.aggregate_id = 'a'`)
	f.exec(t, `INSERT INTO {schema}.event_handled (consumer_group, aggregate_type, aggregate_id, action, event_source, handled_at)
		SELECT v.g, v.kind, event_id::text, v.action, v.source, now() + v.after FROM {schema}.outbox,
		  (VALUES ('mail', 'test.oracle.happened.v1', 'SEND', 'test', interval '5 h'), ('mail', 'test.oracle.happened.v1', 'OTHER', 'elsewhere', '5 h'), ('mail', 'Chosen', 'CHOSEN', NULL, '5.5 h'),
		          ('stats', 'test.oracle.happened.v1', 'A1', 'test', '5 h'), ('inbox:hooks', 'x', 'Y', NULL, '5 h')) AS v (g, kind, action, source, after) WHERE aggregate_id = 'a'`)
	failures, err := outboxops.NewFailures(f.db, outboxops.FailuresConfig{Schema: f.schema})
	require.NoError(t, err)
	why := outboxops.AuditInfo{Operator: "kim", Reason: "no longer wanted"}
	require.NoError(t, failures.Resolve(background, outboxops.FailureID{Kind: outboxops.KindDelivery, Number: 2}, why))

	lines, whole := timelineOf(t, i, "1")
	require.True(t, whole.InOutbox)
	var xid string
	require.NoError(t, f.db.QueryRow(background, f.sql(`SELECT xid::text FROM {schema}.outbox WHERE id = 1`)).Scan(&xid))
	require.Equal(t, "outbox: transaction "+xid+" recorded it, or moved it to outbox if it was delayed", lines[0])
	require.Regexp(t, `^outbox_cursor: relay default sent it to `+f.topic+`, partition \d, offset 0: batch \d+$`, lines[1])
	require.Regexp(t, `^outbox_audit: resolve by kim \(\w+\): no longer wanted delivery-2$`, lines[3])
	require.Equal(t, []string{
		"event_delivery: group stats, action A2: kim resolved it: no longer wanted delivery-2",
		"event_delivery: group stats, action A1: has it from outbox delivery-1",
		"event_delivery: group stats, action A2: parked it from things, partition 3, offset 7 delivery-2",
		"event_delivery: group stats, action A3: has it from outbox delivery-3",
		"event_delivery: group stats, action A1: failed first delivery-1",
		"event_delivery: group stats, action A2: failed first delivery-2",
		"event_delivery: group stats, action A3: failed first delivery-3",
		"event_delivery: group stats, action A1: handled it at attempt 1 delivery-1",
		"event_delivery: group stats, action A2: dead after 2 attempts, its dead letter is not sent yet: timeout too slow delivery-2",
		"event_handled: group mail, action SEND: handled it",
		"event_handled: group mail, action CHOSEN: handled it",
		"event_delivery: group stats, action A3: waits after 3 of 10 attempts: timeout too slow delivery-3",
	}, slices.Concat(lines[2:3], lines[4:]))

	byID, _ := timelineOf(t, i, strings.ToUpper(whole.EventID))
	require.Equal(t, lines, byID)
	f.exec(t, `DELETE FROM {schema}.outbox WHERE id = 1`)
	for _, id := range []string{"1", whole.EventID} {
		kept, left := timelineOf(t, i, id)
		require.Equal(t, []any{int64(1), whole.EventID, whole.Type, false}, []any{left.OutboxID, left.EventID, left.Type, left.InOutbox})
		require.Contains(t, left.Searched, "outbox")
		require.ElementsMatch(t, slices.Concat(lines[1:], []string{"event_handled: group mail, action OTHER: handled it"}), kept, "the source is not known any more")
	}
	for _, id := range []string{"99", uuid.NewString()} {
		_, err = i.Timeline(background, id)
		require.ErrorIs(t, err, outboxops.ErrNotFound)
	}
	for _, id := range []string{"", "0", "-1", "what"} {
		_, err = i.Timeline(background, id)
		require.ErrorIs(t, err, outbox.ErrMalformed)
	}
}

// A delayed event is found by its id, also once it is cancelled. A table that cannot be read in time is named.
func TestTimelineOfDelayed(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	i := f.inspector(t)
	id := uuid.New()
	f.exec(t, `INSERT INTO {schema}.outbox_delayed (due_at, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
		VALUES (now() + interval '1 h', $1, 'acme.order.due.v1', 'shop', 'Order', '1', '1', 'application/json', now())`, id)
	lines, whole := timelineOf(t, i, id.String())
	require.Equal(t, []string{"outbox_delayed: recorded with a due time, by a transaction whose id is not kept", "outbox_delayed: due, and not moved to outbox yet"}, lines)
	require.Equal(t, time.Hour, whole.Entries[1].At.Sub(whole.Entries[0].At))
	require.Equal(t, []any{int64(0), "acme.order.due.v1", false}, []any{whole.OutboxID, whole.Type, whole.InOutbox})

	require.NoError(t, pgx.BeginFunc(background, f.db, func(tx pgx.Tx) error {
		_, err := tx.Exec(background, f.sql(`LOCK TABLE {schema}.event_handled`))
		require.NoError(t, err)
		partly, err := i.Timeline(background, id.String())
		require.NoError(t, err)
		require.Equal(t, []string{"event_handled"}, partly.NotSearched)
		require.NotContains(t, partly.Searched, "event_handled")
		require.Len(t, partly.Entries, 2)
		return nil
	}))
	delayed, err := outboxops.NewDelayed(f.db, outboxops.DelayedConfig{Schema: f.schema})
	require.NoError(t, err)
	n, err := delayed.Cancel(background, []uuid.UUID{id}, outboxops.AuditInfo{Operator: "kim", Reason: "paid"})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	lines, whole = timelineOf(t, i, id.String())
	require.Len(t, lines, 1)
	require.Regexp(t, `^outbox_audit: cancel by kim \(\w+\): paid$`, lines[0])
	require.False(t, whole.InOutbox)
}

// What a relay could not send, sent at a retry, or has not attempted is there.
func TestTimelineOfFailed(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	i := f.inspector(t)
	f.commit(t, numbered("a", 1, 4)...)
	f.exec(t, `INSERT INTO {schema}.outbox_cursor (last_processed_id, snapshot, highest_id, system_identifier, epoch)
		SELECT 4, pg_current_snapshot(), 4, system_identifier, 1 FROM pg_control_system()`)
	f.exec(t, `INSERT INTO {schema}.outbox_failed (relay, outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, created_at,
			status, error_class, last_error, retry_count, next_retry_at, resolved_at, resolution, sent_partition, sent_offset, sent_at)
		SELECT 'default', id, 't/a', event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, created_at,
			(ARRAY['dead', 'failed', 'resolved', 'resolved'])[id], 'message_too_large', 'too large', 5, now() + interval '1 min', CASE WHEN id > 2 THEN now() + interval '2 min' END,
			(ARRAY[NULL, NULL, 'sent', 'expired'])[id], CASE id WHEN 3 THEN 1 END, CASE id WHEN 3 THEN 8 END, CASE id WHEN 3 THEN now() + interval '2 min' END
		  FROM {schema}.outbox`)
	f.commit(t, numbered("a", 5, 1)...)
	for n, want := range []string{
		"outbox_failed: relay default has it dead after 5 retries: message_too_large too large event-1",
		"outbox_failed: relay default has it failed after 5 retries: message_too_large too large event-2",
		"outbox_failed: relay default sent it to t, partition 1, offset 8 at a retry event-3",
		"outbox_failed: relay default did not send it at a retry, because it had expired event-4",
		"outbox_cursor: relay default has not attempted it yet",
	} {
		lines, whole := timelineOf(t, i, strconv.Itoa(n+1))
		require.Equal(t, want, lines[len(lines)-1])
		require.Equal(t, n == 1 || n == 4, whole.Entries[len(lines)-1].At.IsZero())
		if n < 4 {
			require.Equal(t, "outbox_failed: relay default could not send it, or put it behind an earlier event of its key event-"+strconv.Itoa(n+1), lines[1])
			require.Len(t, lines, 3)
		}
	}
}

// What a group has done with an event since it expired may be that it dropped it. Names with percent signs are shown as
// they are.
func TestTimelineOfExpired(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	i := f.inspector(t)
	require.NoError(t, pgx.BeginFunc(background, f.db, func(tx pgx.Tx) error {
		return f.rec.Record(background, tx, outbox.With(numbered("a", 1, 1)[0], outbox.EventOptions{Expires: time.Now().Add(time.Hour)}))
	}))
	f.exec(t, `INSERT INTO {schema}.event_delivery (position, attempt_count, max_attempts, next_retry_at, created_at, updated_at, processed_at, occurred_at, recorded_at,
			event_id, status, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, headers, payload)
		SELECT id, 1, 10, now(), created_at, now(), expires_at - interval '60 min' + n * interval '40 min', occurred_at, created_at, event_id, 'DONE', '100%d', '%s%!' || n, 'things', event_type, source,
			aggregate_type, aggregate_id, content_type, ('{"ce_expirytime": "' || to_char(expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') || '"}')::jsonb, payload
		  FROM {schema}.outbox, generate_series(1, 2) AS n`)
	f.exec(t, `INSERT INTO {schema}.event_handled (consumer_group, aggregate_type, aggregate_id, action, event_source, handled_at)
		SELECT '%v', event_type, event_id::text, 'A' || n, source, expires_at - interval '60 min' + n * interval '45 min' FROM {schema}.outbox, generate_series(1, 2) AS n`)
	f.exec(t, `INSERT INTO {schema}.outbox_failed (relay, outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type,
			occurred_at, created_at, failed_at, status, error_class)
		SELECT '5%d', id, 'thing-events/2', event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type,
			occurred_at, created_at, created_at + interval '3 h', 'parked', NULL FROM {schema}.outbox`)
	want := []string{
		"event_delivery: group 100%d, action %s%!1: has it from outbox delivery-1",
		"event_delivery: group 100%d, action %s%!2: has it from outbox delivery-2",
		"event_delivery: group 100%d, action %s%!1: handled it at attempt 1 delivery-1",
		"event_handled: group %v, action A1: handled it",
		"event_delivery: group 100%d, action %s%!2: handled it at attempt 1, or dropped it because it had expired delivery-2",
		"event_handled: group %v, action A2: handled it, or dropped it because it had expired",
		"outbox_failed: relay 5%d could not send it, or put it behind an earlier event of its key event-1",
		"outbox_failed: relay 5%d has it parked behind an earlier event of its key event-1",
	}
	lines, whole := timelineOf(t, i, "1")
	require.Equal(t, want, lines[1:])
	f.exec(t, `DELETE FROM {schema}.outbox`)
	lines, _ = timelineOf(t, i, whole.EventID)
	require.Equal(t, want, lines, "the deliveries say when it expires")
}
