package delivery

import (
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/testenv"
)

// If the consumer of an event is gone, hooks get the record that brought the event. For an event from
// outbox there is no record.
func TestHooksOfGoneDeliveries(t *testing.T) {
	t.Parallel()
	var seen []envelope.Received
	var retries []bool
	note := func(m *envelope.Received, action string, err error, retry bool) {
		require.Equal(t, "COUNTED", action)
		require.ErrorIs(t, err, errGone)
		seen, retries = append(seen, *m), append(retries, retry)
	}
	cfg := &Rules{Rules: &handling.Rules{Hooks: handling.Hooks{Failed: note}}}
	of := Expired{ID: 7, EventID: "1", Type: "test.sale.made.v1", Action: "COUNTED", Stream: "sales", Attempt: 2, RecordKey: "k", Position: 5, Partition: 3}
	parked, dead := of, of
	parked.FromKafka, dead.Dead = true, true
	(&leaseKeeper{cfg: cfg}).notify([]Expired{parked, of, dead})
	require.Equal(t, []bool{true, true, false}, retries)
	for i, m := range seen {
		require.Equal(t, "1", m.ID)
		require.Equal(t, "test.sale.made.v1", m.Type)
		require.Equal(t, 2, m.Attempt)
		require.Equal(t, "sales", m.Topic())
		require.Equal(t, "k", string(m.Origin.Key))
		if i < 1 {
			require.Equal(t, &envelope.Place{Topic: "sales", Partition: 3, Offset: 5, Key: []byte("k")}, m.Kafka)
		} else {
			require.Nil(t, m.Kafka)
		}
	}
}

// A lane that failed to promote the followers of its last transaction may have nothing more to promote. The
// leaseKeeper promotes them, and then the outage is over.
func TestRepairedHeadsEndOutage(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Migrated(t)
	log := slog.New(slog.DiscardHandler)
	outages := outage.NewLogs(log)
	outages.Report(outagePromoting, time.Now(), errors.New("the connection is gone"))
	require.True(t, outages.Failing())
	k := &leaseKeeper{store: NewStore(db, schema, "mail", "a", time.Minute), outages: outages, log: log}
	require.NoError(t, k.repairHeads(t.Context()))
	require.False(t, outages.Failing())
}
