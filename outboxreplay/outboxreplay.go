// Package outboxreplay sends recorded events to Kafka again, from outbox or from an archive.
//
// [Run] makes the records that a relay would send, byte by byte, and sends them in the order of the
// events of each key: to their own topics, to another topic, or for one consumer group alone. In a dry run it
// only counts.
//
// A record that is sent again is a repeat: a consumer group that has a note of its event in event_handled skips it,
// and one that has none, because it is new or the note is older than RetentionConfig.HandledFor, handles it. While a
// relay runs, its records come between those that are sent again.
package outboxreplay

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/outboxarchive"
	"github.com/outboxgo/outbox/outboxops"
)

// Config says what [Run] sends, and where to. Source is required, and so is Audit unless it is a dry run.
type Config struct {
	// Source has the events: outboxarchive.Recorded for those in outbox, an
	// *outboxarchive.Table for these and those in the archive, or the files of one. Required.
	Source outboxarchive.Source
	// Filter chooses events of the source. Its After is where a run that was stopped goes on. Empty
	// means all.
	Filter outboxarchive.Filter

	// To is the topic to which all records are sent. Empty means their own topics.
	To string
	// Group is the only consumer group that handles what is sent. Each record has a dead letter of class
	// "replay" in the dead-letter topic then, as only those are believed that say for whom a record is; so
	// the client needs the right to write there. Empty means all groups.
	Group string
	// Again has the group handle events that it has handled before, too: what it has noted of them in
	// event_handled is removed before they are sent. It needs Group. False means that they are repeats.
	Again bool
	// Mode is that of the relay. Zero means [outbox.Binary].
	Mode outbox.Mode
	// IDHeader and TraceHeader are those of RelayConfig: names of extra headers, with the event's
	// id and its trace id, for consumers that read them there. Empty means none.
	IDHeader, TraceHeader string

	// Rate is how many events are sent in a second at most, also after a time in which nothing could be
	// sent. Negative means no limit. Zero means
	// 1,000.
	Rate int
	// HandledFor is RetentionConfig.HandledFor of the consumers, for [Report.Older]. Zero means 31 days.
	HandledFor time.Duration
	// SkipUnreadable reports events that cannot be read, or of which no record can be made, in Report.Failed and
	// goes on. Such an event ends the run otherwise. A dry run always goes on. Zero means that the run ends.
	SkipUnreadable bool

	// DryRun counts what would be sent, sends nothing, and changes nothing.
	DryRun bool
	// Schema holds the tables of outbox. Empty means public.
	Schema string
	// Audit says who sends the events again, and why. A dry run needs none. Required.
	Audit outboxops.AuditInfo
	// Progress is called when some events were sent, or counted. Nil is not called.
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
	if c.Mode != outbox.Binary && c.Mode != outbox.Structured {
		errs = append(errs, fmt.Errorf("field Mode is %d: must be Binary or Structured", c.Mode))
	}
	errs = append(errs, c.further().Check(), checkLength("IDHeader", c.IDHeader), checkLength("TraceHeader", c.TraceHeader))
	if !c.DryRun {
		errs = append(errs, c.checkAudit())
		if db == nil {
			errs = append(errs, fmt.Errorf("db %w: outbox_audit keeps what is sent again", outbox.ErrNilArgument))
		}
	}
	return errors.Join(errs...)
}

const (
	maxGroup    = 255
	maxOperator = 100
	maxReason   = 9_000 // outbox_audit takes 10,000, and the selection stands there, too
)

func (c Config) checkAudit() error {
	var errs []error
	for _, field := range []struct {
		name, text string
		limit      int
	}{{"Audit.Operator", c.Audit.Operator, maxOperator}, {"Audit.Reason", c.Audit.Reason, maxReason}} {
		err := check.Text(field.text, field.limit)
		if err == nil && strings.TrimSpace(field.text) == "" {
			err = outbox.ErrEmpty
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("field %s %w", field.name, err))
		}
	}
	return errors.Join(errs...)
}

// Report is what [Run] did, or would do in a dry run.
type Report struct {
	// Read is how many events the source had, and Sent how many Kafka has acknowledged. In a dry run, Sent
	// is how many would be sent.
	Read, Sent int
	// Counts are the sent events by topic and type, sorted.
	Counts []Count
	// Older is how many of them were recorded longer ago than HandledFor: no group has notes of
	// them any more, so each group that gets them handles them again.
	Older int
	// Forgotten is how many notes of the group were removed (Config.Again).
	Forgotten int64
	// Failed are events that could not be read or sent, up to 1,000 of them, and NotSent is how many there are.
	Failed []Failure
	// NotSent is described at Failed.
	NotSent int
	// Next is the Filter.After with which another run goes on: all events up to it were sent, or are in
	// Failed. What was sent behind it is sent again.
	Next int64
}

// Count is how many events of a type went to a topic.
type Count struct {
	// Topic and Type are of the records.
	Topic, Type string
	// Events is how many there are, and Bytes the size of their values.
	Events int
	// Bytes is described at Events.
	Bytes int64
	// First and Last are when the first and the last of them were recorded.
	First, Last time.Time
}

// Failure says why an event was not sent.
type Failure struct {
	// OutboxID and EventID are the event's, as far as they are known.
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
