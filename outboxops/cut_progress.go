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
	// Groups are those of the cut, sorted by name.
	Groups []CutGroup
}

// CutGroup is a group of a cut.
type CutGroup struct {
	Subscription
	// Unread is how many records a returning group has still to read from Kafka, of those that were there when
	// Await was called.
	Unread int64
}

// IsDone reports whether nothing has to be handled any more: all groups that were leaving have left, with no
// delivery open and a consumer that has begun, and all that return have read what is in Kafka.
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

// Unread returns the sum of those of the groups.
func (p CutProgress) Unread() (records int64) {
	for _, g := range p.Groups {
		records += g.Unread
	}
	return records
}

// Await waits until what is in front of the cut at a relay is handled, or ctx ends, and calls progress at once and
// then each second; nil is not called. It needs Kafka to see what returning groups have read. The error may be
// [ErrNoCut].
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

// groupReading is, by group, up to where it has to read.
type groupReading map[string]map[kafka.Partition]int64

// unread returns how many records a group has still to read of those that were there at the first call. A
// partition without a committed offset is one that it has not begun with: it begins at the first record.
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
