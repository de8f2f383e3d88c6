package outboxops

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/handled"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/starts"
)

// RewindConfig is the target of [Rewind]: either Time or Offset.
type RewindConfig struct {
	// Group is the consumer group. Required.
	Group string
	// Schema holds the tables of outbox. Empty means public.
	Schema string
	// Topics are the topics in which the group is rewound; with Offset, exactly one. Empty means all topics in which it
	// has committed offsets.
	Topics []string

	// Time makes the group read again the records with this timestamp or a later one. After a restore, the last
	// position in consumer_start can be older than Time: then the group begins at that position or earlier. Zero means
	// that Offset is used.
	Time time.Time
	// Offset is the first record to read again, in each partition of the topic. Nil means that Time is used.
	Offset *int64

	// Decode reads records, to find their rows of event_handled. Nil means [outbox.DecodeCloudEvent].
	Decode func(*kgo.Record) (*outbox.Message, error)
	// DryRun reports the changes, and makes none.
	DryRun bool
	// Audit is the operator and the reason. It is required unless DryRun is set or db is nil. Zero means none.
	Audit AuditInfo
	// Progress is called with the number of records that have been counted. Nil means none.
	Progress func(records int)
}

// RewindReport is the result of [Rewind]. In a dry run, it says what Rewind would do.
type RewindReport struct {
	// Partitions are the partitions in which the group goes back, sorted.
	Partitions []RewoundPartition
	// Records is the number of records that the group reads again. A handler without a transaction gets all
	// of their events again.
	Records int
	// Noted is the number of their events with a note of this group in event_handled. Actions with a note
	// are not repeated.
	Noted int
	// Older is the number of events without a note that are older than the group's oldest note. If they
	// were handled, they are repeated, because retention has removed the notes
	// (RetentionConfig.HandledFor).
	Older int
	// OldestNote is the time of the oldest note that the group still has; zero without a note.
	OldestNote time.Time
	// Unreadable is the number of records that Decode does not read.
	Unreadable int
}

// Unnoted returns the number of events that have no note and are not older than the oldest note. As far as
// PostgreSQL knows, no handler with a transaction has handled them. Handlers with a key of [outbox.OncePer]
// are an exception, because the event does not lead to their notes.
func (r RewindReport) Unnoted() int { return r.Records - r.Noted - r.Older - r.Unreadable }

// RewoundPartition is a partition in which a group goes back.
type RewoundPartition struct {
	// Topic of the partition.
	Topic string
	// Partition is its number.
	Partition int32
	// From is the committed offset before, and To the committed offset now.
	From, To int64
	// Truncated is set if To is the first offset that Kafka still has, and records before
	// it, which are removed, may have been meant too.
	Truncated bool
}

// ErrGroupActive is returned by [Rewind] while the group has members: stop them first.
var ErrGroupActive = errors.New("the consumer group has members")

// Rewind sets a consumer group back, so that it reads records again when its members are started. Use it
// after PostgreSQL was restored to a point in time, or after a failover that lost transactions. These may
// have been effects of handlers whose offsets Kafka has. Rewind only goes back: it does not change a
// partition in which the group is not as far.
//
// Actions with a note in event_handled are not repeated. The report counts the repeats. For these counts,
// Rewind reads all records that the group will read again.
//
// Rewind first sets back the positions in PostgreSQL, with a row of outbox_audit for each topic, and then
// the offsets in Kafka. If that fails, the row stays: call Rewind again.
//
// It returns [ErrGroupActive] while the group has members, and changes nothing then. A nil db is for a
// group that runs without one. Rewind makes a Kafka client from opts and closes it.
func Rewind(ctx context.Context, db *pgxpool.Pool, opts []kgo.Opt, cfg RewindConfig) (RewindReport, error) {
	cfg.Schema = cmp.Or(cfg.Schema, pg.DefaultSchema)
	if cfg.Decode == nil {
		cfg.Decode = outbox.DecodeCloudEvent
	}
	err := cfg.validate()
	if db != nil && !cfg.DryRun {
		err = errors.Join(err, cfg.Audit.check())
	}
	if err := errors.Join(err, kafka.CheckProducerOpts(opts)); err != nil {
		return RewindReport{}, fmt.Errorf("outbox: rewind config: %w", err)
	}
	client, err := kafka.NewClient(opts)
	if err != nil {
		return RewindReport{}, fmt.Errorf("outbox: rewind config: %w", err)
	}
	defer client.Close()
	r := &rewind{cfg: cfg, db: db, client: client}
	if err := r.run(ctx); err != nil {
		return r.report, fmt.Errorf("outbox: rewind of group %s: %w", cfg.Group, err)
	}
	return r.report, nil
}

