package outboxreplay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/wait"
	"github.com/outboxgo/outbox/outboxarchive"
	"github.com/outboxgo/outbox/outboxops"
)

// StartConfig says which group [StartGroup] starts.
type StartConfig struct {
	// Group is the new group. No worker or consumer of it may have run. Required.
	Group string
	// Topics are all topics that consumers of the group read in Kafka. Nil means a group of workers.
	Topics []string
	// Archive has the events that retention has removed from outbox, in the same database. Required.
	Archive *outboxarchive.Table
	// Incomplete starts the group without events that are unreadable, or missing: the first, or between archive and
	// outbox. False means [ErrIncomplete] then.
	Incomplete bool
	// DryRun changes nothing, and needs no Audit.
	DryRun bool
	// Schema holds the tables of outbox. Empty means public.
	Schema string
	// Audit is the operator and the reason. It is required unless DryRun is set. Zero means none.
	Audit outboxops.AuditInfo
	// Progress is called about once a second. Nil means none.
	Progress func(StartReport)
}

// StartReport says how far [StartGroup] is.
type StartReport struct {
	// Through is the outbox id up to which the group has its events, and Last the id of the cut.
	Through, Last int64
	// Deliveries is the number of deliveries that this call has made: one for each event and action.
	Deliveries int64
	// Waiting says what an operator has to start. It is empty while the group has a process.
	Waiting string
	// First and Kept are the lowest ids in the archive and outbox together, and in outbox alone. Archived is the
	// highest id in the archive. All are 0 if there is no such event.
	First, Archived, Kept int64
	// Failed are events that this call has left out because they cannot be read, at most 1,000. NotRead is the number
	// of all such events.
	Failed []Failure
	// NotRead is described at Failed.
	NotRead int
}

var (
	// ErrGroupBegun means that a group is not new, so it cannot begin with an archive.
	ErrGroupBegun = errors.New("the group has begun already")
	// ErrIncomplete means that events may be missing, or that one cannot be read. Ids of transactions that are open or
	// were rolled back look like those that are missing.
	ErrIncomplete = errors.New("events may be missing")
)

// StartGroup has a new group get the events of an archive, then those that come after. The cut is the moment of the
// first call. StartGroup makes rows of event_delivery for the events before the cut, in the order of their keys, as
// fast as the processes of the group handle them. Start the processes while the call waits for them: see Waiting of
// [StartReport]. If a process starts before the cut, the group is not new, and the call returns [ErrGroupBegun]. After
// the last event StartGroup lets the group go on by itself, and returns: its workers take the later events from
// outbox, and its consumers read them in Kafka.
// Handlers with a transaction handle each event once, whatever happens meanwhile.
//
// StartGroup may end early because of an error or the end of ctx. Another call continues, with the same Group, Archive
// and Incomplete. Two calls at the same time do no harm.
//
// A group of consumers gets the events of this database from the archive, but not what other services have sent to
// its topics before the cut. StartGroup makes a Kafka client from opts and closes it, if there are Topics.
func StartGroup(ctx context.Context, db *pgxpool.Pool, opts []kgo.Opt, cfg StartConfig) (StartReport, error) {
	cfg.Schema = cmp.Or(cfg.Schema, pg.DefaultSchema)
	if err := cfg.validate(db); err != nil {
		return StartReport{}, fmt.Errorf("outbox: start of a group: config: %w", err)
	}
	s := &groupStart{cfg: cfg, db: db, in: func(sql string) string { return pg.InSchema(sql, cfg.Schema) }}
	if err := s.run(ctx, opts); err != nil {
		return s.report, fmt.Errorf("outbox: start group %s: %w", cfg.Group, orNotMigrated(err))
	}
	return s.report, nil
}

