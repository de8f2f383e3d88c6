package outboxops

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/wait"
)

// CutProgress counts the events in front of a cut that are not handled yet.
type CutProgress struct {
	// Relay is the relay of the cut.
	Relay string
	// Groups are the groups of the cut, sorted by name.
	Groups []CutGroup
}

// CutGroup is a group of a cut.
type CutGroup struct {
	Subscription
	// Unread is the number of records in Kafka that a returning group still has to read. Records that
	// arrived after the call of Await do not count.
	Unread int64
}

// IsDone reports whether all events in front of the cut are handled. Then all leaving groups have left,
// with no open delivery and a consumer that has begun. All returning groups have read their records in
// Kafka.
func (p CutProgress) IsDone() bool {
	for _, g := range p.Groups {
		if g.State == SubscriptionLeaving || g.State == SubscriptionLeft && (g.Open > 0 || !g.HasConsumer) {
			return false
		}
	}
	return p.Unread() == 0
}

// Returning reports whether the cut is one to PostgreSQL.
func (p CutProgress) Returning() bool {
	return slices.ContainsFunc(p.Groups, func(g CutGroup) bool { return g.State == SubscriptionReturning })
}

// Unread returns the sum of the unread records of all groups.
func (p CutProgress) Unread() (records int64) {
	for _, g := range p.Groups {
		records += g.Unread
	}
	return records
}

// Await waits until all events in front of the cut at a relay are handled, or ctx ends. It calls progress
// at once and then each second; nil is not called. It asks Kafka for the progress of returning groups. The
// error may be [ErrNoCut].
func (c *Cuts) Await(ctx context.Context, opts []kgo.Opt, relay string, progress func(CutProgress)) error {
	client, err := kafka.NewClient(opts)
	if err != nil {
		return fmt.Errorf("outbox: await cut: %w", err)
	}
	defer client.Close()
	reading := groupReading{}
	for {
		p, err := c.progress(ctx, client, relay, reading)
		if err != nil {
			return fmt.Errorf("outbox: await cut: %w", err)
		}
		if progress != nil {
			progress(p)
		}
		if p.IsDone() {
			return nil
		}
		if wait.Sleep(ctx, time.Second); ctx.Err() != nil {
			return fmt.Errorf("outbox: await cut: %w", context.Cause(ctx))
		}
	}
}

func (c *Cuts) progress(ctx context.Context, client *kgo.Client, relay string, reading groupReading) (CutProgress, error) {
	p := CutProgress{Relay: relay}
	all, err := c.List(ctx)
	if err != nil {
		return p, err
	}
	for _, s := range all {
		if s.Relay != relay {
			continue
		}
		g := CutGroup{Subscription: s}
		if s.State == SubscriptionReturning {
			if g.Unread, err = c.unread(ctx, client, s.Group, reading); err != nil {
				return p, err
			}
		}
		p.Groups = append(p.Groups, g)
	}
	if len(p.Groups) == 0 {
		return p, fmt.Errorf("%w: %s", ErrNoCut, relay)
	}
	return p, nil
}

// groupReading has, by group, the offsets up to which it has to read.
type groupReading map[string]map[kafka.Partition]int64

// unread returns the number of records that a group still has to read, of the records that existed at the
// first call. A group begins a partition without a committed offset at the first record.
func (c *Cuts) unread(ctx context.Context, client *kgo.Client, group string, reading groupReading) (records int64, err error) {
	committed, err := kafka.AllGroupOffsets(ctx, client, group)
	if err != nil {
		return 0, err
	}
	ends, known := reading[group]
	if !known {
		if ends, err = c.endsOf(ctx, client, group, committed); err != nil {
			return 0, err
		}
		reading[group] = ends
	}
	unread, err := unreadOf(ctx, client, committed, ends)
	for _, n := range unread {
		records += n
	}
	return records, err
}

const sqlTopicsOfGroup = `SELECT DISTINCT topic::text FROM {schema}.consumer_start WHERE consumer_group = $1 LIMIT $2`

// endsOf returns the ends of all partitions of the topics that a group reads, also of those that only its
// members have noted.
func (c *Cuts) endsOf(ctx context.Context, client *kgo.Client, group string, committed map[kafka.Partition]int64) (map[kafka.Partition]int64, error) {
	begun := map[string]bool{}
	var noted string
	rows, err := c.db.Query(ctx, c.topics, group, maxGroupTopics)
	if err == nil {
		_, err = pgx.ForEachRow(rows, []any{&noted}, func() error { begun[noted] = true; return nil })
	}
	if err != nil {
		return nil, err
	}
	return endsOf(ctx, client, committed, begun)
}