func (c RewindConfig) validate() error {
	errs := []error{check.Schema(c.Schema)}
	if c.Group == "" {
		errs = append(errs, fmt.Errorf("field Group %w", outbox.ErrEmpty))
	}
	for _, topic := range c.Topics {
		if err := check.Topic(topic); err != nil {
			errs = append(errs, fmt.Errorf("field Topics: %w", err))
		}
	}
	switch {
	case c.Time.IsZero() == (c.Offset == nil):
		errs = append(errs, errors.New("fields Time and Offset: one of them must be set"))
	case c.Offset != nil && *c.Offset < 0:
		errs = append(errs, fmt.Errorf("field Offset is %d: must not be negative", *c.Offset))
	case c.Offset != nil && len(c.Topics) != 1:
		errs = append(errs, errors.New("field Offset: needs one topic in Topics"))
	}
	return errors.Join(errs...)
}

// rewind is one call of [Rewind].
type rewind struct {
	cfg    RewindConfig
	db     *pgxpool.Pool
	client *kgo.Client
	ids    map[string]kafka.TopicID // of the topics
	report RewindReport
}

func (r *rewind) run(ctx context.Context) error {
	if err := kafka.CheckGroupIsEmpty(ctx, r.client, r.cfg.Group); err != nil {
		return activeError(err)
	}
	committed, err := r.committed(ctx)
	if err != nil {
		return err
	}
	if r.ids, err = kafka.TopicIDs(ctx, r.client, committed); err != nil {
		return err
	}
	if err := r.plan(ctx, committed); err != nil {
		return err
	}
	if err := r.countAll(ctx); err != nil {
		return err
	}
	if r.cfg.DryRun || len(r.report.Partitions) == 0 {
		return nil
	}
	return r.apply(ctx)
}

func activeError(err error) error {
	if errors.Is(err, kerr.NonEmptyGroup) || errors.Is(err, kerr.UnknownMemberID) {
		return fmt.Errorf("%w: %w", ErrGroupActive, err)
	}
	return err
}

// committed returns the offsets of the group in the topics that are meant.
func (r *rewind) committed(ctx context.Context) (map[kafka.Partition]int64, error) {
	committed, err := kafka.AllGroupOffsets(ctx, r.client, r.cfg.Group)
	if err != nil {
		return nil, err
	}
	maps.DeleteFunc(committed, func(_ kafka.Partition, offset int64) bool { return offset == kafka.NoOffset })
	has := map[string]bool{}
	for p := range committed {
		has[p.Topic] = true
	}
	for _, topic := range r.cfg.Topics {
		if !has[topic] {
			return nil, fmt.Errorf("topic %s: the group has no committed offset, or none that this client may see: %w", topic, ErrNotFound)
		}
	}
	if len(has) == 0 {
		return nil, fmt.Errorf("the group has no committed offset, or none that this client may see: %w", ErrNotFound)
	}
	if len(r.cfg.Topics) > 0 {
		maps.DeleteFunc(committed, func(p kafka.Partition, _ int64) bool { return !slices.Contains(r.cfg.Topics, p.Topic) })
	}
	return committed, nil
}

