package main

import (
	"testing"

	"github.com/outboxgo/outbox/outboxops"
	"github.com/outboxgo/outbox/outboxtest"
	"github.com/stretchr/testify/require"
)

// The switch pauses the stream of commands for the executors only. To turn it twice is to turn it
// once.
func TestKillSwitch(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	operators, err := outboxops.NewConsumers(f.db, outboxops.ConsumersConfig{Schema: f.schema})
	require.NoError(t, err)
	for _, on := range []bool{true, true, false, false} {
		changed := KillSwitchChanged{On: on, Operator: "risk", Reason: "a drill", happened: now()}
		require.NoError(t, outboxtest.DeliverTwice(t.Context(), t, f.groups[systemGroup], f.events, changed))
		groups, _, err := operators.List(t.Context(), outboxops.ConsumerFilter{})
		require.NoError(t, err)
		if !on {
			require.Empty(t, groups)
			continue
		}
		require.Len(t, groups, 1)
		require.Equal(t, orderExecutor, groups[0].Group)
		require.Nil(t, groups[0].Pause)
		require.Equal(t, tradeCommand, groups[0].Topics[0].Topic)
		require.Equal(t, "risk", groups[0].Topics[0].Pause.Operator)
	}
}
