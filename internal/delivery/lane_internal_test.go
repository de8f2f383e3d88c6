package delivery

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pauses"
)

// An item waits because its stream is paused, or because its action fails, and that ends a moment later. Later items of
// its key must not be handled before it.
func TestLaterItemsOfTheKeyWait(t *testing.T) {
	t.Parallel()
	l := &lane{laneParts: laneParts{cfg: &Rules{}, pauses: pauses.NewSet()}}
	item := func(key int64, ordered bool) laneItem {
		return laneItem{Delivery: Delivery{Stream: "items", Key: Key{key, ordered}}}
	}
	batch := []laneItem{item(1, true), item(0, false), item(1, true), item(2, true), item(0, false)}
	l.begin(make([]Delivery, 1))
	l.pauses.Pause("items")
	require.True(t, l.mustWait(&batch[0]))
	require.True(t, l.mustWait(&batch[1]))
	l.pauses.Resume("items")
	require.True(t, l.mustWait(&batch[2]), "the first one of its key waits")
	require.False(t, l.mustWait(&batch[3]))
	require.False(t, l.mustWait(&batch[4]), "it has no order")
	l.begin(make([]Delivery, 1))
	require.False(t, l.mustWait(&batch[2]), "of the next batch")
}
