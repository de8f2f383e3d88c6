package outboxtest_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
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
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

var (
	background = context.Background()
	noon       = time.Date(2026, 2, 3, 12, 0, 0, 0, time.UTC)
)

var _ = []outboxtest.CleanupT{(*testing.T)(nil), (*testing.B)(nil), (*testing.F)(nil)}

// The events of a shop. orderPlaced has its time in the payload.
type orderPlaced struct {
	ID    string    `json:"id"`
	Cents int64     `json:"cents"`
	At    time.Time `json:"at"`
	Note  any       `json:"note,omitempty"`
}

// productLiked has a time that is not in the payload.
type productLiked struct {
	Product string `json:"product"`
	at      time.Time
}

// parcelSent is no JSON, and its codec never writes the same bytes twice.
type parcelSent struct {
	Number string
	at     time.Time
}

// strayEvent is in no registry.
type strayEvent struct{ productLiked }

func (e orderPlaced) OccurredAt() time.Time  { return e.At }
func (e orderPlaced) order() string          { return e.ID }
func (e productLiked) OccurredAt() time.Time { return e.at }
func (e productLiked) product() string       { return e.Product }
func (e parcelSent) OccurredAt() time.Time   { return e.at }
func (e parcelSent) parcel() string          { return e.Number }

var salted = outbox.Codec{
	ContentType: "application/x-parcel",
	Encode: func(_ context.Context, event any) ([]byte, error) {
		return []byte(uuid.NewString() + event.(parcelSent).Number), nil
	},
	Decode: func(_ context.Context, data []byte, event any) error {
		const salt = 36
		if len(data) < salt {
			return errors.New("no salt")
		}
		event.(*parcelSent).Number = string(data[salt:])
		return nil
	},
}

// schemaFixture is a migrated schema of the test's own.
type schemaFixture struct {
	db     *pgxpool.Pool
	schema string
	events *outbox.Registry
	rec    *outbox.Recorder
}

func newSchemaFixture(t testing.TB) *schemaFixture {
	t.Helper()
	db, schema := testenv.Migrated(t)
	return schemaFixtureIn(t, db, schema)
}

func schemaFixtureIn(t testing.TB, db *pgxpool.Pool, schema string) *schemaFixture {
	t.Helper()
	require.NoError(t, outbox.Migrate(background, db, outbox.MigrateConfig{Schema: schema}))
	h := &schemaFixture{db: db, schema: schema}
	h.register(t,
		outbox.Event("acme.order.placed.v1", "Order", orderPlaced.order),
		outbox.Event("acme.product.liked.v1", "Product", productLiked.product),
		outbox.Event("acme.parcel.sent.v1", "Parcel", parcelSent.parcel).Codec(salted),
		outbox.AllowRaw(),
	)
	return h
}

// register gives the fixture other events.
func (h *schemaFixture) register(t testing.TB, events ...outbox.Definition) {
	t.Helper()
	var err error
	h.events, err = outbox.NewRegistry("shop", events...)
	require.NoError(t, err)
	h.rec, err = outbox.NewRecorder(h.events, outbox.RecorderConfig{Schema: h.schema})
	require.NoError(t, err)
}

// in is db with the fixture's schema.
func (h *schemaFixture) in(db outboxtest.DB) outboxtest.DB { return outboxtest.InSchema(db, h.schema) }

// begin opens a transaction that rolls back when the test ends.
func (h *schemaFixture) begin(t testing.TB) pgx.Tx {
	t.Helper()
	tx, err := h.db.Begin(background)
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(background) })
	return tx
}

func (h *schemaFixture) record(t testing.TB, tx pgx.Tx, events ...outbox.DomainEvent) {
	t.Helper()
	require.NoError(t, h.rec.Record(background, tx, events...))
}

// commit records events in a transaction of their own.
func (h *schemaFixture) commit(t testing.TB, events ...outbox.DomainEvent) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(background, h.db, func(tx pgx.Tx) error { return h.rec.Record(background, tx, events...) }))
}

func (h *schemaFixture) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	_, err := h.db.Exec(background, strings.ReplaceAll(sql, "{s}", pgx.Identifier{h.schema}.Sanitize()), args...)
	require.NoError(t, err)
}

func (h *schemaFixture) table(name string) string { return pgx.Identifier{h.schema, name}.Sanitize() }

// onProduce is a hook that is called for each request to produce.
type onProduce func()

// OnBrokerWrite implements [kgo.HookBrokerWrite].
func (f onProduce) OnBrokerWrite(_ kgo.BrokerMetadata, key int16, _ int, _, _ time.Duration, _ error) {
	if key == kmsg.Produce.Int16() {
		f()
	}
}

// fakeT is a test that fails without the one that runs it.
type fakeT struct {
	failure string
	returns bool // Fatalf does, as it may outside of package testing
	cleanup []func()
}

func (f *fakeT) Helper() {}

func (f *fakeT) Cleanup(g func()) { f.cleanup = append(f.cleanup, g) }

func (f *fakeT) Fatalf(format string, args ...any) {
	f.failure = fmt.Sprintf(format, args...)
	if !f.returns {
		runtime.Goexit()
	}
}

// failure returns how a helper fails a test, and requires that it does.
func failure(t testing.TB, helper func(t *fakeT)) string {
	t.Helper()
	f := new(fakeT)
	done := make(chan struct{})
	go func() {
		defer close(done)
		helper(f)
		f.failure = ""
	}()
	<-done
	require.NotEmpty(t, f.failure, "the helper did not fail the test")
	require.Regexp(t, "^outboxtest: ", f.failure)
	return f.failure
}
