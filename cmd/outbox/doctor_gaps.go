package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/pg"
)

const gapsLooked = 100_000

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
			if err, _ := topicNameErrors(g.at.Topic); err == nil { // Kafka has nothing under other names
				gaps = append(gaps, g)
				firsts[g.at], ends[g.at] = kafka.FirstOffset, kafka.EndOffset
			}
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
	firsts, unknown := kafka.ListOffsets(ctx, client, kafka.Uncommitted, firsts)
	ends, err = kafka.ListOffsets(ctx, client, kafka.Uncommitted, ends)
	unknown = errors.Join(unknown, err)
	for _, g := range gaps {
		first, end := firsts[g.at], ends[g.at] // both are 0 if Kafka does not tell
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
	if kafka.IsTopicOutage(unknown) {
		return nil
	}
	return unknown
}