func (c StartConfig) validate(db *pgxpool.Pool) error {
	errs := []error{check.Schema(c.Schema)}
	if err := check.Text(c.Group, maxGroup); err != nil {
		errs = append(errs, fmt.Errorf("field Group %w", err))
	}
	for _, topic := range c.Topics {
		if err := check.Topic(topic); err != nil {
			errs = append(errs, fmt.Errorf("field Topics: %.300q %w", topic, err))
		}
	}
	if c.Archive == nil {
		errs = append(errs, fmt.Errorf("field Archive %w", outbox.ErrNilArgument))
	}
	if !c.DryRun {
		errs = append(errs, check.Audit("Audit.", c.Audit.Operator, c.Audit.Reason, maxReason))
	}
	if db == nil {
		errs = append(errs, fmt.Errorf("db %w", outbox.ErrNilArgument))
	}
	return errors.Join(errs...)
}

// groupStart is one call of [StartGroup]. It belongs to one goroutine.
type groupStart struct {
	cfg    StartConfig
	db     *pgxpool.Pool
	in     func(string) string
	report StartReport
	shown  time.Time

	omitted int64 // the last id that was left out
}

func (s *groupStart) run(ctx context.Context, opts []kgo.Opt) error {
	state, err := s.look(ctx)
	if err != nil {
		return err
	}
	if !state.starting {
		if err := s.checkNew(ctx, opts); err != nil || s.cfg.DryRun {
			return err
		}
		if err := s.begin(ctx, opts); err != nil {
			return err
		}
		if state, err = s.look(ctx); err != nil {
			return err
		}
	}
	if state.starting && state.through == 0 && !s.cfg.DryRun {
		if err := s.checkBeginning(ctx, state.last); err != nil {
			return err
		}
	}
	for state.starting {
		s.report.Through, s.report.Last = state.through, state.last
		if s.cfg.DryRun {
			return nil
		}
		err := s.fill(ctx)
		if err == nil {
			_, err = pg.Exec(ctx, s.db, s.in(sqlFinishStart), s.cfg.Group, s.report.Through)
		}
		if err == nil || pg.Code(err) != objectInUse {
			return err
		}
		// Another process goes on with the group: its last statement was not known when this one began.
		if state, err = s.look(ctx); err != nil {
			return err
		}
	}
	return nil
}

// The codes of PostgreSQL for a group that is not new, or has gone on.
const (
	objectInUse     = "55006"
	uniqueViolation = "23505"
)

// sqlStartState reads the state of a group that is starting: how far it is, the highest id in front of the cut, how
// many deliveries are open, up to $2, and whether its handlers are known.
const sqlStartState = `
SELECT coalesce(s.state = 'starting', false), coalesce(s.started, 0),
       coalesce((SELECT c.highest_id FROM {schema}.outbox_cursor AS c WHERE c.relay = '` + tables.WorkerPrefix + `' || $1::text ORDER BY c.id DESC LIMIT 1), 0),
       (SELECT count(*) FROM (SELECT FROM {schema}.event_delivery AS d
                               WHERE d.consumer_group = $1::text AND d.status IN ('PENDING', 'PARKED') AND d.resolved_at IS NULL LIMIT $2::bigint) AS waiting),
       coalesce(s.routes <> '{}', false)
       OR EXISTS (SELECT FROM {schema}.consumer_start AS c WHERE c.consumer_group = $1::text AND c.starting)
          AND EXISTS (SELECT FROM {schema}.event_member AS m WHERE m.consumer_group = $1::text AND ` + tables.LiveMember + ` AND pg_catalog.cardinality(m.routes) > 0)
  FROM (SELECT) AS one LEFT JOIN {schema}.event_subscription AS s ON s.consumer_group = $1::text`

type startState struct {
	starting, handlers  bool
	through, last, open int64
}

// mostOpen bounds the deliveries that wait for handlers.
const mostOpen = 10_000

func (s *groupStart) look(ctx context.Context) (state startState, err error) {
	err = pg.QueryRow(ctx, s.db, s.in(sqlStartState), s.cfg.Group, mostOpen).
		Scan(&state.starting, &state.through, &state.last, &state.open, &state.handlers)
	return state, err
}

