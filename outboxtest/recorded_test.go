package outboxtest_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxtest"
	"github.com/stretchr/testify/require"
)

type events = []outbox.DomainEvent

var recordedTests = []struct {
	name           string
	recorded, want events
}{
	{"the one that there is", events{orderPlaced{ID: "1", Cents: 5, At: noon}}, events{orderPlaced{ID: "1", Cents: 5, At: noon}}},
	{"pointers", events{&orderPlaced{ID: "1", At: noon}}, events{&orderPlaced{ID: "1", At: noon}}},
	{"one of several", events{orderPlaced{ID: "1", At: noon}, orderPlaced{ID: "2", At: noon}, productLiked{"1", noon}}, events{orderPlaced{ID: "2", At: noon}}},
	{"several types in another order", events{productLiked{"1", noon}, orderPlaced{ID: "1", At: noon}}, events{orderPlaced{ID: "1", At: noon}, productLiked{"1", noon}}},
	{"as often as it was", events{productLiked{"1", noon}, productLiked{"1", noon}}, events{productLiked{"1", noon}, productLiked{"1", noon}}},
	{"a time beside the payload", events{productLiked{"1", noon}}, events{productLiked{"1", noon}}},
	{"any time", events{productLiked{"1", noon}}, events{productLiked{Product: "1"}}},
	{"any time in the payload", events{orderPlaced{ID: "2", At: noon}, orderPlaced{ID: "1", At: noon}}, events{orderPlaced{ID: "1"}}},
	{"any time in a part of the payload", events{orderPlaced{ID: "1", At: noon, Note: []step{{"paid", noon}}}}, events{orderPlaced{ID: "1", Note: []step{{Name: "paid"}}}}},
	{"the time of the event, which is left out", events{orderPlaced{ID: "1", At: noon, Note: left{noon}}}, events{orderPlaced{ID: "1", Note: left{}}}},
	{"any time, but another one first", events{productLiked{"1", noon}, productLiked{"1", noon.Add(1e9)}}, events{productLiked{Product: "1"}, productLiked{"1", noon}}},
	{"a time to the microsecond", events{productLiked{"1", noon.Add(1999)}}, events{productLiked{"1", noon.Add(1001)}}},
	{"a time of another zone", events{productLiked{"1", noon.In(time.FixedZone("", 3600))}}, events{productLiked{"1", noon}}},
	{"a time before 1970", events{productLiked{"1", time.Unix(-5, 999)}}, events{productLiked{"1", time.Unix(-5, 999)}}},
	{"JSON that jsonb writes otherwise", events{orderPlaced{ID: "1", At: noon, Note: json.RawMessage(`{"bb":1e3,"a":"<&>"}`)}},
		events{orderPlaced{ID: "1", At: noon, Note: json.RawMessage(`{"a":"<&>","bb":1000}`)}}},
	{"options, and none of them wanted", events{outbox.With(orderPlaced{ID: "1", At: noon}, elsewhere)}, events{orderPlaced{ID: "1", At: noon}}},
	{"the options that are wanted", events{orderPlaced{ID: "1", At: noon}, outbox.With(&orderPlaced{ID: "1", At: noon}, elsewhere)},
		events{orderPlaced{ID: "1", At: noon}, outbox.With(orderPlaced{ID: "1", At: noon}, elsewhere)}},
	{"some of the options", events{outbox.With(productLiked{"1", noon}, elsewhere)},
		events{outbox.With(productLiked{"1", noon}, outbox.EventOptions{Attributes: map[string]string{"market": "seoul"}})}},
	{"options that one of two has, and options that both have",
		events{outbox.With(productLiked{"1", noon}, seoul(1)), outbox.With(productLiked{"1", noon}, seoul(2))},
		events{outbox.With(productLiked{"1", noon}, seoul(0)), outbox.With(productLiked{"1", noon}, outbox.EventOptions{ID: uuid.UUID{1}})}},
	{"a chain of options", events{outbox.With(productLiked{"1", noon}, seoul(1)), outbox.With(productLiked{"1", noon}, seoul(2)), outbox.With(productLiked{"1", noon.Add(1e9)}, seoul(3))},
		events{outbox.With(productLiked{Product: "1"}, seoul(0)), outbox.With(productLiked{"1", noon}, seoul(0)), outbox.With(productLiked{Product: "1"}, seoul(1))}},
	{"a due time", events{outbox.With(productLiked{"1", noon}, outbox.EventOptions{NotBefore: noon.Add(time.Hour)}), productLiked{"2", noon}},
		events{productLiked{"2", noon}, outbox.With(productLiked{"1", noon}, outbox.EventOptions{NotBefore: noon.Add(time.Hour)})}},
	{"a time at which it expires", events{outbox.With(productLiked{"1", noon}, outbox.EventOptions{Expires: noon.Add(time.Hour)}), productLiked{"1", noon}},
		events{productLiked{"1", noon}, outbox.With(productLiked{"1", noon}, outbox.EventOptions{Expires: noon.Add(time.Hour)})}},
	{"the key that an event has anyway", events{orderPlaced{ID: "1", At: noon}}, events{outbox.With(orderPlaced{ID: "1", At: noon}, outbox.EventOptions{Key: "1"})}},
	{"raw events, JSON and bytes", events{hook(`{"b":1,"a":2}`, ""), hook("x", "text/plain"), hook("y", "text/plain")},
		events{hook("y", "text/plain"), hook(`{"a":2,"b":1}`, "application/json")}},
	{"a raw event at any time, with options", events{outbox.With(hook("x", "text/plain"), elsewhere)},
		events{outbox.With(outbox.RawEvent{EventType: hookType, AggregateType: "Invoice", AggregateID: "1", Payload: []byte("x"), ContentType: "text/plain"}, elsewhere)}},
	{"a tombstone among others", events{productLiked{"1", noon}, outbox.With(productLiked{"2", noon}, tombstone), outbox.With(hook("", ""), tombstone)},
		events{outbox.With(productLiked{"2", noon}, tombstone), outbox.With(hook("", ""), tombstone)}},
	{"another encoding of the same", events{parcelSent{"1", noon}, parcelSent{"2", noon}}, events{parcelSent{"2", noon}, parcelSent{"1", noon}}},
}

