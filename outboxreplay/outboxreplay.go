// Package outboxreplay sends recorded events to Kafka again, from outbox or from an archive.
//
// [Run] makes the records that a relay would send, byte by byte. It sends them in the order of the events
// of each key: to their own topics, to another topic, or for one consumer group alone. In a dry run it only
// counts.
//
// A record that is sent again is a repeat. A consumer group that has a note of its event in event_handled
// skips the record. A group without a note handles it: the group is new, or the note is older than
// RetentionConfig.HandledFor. While a relay runs, its records come between the repeated ones.
//
// [StartGroup] has a new group of workers or consumers begin with the events of an archive. It sends nothing to Kafka.
package outboxreplay

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/outboxarchive"
	"github.com/outboxgo/outbox/outboxops"
)

// Config chooses the events that [Run] sends, and their destination.
type Config struct {
	// Source has the events: outboxarchive.Recorded those in outbox, an *outboxarchive.Table also those in the archive,
	// or the files of an archive. Required.
	Source outboxarchive.Source
	// Filter chooses events of the source. To continue a stopped run, set its After. Empty means all.
	Filter outboxarchive.Filter

	// To is the topic to which all records are sent. Empty means their own topics.
	To string
	// Group is the only consumer group that handles the records. Before each record, Run writes a dead letter of class
	// "replay", which proves it to consumers. It needs WRITE on the dead-letter topic. Empty means all groups.
	Group string
	// Again makes Group handle events again: Run first removes their rows of event_handled. Danger: effects happen
	// twice.
	Again bool
	// AgainBefore keeps rows from then on. To continue a run with Again, set it to the Report's. Zero means the start
	// of Run.
	AgainBefore time.Time
	// Mode is the mode of the relay. Zero means [outbox.Binary].
	Mode outbox.Mode
	// Set IDHeader and TraceHeader as in RelayConfig. Empty means none.
	IDHeader, TraceHeader string

	// Rate is how many events are sent in a second, at most. Negative means no limit. Zero means 1,000.
	Rate int
	// HandledFor is RetentionConfig.HandledFor of the consumers, for [Report.Older]. Zero means 31 days.
	HandledFor time.Duration
	// SkipUnreadable continues after an event that cannot be read or sent as a record, and lists it in [Report].Failed.
	// False means that such an event ends the run, unless it is a dry run.
	SkipUnreadable bool

	// DryRun counts the events that would be sent, and changes nothing.
	DryRun bool
	// Schema holds the tables of outbox. Empty means public.
	Schema string
	// Audit is the operator and the reason. It is required unless DryRun is set. Zero means none.
	Audit outboxops.AuditInfo
	// Progress is called after some events were sent, or counted. Nil means none.
	Progress func(Report)
}

const (
	defaultRate       = 1000
	maxRate           = 1_000_000
	defaultHandledFor = 31 * 24 * time.Hour
)

func (c Config) withDefaults() Config {
	c.Schema = cmp.Or(c.Schema, pg.DefaultSchema)
	c.Rate = cmp.Or(c.Rate, defaultRate)
	c.HandledFor = cmp.Or(c.HandledFor, defaultHandledFor)
	return c
}

