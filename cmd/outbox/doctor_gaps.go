package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/pg"
)

// sqlOldGaps reads actions that have lacked events for longer than $1, of the first $2 rows.
const sqlOldGaps = `
SELECT consumer_group, topic, action, count(DISTINCT partition), min(opened_at), clock_timestamp()
  FROM (SELECT consumer_group, topic, action, partition, opened_at FROM {schema}.consumer_gap
         WHERE opened_at < clock_timestamp() - $1::interval LIMIT $2) AS g
 GROUP BY consumer_group, topic, action ORDER BY consumer_group, topic, action LIMIT 100`

const gapsLooked = 100_000

// gaps looks for actions that lack events, because members without them have read the events.
func (d *doctor) gaps(ctx context.Context) error {
	var group, topic, action string
	var partitions int64
	var since, now time.Time
	return pg.Query(ctx, d.e.db, "", func(rows pgx.Rows) error {
		_, err := pgx.ForEachRow(rows, []any{&group, &topic, &action, &partitions, &since, &now}, func() error {
			d.add("delivery.gap", severityWarning, fmt.Sprintf("group %s: action %s has lacked events of topic %s for %s, in %s", group, action, topic, age(since, now),
				plural(partitions, "partition", "partitions")),
				"Members without this action have read these events. The action gets them once a member that has it gets the partitions.",
				fmt.Sprintf("Finish the rollout: stop the members without the action. If it is gone for good: SELECT %s.outbox_forget_action(%s, %s, 'your name', 'why')",
					pgx.Identifier{d.e.schemaName()}.Sanitize(), quoteText(group), quoteText(action)))
			return nil
		})
		return err
	}, pg.InSchema(sqlOldGaps, d.e.schemaName()), d.limits.maxAge, gapsLooked)
}

var gapsCheck = check{name: "kafka.gaps", ids: []string{"kafka.gap"}}

// sqlGapsOfPartitions reads the oldest event that actions lack of a partition.
const sqlGapsOfPartitions = `
SELECT consumer_group, topic, partition, action, min(from_offset)
  FROM (SELECT consumer_group, topic, partition, action, from_offset FROM {schema}.consumer_gap LIMIT $1) AS g
 GROUP BY consumer_group, topic, partition, action ORDER BY consumer_group, topic, partition, action LIMIT 10000`

// gapsInKafka looks for events that an action lacks and that Kafka has removed, or removes next.
func (d *doctor) gapsInKafka(ctx context.Context, opts []kgo.Opt) error {
	type gap struct {
		at            kafka.Partition
		group, action string
		from          int64
	}
	var gaps []gap
	firsts, ends := map[kafka.Partition]int64{}, map[kafka.Partition]int64{}
	var g gap
	if err := pg.Query(ctx, d.e.db, "", func(rows pgx.Rows) error {
		_, err := pgx.ForEachRow(rows, []any{&g.group, &g.at.Topic, &g.at.Number, &g.action, &g.from}, func() error {
			gaps = append(gaps, g)
			firsts[g.at], ends[g.at] = kafka.FirstOffset, kafka.EndOffset
			return nil
		})
		return err
	}, pg.InSchema(sqlGapsOfPartitions, d.e.schemaName()), gapsLooked); err != nil || len(gaps) == 0 {
		return err
	}
	client, err := kgo.NewClient(opts...)
	if err != nil {
		return err
	}
	defer client.Close()
	if firsts, err = kafka.ListOffsets(ctx, client, kafka.Uncommitted, firsts); err != nil && !kafka.IsTopicOutage(err) {
		return err
	}
	if ends, err = kafka.ListOffsets(ctx, client, kafka.Uncommitted, ends); err != nil && !kafka.IsTopicOutage(err) {
		return err
	}
	for _, g := range gaps {
		first, end := firsts[g.at], ends[g.at] // both are 0 if the topic is missing
		var what string
		switch {
		case g.from < first:
			what = fmt.Sprintf("Kafka has removed %s that it lacks", plural(first-g.from, "record", "records"))
		case first > 0 && g.from-first < (end-first)/10: // Kafka removes records already, and comes near
			what = fmt.Sprintf("Kafka removes what it lacks after %s", plural(g.from-first, "more record", "more records"))
		default:
			continue
		}
		d.add("kafka.gap", severityError, fmt.Sprintf("group %s: action %s, %s: %s", g.group, g.action, g.at.Name(), what),
			"Retention of the topic removes events before a member that has the action has read them. They are lost for the action.",
			"Start members with the action and stop those without it, or raise retention.ms and retention.bytes of the topic until then.")
	}
	return nil
}
