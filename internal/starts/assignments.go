package starts

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/pg"
)

// Assignment is what PostgreSQL knows about the last assignments of a partition.
type Assignment struct {
	// UncleanEnds is how often memberships that began to read at the same offset have ended uncleanly: their process
	// has ended, or the group has expelled them.
	UncleanEnds int
	// Suspected is set if a record of the partition that is not committed was to be handled alone.
	Suspected bool
}

// MostUncleanEnds is the number of unclean ends at an offset after which the next records are handled alone, and the
// number of ends at such a record after which it is not decoded.
const MostUncleanEnds = 3

// sqlAssign notes that partitions are assigned to a membership. An earlier membership that has not ended cleanly has
// ended uncleanly. A clean end does not reset the count: if members end within moments of their start, a rebalance may
// take the partition from one of them before it has handled anything.
const sqlAssign = `
UPDATE {schema}.consumer_start AS s
   SET assigned_to = $2::text::uuid, assigned_at = now(), read_from = p.at,
       unclean_ends = CASE WHEN s.read_from IS NULL OR s.read_from <> p.at THEN 0 WHEN s.assigned_to <> $2::text::uuid THEN s.unclean_ends + 1 ELSE s.unclean_ends END,
       suspect_offset = CASE WHEN s.suspect_offset >= p.at THEN s.suspect_offset END
  FROM unnest($3::text[], $4::text[]::uuid[], $5::int[], $6::bigint[]) AS p (topic, id, number, at)
 WHERE s.consumer_group = $1 AND s.topic = p.topic AND s.topic_id = p.id AND s.partition = p.number
RETURNING s.topic, s.partition, s.unclean_ends, s.suspect_offset IS NOT NULL`

// assign notes that partitions are assigned to a membership, and where it begins to read.
func (s *Store) assign(ctx context.Context, member string, offsets []Offset) (map[kafka.Partition]Assignment, error) {
	names, ids, numbers := columnsOf(offsets)
	ats := make([]int64, len(offsets))
	for i, o := range offsets {
		ats[i] = o.At
	}
	assignments := map[kafka.Partition]Assignment{}
	err := pg.Query(ctx, s.db, pg.Durable, func(rows pgx.Rows) error {
		var at kafka.Partition
		var a Assignment
		_, err := pgx.ForEachRow(rows, []any{&at.Topic, &at.Number, &a.UncleanEnds, &a.Suspected}, func() error { assignments[at] = a; return nil })
		return err
	}, s.sqlAssign, s.group, member, names, ids, numbers, ats)
	if err != nil {
		return nil, fmt.Errorf("note assigned partitions: %w", err)
	}
	return assignments, nil
}

// sqlSuspect notes that a record is to be handled alone, $6 = 1, or that this has ended with a stop, $6 = -1. A record
// that was noted before has ended a process since. A stop may be noted late: it changes no other record.
const sqlSuspect = `
UPDATE {schema}.consumer_start AS s
   SET suspect_ends = CASE WHEN s.suspect_offset = $5::bigint THEN s.suspect_ends + $6::int ELSE 0 END, suspect_offset = $5::bigint
 WHERE s.consumer_group = $1 AND s.topic = $2::text AND s.topic_id = $3::text::uuid AND s.partition = $4::int
   AND ($6::int > 0 OR s.suspect_offset = $5::bigint)
RETURNING s.suspect_ends`

// suspect notes that a record is to be handled alone, or with [None] that none is. It returns how often processes have
// ended since it was noted first. Stopped takes the note back that it was to be handled.
func (s *Store) suspect(ctx context.Context, at Offset, stopped bool) (ends int, err error) {
	step := 1
	if stopped {
		step = -1
	}
	offset := pgtype.Int8{Int64: at.At, Valid: at.At != None}
	err = pg.ExecRow(ctx, s.db, s.sqlSuspect, s.group, at.Partition.Topic, uuidOf(at.Topic), at.Number, offset, step).Scan(&ends)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) { // the topic was deleted, or a later record was noted
		return 0, fmt.Errorf("note that a record is handled alone: %w", err)
	}
	return ends, nil
}

// Suspect is suspect in a partition of this member.
func (m *Member) Suspect(ctx context.Context, at kafka.Partition, offset int64, stopped bool) (ends int, err error) {
	return m.cfg.Store.suspect(ctx, Offset{Partition: at, Topic: m.TopicID(at.Topic), At: offset}, stopped)
}

