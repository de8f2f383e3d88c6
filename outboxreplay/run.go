package outboxreplay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
	"github.com/outboxgo/outbox/outboxarchive"
)

const (
	// deliveryTimeout is the time after which a record without an acknowledgement counts as failed.
	deliveryTimeout = 30 * time.Second
	// chunkEvents and chunkBytes bound the events in flight; a single event may be larger.
	chunkEvents = 500
	chunkBytes  = 8 << 20
	// chunksPerSecond is the number of chunks in a second at a low rate.
	chunksPerSecond = 10
)

// Run sends events again. Each record that Kafka accepts is on all its replicas (acks=all). The events of a
// key are in their order in Kafka; records that a relay sends meanwhile come between them.
//
// A run may end early because of an error or because ctx has ended. It first waits for the outcome of all
// records in flight. Its report is valid then, and Report.Next is the point from which another run can
// continue. An event that Kafka rejects ends the run: choose an After behind it to leave the event out.
//
// Run inserts a row into outbox_audit before it sends the first event. db is the database of that table; a
// dry run needs none. Run makes a Kafka client from opts and closes it. It refuses the options that
// [outbox.NewRelay] refuses.
func Run(ctx context.Context, db *pgxpool.Pool, opts []kgo.Opt, cfg Config) (Report, error) {
	cfg = cfg.withDefaults()
	if err := errors.Join(cfg.validate(db), kafka.CheckProducerOpts(opts)); err != nil {
		return Report{}, fmt.Errorf("outbox: replay config: %w", err)
	}
	r := &run{cfg: cfg, db: db, topics: map[string]bool{}, report: Report{Next: cfg.Filter.After}, began: time.Now()}
	if !cfg.DryRun {
		sender, err := newSender(opts)
		if err != nil {
			return r.report, fmt.Errorf("outbox: replay config: %w", err)
		}
		defer sender.close()
		r.sender = sender
	}
	err := r.all(ctx)
	slices.SortFunc(r.report.Counts, func(a, b Count) int {
		return cmp.Or(strings.Compare(a.Topic, b.Topic), strings.Compare(a.Type, b.Type))
	})
	if err != nil {
		return r.report, fmt.Errorf("outbox: replay: %w", err)
	}
	return r.report, nil
}

// run is one call of [Run]. It belongs to one goroutine.
type run struct {
	cfg    Config
	db     *pgxpool.Pool
	sender *sender // nil in a dry run
	report Report

	began   time.Time
	due     time.Time // when the rate allows the next chunk
	audited bool
	topics  map[string]bool // that records for one group may go to
	chunk   []resend
	bytes   int   // size of the chunk
	last    int64 // outbox id of the last event from the source
	end     int64 // outbox id of the first event that is not sent, which Next stays below; 0 while there is none
}

// resend is an event and its record.
type resend struct {
	event  outbox.ArchivedEvent
	record *kgo.Record
	dead   *kgo.Record // the dead letter that names the group of the record; nil without a group
	err    error
}

func (r *run) all(ctx context.Context) error {
	if r.cfg.Again && !r.cfg.DryRun {
		if err := r.startAgain(ctx); err != nil {
			return err
		}
	}
	most := chunkEvents
	if r.cfg.Rate > 0 {
		most = min(most, max(1, r.cfg.Rate/chunksPerSecond))
	}
	for e, err := range r.cfg.Source.Events(ctx, r.cfg.Filter) {
		full := len(r.chunk) >= most || r.bytes >= chunkBytes
		if err == nil && full && r.chunk[len(r.chunk)-1].event.OutboxID != e.OutboxID { // Next cannot split an id
			if err := r.flush(ctx); err != nil {
				return err
			}
		}
		r.last = cmp.Or(e.OutboxID, r.last) // an event without one is at the last id or behind it
		if err := r.add(e, err); err != nil {
			r.end = r.last
			return errors.Join(r.flush(ctx), err)
		}
	}
	return r.flush(ctx)
}

// add adds an event to the chunk. Its error ends the run.
func (r *run) add(e outbox.ArchivedEvent, err error) error {
	var unreadable *outboxarchive.ReadError
	if err != nil && !errors.As(err, &unreadable) {
		return err
	}
	s := resend{event: e}
	if err == nil {
		r.report.Read++
		s.record, err = e.KafkaRecord(r.cfg.Mode)
	}
	if err == nil {
		r.cfg.addFurther(&e, s.record)
	}
	if err != nil {
		r.report.fail(&e, err)
		if r.cfg.DryRun || r.cfg.SkipUnreadable {
			return nil
		}
		return fmt.Errorf("event %s: %w", cmp.Or(e.EventID, "unknown"), err)
	}
	s.record.Topic = cmp.Or(r.cfg.To, s.record.Topic)
	if r.cfg.Group != "" {
		s.dead = deadLetterOf(s.record, e.OutboxID, r.cfg.Group, r.cfg.Audit.Reason)
	}
	r.chunk = append(r.chunk, s)
	r.bytes += len(e.Payload)
	return nil
}

// flush sends the chunk, as fast as the rate allows, and reports it.
func (r *run) flush(ctx context.Context) error {
	chunk := r.chunk
	r.chunk, r.bytes = nil, 0
	if len(chunk) == 0 {
		return nil
	}
	if !r.cfg.DryRun {
		if err := r.await(ctx, len(chunk)); err != nil {
			return err
		}
		if err := r.send(ctx, chunk); err != nil {
			return err
		}
	}
	err := r.note(chunk)
	if r.cfg.Progress != nil {
		r.cfg.Progress(r.report)
	}
	return err
}

