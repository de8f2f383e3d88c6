package outage_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/outage"
)

// A state is stored within bounds, whatever fails and whatever the errors say.
func TestStateIsBounded(t *testing.T) {
	t.Parallel()
	var failures []outage.Named
	for i := range 1_000 {
		err := errors.New("\x00" + strings.Repeat("ü", 10_000))
		failures = append(failures, outage.Named{Name: fmt.Sprintf("topic %d", i), Failure: outage.Failure{Err: err, Since: time.Unix(int64(1_000-i), 0)}})
	}
	s := outage.State{Epoch: 7, Reasons: make([]string, 1_000), Outages: outage.OutagesOf(failures, func(outage.Named) string { return "unavailable" })}
	text := s.JSON()
	require.Less(t, len(text), 20_000)
	require.NotContains(t, text, `\u0000`)
	var stored outage.State
	require.NoError(t, json.Unmarshal([]byte(text), &stored))
	require.Len(t, stored.Outages, outage.MaxOutages)
	require.Equal(t, 1_000-outage.MaxOutages, stored.More)
	require.Equal(t, "topic 999", stored.Outages[0].What, "the longest outage is first")
	require.LessOrEqual(t, len(stored.Outages[0].Err), 300)
	require.Len(t, s.Outages, 1_000)
}

// A state differs from one before if something began or ended, not because time has passed.
func TestStateDiffers(t *testing.T) {
	t.Parallel()
	began := time.Now()
	before := outage.State{
		Works: true, Reasons: []string{"for 1 s"}, Breakers: []outage.Breaker{{Action: "a", State: "open"}},
		Outages: []outage.Outage{{What: "Kafka", Class: "no_answer", Since: began, Err: "first"}},
	}
	same := before
	same.Reasons, same.Outages = []string{"for 2 s"}, []outage.Outage{{What: "Kafka", Class: "no_answer", Since: began, Err: "second"}}
	require.False(t, same.Differs(before))
	for _, change := range []func(*outage.State){
		func(s *outage.State) { s.Works = false },
		func(s *outage.State) { s.More = 1 },
		func(s *outage.State) { s.Reasons = nil },
		func(s *outage.State) { s.Breakers = nil },
		func(s *outage.State) { s.Breakers = []outage.Breaker{{Action: "a", State: "half-open"}} },
		func(s *outage.State) { s.Outages = nil },
		func(s *outage.State) {
			s.Outages = []outage.Outage{{What: "Kafka", Class: "unreachable", Since: began}}
		},
		func(s *outage.State) {
			s.Outages = []outage.Outage{{What: "Kafka", Class: "no_answer", Since: began.Add(1)}}
		},
	} {
		other := before
		change(&other)
		require.True(t, other.Differs(before), "%+v", other)
	}
}
