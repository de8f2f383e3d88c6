package itest

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// statementFixture records the same events by Record and by Statement, into two schemas.
type statementFixture struct {
	record, statement *counter
	configure         func(*outbox.RecorderConfig)
}

func newStatementFixture(t *testing.T) *statementFixture {
	t.Helper()
	return &statementFixture{record: newCounter(t, parcels(t)), statement: newCounter(t, parcels(t))}
}

// recorder returns a recorder whose ids are those of every other one of the fixture.
func (f *statementFixture) recorder(t *testing.T, c *counter) *outbox.Recorder {
	t.Helper()
	n := uint32(0)
	cfg := outbox.RecorderConfig{NewID: func() (id uuid.UUID, err error) {
		n++
		copy(id[12:], []byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
		return id, nil
	}}
	if f.configure != nil {
		f.configure(&cfg)
	}
	return c.recorder(t, cfg)
}

// requireEqualRows requires that exec, which runs a statement in a transaction, stores what Record stores.
func (f *statementFixture) requireEqualRows(t *testing.T, ctx context.Context, exec func(query string, args []any) error, events ...outbox.DomainEvent) {
	t.Helper()
	f.record.commit(t, ctx, f.recorder(t, f.record), events...)
	query, args, err := f.recorder(t, f.statement).Statement(ctx, events...)
	require.NoError(t, err)
	require.NoError(t, exec(query, args))
	want, got := f.record.takeTexts(t), f.statement.takeTexts(t)
	require.Len(t, want, len(events))
	require.Equal(t, want, got)
}

// takeTexts returns the rows as PostgreSQL prints them, all columns that a recorder may fill, and removes them.
func (c *counter) takeTexts(t *testing.T) []string {
	t.Helper()
	var columns string
	require.NoError(t, c.db.QueryRow(background, `
		SELECT string_agg(format('coalesce(%I::text, ''NULL'')', attname), ', ' ORDER BY attnum) FROM pg_attribute
		 WHERE attrelid = $1::text::regclass AND attnum > 0 AND NOT attisdropped AND attname <> ALL (ARRAY['id', 'created_at', 'xid'])`,
		pgx.Identifier{c.schema, "outbox"}.Sanitize()).Scan(&columns))
	rows, err := c.db.Query(background, c.sql(`SELECT concat_ws(' | ', `+columns+`) FROM {s}.outbox ORDER BY id`))
	require.NoError(t, err)
	texts, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	_, err = c.db.Exec(background, c.sql(`DELETE FROM {s}.outbox`))
	require.NoError(t, err)
	return texts
}

// execs run a statement in a transaction of each driver and mode.
func execs(t *testing.T, test func(t *testing.T, exec func(query string, args []any) error)) {
	for _, mode := range execModes {
		t.Run("pgx "+mode.String(), func(t *testing.T) {
			db := testenv.PoolIn(t, mode)
			test(t, func(query string, args []any) error {
				return pgx.BeginFunc(background, db, func(tx pgx.Tx) error {
					_, err := tx.Exec(background, query, args...)
					return err
				})
			})
		})
		t.Run("stdlib "+mode.String(), func(t *testing.T) {
			db := stdlib.OpenDBFromPool(testenv.PoolIn(t, mode))
			defer db.Close()
			test(t, func(query string, args []any) error {
				tx, err := db.BeginTx(background, nil)
				require.NoError(t, err)
				defer tx.Rollback()
				if _, err := tx.ExecContext(background, query, args...); err != nil {
					return err
				}
				return tx.Commit()
			})
		})
	}
}

// Whatever Record accepts, Statement stores alike.
func TestStatementStoresTheSameRows(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	f := newStatementFixture(t)
	headers := map[string]string{}
	f.configure = func(cfg *outbox.RecorderConfig) {
		cfg.MaxPayload = 4 << 20
		cfg.Headers = func(context.Context, outbox.DomainEvent) map[string]string { return headers }
	}
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	odd := "$1 ?\x01\x1f\x7f\u0080\u2028\ufffd😀주<&>'\"\\\\u0000 {NULL}"
	corpus := []outbox.DomainEvent{
		content(nil), content(text(`[1e300, -1E-300, -0.0, 100e-2, 1.50, {"b":1,"a":[ ],"b":2}, "\u00e9\u0001\ud83d\ude00\/\\u0000"]`)),
		content(odd), content(map[string]any{odd: []any{odd, nil, true}}), content(text(" \n\t{ \"a\" :\r 1 } ")), content(json.Number("-1e131071")),
		raw("key", nil), raw("key", all), raw("$1", []byte(`\x00`)), raw("null", []byte(random(100_000))), raw(strings.Trim(odd, "\x01"), []byte("NULL")),
		mapParcel{"id": "map"}, id("'; DROP TABLE outbox; --"), id(`\"$1`),
		at(time.Date(1, 1, 1, 0, 0, 0, 1000, time.UTC)), at(time.Date(9999, 12, 31, 23, 59, 59, 999_999_999, time.UTC)),
		at(time.Date(1969, 12, 31, 23, 59, 59, 999_999_999, time.UTC)), at(time.Date(2026, 2, 3, 4, 5, 6, 123_456_789, time.FixedZone("", 9*3600+30*60+17))),
		at(time.Date(1900, 2, 28, 0, 0, 0, 1, time.FixedZone("", -13*3600))),
	}
	var large []outbox.DomainEvent
	for _, accepted := range acceptedEvents {
		if accepted.cfg.NewID == nil && accepted.cfg.Headers == nil {
			large = append(large, accepted.event)
		}
	}
	execs(t, func(t *testing.T, exec func(string, []any) error) {
		headers = nil
		f.requireEqualRows(t, background, exec, corpus...)
		headers = map[string]string{"tenant": odd, `a"b`: "", "주": "x"}
		ctx := outbox.WithTraceParent(outbox.WithCorrelationID(background, "주 \"<&>'$1"), traceparent)
		f.requireEqualRows(t, ctx, exec, append(corpus, large...)...)
		require.Error(t, exec(`SELECT $1::int`, []any{"a"}), "it does run statements")
	})
	for _, event := range corpus {
		f.requireEqualRows(t, background, func(query string, args []any) error {
			_, err := f.statement.db.Exec(background, query, args...)
			return err
		}, event)
	}
}

// And random ones.
func TestStatementRandom(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	f := newStatementFixture(t)
	db := stdlib.OpenDBFromPool(f.statement.db)
	defer db.Close()
	for range 50 {
		events := make([]outbox.DomainEvent, 1+rng.IntN(30))
		for i := range events {
			events[i] = randomParcel(rng)
		}
		f.requireEqualRows(t, background, func(query string, args []any) error {
			_, err := db.ExecContext(background, query, args...)
			return err
		}, events...)
	}
}

// randomParcel returns an event that Record accepts.
func randomParcel(rng *rand.Rand) outbox.DomainEvent {
	at := time.Unix(rng.Int64N(1e11)-3e10, rng.Int64N(1e9)).In(time.FixedZone("", rng.IntN(86400)-43200))
	p := parcel{ID: "i" + randomText(rng), Address: "a" + randomText(rng), Sent: at}
	switch rng.IntN(3) {
	case 0:
		b := make([]byte, rng.IntN(100))
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		p.Content = b
		return rawParcel{p}
	case 1:
		p.Content = text(fmt.Sprintf("[%d.%0*de%d, %q]", rng.Int64(), 1+rng.IntN(20), rng.IntN(1000), rng.IntN(600)-300, "x"))
	default:
		p.Content = map[string]any{randomText(rng): randomText(rng), "n": rng.NormFloat64()}
	}
	return p
}

// randomText has characters that a parser may misread. None is a control character of attributes.
func randomText(rng *rand.Rand) string {
	signs := []rune("ab01 \"\\'${}[],:?<>&/%_주😀\u2028\ufffd\u00ff")
	s := make([]rune, rng.IntN(40))
	for i := range s {
		s[i] = signs[rng.IntN(len(signs))]
	}
	return string(s)
}

// IDs are in the order of the events, however many there are.
func TestStatementKeepsOrder(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	events, ids := numberedParcels(manyEvents)
	query, args, err := c.rec.Statement(background, events...)
	require.NoError(t, err)
	require.Len(t, args, 1)
	require.IsType(t, "", args[0])
	tag, err := c.db.Exec(background, query, args...)
	require.NoError(t, err)
	require.EqualValues(t, manyEvents, tag.RowsAffected())
	require.Equal(t, ids, c.ids(t))
}

func TestStatementIsRolledBack(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	query, args, err := c.rec.Statement(background, good, raw("key", []byte("b")))
	require.NoError(t, err)
	tx := c.begin(t)
	_, err = tx.Exec(background, query, args...)
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(background))
	require.Empty(t, c.ids(t))
}

