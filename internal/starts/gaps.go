package starts

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/pg"
)

// Handler is a handler of a group: an action for the events of a type in a topic.
type Handler struct{ Topic, Action, EventType string }

// Gap is a handler that may have missed events of a partition: those from From up to the offset at which the group
// goes on.
type Gap struct {
	Handler
	Number int32
	From   int64

	id      kafka.TopicID
	version int64
}

// sqlHandlers reads the registered handlers of topics.
const sqlHandlers = `
SELECT topic, action, event_type FROM {schema}.consumer_handler WHERE consumer_group = $1 AND topic = ANY ($2::text[])`

// handlers returns the handlers of topics that the group has registered.
func (s *Store) handlers(ctx context.Context, topics []string) (map[Handler]bool, error) {
	registered := map[Handler]bool{}
	rows, err := s.db.Query(ctx, s.sqlHandlers, s.group, topics)
	if err == nil {
		var h Handler
		_, err = pgx.ForEachRow(rows, []any{&h.Topic, &h.Action, &h.EventType}, func() error { registered[h] = true; return nil })
	}
	if err != nil {
		return nil, fmt.Errorf("read registered handlers: %w", err)
	}
	return registered, nil
}

// sqlRegister registers handlers of a topic. The update makes members that register at the same time wait for each
// other. Each handler that is new gets gaps at the given offsets, except those of the first member of a topic: no
// member without them can have begun to read it.
const sqlRegister = `
WITH topic AS (
    UPDATE {schema}.consumer_start AS s SET handlers = s.handlers + 1
     WHERE s.consumer_group = $1 AND s.topic = $2 AND s.topic_id = $3::text::uuid AND s.partition = -1
    RETURNING s.topic, s.topic_id, s.handlers > 1
           OR EXISTS (SELECT FROM {schema}.consumer_handler AS h WHERE h.consumer_group = $1 AND h.topic = $2) AS known
), fresh AS (
    INSERT INTO {schema}.consumer_handler (consumer_group, topic, action, event_type)
    SELECT $1, t.topic, h.action, h.event_type
      FROM topic AS t CROSS JOIN unnest($4::text[], $5::text[]) AS h (action, event_type)
     ORDER BY h.action, h.event_type
        ON CONFLICT ON CONSTRAINT consumer_handler_pkey DO NOTHING
    RETURNING action, event_type
)
INSERT INTO {schema}.consumer_gap AS g (consumer_group, topic, topic_id, partition, action, event_type, from_offset)
SELECT $1, t.topic, t.topic_id, p.number, f.action, f.event_type, p.at
  FROM topic AS t CROSS JOIN fresh AS f CROSS JOIN unnest($6::int[], $7::bigint[]) AS p (number, at)
 WHERE t.known
 ORDER BY p.number, f.action, f.event_type
    ON CONFLICT ON CONSTRAINT consumer_gap_pkey DO UPDATE
   SET from_offset = least(g.from_offset, excluded.from_offset), version = g.version + 1`

// register registers handlers of a topic. Where the group knows the topic, they have missed everything from offsets on.
func (s *Store) register(ctx context.Context, topic string, id kafka.TopicID, handlers []Handler, offsets map[int32]int64) error {
	var (
		actions, types []string
		numbers        []int32
		ats            []int64
	)
	for _, h := range handlers {
		actions, types = append(actions, h.Action), append(types, h.EventType)
	}
	for number, at := range offsets {
		numbers, ats = append(numbers, number), append(ats, at)
	}
	if _, err := pg.Exec(ctx, s.db, s.sqlRegister, s.group, topic, uuidOf(id), actions, types, numbers, ats); err != nil {
		return fmt.Errorf("register handlers: %w", err)
	}
	return nil
}

// sqlOpen notes that a member without some handlers begins to read partitions. A gap that is there already goes on.
const sqlOpen = `
INSERT INTO {schema}.consumer_gap AS g (consumer_group, topic, topic_id, partition, action, event_type, from_offset)
SELECT $1, p.topic, p.id, p.number, p.action, p.event_type, p.at
  FROM unnest($2::text[], $3::text[]::uuid[], $4::int[], $5::text[], $6::text[], $7::bigint[])
    AS p (topic, id, number, action, event_type, at)
 ORDER BY p.topic, p.number, p.action, p.event_type
    ON CONFLICT ON CONSTRAINT consumer_gap_pkey DO UPDATE
   SET from_offset = least(g.from_offset, excluded.from_offset), version = g.version + 1`

