package outbox

import (
	"testing"
)

// ReadLike puts one of the other cursors in place of the relay's own, for the
// tests outside this package.
func (r *Relay) ReadLike(t testing.TB, name string) {
	t.Helper()
	store := r.engine.Cursors()
	for _, c := range otherCursors {
		if c.name == name {
			store.SQLOpen = withIDs(t, store.SQLOpen, store.Schema(), c.ids, c.order)
			store.InOrder = inOrderOf(c.order)
			return
		}
	}
	t.Fatalf("no cursor %q", name)
}