func (c Config) validate(db *pgxpool.Pool) error {
	errs := []error{check.Schema(c.Schema), check.NotAbove("Rate", c.Rate, maxRate), check.NotNegative("HandledFor", c.HandledFor)}
	if check.IsNil(c.Source) {
		errs = append(errs, fmt.Errorf("field Source %w", outbox.ErrNilArgument))
	}
	if c.To != "" {
		if err := check.Topic(c.To); err != nil {
			errs = append(errs, fmt.Errorf("field To %w", err))
		}
	}
	if c.Group != "" {
		if err := check.Text(c.Group, maxGroup); err != nil {
			errs = append(errs, fmt.Errorf("field Group %w", err))
		}
	}
	if c.Again && c.Group == "" {
		errs = append(errs, fmt.Errorf("field Group %w: Again needs it", outbox.ErrEmpty))
	}
	if !c.AgainBefore.IsZero() && !c.Again {
		errs = append(errs, errors.New("field AgainBefore needs Again"))
	}
	if c.Mode != outbox.Binary && c.Mode != outbox.Structured {
		errs = append(errs, fmt.Errorf("field Mode is %d: must be Binary or Structured", c.Mode))
	}
	errs = append(errs, c.further().Check(), checkLength("IDHeader", c.IDHeader), checkLength("TraceHeader", c.TraceHeader))
	if !c.DryRun {
		errs = append(errs, check.Audit("Audit.", c.Audit.Operator, c.Audit.Reason, maxReason))
		if db == nil {
			errs = append(errs, fmt.Errorf("db %w: outbox_audit keeps what is sent again", outbox.ErrNilArgument))
		}
	}
	return errors.Join(errs...)
}

const (
	maxGroup  = 255
	maxReason = 9_000 // outbox_audit takes 10,000 characters, and the selection is added
)

// Report is the result of [Run]. In a dry run, it says what Run would do.
type Report struct {
	// Read is the number of events that the source returned. Sent is the number that Kafka has
	// acknowledged, or in a dry run, the number that would be sent.
	Read, Sent int
	// Counts are the sent events by topic and type, sorted.
	Counts []Count
	// Older is the number of sent events that were recorded longer ago than HandledFor. No group has notes
	// of them any more, so each group that gets them handles them again.
	Older int
	// Forgotten is the number of notes of the group that were removed (Config.Again).
	Forgotten int64
	// AgainBefore is the Config.AgainBefore for another run that continues this one: the time before which the group
	// has made those notes, by the clock of PostgreSQL.
	AgainBefore time.Time
	// Failed are events that could not be read or sent, at most 1,000. NotSent is the number of all such
	// events.
	Failed []Failure
	// NotSent is described at Failed.
	NotSent int
	// Next is the Filter.After for another run: all events up to it were sent or are in Failed. Another run
	// repeats events that were sent behind it.
	Next int64
}

// Count is the number of events of a type that were sent to a topic.
type Count struct {
	// Topic and Type are the topic and the event type of the records.
	Topic, Type string
	// Events is the number of events, and Bytes the size of their values.
	Events int
	// Bytes is described at Events.
	Bytes int64
	// First and Last are the earliest and the latest time of recording.
	First, Last time.Time
}

// Failure says why an event was not sent.
type Failure struct {
	// OutboxID and EventID are the ids of the event, as far as they are known.
	OutboxID int64
	// EventID is described at OutboxID.
	EventID string
	// Err is an [*outboxarchive.ReadError], an [*outbox.FieldError], or the error of Kafka or of the client.
	Err error
}

const maxFailed = 1000

// note counts an event that was sent.
func (r *Report) note(e *outbox.ArchivedEvent, topic string, bytes int, old bool) {
	r.Sent++
	if old {
		r.Older++
	}
	n := 0
	for n < len(r.Counts) && (r.Counts[n].Topic != topic || r.Counts[n].Type != e.Type) {
		n++
	}
	if n == len(r.Counts) {
		r.Counts = append(r.Counts, Count{Topic: topic, Type: e.Type, First: e.CreatedAt, Last: e.CreatedAt})
	}
	c := &r.Counts[n]
	c.Events++
	c.Bytes += int64(bytes)
	if e.CreatedAt.Before(c.First) {
		c.First = e.CreatedAt
	}
	if e.CreatedAt.After(c.Last) {
		c.Last = e.CreatedAt
	}
}

// fail keeps an event that was not sent.
func (r *Report) fail(e *outbox.ArchivedEvent, err error) {
	r.NotSent++
	if len(r.Failed) < maxFailed {
		r.Failed = append(r.Failed, Failure{OutboxID: e.OutboxID, EventID: e.EventID, Err: err})
	}
}
