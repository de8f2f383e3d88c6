package tables_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/testenv"
)

// The gaps have the transactions that a snapshot calls finished, from a bound on, each once, and no other one.
func TestGaps(t *testing.T) {
	t.Parallel()
	db := testenv.Pool(t, nil)
	const wide = 4294967290
	for name, test := range map[string]struct {
		bound, snapshot, ids string
		from                 int // of the ids that are tried
	}{
		"nothing has begun since":         {"5", "5:5:", "", 0},
		"all have ended":                  {"5", "9:9:", "5 6 7 8", 0},
		"one is open":                     {"5", "7:9:7", "5 6 8", 0},
		"the first is open":               {"5", "5:9:5", "6 7 8", 0},
		"the last is open":                {"5", "8:9:8", "5 6 7", 0},
		"neighbours are open":             {"5", "5:12:5,6,8,9,10", "7 11", 0},
		"all are open":                    {"5", "5:8:5,6,7", "", 0},
		"older ones are open":             {"5", "2:9:2,4", "5 6 7 8", 0},
		"the snapshot is older":           {"9", "5:7:5", "", 0},
		"before every transaction":        {"1", "4:6:4", "1 2 3 5", 0},
		"behind 32 bits":                  {"4294967295", "4294967298:4294967300:4294967298", "4294967295 4294967296 4294967297 4294967299", wide},
		"there is no bound":               {"", "5:9:5", "", 0},
		"there is no snapshot":            {"5", "", "", 0},
		"there is neither, as in a lease": {"", "", "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var ids string
			require.NoError(t, db.QueryRow(context.Background(), `
				SELECT coalesce(string_agg(o.xid::text, ' ' ORDER BY o.xid), '')
				  FROM (SELECT nullif($1::text, '')::xid8 AS bound, nullif($2::text, '')::pg_snapshot AS snapshot) AS b
				 CROSS JOIN LATERAL (`+tables.Gaps+`) AS g
				 CROSS JOIN LATERAL (SELECT xid FROM (SELECT id::text::xid8 AS xid FROM generate_series($3::bigint, $3 + 15) AS id) AS tried
				                      WHERE `+tables.InGap+`) AS o`, test.bound, test.snapshot, test.from).Scan(&ids))
			require.Equal(t, test.ids, ids)
		})
	}
}