// plan decides how far the group goes back in each partition.
func (r *rewind) plan(ctx context.Context, committed map[kafka.Partition]int64) error {
	firsts, byTime := map[kafka.Partition]int64{}, map[kafka.Partition]int64{}
	for p := range committed {
		firsts[p] = kafka.FirstOffset
		if r.cfg.Offset == nil {
			byTime[p] = r.cfg.Time.UnixMilli()
		}
	}
	firsts, err := kafka.ListOffsets(ctx, r.client, kafka.Committed, firsts)
	if err != nil {
		return err
	}
	if byTime, err = kafka.ListOffsets(ctx, r.client, kafka.Committed, byTime); err != nil {
		return err
	}
	saved, err := r.savedBefore(ctx)
	if err != nil {
		return err
	}
	for p, from := range committed {
		to := from
		if r.cfg.Offset != nil {
			to = *r.cfg.Offset
		} else if at := byTime[p]; at >= 0 { // else no record is as young
			to = at
		}
		if at, ok := saved[p]; ok {
			to = min(to, at)
		}
		truncated := to < firsts[p] || r.cfg.Offset == nil && to == firsts[p] && to > 0
		if to = max(to, firsts[p]); to < from {
			r.report.Partitions = append(r.report.Partitions, RewoundPartition{Topic: p.Topic, Partition: p.Number, From: from, To: to, Truncated: truncated})
		}
	}
	slices.SortFunc(r.report.Partitions, func(a, b RewoundPartition) int {
		return cmp.Or(cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition))
	})
	return nil
}

// savedBefore returns the positions that the group had saved at the time to which it is rewound. The
// transactions in which it handled the records before these positions are older. So if the positions are
// not lost, these transactions are not lost either.
func (r *rewind) savedBefore(ctx context.Context) (map[kafka.Partition]int64, error) {
	if r.db == nil || r.cfg.Offset != nil {
		return nil, nil
	}
	offsets, err := starts.NewStore(r.db, r.cfg.Schema, r.cfg.Group).Saved(ctx, r.cfg.Time)
	if err != nil {
		return nil, err
	}
	saved := map[kafka.Partition]int64{}
	for _, o := range offsets {
		if o.Topic == r.ids[o.Partition.Topic] {
			saved[o.Partition] = o.At
		}
	}
	return saved, nil
}

// countAll reads the records that the group will read again, and counts those that are
// noted.
func (r *rewind) countAll(ctx context.Context) error {
	notes, err := newNotes(ctx, r.db, r.cfg.Schema, r.cfg.Group)
	if err != nil {
		return err
	}
	r.report.OldestNote = notes.oldest
	byTopic := map[string]map[int32]RewoundPartition{}
	for _, p := range r.report.Partitions {
		if byTopic[p.Topic] == nil {
			byTopic[p.Topic] = map[int32]RewoundPartition{}
		}
		byTopic[p.Topic][p.Partition] = p
	}
	for topic, partitions := range byTopic {
		if err := r.countTopic(ctx, notes, topic, partitions); err != nil {
			return err
		}
	}
	return nil
}

func (r *rewind) countTopic(ctx context.Context, notes *notes, topic string, partitions map[int32]RewoundPartition) error {
	reader, from := kafka.NewReader(r.client), map[int32]int64{}
	for number, p := range partitions {
		from[number] = p.To
	}
	spans, err := reader.Spans(ctx, topic, from)
	if err != nil {
		return err
	}
	for _, s := range spans {
		p, rewound := partitions[s.Number]
		if !rewound {
			continue
		}
		for s.End = min(s.End, p.From); s.Next < s.End; {
			records, err := reader.Read(ctx, &s)
			if err != nil {
				return err
			}
			if err := r.count(ctx, notes, records); err != nil {
				return err
			}
		}
	}
	return nil
}

// count counts a batch of records.
func (r *rewind) count(ctx context.Context, notes *notes, records []*kgo.Record) error {
	var keys eventKeys
	for _, record := range records {
		m, err := r.cfg.Decode(record)
		switch {
		case err != nil || m == nil:
			r.report.Unreadable++
		default:
			keys.add(m, record.Timestamp, r.ids[record.Topic])
		}
	}
	noted, older, err := notes.count(ctx, keys)
	if err != nil {
		return err
	}
	r.report.Records += len(records)
	r.report.Noted += noted
	r.report.Older += older
	if r.cfg.Progress != nil {
		r.cfg.Progress(r.report.Records)
	}
	return nil
}