// seoul returns options with an id, or without one for 0.
func seoul(id byte) outbox.EventOptions {
	return outbox.EventOptions{ID: uuid.UUID{id}, Attributes: map[string]string{"market": "seoul"}}
}

const hookType = "stripe.invoice.paid.v1"

// hook returns a raw event.
func hook(payload, contentType string) outbox.RawEvent {
	return outbox.RawEvent{EventType: hookType, AggregateType: "Invoice", AggregateID: "1", Payload: []byte(payload), ContentType: contentType, Time: noon}
}

var tombstone = outbox.EventOptions{Tombstone: true}

// step and left are parts of a payload with a time.
type (
	step struct {
		Name string
		At   time.Time
	}
	left struct {
		At time.Time `json:"at,omitzero"`
	}
)

var elsewhere = outbox.EventOptions{
	ID: uuid.UUID{1}, Topic: "elsewhere", Key: "k", Attributes: map[string]string{"market": "seoul", "tier": "vip"}, Headers: map[string]string{"tenant": "acme"},
}

func TestRequireRecorded(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	for _, tt := range recordedTests {
		t.Run(tt.name, func(t *testing.T) {
			tx := h.begin(t)
			h.record(t, tx, tt.recorded...)
			outboxtest.RequireRecorded(background, t, h.in(tx), h.events, tt.want...)
		})
	}
}

