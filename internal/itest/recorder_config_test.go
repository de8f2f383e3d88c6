package itest

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

func TestRecorderConfig(t *testing.T) {
	t.Parallel()
	_, err := outbox.NewRecorder(parcels(t), outbox.RecorderConfig{MaxPayload: 100<<20 + 1})
	require.ErrorContains(t, err, "MaxPayload")
	_, err = outbox.NewRecorder(nil, outbox.RecorderConfig{Schema: strings.Repeat("x", 64), MaxPayload: -1})
	require.ErrorIs(t, err, outbox.ErrNilArgument)
	require.ErrorIs(t, err, outbox.ErrTooLong)
	for _, field := range []string{"registry", "Schema", "MaxPayload"} {
		require.ErrorContains(t, err, field)
	}
	for name, tt := range map[string]struct {
		schema string
		want   error
	}{
		"63 bytes":                 {strings.Repeat("x", 63), nil},
		"64 bytes":                 {strings.Repeat("x", 64), outbox.ErrTooLong},
		"more bytes than letters":  {strings.Repeat("주", 22), outbox.ErrTooLong},
		"quotes":                   {`a "b"`, nil},
		"NUL":                      {"a\x00", outbox.ErrNUL},
		"bytes that are not UTF-8": {badText, outbox.ErrUTF8},
		"whoever is logged in":     {"$user", outbox.ErrMalformed},
	} {
		t.Run("a schema of "+name, func(t *testing.T) {
			_, err := outbox.NewRecorder(parcels(t), outbox.RecorderConfig{Schema: tt.schema})
			require.ErrorIs(t, err, tt.want)
			if tt.want == nil {
				require.NoError(t, err)
			}
		})
	}
}

// A service without any setting uses the schema public.
func TestDefaultSchema(t *testing.T) {
	t.Parallel()
	db := testenv.OtherDatabase(t)
	require.NoError(t, outbox.Migrate(background, db, outbox.MigrateConfig{}))
	rec, err := outbox.NewRecorder(parcels(t), outbox.RecorderConfig{})
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(background, db, func(tx pgx.Tx) error { return rec.Record(background, tx, good) }))
	var id string
	require.NoError(t, db.QueryRow(background, `SELECT aggregate_id FROM public.outbox`).Scan(&id))
	require.Equal(t, "good", id)
}

// A schema that is not on the search path, and a search path that leads to
// another outbox: the recorder writes where it was told to.
func TestSearchPathDoesNotMatter(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // a setting of sessions
	c, trap := newCounter(t, parcels(t)), newCounter(t, parcels(t))
	db := testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.ConnConfig.RuntimeParams["search_path"] = pgx.Identifier{trap.schema}.Sanitize()
	})
	require.NoError(t, pgx.BeginFunc(background, db, func(tx pgx.Tx) error { return c.rec.Record(background, tx, good) }))
	require.Equal(t, []string{"good"}, c.ids(t))
	require.Empty(t, trap.ids(t))
}
