package consumer

import (
	"context"
	"maps"
	"time"

	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/starts"
	"github.com/outboxgo/outbox/internal/wait"
)

// watchHandlers logs handlers that run longer than SlowHandler, until ctx is cancelled.
func (m *membership) watchHandlers(ctx context.Context) {
	const often = time.Second
	for ctx.Err() == nil {
		wait.Sleep(ctx, min(often, m.cfg.SlowHandler/2))
		for _, w := range m.all() {
			w.slow.Report(&w.activity, w.cfg.SlowHandler, w.log, "partition", w.partition.Name())
		}
	}
}

// waitingPatience is how long a member may be without partitions before it is logged. Kafka delays
// the first assignment of a group by three seconds, and a new member of a group gets partitions in the
// second rebalance.
const waitingPatience = 5 * time.Second

// watchWaiting logs what a member without partitions waits for, once for each cause, until ctx is
// cancelled.
func (m *membership) watchWaiting(ctx context.Context) {
	const often = waitingPatience / 10
	for waits, before := 0, ""; ctx.Err() == nil; waits++ {
		wait.Sleep(ctx, often)
		what, atMost := m.waitsFor()
		if what != before {
			waits, before = 0, what
		}
		if what != "" && waits == int(waitingPatience/often) && ctx.Err() == nil {
			m.log.Info("outbox: "+what, "at_most", atMost)
		}
	}
}

// waitsFor returns what a member without partitions waits for, and the longest wait. It returns "" if
// the member has partitions.
func (m *membership) waitsFor() (what string, atMost time.Duration) {
	switch {
	case len(m.all()) > 0:
		return "", 0
	case !m.starts.SawTopics():
		return "waiting for Kafka to answer and to have one of the topics; a new one is found within at_most", starts.MissingInterval
	case !m.isMember():
		return "waiting for the group to assign partitions; a member that is gone has to be expelled, and others have to give up theirs", m.cfg.MaxPollInterval
	}
	return "standing by, the group has no partition for this member; if another member is gone, its partitions are assigned within at_most",
		m.cfg.SessionTimeout + m.cfg.HeartbeatInterval
}

// watchLag records the lag for Health at intervals, until ctx is cancelled.
func (m *membership) watchLag(ctx context.Context) {
	known := map[kafka.Partition]int64{}
	for ctx.Err() == nil {
		wait.Sleep(ctx, handling.SampleInterval)
		if total, ok := m.totalLag(ctx, known); ok {
			m.lag.Add(total)
		}
	}
}

// totalLag returns the lag of all partitions, in records. It notes the ends of partitions in known. A partition whose
// leader does not answer still has the end that is known. It returns false if Kafka does not answer at all: fetching
// reports the outage.
func (m *membership) totalLag(ctx context.Context, known map[kafka.Partition]int64) (total int64, ok bool) {
	committed, ends, err := m.ends(ctx)
	if err != nil && len(ends) == 0 {
		return 0, false
	}
	maps.Copy(known, ends)
	maps.DeleteFunc(known, func(at kafka.Partition, _ int64) bool { _, assigned := committed[at]; return !assigned })
	for at, end := range known {
		total += partitionLag{Next: committed[at], End: end}.records()
	}
	return total, true
}
