package itest

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

var errGenerator = errors.New("out of numbers")

// What is refused before PostgreSQL hears of it, so that tx remains usable.
var refusedEvents = []struct {
	name      string
	event     outbox.DomainEvent
	eventType string
	field     string
	want      error
}{
	{"a type that nobody registered", strayParcel{good}, "itest.strayParcel", "event", outbox.ErrUnregistered},
	{"a pointer to a type that nobody registered", &strayParcel{good}, "itest.strayParcel", "event", outbox.ErrUnregistered},
	{"a type with pointer receivers", &pointerParcel{noon}, "*itest.pointerParcel", "event", outbox.ErrUnregistered},
	{"a nil event", nil, "<nil>", "event", outbox.ErrNilArgument},
	{"a typed nil event", (*parcel)(nil), "*itest.parcel", "event", outbox.ErrNilArgument},

	{"no aggregate id", id(""), parcelSent, "aggregate_id", outbox.ErrEmpty},
	{"no aggregate id in a nil map", mapParcel(nil), "test.map.sent.v1", "aggregate_id", outbox.ErrEmpty},
	{"an aggregate id of 256 characters", id(strings.Repeat("x", 256)), parcelSent, "aggregate_id", outbox.ErrTooLong},
	{"an aggregate id of 256 characters of several bytes", id(strings.Repeat("주", 256)), parcelSent, "aggregate_id", outbox.ErrTooLong},
	{"a blank aggregate id", id("  "), parcelSent, "aggregate_id", outbox.ErrMalformed},
	{"a control character in the aggregate id", id("a\tb"), parcelSent, "aggregate_id", outbox.ErrMalformed},
	{"a noncharacter in the aggregate id", id("a\ufffe"), parcelSent, "aggregate_id", outbox.ErrMalformed},
	{"NUL in the aggregate id", id("a\x00"), parcelSent, "aggregate_id", outbox.ErrNUL},
	{"an aggregate id that is not UTF-8", id(badText), parcelSent, "aggregate_id", outbox.ErrUTF8},
	{"an aggregate id that is not UTF-8 and too long", id(strings.Repeat("\xff", 256)), parcelSent, "aggregate_id", outbox.ErrUTF8},

	{"no partition key", raw("", nil), rawSent, "partition_key", outbox.ErrEmpty},
	{"a partition key of 256 characters", raw(strings.Repeat("주", 256), nil), rawSent, "partition_key", outbox.ErrTooLong},
	{"NUL in the partition key", raw("\x00", nil), rawSent, "partition_key", outbox.ErrNUL},
	{"a partition key that is not UTF-8", raw("\xff", nil), rawSent, "partition_key", outbox.ErrUTF8},

	{"a payload with a channel", content(make(chan int)), parcelSent, "payload", outbox.ErrEncode},
	{"a payload with NaN", content(math.NaN()), parcelSent, "payload", outbox.ErrEncode},
	{"a payload with JSON that is none", content(text(`{`)), parcelSent, "payload", outbox.ErrEncode},
	{"a payload with a number that is none", content(json.Number("x")), parcelSent, "payload", outbox.ErrEncode},
	{"a payload of 960 KiB and one byte", content(strings.Repeat("x", 960<<10-1)), parcelSent, "payload", outbox.ErrTooLarge},
	{"a payload whose numbers PostgreSQL prints in full", content(text("[" + strings.Repeat("1e300,", 4000) + "1e300]")), parcelSent, "payload", outbox.ErrTooLarge},
	{"a payload that PostgreSQL could not even print", content(text("[" + strings.Repeat("1e131000,", 9000) + "1]")), parcelSent, "payload", outbox.ErrTooLarge},
	{"a payload whose fractions PostgreSQL prints in full", content(text("[" + strings.Repeat("1e-16000,", 70) + "1]")), parcelSent, "payload", outbox.ErrTooLarge},
	{"a raw payload of 960 KiB and one byte", raw("key", make([]byte, 960<<10+1)), rawSent, "payload", outbox.ErrTooLarge},
	{"NUL in a payload", content("\x00"), parcelSent, "payload", outbox.ErrNUL},
	{"NUL in a payload's key", content(map[string]int{"a\x00b": 1}), parcelSent, "payload", outbox.ErrNUL},
	{"NUL in a payload, escaped", content(text(`"\u0000"`)), parcelSent, "payload", outbox.ErrNUL},
	{"a payload that is not UTF-8", content(badText), parcelSent, "payload", outbox.ErrUTF8},
	{"a payload's key that is not UTF-8", content(map[string]int{badText: 1}), parcelSent, "payload", outbox.ErrUTF8},
	{"a payload that is not UTF-8, as JSON", content(text(`"` + badText + `"`)), parcelSent, "payload", outbox.ErrUTF8},
	{"a lone surrogate", content(text(`"\ud800"`)), parcelSent, "payload", outbox.ErrJSON},
	{"a number that is too large", content(json.Number("1e200000")), parcelSent, "payload", outbox.ErrJSON},
	{"a number that is too small", content(text(`[1e-16384]`)), parcelSent, "payload", outbox.ErrJSON},
	{"a payload of 1001 levels", content(text(strings.Repeat("[", 1001) + strings.Repeat("]", 1001))), parcelSent, "payload", outbox.ErrJSON},

	{"a zero time", at(time.Time{}), parcelSent, "occurred_at", outbox.ErrTime},
	{"year 10000", at(time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)), parcelSent, "occurred_at", outbox.ErrTime},
	{"year 10000 in Greenwich only", at(time.Date(9999, 12, 31, 23, 0, 0, 0, time.FixedZone("", -2*3600))), parcelSent, "occurred_at", outbox.ErrTime},
	{"year 0", at(time.Date(0, 12, 31, 0, 0, 0, 0, time.UTC)), parcelSent, "occurred_at", outbox.ErrTime},
	{"a year before Christ", at(time.Date(-44, 3, 15, 0, 0, 0, 0, time.UTC)), parcelSent, "occurred_at", outbox.ErrTime},
}