// What Record refuses, Statement refuses, and returns nothing that could be run.
func TestStatementRefuses(t *testing.T) {
	t.Parallel()
	rec, err := outbox.NewRecorder(parcels(t), outbox.RecorderConfig{})
	require.NoError(t, err)
	requireNone := func(t *testing.T, rec *outbox.Recorder, ctx context.Context, want error, says refusal, events ...outbox.DomainEvent) {
		t.Helper()
		query, args, err := rec.Statement(ctx, events...)
		requireRefused(t, err, want, says)
		require.Empty(t, query)
		require.Nil(t, args)
	}
	requireNone(t, rec, background, outbox.ErrEmpty, refusal{"", -1, "events"})
	for _, tt := range refusedEvents {
		t.Run(tt.name, func(t *testing.T) {
			requireNone(t, rec, background, tt.want, refusal{tt.eventType, 2, tt.field}, good, good, tt.event, good)
		})
	}
	for _, tt := range refusedSettings {
		t.Run(tt.name, func(t *testing.T) {
			rec, err := outbox.NewRecorder(parcels(t), tt.cfg)
			require.NoError(t, err)
			ctx := tt.context
			if ctx == nil {
				ctx = background
			}
			requireNone(t, rec, ctx, tt.want, refusal{parcelSent, 0, tt.field}, good)
		})
	}
}