// sqlEnd notes that a membership has ended cleanly in partitions that no other one has got meanwhile.
const sqlEnd = `
UPDATE {schema}.consumer_start AS s SET assigned_to = NULL
  FROM unnest($3::text[], $4::text[]::uuid[], $5::int[]) AS p (topic, id, number)
 WHERE s.consumer_group = $1 AND s.topic = p.topic AND s.topic_id = p.id AND s.partition = p.number AND s.assigned_to = $2::text::uuid`

func (s *Store) end(ctx context.Context, member string, partitions []Offset) error {
	names, ids, numbers := columnsOf(partitions)
	if _, err := pg.Exec(ctx, s.db, s.sqlEnd, s.group, member, names, ids, numbers); err != nil {
		return fmt.Errorf("note clean ends: %w", err)
	}
	return nil
}

// columnsOf returns an array for each column of partitions.
func columnsOf(offsets []Offset) (names, ids []string, numbers []int32) {
	for _, o := range offsets {
		names, ids, numbers = append(names, o.Partition.Topic), append(ids, uuidOf(o.Topic)), append(numbers, o.Number)
	}
	return names, ids, numbers
}

// noteAssigned notes that this member begins to read partitions at offsets.
func (m *Member) noteAssigned(ctx context.Context, topics map[string]topic, from map[kafka.Partition]int64) (map[kafka.Partition]Assignment, error) {
	if m.cfg.Store == nil || len(from) == 0 {
		return nil, nil
	}
	offsets := make([]Offset, 0, len(from))
	for at, offset := range from {
		offsets = append(offsets, Offset{Partition: at, Topic: topics[at.Topic].id, At: offset})
	}
	if !m.hold(offsets) {
		return nil, errEnded
	}
	assignments, err := m.cfg.Store.assign(ctx, m.id.String(), offsets)
	if !m.hold(nil) {
		m.endHeld(offsets) // End may have been faster
		return nil, errEnded
	}
	for at, a := range assignments {
		switch {
		case a.UncleanEnds >= MostUncleanEnds:
			m.cfg.Log.Info("outbox: processes have ended uncleanly at an offset, the next records of the partition will be handled alone, one by one",
				"partition", at.Name(), "offset", from[at], "ends", a.UncleanEnds)
		case a.UncleanEnds > 0:
			m.cfg.Log.Debug("outbox: the process that had a partition last has ended uncleanly at the offset at which it began",
				"partition", at.Name(), "offset", from[at], "ends", a.UncleanEnds)
		}
	}
	return assignments, err
}

// errEnded means that this member begins with no more partitions.
var errEnded = errors.New("the member has ended")

// hold keeps in mind which partitions are noted as assigned to this member. It returns false after End.
func (m *Member) hold(offsets []Offset) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.held == nil {
		return false
	}
	for _, o := range offsets {
		m.held[o.Partition] = o.Topic
	}
	return true
}

// release returns those of some partitions that are noted as assigned to this member, which forgets them.
func (m *Member) release(partitions map[string][]int32) (held []Offset) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for at, id := range m.held {
		if slices.Contains(partitions[at.Topic], at.Number) {
			held = append(held, Offset{Partition: at, Topic: id})
			delete(m.held, at)
		}
	}
	return held
}

// Ended notes that this member has ended cleanly in partitions: all that it has begun, it has completed or rolled back.
func (m *Member) Ended(partitions map[string][]int32) { m.endHeld(m.release(partitions)) }

// Expelled says that the group has taken partitions from this member: it has ended uncleanly there.
func (m *Member) Expelled(partitions map[string][]int32) { m.release(partitions) }

// End is Ended in all partitions of this member, also in those that were assigned to it while it stopped. It begins
// with no others.
func (m *Member) End() {
	m.mu.Lock()
	var ended []Offset
	for at, id := range m.held {
		ended = append(ended, Offset{Partition: at, Topic: id})
	}
	m.held = nil
	m.mu.Unlock()
	m.endHeld(ended)
}

func (m *Member) endHeld(ended []Offset) {
	if len(ended) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), saveTimeout)
	defer cancel()
	began := time.Now()
	if err := m.cfg.Store.end(ctx, m.id.String(), ended); err != nil {
		m.cfg.Log.Debug("outbox: it is not noted that this member has ended cleanly, so it counts as an unclean end",
			"partitions", len(ended), "after", time.Since(began), "error", err)
	}
}
