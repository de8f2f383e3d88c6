package handled_test

import (
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/handled"
)

// Two events have the same identity, digest and key in event_handled only if their source, id and type are the same.
func TestIdentity(t *testing.T) {
	t.Parallel()
	id, long := uuid.NewString(), strings.Repeat("long ", 100)
	at := func(topic byte, source, id string) handled.Identity {
		return handled.EventAt("a.b.c.v1", source, id, [16]byte{topic})
	}
	events := []handled.Identity{
		handled.Event("a.b.c.v1", "shop", id), handled.Event("a.b.c.v2", "shop", id), handled.Event("a.b.c.v1", "store", id),
		handled.Event("a.b.c.v1", "a", "b c"), handled.Event("a.b.c.v1", "a b", "c"), handled.Event("a.b.c.v1 a", "b", "c"),
		handled.Event("a.b.c.v1", long, id), handled.Event("a.b.c.v1", long+"x", id), handled.Event("a.b.c.v1", "shop", long), handled.Event("a.b.c.v2", "shop", long),
		at(1, "orders", "orders/0/1"), at(2, "orders", "orders/0/1"), at(0, "orders", "orders/0/1"),
		handled.Event("", "", ""),
	}
	digests, keys := map[[16]byte]bool{handled.PlaceDigest([16]byte{}, ""): true}, map[[3]string]bool{}
	for i, e := range events {
		require.Equal(t, e, events[i])
		digests[e.Digest()] = true
		keys[[3]string{e.Type, e.Beside(), ""}] = true
		keys[[3]string{e.Type, e.ID, e.Source}] = true
	}
	require.Len(t, digests, len(events)+1)
	require.Len(t, keys, 2*len(events))
	require.Equal(t, at(0, "orders", "1"), handled.Event("a.b.c.v1", "orders", "1"), "the id of the topic is not known")
	require.Equal(t, handled.Event("a.b.c.v1", long, id), handled.Event("a.b.c.v1", long, id))
	require.NotEqual(t, handled.PlaceDigest([16]byte{1}, "orders/0/1"), handled.PlaceDigest([16]byte{2}, "orders/0/1"))
}