// fill makes deliveries until the group has those of all events in front of the cut.
func (s *groupStart) fill(ctx context.Context) error {
	var chunk []outbox.ArchivedEvent
	bytes := 0
	for e, err := range s.cfg.Archive.Events(ctx, outboxarchive.Filter{After: s.report.Through}) {
		var unreadable *outboxarchive.ReadError
		switch {
		case err != nil && !errors.As(err, &unreadable):
			return err
		case e.OutboxID > s.report.Last:
			return s.add(ctx, chunk)
		case err != nil && !s.cfg.Incomplete:
			// A chunk cannot split an id, and another call begins with this one.
			chunk = slices.DeleteFunc(chunk, func(before outbox.ArchivedEvent) bool { return before.OutboxID >= e.OutboxID })
			return cmp.Or(s.add(ctx, chunk), fmt.Errorf("%w: %w", ErrIncomplete, err))
		case err != nil:
			s.omit(e, err)
			continue
		}
		full := len(chunk) >= chunkEvents || bytes >= chunkBytes
		if full && chunk[len(chunk)-1].OutboxID != e.OutboxID { // a chunk cannot split an id
			if err := s.add(ctx, chunk); err != nil {
				return err
			}
			chunk, bytes = chunk[:0], 0
		}
		chunk, bytes = append(chunk, e), bytes+len(e.Payload)
	}
	return s.add(ctx, chunk)
}

// omit reports an event that cannot be read, once: the events behind those that have deliveries are read again after
// another process has gone on.
func (s *groupStart) omit(e outbox.ArchivedEvent, err error) {
	if e.OutboxID <= s.omitted {
		return
	}
	s.omitted = e.OutboxID
	if s.report.NotRead++; len(s.report.Failed) < maxFailed {
		s.report.Failed = append(s.report.Failed, Failure{OutboxID: e.OutboxID, EventID: e.EventID, Err: err})
	}
}

const sqlStartEvents = `
SELECT {schema}.outbox_start_events($1::text, $2::bigint, $3::bigint, $4::bigint[], $5::text[]::uuid[], $6::text[], $7::text[], $8::text[], $9::text[], $10::text[], $11::bytea[], $12::text[], $13::text[], $14::text[], $15::text[], $16::timestamptz[], $17::timestamptz[])`

// add makes the deliveries of events.
func (s *groupStart) add(ctx context.Context, events []outbox.ArchivedEvent) error {
	if len(events) == 0 {
		return nil
	}
	if err := s.awaitRoom(ctx); err != nil {
		return err
	}
	var made int64
	through := events[len(events)-1].OutboxID
	args := append([]any{s.cfg.Group, s.report.Through, through}, columnsOfEvents(events)...)
	if err := pg.QueryRow(ctx, s.db, s.in(sqlStartEvents), args...).Scan(&made); err != nil {
		return fmt.Errorf("events with outbox ids %d to %d: %w", events[0].OutboxID, through, err)
	}
	s.report.Through = through
	s.report.Deliveries += made
	s.show("")
	return nil
}

