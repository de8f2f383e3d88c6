package outboxops

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pauses"
	"github.com/outboxgo/outbox/internal/pg"
)

// Consumers shows consumer groups, and pauses and resumes them. It is safe for concurrent use.
//
// All members of a group read the pauses every two seconds, and after a start before they handle events.
// Running handlers finish their events. While PostgreSQL does not answer, a member uses the pauses that it
// has read last. Groups that run without a database cannot be paused here.
type Consumers struct {
	db                  *pgxpool.Pool
	list, pause, resume string
}

// ConsumersConfig names the schema of the tables. It may be zero.
type ConsumersConfig struct {
	// Schema holds the tables of outbox. Empty means public.
	Schema string
}

// NewConsumers returns access to the consumer groups in db. It does no I/O; closing db stays
// with the caller.
func NewConsumers(db *pgxpool.Pool, cfg ConsumersConfig) (*Consumers, error) {
	if err := checkDB(db, &cfg.Schema); err != nil {
		return nil, fmt.Errorf("outbox: consumers config: %w", err)
	}
	in := func(sql string) string { return pg.InSchema(sql, cfg.Schema) }
	return &Consumers{db: db, list: in(sqlGroups), pause: in(sqlPauseConsumer), resume: in(sqlResumeConsumer)}, nil
}

// ConsumerGroup is a consumer group that has begun to read, or that is paused.
type ConsumerGroup struct {
	// Group is its name.
	Group string
	// Pause is the pause of all topics; nil if there is none.
	Pause *ConsumerPause
	// Topics are the topics that the group has begun with and the paused topics, sorted by name.
	Topics []ConsumerTopic
}

// ConsumerTopic is a topic that a group reads.
type ConsumerTopic struct {
	// Topic is its name.
	Topic string
	// Partitions is the number of its partitions that the group has begun with.
	Partitions int
	// SavedAt is when a member saved a position in it last, which members do once a
	// minute while they have something to save; zero if none has.
	SavedAt time.Time
	// Lost is the number of records that Kafka had removed before the group could read them, or has lost with a broker.
	Lost int64
	// Pause is the pause of this topic alone; nil if there is none.
	Pause *ConsumerPause
}

// ConsumerPause is the operator, the time and the reason of a pause.
type ConsumerPause struct {
	// Operator and Reason are the fields of [AuditInfo].
	Operator, Reason string
	// At is the time of the pause.
	At time.Time
}

// sqlGroups reads all groups, or the group $1. Consumers can insert any rows for their groups. So it reads
// at most $2 groups, $3 rows of each and $4 rows of all groups, by the primary key. It returns at most $5
// lines: of each group the paused topics first, so that no group hides another group. If a topic was
// created again, only the topic id counts that a member wrote last.
const sqlGroups = `
WITH RECURSIVE names AS (
    SELECT coalesce(nullif($1::text, ''), (SELECT consumer_group::text FROM {schema}.consumer_start ORDER BY consumer_group LIMIT 1)) AS name
     UNION ALL
    SELECT (SELECT s.consumer_group::text FROM {schema}.consumer_start AS s WHERE s.consumer_group > names.name ORDER BY s.consumer_group LIMIT 1)
      FROM names WHERE names.name IS NOT NULL AND $1::text = ''
), begun AS MATERIALIZED (
    SELECT name FROM names WHERE name IS NOT NULL LIMIT $2
), looked AS MATERIALIZED (
    SELECT s.* FROM begun CROSS JOIN LATERAL (
        SELECT consumer_group, topic, topic_id, partition, position, saved_at, lost
          FROM {schema}.consumer_start WHERE consumer_group = begun.name ORDER BY consumer_group, topic, topic_id, partition LIMIT $3) AS s
     LIMIT $4
), read AS (
    SELECT DISTINCT ON (consumer_group, topic) consumer_group, topic, partitions, saved_at, lost
      FROM (SELECT consumer_group, topic, topic_id, count(*) FILTER (WHERE partition >= 0) AS partitions,
                   max(saved_at) FILTER (WHERE position IS NOT NULL) AS saved_at, max(saved_at) AS written_at,
                   greatest(least(sum(sum(lost)) OVER (PARTITION BY consumer_group, topic), 9223372036854775807), 0)::bigint AS lost
              FROM looked GROUP BY consumer_group, topic, topic_id) AS t
     ORDER BY consumer_group, topic, written_at DESC
), lines AS (
    SELECT consumer_group, topic, coalesce(r.partitions, 0) AS partitions, r.saved_at, coalesce(r.lost, 0) AS lost, coalesce(p.operator, '') AS operator,
           coalesce(p.reason, '') AS reason, p.paused_at, p.paused_at IS NOT NULL AS paused,
           row_number() OVER (PARTITION BY consumer_group ORDER BY p.paused_at IS NULL, topic) AS place
      FROM read AS r FULL JOIN (SELECT * FROM {schema}.consumer_pause WHERE $1::text = '' OR consumer_group = $1) AS p USING (consumer_group, topic)
     ORDER BY place, consumer_group LIMIT $5 + 1
)
SELECT consumer_group, topic, partitions, saved_at, lost, operator, reason, paused_at, paused,
       (SELECT count(*) FROM begun) >= $2 OR (SELECT count(*) FROM looked) >= $4
       OR EXISTS (SELECT FROM looked GROUP BY consumer_group HAVING count(*) >= $3) OR (SELECT count(*) FROM lines) > $5
  FROM (SELECT * FROM lines ORDER BY place, consumer_group LIMIT $5) AS l
 ORDER BY consumer_group, topic`

