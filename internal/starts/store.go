package starts

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/pg"
)

// Store is the tables consumer_start, consumer_handler and consumer_gap, for one group.
type Store struct {
	db    *pgxpool.Pool
	group string

	look, read, write, begin, save, saved               string
	sqlHandlers, sqlRegister, sqlOpen, sqlGaps, sqlPass string
	sqlAssign, sqlEnd, sqlSuspect                       string
}

// NewStore returns the store of a group. It does no I/O.
func NewStore(db *pgxpool.Pool, schema, group string) *Store {
	in := func(sql string) string { return pg.InSchema(sql, schema) }
	return &Store{
		db: db, group: group,
		look: in(sqlLook), read: in(sqlRead), write: in(sqlWrite), begin: in(sqlBegin), save: in(sqlSave), saved: in(sqlSaved),
		sqlHandlers: in(sqlHandlers), sqlRegister: in(sqlRegister), sqlOpen: in(sqlOpen), sqlGaps: in(sqlGaps), sqlPass: in(sqlPass),
		sqlAssign: in(sqlAssign), sqlEnd: in(sqlEnd), sqlSuspect: in(sqlSuspect),
	}
}

// topic is the stored state of a topic.
type topic struct {
	id kafka.TopicID
	// listed is set if the topic with this id is listed, and before if there are other
	// ids under its name: then it did not exist when the group first looked for it, or
	// it was deleted and created again.
	listed, before bool
	// starting is set while the group gets the events of an archive first.
	starting bool
	// silent are the partitions because of which the topic cannot be listed yet, see [Member.ask].
	silent     silence
	partitions map[int32]partition
}

// partition is the stored state of a partition.
type partition struct {
	start int64
	// position is the offset that was saved last, or None if the group has not begun
	// with the partition.
	position int64
}

// uuidOf returns an id as text: pgx cannot encode an array of ids in all of its modes.
func uuidOf(id kafka.TopicID) string { return uuid.UUID(id).String() }

// None is the offset of a partition without one.
const None int64 = -1

// wholeTopic is the partition of the row that says that a topic is listed.
const wholeTopic = kafka.Unassigned

// sqlLook fails if a table does not exist.
const sqlLook = `SELECT FROM {schema}.consumer_start, {schema}.consumer_handler, {schema}.consumer_gap LIMIT 0`

// Check reports why the table cannot be used.
func (s *Store) Check(ctx context.Context) error {
	_, err := s.db.Exec(ctx, s.look)
	return err
}

// sqlRead reads the rows of topics, of all their ids.
const sqlRead = `
SELECT topic, topic_id, partition, coalesce(start_offset, -1), coalesce(position, -1), starting
  FROM {schema}.consumer_start
 WHERE consumer_group = $1 AND topic = ANY ($2::text[])`

// topics returns the stored state of topics, which are given with their ids.
func (s *Store) topics(ctx context.Context, ids map[string]kafka.TopicID) (map[string]topic, error) {
	names := make([]string, 0, len(ids))
	topics := make(map[string]topic, len(ids))
	for name := range ids {
		names = append(names, name)
		topics[name] = topic{id: ids[name], partitions: map[int32]partition{}}
	}
	rows, err := s.db.Query(ctx, s.read, s.group, names)
	if err != nil {
		return nil, fmt.Errorf("read where reading begins: %w", err)
	}
	var (
		name     string
		id       [16]byte
		n        int32
		p        partition
		starting bool
	)
	_, err = pgx.ForEachRow(rows, []any{&name, &id, &n, &p.start, &p.position, &starting}, func() error {
		t := topics[name]
		t.starting = t.starting || starting
		switch {
		case id != ids[name]:
			t.before = true
		case n == wholeTopic:
			t.listed = true
		default:
			t.partitions[n] = p
		}
		topics[name] = t
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read where reading begins: %w", err)
	}
	return topics, nil
}

// sqlWrite lists topics and their partitions. If another member has listed a topic, or is
// about to, none of its partitions are written: the first member decides. Rows of topics
// that were deleted long ago go, and gaps of deleted topics at once.
const sqlWrite = `
WITH listed AS (
    INSERT INTO {schema}.consumer_start (consumer_group, topic, topic_id, partition)
    SELECT $1, t.topic, t.id, -1 FROM unnest($2::text[], $3::text[]::uuid[]) AS t (topic, id) ORDER BY t.topic
        ON CONFLICT (consumer_group, topic, topic_id, partition) DO NOTHING
    RETURNING topic, topic_id
), begun AS (
    INSERT INTO {schema}.consumer_start (consumer_group, topic, topic_id, partition, start_offset, position)
    SELECT $1, l.topic, l.topic_id, p.number, p.start, nullif(p.position, -1)
      FROM listed AS l JOIN unnest($4::text[], $5::int[], $6::bigint[], $7::bigint[]) AS p (topic, number, start, position) ON p.topic = l.topic
        ON CONFLICT (consumer_group, topic, topic_id, partition) DO NOTHING
)
SELECT {schema}.outbox_remove_topics($1::text, pg_catalog.array_agg(topic), pg_catalog.array_agg(topic_id)) FROM listed`

// list lists topics, all in one transaction, unless another member was faster. One that
// does not exist has neither an id nor partitions.
func (s *Store) list(ctx context.Context, topics map[string]topic) error {
	var (
		names, of         []string
		ids               []string
		numbers           []int32
		begins, positions []int64
	)
	for name, t := range topics {
		names, ids = append(names, name), append(ids, uuidOf(t.id))
		for n, p := range t.partitions {
			of, numbers, begins, positions = append(of, name), append(numbers, n), append(begins, p.start), append(positions, p.position)
		}
	}
	if _, err := pg.Exec(ctx, s.db, s.write, s.group, names, ids, of, numbers, begins, positions); err != nil {
		return fmt.Errorf("write where reading begins: %w", err)
	}
	return nil
}

// sqlSaved reads the positions that were saved until $2.
const sqlSaved = `
SELECT topic, topic_id, partition, position
  FROM {schema}.consumer_start
 WHERE consumer_group = $1 AND position IS NOT NULL AND saved_at <= $2`

// Saved returns the positions that were saved until a time and not since. All records before them
// were handled by then.
func (s *Store) Saved(ctx context.Context, until time.Time) ([]Offset, error) {
	rows, err := s.db.Query(ctx, s.saved, s.group, until)
	if err != nil {
		return nil, fmt.Errorf("read saved positions: %w", err)
	}
	offsets, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (o Offset, err error) {
		err = row.Scan(&o.Partition.Topic, &o.Topic, &o.Number, &o.At)
		return o, err
	})
	if err != nil {
		return nil, fmt.Errorf("read saved positions: %w", err)
	}
	return offsets, nil
}