// One document is one value of PostgreSQL, which has limits of its own.
func TestStatementOfTooManyEvents(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	codec := rawCodec
	large := make([]byte, 100<<20)
	codec.Encode = func(context.Context, any) ([]byte, error) { return large, nil }
	events, err := outbox.NewRegistry("post-office", outbox.Event(rawSent, "Raw", rawParcel.Number).Codec(codec))
	require.NoError(t, err)
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{MaxPayload: len(large)})
	require.NoError(t, err)
	_, args, err := rec.Statement(background, raw("key", nil))
	require.NoError(t, err, "a single event always fits")
	require.Greater(t, len(args[0].(string)), len(large)*4/3)
	_, _, err = rec.Statement(background, raw("key", nil), raw("key", nil))
	requireRefused(t, err, outbox.ErrTooLarge, refusal{"", -1, "events"})
}

// The hook gets the events, its context is that of the headers, and done tells whether there is a statement.
func TestStatementCallsHook(t *testing.T) {
	t.Parallel()
	var recorded []outbox.DomainEvent
	var ends []error
	rec, err := outbox.NewRecorder(parcels(t), outbox.RecorderConfig{Hooks: outbox.RecorderHooks{
		Recording: func(ctx context.Context, events []outbox.DomainEvent) (context.Context, func(error)) {
			recorded = append(recorded, events...)
			return outbox.WithTraceParent(ctx, traceparent), func(err error) { ends = append(ends, err) }
		},
	}})
	require.NoError(t, err)
	_, args, err := rec.Statement(background, good, raw("key", nil))
	require.NoError(t, err)
	require.Contains(t, args[0], traceparent)
	_, _, err = rec.Statement(background, id(""))
	require.ErrorIs(t, err, outbox.ErrEmpty)
	require.Equal(t, []outbox.DomainEvent{good, raw("key", nil), id("")}, recorded)
	require.Equal(t, []error{nil, err}, ends)
	_, _, err = rec.Statement(background)
	require.Error(t, err)
	require.Len(t, ends, 2, "no events, no hook")
}

// A missing table is PostgreSQL's error, as for Queue.
func TestStatementWithoutTables(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Schema(t)
	rec, err := outbox.NewRecorder(parcels(t), outbox.RecorderConfig{Schema: schema})
	require.NoError(t, err)
	query, args, err := rec.Statement(background, good)
	require.NoError(t, err)
	_, err = db.Exec(background, query, args...)
	require.ErrorContains(t, err, "42P01")
}

// Through a search path that leads elsewhere, and with a session that reads dates in another way.
func TestStatementInStrangeSessions(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // settings of sessions
	f := newStatementFixture(t)
	db := testenv.Pool(t, func(cfg *pgxpool.Config) {
		for name, value := range map[string]string{"search_path": "pg_temp", "TimeZone": "Asia/Kathmandu", "DateStyle": "SQL, DMY", "bytea_output": "escape", "extra_float_digits": "0"} {
			cfg.ConnConfig.RuntimeParams[name] = value
		}
	})
	exec := func(query string, args []any) error {
		_, err := db.Exec(background, query, args...)
		return err
	}
	f.requireEqualRows(t, background, exec, at(time.Date(2026, 2, 3, 4, 5, 6, 7000, time.UTC)), raw("k", []byte{0, 255}), content(1e300), at(time.Date(88, 1, 2, 3, 4, 5, 0, time.UTC)))
}

// An ended transaction of database/sql says so.
func TestStatementInEndedTransaction(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	db := stdlib.OpenDBFromPool(c.db)
	defer db.Close()
	tx, err := db.BeginTx(background, nil)
	require.NoError(t, err)
	require.NoError(t, tx.Commit())
	query, args, err := c.rec.Statement(background, slices.Repeat([]outbox.DomainEvent{good}, 3)...)
	require.NoError(t, err)
	_, err = tx.ExecContext(background, query, args...)
	require.ErrorIs(t, err, sql.ErrTxDone)
}
