package outboxops_test

import (
	"encoding/base64"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxops"
)

// A dead delivery gets another payload and all its attempts again, before the later ones of its key. The audit has the
// payload from before. Rows of other groups and actions stay, and a dry run changes nothing.
func TestEditDelivery(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	f := h.operator(t)
	ids := h.deliver(t, "k", "HKD")
	others := append(h.deliverTo(t, "stats", "SUMMED", "k", "D"), h.deliverTo(t, "mail", "COUNTED", "k", "D")...)
	id := delivery(ids[0])
	var rejected *outbox.FieldError
	for _, bad := range []string{``, `{`, `{} {}`, `"\u0000"`, `"` + strings.Repeat("x", 960<<10) + `"`} {
		require.ErrorAs(t, f.Edit(background, id, []byte(bad), kim), &rejected, bad)
		require.Equal(t, "payload", rejected.Field)
	}
	require.NoError(t, f.CheckEdit(background, id, []byte(`{"n": 2}`), kim))
	require.Equal(t, "HKD", h.played(t, ids))
	require.Zero(t, h.count(t, "outbox_audit"))

	require.NoError(t, f.Edit(background, id, []byte(`{"n": 2}`), kim))
	require.Equal(t, "PKD", h.played(t, ids))
	require.Equal(t, "DD", h.played(t, others))
	row, err := f.Get(background, id)
	require.NoError(t, err)
	require.Equal(t, `{"n": 2}`, string(row.Payload))
	require.Zero(t, row.Attempts)
	require.Equal(t, map[string]string{"traceparent": "00-x"}, row.Headers)
	var size int
	require.NoError(t, h.db.QueryRow(background, h.sql(`SELECT size FROM {schema}.event_delivery WHERE id = $1`), ids[0]).Scan(&size))
	require.Equal(t, len(`{"n": 2}`)+len(`{"traceparent": "00-x"}`), size)
	for _, other := range others {
		row, err := f.Get(background, delivery(other))
		require.NoError(t, err)
		require.Equal(t, `{"n": 1}`, string(row.Payload))
	}
	entries, err := f.Audit(background, id, outboxops.AuditPage{})
	require.NoError(t, err)
	require.Len(t, entries, 2)
	require.Equal(t, []string{"retry", "edit"}, []string{entries[0].Action, entries[1].Action})
	require.Equal(t, `{"n": 1}`, string(entries[1].Payload), "what it was")
	require.Equal(t, []any{"stats", "COUNTED", "k", int64(1), kim.Operator}, []any{entries[1].Group, entries[1].Handler, entries[1].Key, entries[1].OutboxID, entries[1].Operator})
}

// Only a dead delivery that is not resolved can be edited: none that a worker has, or will have.
func TestEditRefusesOtherDeliveries(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	f := h.operator(t)
	ids := h.deliver(t, "k", "WKFD")
	require.NoError(t, f.Resolve(background, delivery(ids[3]), kim))
	ids = append(ids, h.deliver(t, "", "PEX")...)
	before := h.played(t, ids)
	for _, id := range ids {
		for _, edit := range []func() error{
			func() error { return f.Edit(background, delivery(id), []byte(`{}`), kim) },
			func() error { return f.CheckEdit(background, delivery(id), []byte(`{}`), kim) },
		} {
			require.ErrorIs(t, edit(), outboxops.ErrStatus)
		}
	}
	require.ErrorIs(t, f.Edit(background, delivery(1_000_000), []byte(`{}`), kim), outboxops.ErrNotFound)
	require.Equal(t, before, h.played(t, ids))
	require.Equal(t, 1, h.count(t, "outbox_audit"), "the resolution")
}