// awaitRoom waits until the handlers of the group are known, and few deliveries wait for them.
func (s *groupStart) awaitRoom(ctx context.Context) error {
	const often = 100 * time.Millisecond
	for {
		state, err := s.look(ctx)
		switch {
		case err != nil:
			return err
		case !state.handlers:
			s.show("no process of the group runs")
		case state.open >= mostOpen:
			s.show("")
		default:
			return nil
		}
		if wait.Sleep(ctx, often); ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}

func (s *groupStart) show(waiting string) {
	if s.report.Waiting = waiting; s.cfg.Progress != nil && time.Since(s.shown) >= time.Second {
		s.shown = time.Now()
		s.cfg.Progress(s.report)
	}
}

// columnsOfEvents returns the arguments of sqlStartEvents behind the first three.
func columnsOfEvents(events []outbox.ArchivedEvent) []any {
	var (
		ids                                              []int64
		eventIDs, types, sources, aggregateTypes, aggIDs []string
		contentTypes, topics, keys                       []string
		payloads, headers                                []pgtype.Text
		payloadBytes                                     [][]byte
		occurred, recorded                               []time.Time
		text                                             = func(b []byte, valid bool) pgtype.Text { return pgtype.Text{String: string(b), Valid: valid} }
	)
	for i := range events {
		e := &events[i]
		ids, eventIDs, types, sources = append(ids, e.OutboxID), append(eventIDs, e.EventID), append(types, e.Type), append(sources, e.Source)
		aggregateTypes, aggIDs = append(aggregateTypes, e.AggregateType), append(aggIDs, e.AggregateID)
		binary := e.Payload
		if e.JSON {
			binary = nil
		} else if binary == nil && e.ContentType != "" {
			binary = []byte{}
		}
		payloads, payloadBytes = append(payloads, text(e.Payload, e.JSON)), append(payloadBytes, binary)
		topic := e.Topic
		if topic == "" && check.HasTopic(e.Type) {
			topic = check.TopicOf(e.Type)
		}
		contentTypes, topics, keys = append(contentTypes, e.ContentType), append(topics, topic), append(keys, e.PartitionKey)
		headers = append(headers, text(e.Headers, e.Headers != nil))
		occurred, recorded = append(occurred, e.OccurredAt), append(recorded, e.CreatedAt)
	}
	return []any{ids, eventIDs, types, sources, aggregateTypes, aggIDs, payloads, payloadBytes, contentTypes, topics, keys, headers, occurred, recorded}
}

const (
	sqlStartGroup  = `SELECT {schema}.outbox_start_group($1::text, $2::text[], $3::text[]::uuid[], $4::int[], $5::bigint[], $6::text, $7::text)`
	sqlFinishStart = `SELECT {schema}.outbox_finish_start($1::text, $2::bigint)`
)

// begin makes the cut. The offsets at which consumers will read are read before it, so each event that is not in front
// of the cut is behind them.
func (s *groupStart) begin(ctx context.Context, opts []kgo.Opt) error {
	var topics, ids []string
	var numbers []int32
	var offsets []int64
	if len(s.cfg.Topics) > 0 {
		found, ends, err := s.ends(ctx, opts)
		if err != nil {
			return err
		}
		for at, offset := range ends {
			topics, ids = append(topics, at.Topic), append(ids, uuid.UUID(found[at.Topic]).String())
			numbers, offsets = append(numbers, at.Number), append(offsets, offset)
		}
	}
	_, err := pg.Exec(ctx, s.db, s.in(sqlStartGroup), s.cfg.Group, topics, ids, numbers, offsets, s.cfg.Audit.Operator, s.cfg.Audit.Reason)
	if code := pg.Code(err); code == objectInUse || code == uniqueViolation {
		return fmt.Errorf("%w: %w", ErrGroupBegun, err)
	}
	return err
}

// ends returns the ids of the topics, and the ends of their partitions. The group must not have offsets in Kafka.
func (s *groupStart) ends(ctx context.Context, opts []kgo.Opt) (map[string]kafka.TopicID, map[kafka.Partition]int64, error) {
	client, err := kafka.NewClient(opts)
	if err != nil {
		return nil, nil, err
	}
	defer client.Close()
	committed, err := kafka.AllGroupOffsets(ctx, client, s.cfg.Group)
	switch {
	case err != nil:
		return nil, nil, err
	case len(committed) > 0:
		return nil, nil, fmt.Errorf("%w: it has committed offsets in Kafka", ErrGroupBegun)
	}
	response, err := kafka.Metadata(ctx, client, s.cfg.Topics...)
	if err != nil {
		return nil, nil, fmt.Errorf("describe topics: %w", err)
	}
	ids, wanted := map[string]kafka.TopicID{}, map[kafka.Partition]int64{}
	for _, t := range response.Topics {
		if err := kerr.ErrorForCode(t.ErrorCode); err != nil {
			return nil, nil, fmt.Errorf("topic %s: %w", *t.Topic, err)
		}
		ids[*t.Topic] = t.TopicID
		for _, p := range t.Partitions {
			wanted[kafka.Partition{Topic: *t.Topic, Number: p.Partition}] = kafka.EndOffset
		}
	}
	ends, err := kafka.ListOffsets(ctx, client, kafka.Committed, wanted)
	return ids, ends, err
}

// sqlGroupBegun says whether a group has begun. outbox_start_group checks it again.
const sqlGroupBegun = `
SELECT EXISTS (SELECT FROM {schema}.event_subscription WHERE consumer_group = $1::text)
    OR EXISTS (SELECT FROM {schema}.consumer_start WHERE consumer_group = $1::text)
    OR EXISTS (SELECT FROM {schema}.event_handled WHERE consumer_group = $1::text)`

// checkNew reports whether the group is new and the archive complete.
func (s *groupStart) checkNew(ctx context.Context, opts []kgo.Opt) error {
	var begun bool
	if err := pg.QueryRow(ctx, s.db, s.in(sqlGroupBegun), s.cfg.Group).Scan(&begun); err != nil {
		return err
	}
	if begun {
		return ErrGroupBegun
	}
	if s.cfg.DryRun && len(s.cfg.Topics) > 0 {
		if _, _, err := s.ends(ctx, opts); err != nil {
			return err
		}
	}
	return s.checkComplete(ctx)
}

// sqlDrawnIDs reads the last id that outbox has drawn. A role without a right to the sequence reads it in the
// positions: retention removes no event behind them.
const sqlDrawnIDs = tables.NewestCursors + `
SELECT greatest(0, (SELECT max(highest_id) FROM positions),
                CASE WHEN pg_catalog.has_sequence_privilege(s.id, 'SELECT, USAGE') THEN pg_catalog.pg_sequence_last_value(s.id) END)
  FROM (SELECT pg_catalog.pg_get_serial_sequence({outbox}, 'id')::regclass AS id) AS s`

// sqlFirstKept reads the lowest id in outbox, or 0.
const sqlFirstKept = `SELECT coalesce((SELECT o.id FROM {schema}.outbox AS o ORDER BY o.id LIMIT 1), 0)`

// checkComplete reports whether the archive has all events that outbox has not.
func (s *groupStart) checkComplete(ctx context.Context) error {
	var drawn int64
	if err := pg.QueryRow(ctx, s.db, s.in(sqlDrawnIDs)).Scan(&drawn); err != nil {
		return err
	}
	if err := s.readRange(ctx); err != nil {
		return err
	}
	last, kept := s.report.Archived, s.report.Kept
	switch {
	case s.cfg.Incomplete:
	case s.report.First > 1:
		return s.startsLate()
	case kept > last+1 && last > 0:
		return fmt.Errorf("%w: the archive ends with outbox id %d, and outbox begins with %d", ErrIncomplete, last, kept)
	case kept == 0 && drawn > last:
		return fmt.Errorf("%w: the archive ends with outbox id %d, outbox is empty, and ids up to %d are drawn", ErrIncomplete, last, drawn)
	}
	return nil
}

// checkBeginning reports whether the first events are still there, before the group gets any. Between checkComplete and
// the cut they may have expired; from the cut on, outboxarchive.Table.Expire keeps them. The other checks of
// checkComplete cannot be repeated: events have gone to the archive since, and ids that were rolled back are between.
func (s *groupStart) checkBeginning(ctx context.Context, cut int64) error {
	if s.cfg.Incomplete || cut == 0 {
		return nil
	}
	if err := s.readRange(ctx); err != nil {
		return err
	}
	switch s.report.First {
	case 0:
		return fmt.Errorf("%w: there are none up to the cut, outbox id %d", ErrIncomplete, cut)
	case 1:
		return nil
	}
	return s.startsLate()
}

func (s *groupStart) startsLate() error {
	return fmt.Errorf("%w: the first one has outbox id %d, not 1", ErrIncomplete, s.report.First)
}

// readRange reads where the archive and outbox begin and end. It reads the archive last, because retention moves events
// there meanwhile.
func (s *groupStart) readRange(ctx context.Context) (err error) {
	if err := pg.QueryRow(ctx, s.db, s.in(sqlFirstKept)).Scan(&s.report.Kept); err != nil {
		return err
	}
	if s.report.First, s.report.Archived, err = s.cfg.Archive.Range(ctx); err != nil {
		return err
	}
	if s.report.Kept > 0 && (s.report.First == 0 || s.report.Kept < s.report.First) {
		s.report.First = s.report.Kept
	}
	return nil
}
