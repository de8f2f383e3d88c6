package outboxops_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// unprintable is a JSON text that PostgreSQL stores in a few kilobytes. Printed, it would exceed 1 GB, so
// PostgreSQL fails to print it after seconds.
var unprintable = "[" + strings.Repeat("1e131000,", 9000) + "1]"

// insertDead adds a dead event of each payload and error class, NULL for nil.
func (h *opsFixture) insertDead(t *testing.T, payload, class any) outboxops.FailureID {
	t.Helper()
	h.position(t, "default")
	var id int64
	require.NoError(t, h.db.QueryRow(background, h.sql(`
		INSERT INTO {schema}.outbox_failed (outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type,
		            occurred_at, created_at, status, error_class, last_error)
		VALUES (1, 'topic/key', gen_random_uuid(), 'a.order.placed.v1', 's', 'A', 'id', $1::text::jsonb, 'application/json', now(), now(), 'dead', $2, 'bad')
		RETURNING id`), payload, class).Scan(&id))
	return outboxops.FailureID{Kind: outboxops.KindEvent, Number: id}
}

// insertUnprintable adds three events. PostgreSQL cannot print the payload of the second one.
func (h *opsFixture) insertUnprintable(t *testing.T) {
	t.Helper()
	testenv.AllowUnprintable(t, h.db, h.schema)
	_, err := h.db.Exec(background, h.sql(`
		INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, headers, occurred_at)
		SELECT gen_random_uuid(), 'a.order.placed.v1', 's', 'A', 'id', p.text::jsonb, 'application/json', '{"tenant": "a", "n": 1}', now()
		  FROM unnest($1::text[]) WITH ORDINALITY AS p (text, n) ORDER BY n`), []string{`{}`, unprintable, `{"a":  1}`})
	require.NoError(t, err)
}

// Operators see recorded events, even if one of them cannot be printed.
func TestUnreadableRecordedEvent(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	h := newFixture(t)
	i := h.inspector(t)
	ctx, cancel := context.WithCancel(background)
	defer cancel()
	tailed := make(chan outboxops.RecordedEvent, 10_000)
	go func() {
		defer close(tailed)
		for e, err := range i.Tail(ctx, outboxops.EventFilter{}) {
			if err != nil {
				t.Error(err)
				return
			}
			tailed <- e
		}
	}()
	awaitTail(t, h, tailed)
	h.insertUnprintable(t)
	all, err := i.Events(background, outboxops.EventFilter{}, outboxops.EventPage{})
	require.NoError(t, err)
	require.Len(t, all, 3)
	require.Equal(t, 65536, all[1].Size, "what the row says")

	e, err := i.Event(background, all[1].OutboxID)
	require.NoError(t, err)
	require.ErrorIs(t, e.PayloadErr, outboxops.ErrUnreadable)
	require.ErrorContains(t, e.PayloadErr, "bytes as stored")
	require.Nil(t, e.Payload)
	require.Equal(t, map[string]string{"tenant": "a", "n": "1"}, e.Headers)

	for _, want := range []string{`{}`, "", `{"a": 1}`} {
		e := <-tailed
		for ; e.Type != "a.order.placed.v1"; e = <-tailed {
		}
		require.Equal(t, want, string(e.Payload))
		require.Equal(t, map[string]string{"tenant": "a", "n": "1"}, e.Headers)
		if want == "" {
			require.ErrorIs(t, e.PayloadErr, outboxops.ErrUnreadable)
		} else {
			require.NoError(t, e.PayloadErr)
		}
	}
}

// awaitTail records events of another type until a tail yields one.
func awaitTail(t *testing.T, h *opsFixture, tailed <-chan outboxops.RecordedEvent) {
	t.Helper()
	require.Eventually(t, func() bool {
		_, err := h.db.Exec(background, h.sql(`
			INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
			VALUES (gen_random_uuid(), 'a.first.event.v1', 's', 'A', 'id', '{}', 'application/json', now())`))
		require.NoError(t, err)
		return len(tailed) > 0
	}, testenv.Patience, 50*time.Millisecond)
	_, err := h.db.Exec(background, h.sql(`DELETE FROM {schema}.outbox`))
	require.NoError(t, err)
}

