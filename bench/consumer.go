package main

import (
	"context"
	"errors"
	"fmt"
	"maps"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

const (
	shelfPartitions = 3
	manyPartitions  = 100
	oneByOneShare   = 10 // of the events; a transaction for each takes its time
	readShare       = 10 // times as many events, for a handler that does nothing
)

// shelf is a topic full of events, for consumers to count by their keys.
type shelf struct {
	topic  string
	events int
	counts map[string]int
}

// newShelf fills a topic with the records that a relay would make of n events.
func (b *bench) newShelf(ctx context.Context, n int) (*shelf, error) {
	return b.newShelfOf(ctx, fmt.Sprintf("shelf%d", n), n, shelfPartitions, orders.New)
}

func (b *bench) newShelfOf(ctx context.Context, name string, n, partitions int, event func(n int) orders.Placed) (*shelf, error) {
	topic, err := b.newConsumedTopic(ctx, name, partitions)
	if err != nil {
		return nil, err
	}
	client, err := newProducer(b.cfg.Brokers)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	s := &shelf{topic: topic, events: n, counts: map[string]int{}}
	var acks kgo.FirstErrPromise
	for i := range n {
		e := event(i)
		record, err := b.recordOf(e, topic)
		if err != nil {
			return nil, err
		}
		client.Produce(ctx, record, acks.Promise())
		s.counts[e.Order]++
	}
	if err := acks.Err(); err != nil {
		return nil, fmt.Errorf("produce: %w", err)
	}
	return s, nil
}

// newConsumedTopic makes a topic and its dead-letter topic, for which a consumer looks.
func (b *bench) newConsumedTopic(ctx context.Context, name string, partitions int) (topic string, err error) {
	if topic, err = b.NewTopic(ctx, name, partitions); err == nil {
		_, err = b.NewTopic(ctx, name+".dlq", 1)
	}
	return topic, err
}

// counting is a way to consume a shelf.
type counting struct {
	name  string
	shelf *shelf
	job   job
}

// consumer compares a transaction for what arrived together with one for each
// event, and with handlers that aggregate.
func (b *bench) consumer(ctx context.Context) error {
	schema, err := b.NewSchema(ctx, "consumer")
	if err != nil {
		return err
	}
	few, err := b.newShelf(ctx, b.cfg.handled/oneByOneShare)
	if err != nil {
		return err
	}
	many, err := b.newShelf(ctx, b.cfg.handled)
	if err != nil {
		return err
	}
	wide, err := b.newShelfOf(ctx, "wide", readShare*b.cfg.handled, manyPartitions, orders.New)
	if err != nil {
		return err
	}
	large := counting{"consumer/batch-1000", many, job{InBatch: true, MaxPoll: 1000}}
	all := []counting{
		{"consumer/one-by-one", few, job{MaxPoll: 1}},
		{"consumer/together", many, job{}},
		{"consumer/batch", many, job{InBatch: true}},
		large,
		{"consumer/100-partitions", wide, job{NoTx: true}},
	}
	if _, err := b.count(ctx, schema, 0, large); err != nil { // for warming up
		return err
	}
	runs := map[string][]used{}
	for round := range b.cfg.runs {
		for _, c := range all {
			u, err := b.count(ctx, schema, round+1, c)
			if err != nil {
				return err
			}
			b.say("%d/%d %s: %s events/s, %.1f µs CPU/event", round+1, b.cfg.runs, c.name, report.Number(u.rate()), u.cpu())
			runs[c.name] = append(runs[c.name], u)
		}
	}
	b.reportConsumer(all, runs)
	return nil
}

// reportConsumer holds all ways against the first. What handlers cost that aggregate
// is the consumer's cost; the others also show that of a statement for each event.
func (b *bench) reportConsumer(all []counting, runs map[string][]used) {
	base := all[0].name
	b.report.Add(report.Measured(base, "events/s", each(runs[base], used.rate)))
	for _, c := range all[1:] {
		r := report.Compared(c.name, "events/s", each(runs[c.name], used.rate), base, each(runs[base], used.rate))
		switch {
		case c.job.NoTx:
			b.report.Add(r.ValueAtLeast(80_000), report.Measured(c.name+"-heap", "MiB", each(runs[c.name], used.peak)).ValueAtMost(256))
		case c.job.InBatch:
			b.report.Add(r.ValueAtLeast(20_000))
		default:
			b.report.Add(r.RatioAtLeast(5))
		}
	}
	for _, c := range all {
		b.report.Add(report.Measured(c.name+"-cpu", "µs/event", each(runs[c.name], used.cpu)),
			report.Measured(c.name+"-allocs", "allocs/event", each(runs[c.name], used.allocs)),
			report.Measured(c.name+"-bytes", "bytes/event", each(runs[c.name], used.bytes)))
	}
}

// ddlCounts makes the counters anew. There is one for each key, and so all of its
// events come from one partition.
const ddlCounts = `
DROP TABLE IF EXISTS {schema}.counts;
CREATE TABLE {schema}.counts (key text PRIMARY KEY, n int NOT NULL) WITH (fillfactor = 50);
INSERT INTO {schema}.counts SELECT 'order-' || lpad(g::text, 5, '0'), 0 FROM generate_series(0, 9999) AS g;`

// count lets a new group consume a shelf in a process of its own. What earlier
// groups have noted in event_handled stays there, as it would.
func (b *bench) count(ctx context.Context, schema string, round int, c counting) (u used, err error) {
	if _, err := b.DB.Exec(ctx, services.InSchema(ddlCounts, schema), pgx.QueryExecModeSimpleProtocol); err != nil {
		return u, fmt.Errorf("create counters: %w", err)
	}
	for _, sql := range []string{`VACUUM (ANALYZE) {schema}.counts`, `VACUUM (ANALYZE) {schema}.event_handled`, `CHECKPOINT`} {
		if _, err := b.DB.Exec(ctx, services.InSchema(sql, schema)); err != nil {
			return u, fmt.Errorf("%s: %w", sql, err)
		}
	}
	j := c.job
	j.Work, j.Topic, j.Schema, j.Events, j.EventType = "count", c.shelf.topic, schema, c.shelf.events, b.EventType()
	j.Group = fmt.Sprintf("bench-%s-%s-%d", b.ID, c.name, round)
	defer func() {
		_, derr := b.Admin.DeleteGroup(context.WithoutCancel(ctx), j.Group)
		err = errors.Join(err, derr)
	}()
	if err := spawn(ctx, b.connect(j), b.stderr, &u, nil); err != nil {
		return u, fmt.Errorf("%s: %w", c.name, err)
	}
	if j.NoTx { // nothing is counted
		return u, nil
	}
	if err := b.checkCounts(ctx, j, c.shelf); err != nil {
		return u, fmt.Errorf("%s: %w", c.name, err)
	}
	return u, nil
}

// sqlHandled counts what a group has noted.
const sqlHandled = `SELECT count(*) FROM {schema}.event_handled WHERE consumer_group = $1`

// checkCounts finds out whether each event was counted once, noted and committed.
func (b *bench) checkCounts(ctx context.Context, j job, s *shelf) error {
	var noted int
	if err := b.DB.QueryRow(ctx, services.InSchema(sqlHandled, j.Schema), j.Group).Scan(&noted); err != nil {
		return fmt.Errorf("count what is handled: %w", err)
	}
	offsets, err := b.Admin.FetchOffsetsForTopics(ctx, j.Group, s.topic)
	if err != nil {
		return fmt.Errorf("read offsets: %w", err)
	}
	var committed int64
	offsets.Each(func(o kadm.OffsetResponse) { committed += o.At })
	if noted != s.events || committed != int64(s.events) {
		return fmt.Errorf("%d events were noted %d times and committed %d times", s.events, noted, committed)
	}
	rows, err := b.DB.Query(ctx, services.InSchema(`SELECT key, n FROM {schema}.counts WHERE n > 0`, j.Schema))
	if err != nil {
		return fmt.Errorf("read counters: %w", err)
	}
	counts := map[string]int{}
	var key string
	var n int
	if _, err = pgx.ForEachRow(rows, []any{&key, &n}, func() error { counts[key] = n; return nil }); err != nil {
		return fmt.Errorf("read counters: %w", err)
	}
	if !maps.Equal(counts, s.counts) {
		return fmt.Errorf("the counters do not show what happened to %d events", s.events)
	}
	return nil
}