var notRecordedTests = []struct {
	name           string
	recorded, want events
	says           []string
}{
	{"nothing was", nil, events{orderPlaced{ID: "1", Cents: 5, At: noon}}, []string{
		"not recorded in this transaction:\n" +
			`  acme.order.placed.v1 at 2026-02-03T12:00:00Z: {"at": "2026-02-03T12:00:00Z", "id": "1", "cents": 5}` + "\n" +
			"these were:\n  none\n"}},
	{"another payload", events{orderPlaced{ID: "1", Cents: 6, At: noon}}, events{orderPlaced{ID: "1", Cents: 5, At: noon}}, []string{
		`"cents": 5}` + "\nthese were:\n" + `  acme.order.placed.v1 at 2026-02-03T12:00:00Z: {"at": "2026-02-03T12:00:00Z", "id": "1", "cents": 6}`}},
	{"another payload, at any time", events{orderPlaced{ID: "1", At: noon}}, events{orderPlaced{ID: "2"}}, []string{`"id": "2"`, `"id": "1"`}},
	{"more steps", events{orderPlaced{ID: "1", At: noon, Note: []step{{"paid", noon}, {"sent", noon}}}}, events{orderPlaced{ID: "1", Note: []step{{Name: "paid"}}}}, []string{"these were:"}},
	{"no time in its place", events{orderPlaced{ID: "1", At: noon, Note: "noon"}}, events{orderPlaced{ID: "1", Note: time.Time{}}}, []string{`"note": "noon"`}},
	{"a member that is no time", events{orderPlaced{ID: "1", At: noon, Note: 1}}, events{orderPlaced{ID: "1"}}, []string{`"note": 1`}},
	{"another time of what is left out", events{orderPlaced{ID: "1", At: noon, Note: left{noon.Add(time.Hour)}}}, events{orderPlaced{ID: "1", Note: left{}}}, []string{"13:00:00"}},
	{"another type", events{productLiked{"1", noon}}, events{orderPlaced{ID: "1", At: noon}}, []string{
		"these were:\n" + `  acme.product.liked.v1 at 2026-02-03T12:00:00Z: {"product": "1"}`}},
	{"another time", events{productLiked{"1", noon.Add(time.Microsecond)}}, events{productLiked{"1", noon}}, []string{
		"not recorded in this transaction:\n" + `  acme.product.liked.v1 at 2026-02-03T12:00:00Z: {`,
		"these were:\n" + `  acme.product.liked.v1 at 2026-02-03T12:00:00.000001Z: {`}},
	{"one of two", events{productLiked{"1", noon}, productLiked{"3", noon}}, events{productLiked{"1", noon}, productLiked{"2", noon}}, []string{
		"not recorded in this transaction:\n" + `  acme.product.liked.v1 at 2026-02-03T12:00:00Z: {"product": "2"}` + "\nthese were:\n",
		`"1"`, `"3"`}},
	{"once, wanted twice", events{productLiked{"1", noon}}, events{productLiked{"1", noon}, productLiked{Product: "1"}}, []string{
		"not recorded in this transaction:\n" + `  acme.product.liked.v1: {"product": "1"}`}},
	{"another topic", events{outbox.With(productLiked{"1", noon}, elsewhere)}, events{outbox.With(productLiked{"1", noon}, outbox.EventOptions{Topic: "here"})}, []string{
		"not recorded in this transaction:\n" + `  acme.product.liked.v1 at 2026-02-03T12:00:00Z with topic here: {`,
		"with id 01000000-0000-0000-0000-000000000000, topic elsewhere, key k, attributes map[market:seoul tier:vip], headers map[tenant:acme]: {"}},
	{"no such attribute", events{productLiked{"1", noon}}, events{outbox.With(productLiked{"1", noon}, outbox.EventOptions{Attributes: map[string]string{"market": "x"}})}, []string{
		"with attributes map[market:x]: {"}},
	{"other bytes", events{parcelSent{"1", noon}}, events{parcelSent{"2", noon}}, []string{
		"acme.parcel.sent.v1 at 2026-02-03T12:00:00Z: {Number:2 at:", "these were:", "{Number:1 at:"}},
	{"bytes of another type", events{parcelSent{"1", noon}}, events{productLiked{"2", noon}}, []string{"37 bytes of application/x-parcel: "}},
	{"other bytes of a raw event", events{hook("x", "text/plain")}, events{hook("y", "text/plain")}, []string{
		"stripe.invoice.paid.v1 at 2026-02-03T12:00:00Z: ", "these were:"}},
	{"a raw event that is refused", nil, events{hook("{", "")}, []string{"wanted event of type stripe.invoice.paid.v1: ", "payload"}},
	{"no tombstone", events{productLiked{"1", noon}}, events{outbox.With(productLiked{"1", noon}, tombstone)}, []string{
		"acme.product.liked.v1 at 2026-02-03T12:00:00Z: a tombstone", "these were:"}},
	{"an unregistered event", nil, events{strayEvent{}}, []string{"outboxtest_test.strayEvent is not registered"}},
	{"a nil event", nil, events{productLiked{"1", noon}, nil}, []string{"wanted event 1 must not be nil"}},
	{"a nil pointer", nil, events{(*orderPlaced)(nil)}, []string{"wanted event 0 must not be nil"}},
	{"an event that cannot be encoded", nil, events{orderPlaced{ID: "1", Note: func() {}}}, []string{"encode wanted event 0, acme.order.placed.v1: ", "unsupported type"}},
	{"JSON that PostgreSQL refuses", nil, events{orderPlaced{ID: "a\x00"}}, []string{"wanted events as jsonb: "}},
	{"nothing wanted", nil, nil, []string{"name at least one"}},
}

