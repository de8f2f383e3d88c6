package outboxops_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

var failureIDTests = []struct {
	text, field string
	err         error // nil: any
}{
	{"", "failure id", outbox.ErrMalformed},
	{"17", "failure id", outbox.ErrMalformed},
	{"event", "failure id", outbox.ErrMalformed},
	{"-17", "field Kind", outbox.ErrEmpty},
	{"other-17", "field Kind", outbox.ErrMalformed},
	{"Event-17", "field Kind", outbox.ErrMalformed},
	{"event-", "field Number", outbox.ErrMalformed},
	{"event-x", "field Number", outbox.ErrMalformed},
	{"event-9223372036854775808", "field Number", outbox.ErrMalformed},
	{"event-0", "field Number", nil},
	{"event--1", "field Number", nil},
}

func TestParseFailureID(t *testing.T) {
	t.Parallel()
	id, err := outboxops.ParseFailureID("event-17")
	require.NoError(t, err)
	require.Equal(t, outboxops.FailureID{Kind: outboxops.KindEvent, Number: 17}, id)
	require.Equal(t, "event-17", id.String())
	for _, tt := range failureIDTests {
		id, err := outboxops.ParseFailureID(tt.text)
		require.ErrorContains(t, err, tt.field, tt.text)
		require.Zero(t, id)
		if tt.err != nil {
			require.ErrorIs(t, err, tt.err, tt.text)
		}
	}
}

func TestFailureIDAsText(t *testing.T) {
	t.Parallel()
	for id, text := range map[outboxops.FailureID]string{{}: `""`, {Kind: outboxops.KindEvent, Number: 17}: `"event-17"`, {Kind: outboxops.KindDelivery, Number: 4}: `"delivery-4"`} {
		data, err := json.Marshal(id)
		require.NoError(t, err)
		require.Equal(t, text, string(data))
		back := outboxops.FailureID{Kind: "was", Number: 1}
		require.NoError(t, json.Unmarshal(data, &back))
		require.Equal(t, id, back)
	}
	require.ErrorIs(t, json.Unmarshal([]byte(`"17"`), new(outboxops.FailureID)), outbox.ErrMalformed)
}

// An impossible id or kind is refused before the database is used.
func TestFailuresRefuseIDs(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Schema(t)
	f, err := outboxops.NewFailures(db, outboxops.FailuresConfig{Schema: schema})
	require.NoError(t, err)
	for field, id := range map[string]outboxops.FailureID{"field Kind": {Number: 1}, "field Number": {Kind: outboxops.KindEvent}, `"other"`: {Kind: "other", Number: 1}} {
		_, getErr := f.Get(background, id)
		_, auditErr := f.Audit(background, id, outboxops.AuditPage{})
		_, listErr := f.List(background, outboxops.FailureFilter{}, outboxops.FailurePage{After: []outboxops.FailureID{id}})
		for _, err := range []error{getErr, auditErr, listErr, f.Retry(background, id, kim), f.Resolve(background, id, kim), f.Hold(background, id, kim), f.Release(background, id, kim), f.AuditRead(background, id, kim), f.Edit(background, id, nil, kim)} {
			require.ErrorContains(t, err, field)
		}
	}
	other := outboxops.FailureFilter{Kind: "other"}
	_, listErr := f.List(background, other, outboxops.FailurePage{})
	_, countErr := f.Count(background, other)
	_, retryErr := f.RetryAll(background, other, outboxops.BulkConfig{}, kim)
	for _, err := range []error{listErr, countErr, retryErr} {
		require.ErrorIs(t, err, outbox.ErrMalformed)
		require.ErrorContains(t, err, "field Kind")
	}
}
