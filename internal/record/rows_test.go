package record

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
)

// given is an event that may be delayed.
type given struct{ notBefore time.Time }

func (given) Topic() string             { return "" }
func (given) AggregateID() string       { return "1" }
func (given) Key() (string, bool)       { return "", false }
func (given) OccurredAt() time.Time     { return time.Unix(0, 0) }
func (e given) NotBefore() time.Time    { return e.notBefore }
func (given) Expires() time.Time        { return time.Time{} }
func (given) Encode() ([]byte, error)   { return []byte("x"), nil }
func (given) DataSchema() string        { return "" }
func (given) NewID() (uuid.UUID, error) { return uuid.New(), nil }

// noted is a transaction that notes how rows are stored.
type noted struct {
	pgx.Tx
	how string
}

func (n *noted) Exec(context.Context, string, ...any) (tag pgconn.CommandTag, err error) {
	n.how += "INSERT"
	return tag, nil
}

func (n *noted) CopyFrom(context.Context, pgx.Identifier, []string, pgx.CopyFromSource) (int64, error) {
	n.how += "COPY"
	return 0, nil
}

// PostgreSQL takes no statement of 1 GiB: pgx would close the connection of the caller. COPY has no such bound.
func TestRowsTooLarge(t *testing.T) {
	t.Parallel()
	now, later := given{}, given{time.Unix(1, 0)}
	for _, tt := range []struct {
		name    string
		canCopy bool
		before  int // bytes
		events  []given
		how     string // "" = refused
	}{
		{"two that fit", true, 0, []given{now, now}, "INSERT"},
		{"two for COPY", true, maxStatement, []given{now, now}, "COPY"},
		{"two for a statement", false, maxStatement, []given{now, now}, ""},
		{"a delayed one last", true, maxStatement, []given{now, later}, ""},
		{"a delayed one first", true, maxStatement - 150, []given{later, now}, ""},
		{"a single one", false, maxStatement, []given{now}, "COPY"},
		{"a single delayed one", false, maxStatement, []given{later}, "INSERT"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			rows := NewRows("source", len(tt.events), 1, tt.canCopy)
			rows.size = tt.before
			for i, e := range tt.events {
				rejected := rows.Add(Type{Name: "a.b.c.v1", AggregateType: "A", ContentType: "text/plain"}, &Extras{}, e)
				if tt.how == "" && i == len(tt.events)-1 {
					require.NotNil(t, rejected)
					require.ErrorIs(t, rejected, ErrTooLarge)
					require.Equal(t, []any{-1, "events"}, []any{rejected.Index, rejected.Field})
					return
				}
				require.Nil(t, rejected)
			}
			tx := &noted{}
			require.NoError(t, NewStore("public").Insert(t.Context(), tx, rows))
			require.Equal(t, tt.how, tx.how)
		})
	}
}