// A payload that cannot be printed is shown as unreadable, and can be replaced.
func TestUnreadableFailure(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	h := newFixture(t)
	f := h.operator(t)
	id := h.insertDead(t, unprintable, "message_too_large")
	row, err := f.Get(background, id)
	require.NoError(t, err)
	require.ErrorIs(t, row.PayloadErr, outboxops.ErrUnreadable)

	var rejected *outbox.FieldError
	for _, large := range []string{unprintable, `"` + strings.Repeat("x", 960<<10) + `"`} {
		err := f.Edit(background, id, []byte(large), kim)
		require.ErrorAs(t, err, &rejected)
		require.Equal(t, "payload", rejected.Field)
		require.ErrorIs(t, err, outbox.ErrTooLarge)
	}
	higher, err := outboxops.NewFailures(h.db, outboxops.FailuresConfig{Schema: h.schema, MaxPayload: 2 << 20})
	require.NoError(t, err)
	require.NoError(t, higher.Edit(background, id, []byte(`"`+strings.Repeat("x", 960<<10)+`"`), kim))
	row, err = f.Get(background, id)
	require.NoError(t, err)
	require.NoError(t, row.PayloadErr)
	require.Len(t, row.Payload, 960<<10+2)
	entries, err := f.Audit(background, id, outboxops.AuditPage{})
	require.NoError(t, err)
	require.Len(t, entries, 1)
	require.ErrorIs(t, entries[0].PayloadErr, outboxops.ErrUnreadable, "what it was")
	entries, err = f.Audit(background, outboxops.FailureID{}, outboxops.AuditPage{})
	require.NoError(t, err)
	require.NoError(t, entries[0].PayloadErr, "of all failures it is not read")
}

// An event that a relay could not read has no payload. It can be edited or resolved, but not retried.
func TestFailureWithoutPayload(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	f := h.operator(t)
	h.insertUnprintable(t)
	id, other := h.insertDead(t, nil, "unreadable_row"), h.insertDead(t, nil, "unreadable_row")
	_, err := h.db.Exec(background, h.sql(`UPDATE {schema}.outbox_failed AS f SET event_id = o.event_id FROM {schema}.outbox AS o WHERE o.id = f.outbox_id AND f.id = $1`), id.Number)
	require.NoError(t, err)
	row, err := f.Get(background, id)
	require.NoError(t, err)
	require.ErrorIs(t, row.PayloadErr, outboxops.ErrUnreadable)
	require.ErrorContains(t, row.PayloadErr, "bad", "what the relay said")
	err = f.Retry(background, id, kim)
	require.ErrorIs(t, err, outboxops.ErrStatus)
	require.ErrorContains(t, err, "payload")
	for _, dryRun := range []bool{true, false} {
		n, err := f.RetryAll(background, outboxops.FailureFilter{}, outboxops.BulkConfig{DryRun: dryRun}, kim)
		require.NoError(t, err)
		require.Zero(t, n)
	}
	require.NoError(t, f.Edit(background, id, []byte(`{"a": 1}`), kim))
	row, err = f.Get(background, id)
	require.NoError(t, err)
	require.Equal(t, `{"a": 1}`, string(row.Payload))
	require.Empty(t, row.Class)
	require.Equal(t, map[string]string{"tenant": "a", "n": "1"}, row.Headers, "those of its row in outbox")
	var size int
	require.NoError(t, h.db.QueryRow(background, h.sql(`SELECT size FROM {schema}.outbox_failed WHERE id = $1`), id.Number).Scan(&size))
	require.Equal(t, len(`{"a": 1}`)+len(`{"n": 1, "tenant": "a"}`), size)
	require.NoError(t, f.Resolve(background, other, kim))
}

