package relay

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/testenv"
)

// acceptingSender accepts all events.
type acceptingSender struct {
	hang chan struct{} // if there is one, it is closed when an event is sent, which then gets no answer
}

func (s acceptingSender) produce(stop, _ context.Context, batch []envelope.Event, which []int) (sent sendResult, err error) {
	if s.hang != nil {
		close(s.hang)
		<-stop.Done()
		return sendResult{}, lease.ErrLeaseLost
	}
	for _, i := range which {
		at := s.partition(&batch[i])
		sent.records, sent.errs = append(sent.records, kgo.Record{Topic: at.Topic, Partition: at.Number}), append(sent.errs, nil)
	}
	sent.works = true
	return sent, nil
}

func (acceptingSender) prepare(context.Context, []string)     {}
func (acceptingSender) works(context.Context, string) bool    { return true }
func (acceptingSender) topic(*envelope.Event) (string, error) { return "b-events", nil }
func (acceptingSender) partition(*envelope.Event) kafka.Partition {
	return kafka.Partition{Topic: "b-events", Number: 2}
}

// A suspect is probed while the probe of a bad partition has no answer.
func TestSuspectsWaitForNoProbe(t *testing.T) {
	t.Parallel()
	d := testenv.NewTables(t)
	d.InsertParked(t, 2, 2)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET status = 'waiting', place = 'b-events/' || outbox_id`)
	bad := newLockedFixture(t, d, new(testenv.Buffer))
	bad.Breaker = breaker.New(someRules, func(_, _ breaker.State, _ float64) {})
	bad.Bad.Load([]cursor.BadPartition{{Name: "b-events/1", Err: errDown}, {Name: "b-events/2", Err: errSuspect}})
	suspects := NewRetrier(bad.RetrierParts)
	hang, waits := make(chan struct{}), make(chan struct{}, 1)
	suspects.ProbeNow = waits
	for r, s := range map[*retrier]acceptingSender{bad: {hang}, suspects: {}} {
		r.Deliverer = &Deliverer{DeliveryParts{
			Sender: s, Breaker: r.Breaker, Bad: r.Bad, Unanswered: r.Unanswered, Log: r.Log, KafkaOutage: r.Outage, OnSend: func() {}, OnRecovered: func() {},
		}}
	}
	ctx, stop := context.WithCancel(t.Context())
	var probes sync.WaitGroup
	probes.Go(func() { bad.RunProbes(ctx) })
	<-hang
	probes.Go(func() { suspects.RunSuspects(ctx) })
	require.Eventually(t, func() bool { return slices.Equal(d.IDs(t, "outbox_failed"), []int64{1}) }, testenv.Patience, 10*time.Millisecond)
	stop()
	probes.Wait()
}
