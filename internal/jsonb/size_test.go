package jsonb

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/testenv"
)

type largeText struct {
	name, text string
	holds      bool
}

// largeTexts returns texts that PostgreSQL can just hold, or just not.
func largeTexts() []largeText {
	return []largeText{
		{"the largest array", "[" + strings.Repeat("0,", maxElements-1) + "0]", true},
		{"a member too many", "{" + strings.Repeat(`"":0,`, maxMembers) + `"":0}`, false},
	}
}

// Check agrees with PostgreSQL about the largest arrays and objects.
func TestLargeTexts(t *testing.T) {
	testenv.Long(t)
	pg := testenv.Pool(t, nil)
	for _, tt := range largeTexts() {
		_, err := Check([]byte(tt.text))
		_, code := printJSONB(t, pg, tt.text)
		require.Equal(t, tt.holds, code == "", "PostgreSQL: %s: %s", tt.name, code)
		if tt.holds {
			require.NoError(t, err, tt.name)
		} else {
			require.ErrorIs(t, err, check.ErrJSON, tt.name)
		}
	}
}

// storedIn returns how many bytes PostgreSQL's jsonb takes for a text, without the length in front.
func storedIn(t *testing.T, pg *pgxpool.Pool, text string) (n int) {
	t.Helper()
	require.NoError(t, pg.QueryRow(context.Background(), `SELECT pg_column_size($1::text::jsonb) - 4`, text).Scan(&n), text)
	return n
}

func TestStoredJSONB(t *testing.T) {
	t.Parallel()
	pg := testenv.Pool(t, nil)
	for _, text := range []string{
		`[]`, `{}`, `[[],{},[[]]]`, `[null,true,false]`, `{"abcd":0,"efgh":[1]}`, `[10000,9999,99990001,0.0001,0.00012,123.456e2,0e-70,1e-70,1e300,-1]`,
	} {
		n, err := storedSize([]byte(text))
		require.NoError(t, err)
		require.Equal(t, padded(storedIn(t, pg, text)), n, text)
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	g := jsonMaker{rand.New(rand.NewPCG(seed, 0))}
	for range 500 {
		number := g.number()
		if _, err := Check([]byte(number)); err == nil {
			text := fmt.Sprintf("[%s]", number)
			n, err := storedSize([]byte(text))
			require.NoError(t, err)
			require.Equal(t, padded(storedIn(t, pg, text)), n, text)
		}
		if text := "[" + g.value(4) + "]"; nesting(text) <= maxDepth {
			if _, err := Check([]byte(text)); err == nil {
				n, err := storedSize([]byte(text))
				require.NoError(t, err)
				require.GreaterOrEqual(t, n, storedIn(t, pg, text), text)
				require.LessOrEqual(t, n, 6*len(text), text)
			}
		}
	}
}