// Offset is an offset of a partition.
type Offset struct {
	kafka.Partition
	Topic kafka.TopicID
	At    int64
	// Lost is how many offsets before At Kafka had removed.
	Lost int64
	// SetBack is set if At is lower than an offset that may be saved: Kafka has lost records.
	SetBack bool
}

// sqlBegin notes that the group has begun with partitions, also those not listed yet.
const sqlBegin = `
INSERT INTO {schema}.consumer_start AS s (consumer_group, topic, topic_id, partition, start_offset, position, lost, lost_at)
SELECT $1, p.topic, p.id, p.number, p.at, p.at, p.lost, CASE WHEN p.lost > 0 THEN now() END
  FROM unnest($2::text[], $3::text[]::uuid[], $4::int[], $5::bigint[], $6::bigint[]) AS p (topic, id, number, at, lost)
 ORDER BY p.topic, p.number
    ON CONFLICT (consumer_group, topic, topic_id, partition) DO UPDATE
   SET position = excluded.position, saved_at = now(), lost = s.lost + excluded.lost, lost_at = coalesce(excluded.lost_at, s.lost_at)`

// Begin notes with which offsets the group begins.
func (s *Store) Begin(ctx context.Context, offsets []Offset) error {
	return s.put(ctx, s.begin, "note where reading begins", offsets)
}

// sqlSave saves positions of partitions that the group has begun with. A member that has lost a partition may be late.
// So a position is set back only where Kafka has lost records, and by the last member only.
const sqlSave = `
UPDATE {schema}.consumer_start AS s
   SET position = CASE WHEN p.at < 0 THEN s.position
                       WHEN p.set_back AND coalesce(s.assigned_to, $7::text::uuid) = $7::text::uuid THEN p.at
                       ELSE greatest(s.position, p.at) END,
       saved_at = now(), lost = s.lost + p.lost, lost_at = CASE WHEN p.lost > 0 THEN now() ELSE s.lost_at END
  FROM unnest($2::text[], $3::text[]::uuid[], $4::int[], $5::bigint[], $6::bigint[], $8::bool[]) AS p (topic, id, number, at, lost, set_back)
 WHERE s.consumer_group = $1 AND s.topic = p.topic AND s.topic_id = p.id AND s.partition = p.number`

// Save saves positions of a membership. An offset that is [None] leaves the position as it is.
func (s *Store) Save(ctx context.Context, member string, offsets []Offset) error {
	setBack := make([]bool, len(offsets))
	for i, o := range offsets {
		setBack[i] = o.SetBack
	}
	return s.put(ctx, s.save, "save positions", offsets, member, setBack)
}

// put runs a statement with a row for each offset, and more arguments.
func (s *Store) put(ctx context.Context, sql, what string, offsets []Offset, more ...any) error {
	names, ids, numbers := columnsOf(offsets)
	ats, lost := make([]int64, len(offsets)), make([]int64, len(offsets))
	for i, o := range offsets {
		ats[i], lost[i] = o.At, o.Lost
	}
	if _, err := pg.Exec(ctx, s.db, sql, append([]any{s.group, names, ids, numbers, ats, lost}, more...)...); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}
