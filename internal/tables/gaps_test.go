package tables_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/testenv"
)

// The gaps have the transactions that a snapshot calls finished, from a bound on, and no other one.
func TestGaps(t *testing.T) {
	t.Parallel()
	db := testenv.Pool(t, nil)
	for name, test := range map[string]struct{ bound, snapshot, gaps string }{
		"nothing has begun since":         {"5", "5:5:", ""},
		"all have ended":                  {"5", "9:9:", "5-8"},
		"one is open":                     {"5", "7:9:7", "5-6 8-8"},
		"the first is open":               {"5", "5:9:5", "6-8"},
		"the last is open":                {"5", "8:9:8", "5-7"},
		"neighbours are open":             {"5", "5:12:5,6,8,9,10", "7-7 11-11"},
		"all are open":                    {"5", "5:8:5,6,7", ""},
		"older ones are open":             {"5", "2:9:2,4", "5-8"},
		"the snapshot is older":           {"9", "5:7:5", ""},
		"before every transaction":        {"1", "4:6:4", "1-3 5-5"},
		"behind 32 bits":                  {"4294967295", "4294967298:4294967300:4294967298", "4294967295-4294967297 4294967299-4294967299"},
		"there is no bound":               {"", "5:9:5", ""},
		"there is no snapshot":            {"5", "", ""},
		"there is neither, as in a lease": {"", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var gaps string
			require.NoError(t, db.QueryRow(context.Background(), `
				SELECT coalesce(string_agg(g.first || '-' || g.last, ' ' ORDER BY g.first), '')
				  FROM (SELECT nullif($1::text, '')::xid8 AS bound, nullif($2::text, '')::pg_snapshot AS snapshot) AS b
				 CROSS JOIN LATERAL (`+tables.Gaps+`) AS g`, test.bound, test.snapshot).Scan(&gaps))
			require.Equal(t, test.gaps, gaps)
		})
	}
}