func TestRequireRecordedFails(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	for _, tt := range notRecordedTests {
		t.Run(tt.name, func(t *testing.T) {
			tx := h.begin(t)
			h.record(t, tx, tt.recorded...)
			says := failure(t, func(f *fakeT) { outboxtest.RequireRecorded(background, f, h.in(tx), h.events, tt.want...) })
			for _, want := range tt.says {
				require.Contains(t, says, want)
			}
		})
	}
}

// Tests that share a database and roll back do not see each other; a query through the pool sees
// what is committed.
func TestRecordedWhere(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	h.commit(t, productLiked{"committed", noon})
	tx := h.begin(t)
	require.Empty(t, outboxtest.Recorded[productLiked](background, t, h.in(tx), h.events), "it has recorded nothing")
	h.record(t, tx, productLiked{"open", noon})
	savepoint, err := tx.Begin(background)
	require.NoError(t, err)
	h.record(t, savepoint, productLiked{"nested", noon})
	require.NoError(t, savepoint.Commit(background))
	gone, err := tx.Begin(background)
	require.NoError(t, err)
	h.record(t, gone, productLiked{"gone", noon})
	require.NoError(t, gone.Rollback(background))

	conn, err := h.db.Acquire(background)
	require.NoError(t, err)
	defer conn.Release()
	for _, tt := range []struct {
		name string
		db   outboxtest.DB
		want []string
	}{
		{"transaction", tx, []string{"open", "nested"}},
		{"pool", h.db, []string{"committed"}},
		{"connection", conn, []string{"committed"}},
	} {
		var got []string
		for _, e := range outboxtest.Recorded[productLiked](background, t, h.in(tt.db), h.events) {
			got = append(got, e.Product)
		}
		require.Equal(t, tt.want, got, tt.name)
	}
	says := failure(t, func(f *fakeT) {
		outboxtest.RequireRecorded(background, f, h.in(h.db), h.events, productLiked{"open", noon})
	})
	require.Contains(t, says, "not recorded in schema "+h.schema)
}

// Without InSchema, and for pools of every mode of the protocol.
func TestRecordedInPublic(t *testing.T) {
	t.Parallel()
	other := testenv.OtherDatabase(t)
	h := schemaFixtureIn(t, other, "public")
	h.commit(t, orderPlaced{ID: "1", At: noon}, parcelSent{"1", noon})
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeCacheStatement, pgx.QueryExecModeDescribeExec,
	} {
		if mode == pgx.QueryExecModeCacheStatement || mode == pgx.QueryExecModeDescribeExec {
			testenv.Direct(t) // prepared statements, from here on
		}
		db := testenv.Pool(t, func(cfg *pgxpool.Config) {
			cfg.ConnConfig.Database, cfg.ConnConfig.DefaultQueryExecMode = other.Config().ConnConfig.Database, mode
		})
		outboxtest.RequireRecorded(background, t, db, h.events, orderPlaced{ID: "1", At: noon}, parcelSent{"1", noon})
		outboxtest.RequireNotRecorded[productLiked](background, t, db, h.events)
		db.Close()
	}
}

func TestRequireNotRecorded(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	tx := h.begin(t)
	h.record(t, tx, orderPlaced{ID: "1", At: noon})
	outboxtest.RequireNotRecorded[productLiked](background, t, h.in(tx), h.events)
	says := failure(t, func(f *fakeT) { outboxtest.RequireNotRecorded[orderPlaced](background, f, h.in(tx), h.events) })
	require.Contains(t, says, "recorded in this transaction, and should not be:\n"+`  acme.order.placed.v1 at 2026-02-03T12:00:00Z: {"at"`)
	says = failure(t, func(f *fakeT) { outboxtest.RequireNotRecorded[strayEvent](background, f, h.in(tx), h.events) })
	require.Contains(t, says, "strayEvent is not registered")
}

// Events come back in their order, with what travels in the payload.
func TestRecorded(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	tx := h.begin(t)
	h.record(t, tx, orderPlaced{ID: "2", At: noon}, productLiked{"1", noon}, &orderPlaced{ID: "1", Cents: 5, At: noon}, parcelSent{"1", noon})
	require.Equal(t, []orderPlaced{{ID: "2", At: noon}, {ID: "1", Cents: 5, At: noon}}, outboxtest.Recorded[orderPlaced](background, t, h.in(tx), h.events))
	require.Equal(t, []productLiked{{Product: "1"}}, outboxtest.Recorded[productLiked](background, t, h.in(tx), h.events))
	require.Equal(t, []parcelSent{{Number: "1"}}, outboxtest.Recorded[parcelSent](background, t, h.in(tx), h.events))
	says := failure(t, func(f *fakeT) { outboxtest.Recorded[strayEvent](background, f, h.in(tx), h.events) })
	require.Contains(t, says, "strayEvent is not registered")
}

