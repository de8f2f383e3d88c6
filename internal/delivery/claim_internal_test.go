package delivery

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// A claim reads no rows of types that its process has no handler for, however many are due before its own. It claims
// rows of ten actions with a hundred types each by as many look-ups in the index.
func TestClaimsWalkNoUnknownRows(t *testing.T) {
	testenv.Long(t)
	// Not parallel: it counts the buffers that PostgreSQL touches.
	f := newPlans(t)
	insert := func(first, n int, types string) {
		f.exec(`
			INSERT INTO {schema}.event_delivery (position, order_key, attempt_count, max_attempts, next_retry_at, created_at, updated_at, occurred_at, recorded_at,
			       event_id, status, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, payload)
			SELECT n, n, 0, 3, now() - interval '1 h' + n * interval '1 ms', now(), now(), now(), now(), gen_random_uuid(), 'PENDING', 'g', 'a', 's', `+types+`, '/s', 't', 'k', 'application/json', '{}'
			  FROM generate_series($1::bigint, $2) AS n`, first, first+n-1)
	}
	const unknown, known = 200_000, 100
	f.exec(`ANALYZE {schema}.event_delivery`)
	f.prepare("claim", statements[0].types, sqlClaim)
	f.prepare("left", statements[3].types, sqlRemaining)
	insert(1, unknown, `'unknown' || n % 7`)
	insert(unknown+1, known, `'t'`)
	f.exec(`ANALYZE {schema}.event_delivery`)
	many := make([]Claimable, 10)
	for i := range many {
		many[i] = Claimable{Pair{fmt.Sprint("a", i), "s"}, nil}
		for n := range 100 {
			many[i].Types = append(many[i].Types, fmt.Sprint("t", n))
		}
	}
	actions, streams, types := columnsOfClaimable(many)
	list := func(texts []string) string {
		return `E'{"` + strings.ReplaceAll(strings.Join(texts, `","`), "\n", `\n`) + `"}'`
	}
	since := `'{` + strings.TrimSuffix(strings.Repeat("2000-01-01,", len(many)), ",") + `}'`
	for _, test := range []struct {
		name, args string
		most       int
	}{
		{"claim", `'g', 'w', '1 min', '{a}', '{s}', 1000, 10, false, '{2000-01-01}', 1000000000, E'{"\nt"}', '{}', false`, 40 * known},
		{"left", `'g', '{a}', '{s}', '{2000-01-01}', false, E'{"\nt"}', '{}'`, 10},
		{"claim", fmt.Sprintf(`'g', 'w', '1 min', %s, %s, 1000, 10, false, %s, 1000000000, %s, '{}', false`, list(actions), list(streams), since, list(types)), 4500},
		{"left", fmt.Sprintf(`'g', %s, %s, %s, false, %s, '{}'`, list(actions), list(streams), since, list(types)), 4500},
	} {
		f.inTx(func(tx pgx.Tx) {
			buffers, plan := f.buffersOf(tx, test.name, test.args)
			t.Logf("%s of %.40s: %d buffers", test.name, test.args, buffers)
			require.LessOrEqual(t, buffers, test.most, plan)
		})
	}
	f.inTx(func(tx pgx.Tx) {
		tag, err := tx.Exec(t.Context(), `EXECUTE claim('g', 'w', '1 min', '{a}', '{s}', 1000, 10, false, '{2000-01-01}', 1000000000, E'{"\nt"}', '{}', false)`, pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err)
		require.EqualValues(t, known, tag.RowsAffected())
	})
}
