package cursor_test

import (
	"context"
	"fmt"
	"math"
	"testing"

	"github.com/outboxgo/outbox/internal/cursor"

	"github.com/stretchr/testify/require"
)

// The login of a group of workers may write any position of the group. It stops neither relays nor other groups, and
// makes no statement with which an operator would use up the ids.
func TestPositionOfAGroupStopsNoOther(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		highest int64
		stops   bool // the group itself
	}{
		"above all ids that there will be": {math.MaxInt64, false},
		"above the ids that were drawn":    {100, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, ctx := newFixture(t), context.Background()
			d.Insert(t, 6)
			d.Exec(t, `INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
				SELECT 'worker:mine', 0, pg_current_snapshot(), $1, system_identifier, 1 FROM pg_control_system()`, test.highest)
			_, _, _, err := d.arrive(t, "default")
			require.NoError(t, err)
			require.NoError(t, cursor.NewStore(d.DB, d.Schema, "worker:theirs").CheckSequence(ctx))
			own := cursor.NewStore(d.DB, d.Schema, "worker:mine")
			err = own.CheckSequence(ctx)
			if !test.stops {
				require.NoError(t, err)
				return
			}
			require.ErrorIs(t, err, cursor.ErrSequenceBehind)
			d.Exec(t, remedy(t, err))
			require.NoError(t, own.CheckSequence(ctx))
		})
	}
}

// The same of the id of a position, which a role of a whole database may write.
func TestIDOfAPositionStopsNoOther(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	for _, relay := range []string{"worker:mine", "theirs"} {
		d.Exec(t, fmt.Sprintf(`INSERT INTO {schema}.outbox_cursor (id, relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
			SELECT 1000, '%s', 0, pg_current_snapshot(), 0, system_identifier, 1 FROM pg_control_system()`, relay))
		own, other := cursor.NewStore(d.DB, d.Schema, "worker:mine"), cursor.NewStore(d.DB, d.Schema, "worker:other")
		require.ErrorIs(t, own.CheckSequence(ctx), cursor.ErrSequenceBehind)
		_, _, _, err := d.arrive(t, "default")
		if relay == "theirs" { // relays have the same login
			require.ErrorIs(t, err, cursor.ErrSequenceBehind)
			continue
		}
		require.NoError(t, err)
		require.NoError(t, other.CheckSequence(ctx))
		d.Exec(t, `DELETE FROM {schema}.outbox_cursor WHERE relay = 'worker:mine'`)
	}
}

// Positions of one group whose rows were copied without the sequence: their ids are those that a relay, and another
// group, will draw next.
func TestNextIDsAreThoseOfAnotherGroup(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	d.Exec(t, `INSERT INTO {schema}.outbox_cursor (id, relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
		SELECT n, 'worker:theirs', 0, pg_current_snapshot(), 0, system_identifier, 1 FROM pg_control_system(), unnest(ARRAY[1, 2, 3, 5000, 9223372036854775807]) AS n`)
	for _, name := range []string{"default", "worker:mine"} {
		err := cursor.NewStore(d.DB, d.Schema, name).CheckSequence(ctx)
		require.ErrorIs(t, err, cursor.ErrSequenceBehind)
		require.ErrorContains(t, err, "5000 is in use already")
	}
	d.Exec(t, remedy(t, cursor.NewStore(d.DB, d.Schema, "default").CheckSequence(ctx)))
	_, _, _, err := d.arrive(t, "default")
	require.NoError(t, err)
}
