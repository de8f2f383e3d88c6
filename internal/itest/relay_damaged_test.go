package itest

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
)

// commitDamaged records an event whose payload PostgreSQL can neither read nor copy.
func (h *relayFixture) commitDamaged(t *testing.T, e oracle.Event) {
	t.Helper()
	e.Filler = random(5000)
	require.NoError(t, pgx.BeginFunc(context.Background(), h.db, func(tx pgx.Tx) error {
		if err := h.record(context.Background(), tx, e); err != nil {
			return err
		}
		testenv.Damage(t, tx, h.schema, "outbox")
		return nil
	}))
}

// A damaged event behind a parked key delays no event of another key. It dies when its turn comes, and later events of
// its key are sent.
func TestDamagedRowBehindParkedKey(t *testing.T) {
	t.Parallel()
	h, reader := newPlacesFixture(t)
	missing := h.missing(t)
	key, other := numbered("a", 1, 3), numbered("b", 1, 2)
	testenv.Run(t, h.plainRelay(t, quick).Run)
	missing.commit(t, key[0])
	h.awaitStatuses(t, map[string]int{"waiting": 1})
	missing.commitDamaged(t, key[1])
	missing.commit(t, key[2])
	h.commit(t, other...)
	requireArrival(t, reader, other...)
	h.awaitStatuses(t, map[string]int{"waiting": 1, "parked": 2})

	testenv.CreateTopic(t, h.brokers, missing.topic, 1)
	behind := missing.follow(t)
	requireArrival(t, behind, key[0], key[2])
	h.awaitStatuses(t, map[string]int{"dead": 1})
	require.False(t, behind.Has(key[1].ID))
	require.Equal(t, 1, h.countWhere(t, `SELECT count(*) FROM {s}.outbox_failed WHERE error_class = 'unreadable_row' AND payload IS NULL`))
}
