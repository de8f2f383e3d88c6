package faults

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// One kill of a consumer, which `make test` has as well: its partitions go to the other members, and what
// handlers do in PostgreSQL is done once. TestKilledConsumers has everything.
func TestKilledConsumer(t *testing.T) {
	t.Parallel()
	v := groupResult{Seed: seedOf(t), Balancer: *groupBalancer}
	g := newGroup(t, v.Seed, 0, shortSessions())
	g.setSession(t, session)
	g.replace(t)
	g.awaitStart(t)
	g.run(t, incident{what: "kill a member", kills: 1, delay: 100 * time.Millisecond, begin: (*group).killSome, wait: true}, 600)
	g.awaitRetried(t)
	g.stop(t, g.workers...)
	g.compare(t, &v)
	require.NoError(t, v.Err())
	require.Equal(t, 1, v.Kills)
}

// One kill of a worker, as above. TestKilledWorkers has everything.
func TestKilledWorker(t *testing.T) {
	t.Parallel()
	v := busResult{Seed: seedOf(t)}
	b := newBus(t, v.Seed)
	b.awaitRecorded(t, b.sell(100))
	b.replace(t)
	for _, group := range busGroups {
		b.run(t, mishap{what: "kill a worker", kills: 1, delay: 100 * time.Millisecond, group: group, begin: (*bus).killSome}, 200)
	}
	b.awaitHandled(t)
	b.stop(t, slices.Clone(b.members)...)
	b.compare(t, &v)
	require.NoError(t, v.Err())
	require.Equal(t, len(busGroups), v.Kills)
}