// await waits until the rate allows another chunk. After a slow source or an outage of Kafka, it does not
// allow a burst.
func (r *run) await(ctx context.Context, events int) error {
	if r.cfg.Rate > 0 {
		if left := time.Until(r.due); left > 0 {
			wait.Sleep(ctx, left)
		}
		if now := time.Now(); r.due.Before(now) {
			r.due = now
		}
		r.due = r.due.Add(time.Duration(float64(events) / float64(r.cfg.Rate) * float64(time.Second)))
	}
	return context.Cause(ctx)
}

// send sends a chunk and waits for every outcome. It waits even if ctx ends, because Kafka may have records
// that it has not acknowledged.
func (r *run) send(ctx context.Context, chunk []resend) error {
	if err := r.checkTopics(ctx, chunk); err != nil {
		return err
	}
	if err := r.audit(ctx); err != nil {
		return err
	}
	if r.cfg.Again {
		if err := r.forget(ctx, chunk); err != nil {
			return err
		}
	}
	ctx = context.WithoutCancel(ctx)
	if r.cfg.Group != "" {
		r.produce(ctx, chunk, func(s *resend) **kgo.Record { return &s.dead })
		for i := range chunk {
			if s := &chunk[i]; s.err == nil {
				s.record = addressed(s.record, s.dead, s.event.OutboxID, r.cfg.Group)
			}
		}
	}
	r.produce(ctx, chunk, func(s *resend) **kgo.Record { return &s.record })
	return nil
}

// ErrCompacted means that [Run] does not send events to a single group, because their topic is compacted. Kafka
// would keep such a record as the last one of its key, and forget the one for all groups. Choose another topic as
// Config.To.
var ErrCompacted = errors.New("in a compacted topic a record for one group would replace the last one of its key for every group")

// checkTopics returns ErrCompacted for a topic of the chunk. It asks Kafka once about each.
func (r *run) checkTopics(ctx context.Context, chunk []resend) error {
	for _, s := range chunk {
		if topic := s.record.Topic; r.cfg.Group != "" && !r.topics[topic] {
			if kafka.IsCompacted(ctx, r.sender.client, topic) {
				return fmt.Errorf("%w: %s", ErrCompacted, topic)
			}
			r.topics[topic] = true
		}
	}
	return nil
}

// produce sends the records of a chunk up to the first one that has an error, and sets their errors. Later
// records get errBehind.
func (r *run) produce(ctx context.Context, chunk []resend, of func(*resend) **kgo.Record) {
	if n := slices.IndexFunc(chunk, func(s resend) bool { return s.err != nil }); n >= 0 {
		for i := n + 1; i < len(chunk); i++ {
			chunk[i].err = errBehind
		}
		chunk = chunk[:n]
	}
	records := make([]kgo.Record, len(chunk))
	for i := range chunk {
		records[i] = **of(&chunk[i])
	}
	for i, err := range r.sender.send(ctx, records) {
		*of(&chunk[i]), chunk[i].err = &records[i], err
	}
}

// note reports a chunk. Its error is the error of the first event that was not sent.
func (r *run) note(chunk []resend) error {
	var stop error
	old := r.began.Add(-r.cfg.HandledFor)
	for i := range chunk {
		s := &chunk[i]
		switch {
		case s.err == nil:
			r.report.note(&s.event, s.record.Topic, len(s.record.Value), s.event.CreatedAt.Before(old))
		case errors.Is(s.err, errBehind):
		default:
			r.report.fail(&s.event, s.err)
		}
		if stop == nil && s.err != nil {
			r.end = s.event.OutboxID
			stop = fmt.Errorf("event %s, outbox id %d, to topic %s: %w", s.event.EventID, s.event.OutboxID, s.record.Topic, s.err)
		}
		if stop == nil {
			r.report.Next = s.event.OutboxID
		}
	}
	if r.end > 0 {
		r.report.Next = min(r.report.Next, r.end-1)
	}
	return stop
}

const sqlAuditReplay = `SELECT {schema}.outbox_audit_replay($1::text, $2::text, $3::text, $4::text)`

// audit writes who sends which events, and why, before anything is sent.
func (r *run) audit(ctx context.Context) error {
	if r.audited {
		return nil
	}
	a := r.cfg.Audit
	_, err := pg.Exec(ctx, r.db, pg.InSchema(sqlAuditReplay, r.cfg.Schema), r.cfg.To, r.cfg.Group, a.Operator, a.Reason+" ("+r.cfg.selection()+")")
	if err != nil {
		return fmt.Errorf("add row to outbox_audit: %w", orNotMigrated(err))
	}
	r.audited = true
	return nil
}

func orNotMigrated(err error) error {
	if pg.IsUndefined(err) {
		return fmt.Errorf("%w: %w", outbox.ErrNotMigrated, err)
	}
	return err
}

// selection describes the chosen events in at most 900 characters.
func (c Config) selection() string {
	var parts []string
	add := func(name, value string) {
		if value != "" {
			parts = append(parts, name+" "+value)
		}
	}
	at := func(t time.Time) string {
		if t.IsZero() {
			return ""
		}
		return t.UTC().Format(time.RFC3339Nano)
	}
	f := c.Filter
	if f.After > 0 {
		add("after", fmt.Sprint(f.After))
	}
	add("since", at(f.Since))
	add("until", at(f.Until))
	add("types", strings.Join(f.Types, ","))
	add("of topics", strings.Join(f.Topics, ","))
	add("keys", strings.Join(f.Keys, ","))
	add("aggregate", strings.TrimSuffix(f.AggregateType+"/"+f.AggregateID, "/"))
	add("ids", strings.Join(f.EventIDs, ","))
	add("again before", at(c.AgainBefore))
	if len(parts) == 0 {
		return "all events"
	}
	text := []rune(strings.Join(parts, ", "))
	if len(text) > maxSelection {
		text = append(text[:maxSelection], '…')
	}
	return string(text)
}

const maxSelection = 900
