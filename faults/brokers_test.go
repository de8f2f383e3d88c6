package faults

import (
	"flag"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
)

var deliveryTimeout = flag.Duration("faults.delivery", 0, "DeliveryTimeout of the relays of TestClusterFaults; 0 means the default")

// maxBehind is how much later than a plain producer a relay may send to a partition again.
const maxBehind = 3 * time.Second

// The promises hold while three brokers with three replicas of everything fail in the ways of
// real clusters, and relays with default options recover about as soon as a plain producer with
// default options does: that producer sends beside them, to a topic of the same shape. All
// recoveries are measured before the test fails. Only the long form has a bound for them,
// because it has the machine alone.
func TestClusterFaults(t *testing.T) {
	testenv.Long(t)
	// Not parallel: three brokers need both processors, and relays beside them would lose their leases.
	v := clusterResult{Seed: seedOf(t)}
	s := newBrokersSite(t)
	stopWriting := s.write(t, v.Seed)
	s.awaitStart(t)
	for _, step := range brokersPlan(v.Seed, *faultMinutes) {
		if *faultMinutes > 0 && time.Since(s.start).Minutes() > *faultMinutes {
			break
		}
		v.Faults++
		step.do(s, t, step)
		s.heal(t)
	}
	confirmed := stopWriting()
	v.Seconds = time.Since(s.start).Seconds()
	s.compareAll(t, &v, confirmed)
	for _, r := range s.recoveries {
		v.WorstBehind = max(v.WorstBehind, r.behind.Milliseconds())
		v.WorstWaitBehind = max(v.WorstWaitBehind, r.waitBehind().Milliseconds())
		if *faultMinutes > 0 && r.behind > maxBehind {
			t.Errorf("more than %v behind the plain producer: %s", maxBehind, r)
		}
	}
	t.Logf("%s", v)
	require.NoError(t, v.Err())
	s.requireEpochsInOrder(t)
}

// clusterResult is what TestClusterFaults prints in the end.
type clusterResult struct {
	Seed       uint64  `json:"seed"`
	Seconds    float64 `json:"seconds"`
	Faults     int     `json:"faults"`
	Events     int     `json:"events"`     // that committed
	Lost       int     `json:"lost"`       // committed and never arrived
	Phantom    int     `json:"phantom"`    // arrived and never committed
	Duplicates int     `json:"duplicates"` // arrivals after the first
	Inversions int     `json:"inversions"` // first arrivals behind a later version of their key in their partition
	// Moved counts first arrivals behind a later version of their key in another partition: a key
	// moves when partitions are added.
	Moved           int   `json:"moved_inversions"`
	WorstBehind     int64 `json:"worst_behind_ms"`      // see recovery.behind
	WorstWaitBehind int64 `json:"worst_wait_behind_ms"` // see recovery.waitBehind
}

// String returns the result as one line of JSON.
func (v clusterResult) String() string { return lineOf(v) }

// Err says what is wrong, or returns nil. To send twice is allowed.
func (v clusterResult) Err() error {
	if v.Lost+v.Phantom+v.Inversions > 0 {
		return fmt.Errorf("faults: %s", v)
	}
	return nil
}

// compareAll sets the counts of the result, after a time in which nothing is disturbed.
func (s *brokersSite) compareAll(t *testing.T, v *clusterResult, confirmed map[string]struct{}) {
	t.Helper()
	committed := s.recorded(t)
	for id := range confirmed {
		if _, there := committed[id]; !there {
			t.Errorf("event %s was confirmed, and is not there", id)
		}
	}
	if !s.await(t, stall, func() bool { return s.reader.Missing(committed) == 0 }) {
		t.Errorf("%d events have not arrived within %v", s.reader.Missing(committed), stall)
	}
	ends, err := oracle.Ends(s.ctx, s.brokers, s.topic)
	require.NoError(t, err)
	require.True(t, s.await(t, testenv.Patience, func() bool { return s.reader.CaughtUp(ends) }), "the reader lags behind")
	_, err = s.reader.Arrived()
	require.NoError(t, err)
	if !s.await(t, stall, func() bool { return s.countFailed(t, `status <> 'resolved'`) == 0 }) {
		t.Errorf("%d events still wait in outbox_failed", s.countFailed(t, `status <> 'resolved'`))
	}

	arrived, inPartitions := s.arrivals.inOrder()
	var o, perPartition oracle.Result
	o.Compare(committed, arrived)
	perPartition.Compare(committed, inPartitions)
	v.Events, v.Lost, v.Phantom, v.Duplicates, v.Inversions = len(committed), o.Lost, o.Phantom, o.Duplicates, perPartition.Inversions
	v.Moved = max(0, o.Inversions-perPartition.Inversions)
	s.requireVerified(t)
}
