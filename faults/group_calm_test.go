package faults

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// No process is killed here, and all times are defaults: franz-go's, the consumer's, and those of
// Kafka, which waits for more members of a new group. Members come and go, also while they join,
// and the topic gets partitions and is created again. As every member ends cleanly, handlers
// without a transaction see nothing twice.
func TestCalmConsumers(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	const joinDelay = 3 * time.Second // Kafka's default
	v := groupResult{Seed: seedOf(t), Balancer: *groupBalancer, JoinDelay: joinDelay.String(), Incidents: map[string]int{}}
	g := newGroup(t, v.Seed, joinDelay, map[string]string{})
	g.replace(t)
	g.awaitStart(t)
	for _, p := range []incident{
		{kind: "starts", what: "start", begin: func(*group, *testing.T, incident) {}},
		{kind: "stops", what: "stop a member", begin: (*group).stopOne},
		{kind: "partitions_added", what: "add partitions to the topic", begin: (*group).addPartitions},
		{kind: "topics_recreated", what: "delete the topic and create it again", begin: (*group).createTopic},
		{kind: "joining_stops", what: "stop all members while they join", begin: (*group).stopJoining},
		{kind: "topics_recreated_unseen", what: "delete the topic and create it again while no member runs", begin: (*group).createTopicUnseen},
		{kind: "slow_stops", what: "stop all members while handlers are slow", begin: (*group).stopAllSlow},
	} {
		p.delay, p.wait = joinDelay/2, true
		g.run(t, p, 200)
		v.Incidents[p.kind]++
	}
	g.awaitRetried(t)
	g.stop(t, g.workers...)
	g.compare(t, &v)
	t.Logf("%s", v)
	require.NoError(t, v.Err())
	require.Zero(t, v.RepeatsSeen, "seen again, though every member ended cleanly")
}