// A payload of which PostgreSQL has lost pages can be replaced. The audit says that it does not have the payload from
// before.
func TestEditOfADamagedRow(t *testing.T) {
	t.Parallel()
	for name, kind := range map[string]struct{ table, column, value string }{
		"event":                {"outbox_failed", "payload", "to_jsonb($1::text)"},
		"headers of event":     {"outbox_failed", "headers", "jsonb_build_object('a', $1::text)"},
		"delivery":             {"event_delivery", "payload", "to_jsonb($1::text)"},
		"headers of delivery":  {"event_delivery", "headers", "jsonb_build_object('a', $1::text)"},
		"delivery of a record": {"event_delivery", "payload = NULL, record = '{}', record_partition = 0, record_digest = 'x', payload_bytes", "$1::text::bytea"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newFixture(t)
			f := h.operator(t)
			var id outboxops.FailureID
			if kind.table == "outbox_failed" {
				id = h.insertDead(t, `{}`, "message_too_large")
			} else {
				id = delivery(h.deliver(t, "k", "D")[0])
			}
			h.exec(t, `UPDATE {schema}.`+kind.table+` SET `+kind.column+` = `+kind.value, random(20_000))
			testenv.Damage(t, h.db, h.schema, kind.table)
			if strings.Contains(kind.column, "payload") {
				row, err := f.Get(background, id)
				require.NoError(t, err)
				require.ErrorIs(t, row.PayloadErr, outboxops.ErrUnreadable)
			}
			require.NoError(t, f.CheckEdit(background, id, []byte(`{"n": 2}`), kim))
			require.NoError(t, f.Edit(background, id, []byte(`{"n": 2}`), kim))
			row, err := f.Get(background, id)
			require.NoError(t, err)
			require.Equal(t, `{"n": 2}`, string(row.Payload))
			entries, err := f.Audit(background, id, outboxops.AuditPage{})
			require.NoError(t, err)
			edit := entries[len(entries)-1]
			require.Equal(t, []any{"edit", kim.Operator}, []any{edit.Action, edit.Operator})
			if strings.Contains(kind.column, "payload") {
				require.Nil(t, edit.Payload)
				require.NoError(t, edit.PayloadErr)
				require.Contains(t, edit.Reason, kim.Reason+" (the payload from before cannot be read: XX001 ")
			} else {
				require.Equal(t, kim.Reason, edit.Reason)
			}
		})
	}
}

// A delivery whose record is damaged beside its value cannot be edited, and the error says so.
func TestEditOfADamagedRecord(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	id := h.deliver(t, "k", "D")[0]
	h.asRecord(t, id, "{}", map[string]string{"a": random(20_000)}, "")
	testenv.Damage(t, h.db, h.schema, "event_delivery")
	err := h.operator(t).Edit(background, delivery(id), []byte(`{}`), kim)
	require.ErrorIs(t, err, outboxops.ErrStatus)
	require.ErrorContains(t, err, "the row does not have the whole record")
}

// A delayed event of which PostgreSQL has lost pages is cancelled, together with others.
func TestCancelOfADamagedRow(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	delayed, err := outboxops.NewDelayed(h.db, outboxops.DelayedConfig{Schema: h.schema})
	require.NoError(t, err)
	var ids []uuid.UUID
	for n := range 2 {
		ids = append(ids, uuid.New())
		h.exec(t, `INSERT INTO {schema}.outbox_delayed (due_at, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
			VALUES (now() + interval '1 hour', $1, 'acme.order.due.v1', 'shop', 'Order', 'k', to_jsonb($2::text), 'application/json', now())`, ids[n], random(20_000))
		if n == 0 {
			testenv.Damage(t, h.db, h.schema, "outbox_delayed")
		}
	}
	n, err := delayed.Cancel(background, ids, kim)
	require.NoError(t, err)
	require.Equal(t, 2, n)
	entries, err := h.operator(t).Audit(background, outboxops.FailureID{}, outboxops.AuditPage{})
	require.NoError(t, err)
	require.Len(t, entries, 2)
	require.Equal(t, kim.Reason, entries[0].Reason)
	require.Contains(t, entries[1].Reason, kim.Reason+" (the payload from before cannot be read: XX001 ")
	require.Equal(t, 1, h.count(t, "outbox_audit WHERE payload IS NOT NULL"))
}