// open opens gaps. From is the offset at which the member without the handler begins to read.
func (s *Store) open(ctx context.Context, gaps []Gap) error {
	var (
		topics, ids, actions, types []string
		numbers                     []int32
		ats                         []int64
	)
	for _, g := range gaps {
		topics, ids, numbers = append(topics, g.Topic), append(ids, uuidOf(g.id)), append(numbers, g.Number)
		actions, types, ats = append(actions, g.Action), append(types, g.EventType), append(ats, g.From)
	}
	if _, err := pg.Exec(ctx, s.db, s.sqlOpen, s.group, topics, ids, numbers, actions, types, ats); err != nil {
		return fmt.Errorf("open gaps: %w", err)
	}
	return nil
}

// OpenGaps notes that handlers of the group that this member lacks miss the records of a partition from an offset on.
// Kafka has written them in place of lost ones, before the offset at which the member has begun.
func (m *Member) OpenGaps(ctx context.Context, at kafka.Partition, from int64) error {
	if m.cfg.Store == nil {
		return nil
	}
	lacking, err := m.cfg.Store.handlers(ctx, []string{at.Topic})
	if err != nil {
		return err
	}
	for _, own := range m.cfg.Handlers {
		delete(lacking, own)
	}
	var gaps []Gap
	for h := range lacking {
		gaps = append(gaps, Gap{Handler: h, Number: at.Number, From: from, id: m.TopicID(at.Topic)})
	}
	if len(gaps) == 0 {
		return nil
	}
	return m.cfg.Store.open(ctx, gaps)
}

// sqlGaps reads the gaps of topics.
const sqlGaps = `
SELECT topic, topic_id, partition, action, event_type, from_offset, version
  FROM {schema}.consumer_gap WHERE consumer_group = $1 AND topic = ANY ($2::text[])`

// gaps returns the gaps of topics, of all their ids.
func (s *Store) gaps(ctx context.Context, topics []string) (gaps []Gap, err error) {
	rows, err := s.db.Query(ctx, s.sqlGaps, s.group, topics)
	if err == nil {
		gaps, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (g Gap, err error) {
			err = row.Scan(&g.Topic, &g.id, &g.Number, &g.Action, &g.EventType, &g.From, &g.version)
			return g, err
		})
	}
	if err != nil {
		return nil, fmt.Errorf("read gaps: %w", err)
	}
	return gaps, nil
}

// sqlPass moves gaps to the offset up to which they are read, and removes those that are read to their end, $7. It
// changes no gap that a member without the handler has extended meanwhile.
const sqlPass = `
WITH read AS (
    SELECT * FROM unnest($2::text[], $3::text[]::uuid[], $4::int[], $5::text[], $6::text[], $8::bigint[], $9::bigint[])
        AS p (topic, id, number, action, event_type, at, version)
), moved AS (
    UPDATE {schema}.consumer_gap AS g SET from_offset = p.at FROM read AS p
     WHERE g.consumer_group = $1 AND g.topic = p.topic AND g.topic_id = p.id AND g.partition = p.number
       AND g.action = p.action AND g.event_type = p.event_type AND g.version = p.version AND p.at < $7::bigint
)
SELECT {schema}.outbox_remove_gaps($1::text, pg_catalog.array_agg(topic), pg_catalog.array_agg(id), pg_catalog.array_agg(number),
       pg_catalog.array_agg(action), pg_catalog.array_agg(event_type), pg_catalog.array_agg(version))
  FROM read WHERE at >= $7::bigint`

// pass notes up to which offset the gaps of a partition are read. They are read to their end at until.
func (s *Store) pass(ctx context.Context, gaps []Gap, until int64) error {
	var (
		topics, ids, actions, types []string
		numbers                     []int32
		ats, versions               []int64
	)
	for _, g := range gaps {
		topics, ids, numbers = append(topics, g.Topic), append(ids, uuidOf(g.id)), append(numbers, g.Number)
		actions, types = append(actions, g.Action), append(types, g.EventType)
		ats, versions = append(ats, g.From), append(versions, g.version)
	}
	_, err := pg.Exec(ctx, s.db, s.sqlPass, s.group, topics, ids, numbers, actions, types, until, ats, versions)
	if err != nil {
		return fmt.Errorf("note what is read of gaps: %w", err)
	}
	return nil
}

// registerHandlers registers the handlers of this member for topics, and returns the handlers of the group that this
// member does not have. A member calls it before it reads a topic. So a member that reads the topic later knows the
// handlers, and what others have read before is in the gaps of new ones.
func (m *Member) registerHandlers(ctx context.Context, found map[string]topicInfo, topics map[string]topic) (lacking []Handler, err error) {
	registered, err := m.cfg.Store.handlers(ctx, slices.Collect(maps.Keys(found)))
	if err != nil {
		return nil, err
	}
	fresh := map[string][]Handler{}
	for _, h := range m.cfg.Handlers {
		if _, ok := found[h.Topic]; ok && !registered[h] {
			fresh[h.Topic] = append(fresh[h.Topic], h)
		}
		delete(registered, h)
	}
	if err := m.register(ctx, found, topics, fresh); err != nil {
		return nil, err
	}
	return slices.Collect(maps.Keys(registered)), nil
}