func TestRecordRefusesEvent(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	for _, tt := range refusedEvents {
		t.Run(tt.name, func(t *testing.T) {
			c.requireRefused(t, background, c.rec, tt.want, refusal{tt.eventType, 2, tt.field}, good, good, tt.event, good)
			c.requireRefused(t, background, c.rec, tt.want, refusal{tt.eventType, 0, tt.field}, tt.event)
		})
	}
}

// requireRefused requires that Record and Queue refuse the events, that nothing
// is written or queued, and that the transaction goes on.
func (c *counter) requireRefused(t *testing.T, ctx context.Context, rec *outbox.Recorder, want error, says refusal, events ...outbox.DomainEvent) {
	t.Helper()
	tx := c.begin(t)
	before := len(c.ids(t))
	requireRefused(t, rec.Record(ctx, tx, events...), want, says)
	var n int
	require.NoError(t, tx.QueryRow(background, c.sql(`SELECT count(*) FROM {s}.outbox`)).Scan(&n))
	require.Equal(t, before, n, "nothing was written")

	batch := &pgx.Batch{}
	batch.Queue(`SELECT 1`)
	requireRefused(t, rec.Queue(ctx, batch, events...), want, says)
	require.Equal(t, 1, batch.Len(), "nothing was queued")

	require.NoError(t, c.rec.Record(background, tx, good), "the transaction is usable")
	require.NoError(t, tx.Commit(background))
	require.Len(t, c.ids(t), before+1)
}

var refusedSettings = []struct {
	name    string
	cfg     outbox.RecorderConfig
	context context.Context
	field   string
	want    error
}{
	{name: "a generator that fails", cfg: outbox.RecorderConfig{NewID: func() (uuid.UUID, error) { return uuid.UUID{}, errGenerator }}, field: "event_id", want: errGenerator},
	{name: "a payload above a lower limit", cfg: outbox.RecorderConfig{MaxPayload: 5}, field: "payload", want: outbox.ErrTooLarge},

	{name: "NUL in the correlation id", context: outbox.WithCorrelationID(background, "\x00"), field: "correlation_id", want: outbox.ErrNUL},
	{name: "a correlation id that is not UTF-8", context: outbox.WithCorrelationID(background, badText), field: "correlation_id", want: outbox.ErrUTF8},
	{name: "a correlation id of 256 characters", context: outbox.WithCorrelationID(background, strings.Repeat("주", 256)), field: "correlation_id", want: outbox.ErrTooLong},

	{name: "a header ce_id", cfg: header("ce_id", "1"), field: "headers", want: outbox.ErrMalformed},
	{name: "a header CE_own", cfg: header("CE_own", "1"), field: "headers", want: outbox.ErrMalformed},
	{name: "a header content-type", cfg: header("content-type", "text/plain"), field: "headers", want: outbox.ErrMalformed},
	{name: "a header Content-Type", cfg: header("Content-Type", "text/plain"), field: "headers", want: outbox.ErrMalformed},
	{name: "a header correlationid", cfg: header("correlationid", "1"), field: "headers", want: outbox.ErrMalformed},
	{name: "a header CorrelationID", cfg: header("CorrelationID", "1"), field: "headers", want: outbox.ErrMalformed},
	{name: "a header traceparent", cfg: header("traceparent", traceparent), field: "headers", want: outbox.ErrMalformed},
	{name: "a header TraceParent", cfg: header("TraceParent", traceparent), field: "headers", want: outbox.ErrMalformed},
	{name: "a header without a name", cfg: header("", "1"), field: "headers", want: outbox.ErrEmpty},
	{name: "NUL in a header", cfg: header("tenant", "a\x00"), field: "headers", want: outbox.ErrNUL},
	{name: "NUL in a header's name", cfg: header("ten\x00ant", "a"), field: "headers", want: outbox.ErrNUL},
	{name: "a header that is not UTF-8", cfg: header("tenant", badText), field: "headers", want: outbox.ErrUTF8},
	{name: "a header's name that is not UTF-8", cfg: header(badText, "a"), field: "headers", want: outbox.ErrUTF8},
	{name: "headers of 8 KiB and a byte", cfg: headersOf(8<<10 + 1), field: "headers", want: outbox.ErrTooLarge},
}