// apply sets the group back: first the positions in PostgreSQL, which count only where
// Kafka has no offset, then the offsets. Kafka refuses them if the group has members.
func (r *rewind) apply(ctx context.Context) error {
	offsets := map[kafka.Partition]int64{}
	for _, p := range r.report.Partitions {
		offsets[kafka.Partition{Topic: p.Topic, Number: p.Partition}] = p.To
	}
	if r.db != nil {
		if err := r.savePositions(ctx, offsets); err != nil {
			return err
		}
	}
	return activeError(kafka.CommitGroupOffsets(ctx, r.client, r.cfg.Group, offsets))
}

const sqlRewindConsumer = `SELECT {schema}.outbox_rewind_consumer($1::text, $2::text[], $3::text[]::uuid[], $4::int[], $5::bigint[], $6::text, $7::text)`

func (r *rewind) savePositions(ctx context.Context, offsets map[kafka.Partition]int64) error {
	var (
		topics    []string
		topicIDs  []string
		numbers   []int32
		positions []int64
	)
	for p, offset := range offsets {
		topics, topicIDs = append(topics, p.Topic), append(topicIDs, uuid.UUID(r.ids[p.Topic]).String())
		numbers, positions = append(numbers, p.Number), append(positions, offset)
	}
	_, err := pg.Exec(ctx, r.db, pg.InSchema(sqlRewindConsumer, r.cfg.Schema), r.cfg.Group, topics, topicIDs, numbers, positions, r.cfg.Audit.Operator, r.cfg.Audit.Reason)
	if err != nil {
		return fmt.Errorf("set positions back: %w", orNotMigrated(err))
	}
	return nil
}

// eventKeys are the keys under which events are noted, see [handled].
type eventKeys struct {
	types, ids, sources, beside []string
	times                       []time.Time
}

func (k *eventKeys) add(m *outbox.Message, at time.Time, topic kafka.TopicID) {
	e := handled.Event(m.Type, m.Source, m.ID)
	if m.ByPosition {
		e = handled.EventAt(m.Type, m.Source, m.ID, topic)
	}
	k.types, k.ids, k.sources = append(k.types, e.Type), append(k.ids, e.ID), append(k.sources, e.Source)
	k.beside, k.times = append(k.beside, e.Beside()), append(k.times, at)
}

// notes are the rows of a group in event_handled.
type notes struct {
	db         *pgxpool.Pool
	group, sql string
	oldest     time.Time
}

// sqlOldestNote finds the oldest note of a group. Notes are made in the order of ids.
const sqlOldestNote = `
SELECT coalesce((SELECT handled_at FROM {schema}.event_handled WHERE consumer_group = $1 ORDER BY id LIMIT 1), '-infinity')`

// sqlCountNoted counts events that the group has noted for some action, and those that it
// has not and that are older than $7.
const sqlCountNoted = `
SELECT count(*) FILTER (WHERE noted), count(*) FILTER (WHERE NOT noted AND at < $7)
  FROM (SELECT k.at, EXISTS (SELECT FROM {schema}.event_handled AS h
                              WHERE h.consumer_group = $1 AND h.aggregate_type = k.type
                                AND (h.aggregate_id = k.id AND (h.event_source IS NULL OR h.event_source = k.source) OR h.aggregate_id = k.beside)) AS noted
          FROM unnest($2::text[], $3::text[], $4::text[], $5::text[], $6::timestamptz[]) AS k (type, id, source, beside, at)) AS k`

func newNotes(ctx context.Context, db *pgxpool.Pool, schema, group string) (*notes, error) {
	n := &notes{db: db, group: group, sql: pg.InSchema(sqlCountNoted, schema)}
	if db == nil {
		return n, nil
	}
	var oldest pgtype.Timestamptz
	if err := pg.QueryRow(ctx, db, pg.InSchema(sqlOldestNote, schema), group).Scan(&oldest); err != nil {
		return nil, fmt.Errorf("find the oldest note: %w", err)
	}
	n.oldest = oldest.Time
	return n, nil
}

func (n *notes) count(ctx context.Context, k eventKeys) (noted, older int, err error) {
	if n.db == nil || len(k.ids) == 0 {
		return 0, 0, nil
	}
	err = n.db.QueryRow(ctx, n.sql, n.group, k.types, k.ids, k.sources, k.beside, k.times, n.oldest).Scan(&noted, &older)
	if err != nil {
		return 0, 0, fmt.Errorf("count notes: %w", err)
	}
	return noted, older, nil
}