// An event that cannot be read again was not recorded well.
func TestRecordedUnreadable(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	for _, tt := range []struct{ name, change, says string }{
		{"the codec fails", `payload_bytes = 'short'`, "the registry's codec cannot decode it: no salt"},
		{"of another content type", `content_type = 'application/x-old'`, "recorded as application/x-old, and the registry's codec is for application/x-parcel"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tx := h.begin(t)
			h.record(t, tx, parcelSent{"1", noon})
			_, err := tx.Exec(background, `UPDATE `+pgx.Identifier{h.schema, "outbox"}.Sanitize()+` SET `+tt.change)
			require.NoError(t, err)
			says := failure(t, func(f *fakeT) { outboxtest.Recorded[parcelSent](background, f, h.in(tx), h.events) })
			require.Contains(t, says, tt.says)
			says = failure(t, func(f *fakeT) {
				outboxtest.RequireRecorded(background, f, h.in(tx), h.events, parcelSent{"1", noon})
			})
			require.Contains(t, says, "not recorded")
		})
	}
}

// oneWay writes what it cannot read.
type oneWay struct{ productLiked }

func TestRecordedIsReadAgain(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	codec := outbox.JSON()
	codec.Decode = func(context.Context, []byte, any) error { return errors.New("one way") }
	h.register(t, outbox.Event("acme.one.way.v1", "Way", oneWay.product).Codec(codec))
	tx := h.begin(t)
	event := oneWay{productLiked{"1", noon}}
	h.record(t, tx, event)
	says := failure(t, func(f *fakeT) { outboxtest.RequireRecorded(background, f, h.in(tx), h.events, event) })
	require.Contains(t, says, "acme.one.way.v1 was recorded, and the registry's codec cannot decode it: one way")
}

// secretive writes more than it reads: its codec decodes different payloads into
// equal events.
type secretive struct {
	productLiked
	secret string
}

func (e secretive) MarshalJSON() ([]byte, error) {
	return json.Marshal(map[string]string{"secret": e.secret})
}
func (e *secretive) UnmarshalJSON([]byte) error { return nil }

func TestRequireRecordedComparesPayloads(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	h.register(t, outbox.Event("acme.secret.kept.v1", "Secret", secretive.product))
	tx := h.begin(t)
	h.record(t, tx, secretive{productLiked{"1", noon}, "a"})
	outboxtest.RequireRecorded(background, t, h.in(tx), h.events, secretive{productLiked{"1", noon}, "a"})
	says := failure(t, func(f *fakeT) {
		outboxtest.RequireRecorded(background, f, h.in(tx), h.events, secretive{productLiked{"1", noon}, "b"})
	})
	require.Contains(t, says, `{"secret": "b"}`)
}

func TestRecordedWithoutTables(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	says := failure(t, func(f *fakeT) {
		outboxtest.RequireNotRecorded[orderPlaced](background, f, outboxtest.InSchema(h.db, "nowhere"), h.events)
	})
	require.Contains(t, says, "read outbox: ")
	require.Contains(t, says, "nowhere.outbox")
}

// A failure message remains readable.
func TestFailureIsCut(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	tx := h.begin(t)
	for range 25 {
		h.record(t, tx, productLiked{strings.Repeat("é", 250), noon}, orderPlaced{ID: "1", At: noon, Note: strings.Repeat("é", 5000)})
	}
	says := failure(t, func(f *fakeT) { outboxtest.RequireNotRecorded[orderPlaced](background, f, h.in(tx), h.events) })
	require.Contains(t, says, "and 5 more")
	require.Contains(t, says, "é… (10")
	require.Less(t, len(says), 23_000)
}

// A Fatalf that returns must not lead to a panic.
func TestFatalfThatReturns(t *testing.T) {
	t.Parallel()
	h := newSchemaFixture(t)
	f := &fakeT{returns: true}
	require.Empty(t, outboxtest.Recorded[strayEvent](background, f, h.in(h.db), h.events))
	require.NotEmpty(t, f.failure)
	require.Empty(t, outboxtest.NewRecord(background, f, h.events, strayEvent{}))
}