// The limits of sqlGroups: groups, partitions of a group, partitions of all groups, and topics of all
// groups.
const (
	maxGroups          = 1000
	maxGroupPartitions = 10_000
	maxPartitions      = 200_000
	maxGroupTopics     = 10_000
)

// ConsumerFilter picks consumer groups. The zero value picks all.
type ConsumerFilter struct {
	// Group is the name of one.
	Group string
}

// List returns the groups, sorted by name. It reads 1,000 groups, 10,000 partitions of each and 200,000 of
// all. It returns at most 10,000 topics, of each group the paused ones first. If there are more, more is
// set, and the numbers of a topic may be too small. Only an attack leads to such numbers.
func (c *Consumers) List(ctx context.Context, filter ConsumerFilter) (groups []ConsumerGroup, more bool, err error) {
	var (
		group  string
		t      ConsumerTopic
		p      ConsumerPause
		paused bool
	)
	add := func() {
		if len(groups) == 0 || groups[len(groups)-1].Group != group {
			groups = append(groups, ConsumerGroup{Group: group})
		}
		g := &groups[len(groups)-1]
		t.Pause = nil
		if paused {
			pause := p
			t.Pause = &pause
		}
		if t.Topic == pauses.All {
			g.Pause = t.Pause
			return
		}
		g.Topics = append(g.Topics, t)
	}
	err = pg.Query(ctx, c.db, pg.PlannerSettings, func(rows pgx.Rows) error {
		_, err := pgx.ForEachRow(rows, []any{&group, &t.Topic, &t.Partitions, pg.Time{At: &t.SavedAt}, &t.Lost, &p.Operator, &p.Reason, pg.Time{At: &p.At}, &paused, &more}, func() error {
			add()
			return nil
		})
		return err
	}, c.list, filter.Group, maxGroups, maxGroupPartitions, maxPartitions, maxGroupTopics)
	if err != nil {
		return nil, false, fmt.Errorf("outbox: list consumer groups: %w", orNotMigrated(err))
	}
	return groups, more, nil
}

const sqlPauseConsumer = `SELECT {schema}.outbox_pause_consumer($1::text, $2::text, $3::text, $4::text)`

// Pause stops all members of a group from handling events of a topic, or of all topics if topic is empty.
// Resume with the same arguments ends the pause. The pause survives restarts, and also applies to groups
// that have not begun yet. Offsets stay, and retention of the topic goes on: a pause that is longer than
// the retention loses records.
//
// It returns [ErrStatus] if the same pause exists already.
func (c *Consumers) Pause(ctx context.Context, group, topic string, why AuditInfo) error {
	return c.change(ctx, "pause", c.pause, "it is paused already", group, topic, why)
}

const sqlResumeConsumer = `SELECT {schema}.outbox_resume_consumer($1::text, $2::text, $3::text, $4::text)`

// Resume ends a pause of a topic, or with an empty name the pause of all topics. Topics that were paused
// separately remain paused.
//
// It returns [ErrStatus] if there is no such pause.
func (c *Consumers) Resume(ctx context.Context, group, topic string, why AuditInfo) error {
	return c.change(ctx, "resume", c.resume, "it is not paused", group, topic, why)
}

// maxGroup is the largest number of characters in the name of a consumer group.
const maxGroup = 255

func (c *Consumers) change(ctx context.Context, action, sql, otherwise, group, topic string, why AuditInfo) error {
	if err := why.check(); err != nil {
		return err
	}
	err := check.Text(group, maxGroup)
	if group == "" {
		err = outbox.ErrEmpty
	}
	if err != nil {
		return fmt.Errorf("outbox: %s: consumer group %w", action, err)
	}
	if topic != pauses.All {
		if err := check.Topic(topic); err != nil {
			return fmt.Errorf("outbox: %s group %s: %w", action, group, err)
		}
	}
	var done bool
	err = pg.QueryRow(ctx, c.db, sql, group, topic, why.Operator, why.Reason).Scan(&done)
	if err == nil && !done {
		err = fmt.Errorf("%w: %s", ErrStatus, otherwise)
	}
	if err != nil && topic != pauses.All {
		err = fmt.Errorf("topic %s: %w", topic, err)
	}
	if err != nil {
		return fmt.Errorf("outbox: %s group %s: %w", action, group, orNotMigrated(err))
	}
	return nil
}