// headersOf returns two headers that are n bytes as JSON.
func headersOf(n int) outbox.RecorderConfig {
	half := strings.Repeat("x", n/2-len(`{"a":"",`))
	return outbox.RecorderConfig{Headers: func(context.Context, outbox.DomainEvent) map[string]string {
		return map[string]string{"a": half, "b": strings.Repeat("x", n-len(`{"a":"","b":""}`)-len(half))}
	}}
}

func TestRecordRefusesSettings(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	for _, tt := range refusedSettings {
		t.Run(tt.name, func(t *testing.T) {
			ctx := tt.context
			if ctx == nil {
				ctx = background
			}
			c.requireRefused(t, ctx, c.recorder(t, tt.cfg), tt.want, refusal{parcelSent, 0, tt.field}, good)
		})
	}
}

// Headers that exceed their limit in bytes are ErrTooLarge, whether one of them
// does alone or all do together; they have no columns that count characters.
func TestRecordRefusesLargeHeader(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]outbox.RecorderConfig{
		"a value of 9 KiB":        header("tenant", strings.Repeat("x", 9<<10)),
		"a value of 8 KiB":        header("tenant", strings.Repeat("x", 8<<10)),
		"a value that JSON grows": header("tenant", strings.Repeat("<", 2<<10)),
		"a name of 9 KiB":         header(strings.Repeat("x", 9<<10), "1"),
	} {
		t.Run(name, func(t *testing.T) {
			rec, err := outbox.NewRecorder(parcels(t), cfg)
			require.NoError(t, err)
			err = rec.Queue(background, &pgx.Batch{}, good)
			require.Error(t, err)
			require.True(t, errors.Is(err, outbox.ErrTooLarge), "%.200v", err)
		})
	}
}

// What is just small, short or early enough is stored.
var acceptedEvents = []struct {
	name  string
	event outbox.DomainEvent
	cfg   outbox.RecorderConfig
}{
	{"an aggregate id of 255 characters in 765 bytes", id(strings.Repeat("주", 255)), outbox.RecorderConfig{}},
	{"a partition key of 255 characters in 1020 bytes", raw(strings.Repeat("😀", 255), nil), outbox.RecorderConfig{}},
	{"blanks at the ends of the aggregate id", id(" 7 "), outbox.RecorderConfig{}},
	{"a payload of 960 KiB", content(strings.Repeat("x", 960<<10-2)), outbox.RecorderConfig{}},
	{"a raw payload of 960 KiB", raw("key", make([]byte, 960<<10)), outbox.RecorderConfig{}},
	{"a payload at a limit of one byte", content(7), outbox.RecorderConfig{MaxPayload: len("7")}},
	{"a payload above the usual limit under a higher one", content(strings.Repeat("x", 2<<20)), outbox.RecorderConfig{MaxPayload: 4 << 20}},
	{"a payload of null", content(nil), outbox.RecorderConfig{}},
	{"a payload of 1000 levels", content(text(strings.Repeat("[", 1000) + strings.Repeat("]", 1000))), outbox.RecorderConfig{}},
	{"the largest number", content(json.Number("-1e131071")), outbox.RecorderConfig{}},
	{"a pair of surrogates", content(text(`"\ud83d\ude00"`)), outbox.RecorderConfig{}},
	{"an escaped U+FFFD", content(text(`"\ufffd"`)), outbox.RecorderConfig{}},
	{"a time just behind zero", at(time.Time{}.Add(time.Microsecond)), outbox.RecorderConfig{}},
	{"a time that is not yet year 1 where it was taken", at(time.Date(0, 12, 31, 23, 0, 0, 0, time.FixedZone("", -2*3600))), outbox.RecorderConfig{}},
	{"the last second of year 9999", at(time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)), outbox.RecorderConfig{}},
	{"a map", mapParcel{"id": "map"}, outbox.RecorderConfig{}},
	{"a header with nothing in it", good, header("tenant", "")},
	{"headers of 8 KiB", good, headersOf(8 << 10)},
}

func TestRecordAcceptsEvent(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	for i, tt := range acceptedEvents {
		t.Run(tt.name, func(t *testing.T) {
			c.commit(t, background, c.recorder(t, tt.cfg), tt.event)
			require.Len(t, c.ids(t), i+1)
		})
	}
}

// PostgreSQL can print the array, but not hold it while it reads it.
func TestRecordRefusesLongArray(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	c := newCounter(t, parcels(t))
	long := content(text("[" + strings.Repeat("0,", 1<<24) + "0]"))
	c.requireRefused(t, background, c.recorder(t, outbox.RecorderConfig{MaxPayload: 64 << 20}), outbox.ErrJSON, refusal{parcelSent, 0, "payload"}, long)
}