// register registers new handlers. Their gaps begin at the committed offsets, or where reading would begin.
func (m *Member) register(ctx context.Context, found map[string]topicInfo, topics map[string]topic, fresh map[string][]Handler) error {
	wanted, firsts := map[string][]int32{}, map[kafka.Partition]int64{}
	for name := range fresh {
		if numbers := found[name].partitions; len(numbers) > 0 {
			wanted[name] = numbers
		}
	}
	offsetsInKafka, err := kafka.GroupOffsets(ctx, m.client, m.cfg.Group, wanted)
	if err != nil {
		return err
	}
	committed := m.counting(offsetsInKafka, found)
	offsets := map[string]map[int32]int64{}
	for name, numbers := range wanted {
		offsets[name] = map[int32]int64{}
		for _, number := range numbers {
			at := kafka.Partition{Topic: name, Number: number}
			offset, ok := committed[at]
			p, listed := topics[name].partitions[number]
			switch {
			case ok:
				offsets[name][number] = offset
			case !listed:
				firsts[at] = kafka.FirstOffset
			case p.position != None:
				offsets[name][number] = p.position
			default:
				offsets[name][number] = p.start
			}
		}
	}
	answers, _, _ := m.ask(ctx, firsts)
	for at := range firsts {
		offsets[at.Topic][at.Number] = answers[at] // 0 if Kafka does not say it: nothing can come before that
	}
	for name, handlers := range fresh {
		if err := m.cfg.Store.register(ctx, name, topics[name].id, handlers, offsets[name]); err != nil {
			return err
		}
	}
	return nil
}

// findGaps opens gaps for the handlers that this member lacks, and returns the gaps of its own handlers in the
// partitions that it begins with.
func (m *Member) findGaps(ctx context.Context, topics map[string]topic, lacking []Handler, decided map[kafka.Partition]start) (map[kafka.Partition][]Gap, error) {
	var opened []Gap
	for at, s := range decided {
		for _, h := range lacking {
			if h.Topic == at.Topic {
				opened = append(opened, Gap{Handler: h, Number: at.Number, From: s.at, id: topics[at.Topic].id})
			}
		}
	}
	if len(opened) > 0 {
		if err := m.cfg.Store.open(ctx, opened); err != nil {
			return nil, err
		}
	}
	all, err := m.cfg.Store.gaps(ctx, slices.Collect(maps.Keys(topics)))
	if err != nil {
		return nil, err
	}
	own := map[kafka.Partition][]Gap{}
	for _, g := range all {
		at := kafka.Partition{Topic: g.Topic, Number: g.Number}
		if _, ok := decided[at]; ok && g.id == topics[g.Topic].id && slices.Contains(m.cfg.Handlers, g.Handler) {
			own[at] = append(own[at], g)
		}
	}
	for at, gaps := range own {
		if own[at], err = m.beginGaps(ctx, at, decided[at], gaps); err != nil {
			return nil, err
		}
	}
	return own, nil
}

// PassGaps notes that the gaps of a partition are read up to From of each. They are read to their end at until.
func (m *Member) PassGaps(ctx context.Context, gaps []Gap, until int64) error {
	return m.cfg.Store.pass(ctx, gaps, until)
}

// beginGaps returns the gaps of a partition in which there are records to read. It removes the others, and reports
// records of gaps that Kafka has removed.
func (m *Member) beginGaps(ctx context.Context, at kafka.Partition, s start, gaps []Gap) ([]Gap, error) {
	var lost int64
	from, changed := s.at, false
	for i, g := range gaps {
		if g.From < s.first {
			from = min(from, g.From)
			lost = max(lost, min(s.first, s.at-s.lost)-g.From)
			gaps[i].From = s.first
		}
		changed = changed || gaps[i] != g || gaps[i].From >= s.at
	}
	if slices.ContainsFunc(gaps, func(g Gap) bool { return g.From >= s.at }) {
		// Another member may have got the partition since the offset was read, and have extended the gaps before they
		// were read. Kafka takes no commit of this member then.
		if err := m.cfg.Commit(ctx, map[kafka.Partition]kgo.EpochOffset{at: s.epochOffset()}); err != nil {
			return nil, fmt.Errorf("prove that the partition is assigned: %w", err)
		}
	}
	if changed {
		if err := m.cfg.Store.pass(ctx, gaps, s.at); err != nil {
			return nil, err
		}
	}
	if lost > 0 {
		m.Passed(at, from, lost)
	}
	return slices.DeleteFunc(gaps, func(g Gap) bool { return g.From >= s.at }), nil
}