// asRecord makes a delivery one that Kafka has brought: a record with a value, headers, and parts of its column
// record.
func (h *opsFixture) asRecord(t *testing.T, id int64, value string, headers map[string]string, parts string) {
	t.Helper()
	var all []string
	encoded := func(text string) string { return base64.StdEncoding.EncodeToString([]byte(text)) }
	for name, text := range headers {
		all = append(all, fmt.Sprintf(`{"name": %q, "value": %q}`, encoded(name), encoded(text)))
	}
	h.exec(t, `UPDATE {schema}.event_delivery SET position = 17, record_partition = 3, record_id = 'one', record_digest = decode(md5($1::text), 'hex'),
		record = convert_to($2, 'UTF8'), headers = NULL, payload = NULL, payload_bytes = convert_to($3, 'UTF8') WHERE id = $1`,
		id, fmt.Sprintf(`{"key": "aw==", "headers": [%s], "time": 1%s}`, strings.Join(all, ", "), parts), value)
}

// The value of a record stays bytes, also if it is JSON that jsonb does not take. It cannot become that of another
// event.
func TestEditRecord(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	f := h.operator(t)
	binary := map[string]string{"ce_id": "one", "ce_source": "shop", "ce_type": "shop.order.created.v1", "ce_specversion": "1.0", "content-type": "application/json"}
	ids := h.deliver(t, "k", "DDDDD")
	h.asRecord(t, ids[0], `{half`, binary, "")
	require.ErrorIs(t, f.Edit(background, delivery(ids[0]), []byte(`{`), kim), outbox.ErrJSON)
	require.NoError(t, f.Edit(background, delivery(ids[0]), []byte(`{"b":  1, "a": "\u0000"}`), kim))
	row, err := f.Get(background, delivery(ids[0]))
	require.NoError(t, err)
	require.Equal(t, `{"b":  1, "a": "\u0000"}`, string(row.Payload))
	require.Equal(t, binary, row.Headers)
	entries, err := f.Audit(background, row.ID, outboxops.AuditPage{})
	require.NoError(t, err)
	require.Equal(t, `{half`, string(entries[1].Payload))
	require.Zero(t, entries[1].OutboxID, "an offset is none")

	h.asRecord(t, ids[1], "", binary, `, "no_value": true`)
	require.NoError(t, f.Edit(background, delivery(ids[1]), []byte(`{}`), kim))
	var record string
	require.NoError(t, h.db.QueryRow(background, h.sql(`SELECT convert_from(record, 'UTF8') FROM {schema}.event_delivery WHERE id = $1`), ids[1]).Scan(&record))
	require.NotContains(t, record, "no_value", "a handler would see no payload")
	require.Contains(t, record, `"time": 1`)

	structured := func(id string) string {
		return fmt.Sprintf(`{"specversion": "1.0", "id": %q, "source": "shop", "type": "shop.order.created.v1", "datacontenttype": "application/json", "data": {"n": 1}}`, id)
	}
	h.asRecord(t, ids[2], structured("one"), map[string]string{"Content-Type": "application/cloudevents+json"}, "")
	require.ErrorContains(t, f.Edit(background, delivery(ids[2]), []byte(structured("two")), kim), `it is the event "two" of "shop", want "one"`)
	require.NoError(t, f.Edit(background, delivery(ids[2]), []byte(structured("one")), kim))

	h.asRecord(t, ids[3], "", binary, `, "missing": {"value": 100000000}`)
	h.asRecord(t, ids[4], "", binary, "")
	h.exec(t, `UPDATE {schema}.event_delivery SET dead_letter = 'order-events.dlq-0-7' WHERE id = $1`, ids[4])
	for n, why := range map[int]string{3: "too long to be read", 4: "only the dead letter order-events.dlq-0-7 has the value"} {
		err := f.Edit(background, delivery(ids[n]), []byte(`{}`), kim)
		require.ErrorIs(t, err, outboxops.ErrStatus)
		require.ErrorContains(t, err, why)
	}
}

// A delivery whose payload PostgreSQL cannot print gets one that it can.
func TestEditUnreadableDelivery(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	f := h.operator(t)
	id := h.deliver(t, "k", "D")[0]
	h.exec(t, `UPDATE {schema}.event_delivery SET payload = $2::text::jsonb WHERE id = $1`, id, unprintable)
	require.NoError(t, f.Edit(background, delivery(id), []byte(`{"n": 2}`), kim))
	row, err := f.Get(background, delivery(id))
	require.NoError(t, err)
	require.Equal(t, `{"n": 2}`, string(row.Payload))
}
