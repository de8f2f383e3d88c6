package pg_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
)

// One kind of scanning keeps a time within what RFC 3339 can write, the other far from it, where it is so in the table.
func TestTimes(t *testing.T) {
	types := pgtype.NewMap()
	for text, want := range map[string]struct{ written, year int }{
		"infinity": {9999, 294247}, "-infinity": {1, -290308}, "0044-03-15 00:00:00+00 BC": {1, -43}, "0001-01-01 00:00:00+00": {1, 1},
		"9999-12-31 23:59:59.999999+00": {9999, 9999}, "10000-01-01 00:00:00+00": {9999, 10000}, "294276-12-31 23:59:59.999999+00": {9999, 294276},
	} {
		var value pgtype.Timestamptz
		require.NoError(t, types.Scan(pgtype.TimestamptzOID, pgtype.TextFormatCode, []byte(text), &value))
		binary, err := types.Encode(pgtype.TimestamptzOID, pgtype.BinaryFormatCode, value, nil)
		require.NoError(t, err)
		for format, raw := range map[int16][]byte{pgtype.TextFormatCode: []byte(text), pgtype.BinaryFormatCode: binary} {
			var written, instant time.Time
			require.NoError(t, types.Scan(pgtype.TimestamptzOID, format, raw, pg.Time{At: &written}))
			require.NoError(t, types.Scan(pgtype.TimestamptzOID, format, raw, pg.Instant{At: &instant}))
			require.Equal(t, want.written, written.UTC().Year(), text)
			require.Equal(t, want.year, instant.UTC().Year(), text)
		}
	}
}
