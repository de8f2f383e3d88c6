// Package verify compares the events that were committed with the records that Kafka has: it finds events that are
// lost, records of no event, repeated records, and records of a key that are out of order.
//
// [Run] reads PostgreSQL and Kafka while everything runs. [RunHistory] judges events and records that were written
// down. Both give what they read to the same judge.
//
// # What is judged while relays and writers run
//
// Run reads in this order, so that nothing that happens meanwhile looks wrong:
//
//  1. the position of the relay, then outbox_failed and outbox_audit. Each event that the relay has attempted is in
//     Kafka now, or its row was seen.
//  2. the ends of all partitions. Only records in front of these ends are read, so each of them is of an event that is
//     committed now.
//  3. outbox, then the archive: retention moves rows in this direction.
//  4. the oldest row that retention has left. An older record may be of an event that was removed.
//  5. the records.
//
// # Memory
//
// Each event and each record is an item of 50 bytes. Items are sorted on disk: 32 MiB of them at once are sorted in
// memory and written to a file, and at most 64 files of a level are merged. Two such sorts are in use, one by event and
// one by key and offset. So memory does not depend on the number of events, and the files need up to 150 bytes for
// an event that has one record, twice that while files are merged.
package verify

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/pg"
)

// Config chooses what [Run] compares.
type Config struct {
	Schema  string // of the tables; empty means public
	Archive string // schema of outbox_archive; empty means that there is none
	Relay   string // whose position counts

	After, Before int64     // only events with ids between these; zero means no bound
	Since, Until  time.Time // only events that were recorded in this time; zero means no bound

	Findings int // that are kept of each kind
	// Progress is called now and then. Nil is not called.
	Progress func(Step)

	memory int // of a sort, in bytes; zero means runBytes
}

// Step is how far a part of the work is. A total of zero is not known.
type Step struct {
	What        string
	Done, Total int64
}

// Kind is what is wrong.
type Kind string

// The kinds of findings.
const (
	Lost     Kind = "lost"     // the relay has passed the event, and no record has it
	Phantom  Kind = "phantom"  // a record has an event that was not committed
	Repeated Kind = "repeated" // a record has an event that an earlier record has
	Inverted Kind = "inverted" // the first record of an event is behind that of a later event of its key
)

// Kinds are all kinds, the worst first.
var Kinds = []Kind{Lost, Phantom, Inverted, Repeated}

// Finding is one thing that is wrong.
type Finding struct {
	Kind     Kind
	EventID  string
	OutboxID int64  // zero if it is not known
	Topic    string // of the record, or to which the event belongs
	// Partition and Offset say where the record is. The partition of a lost event is -1.
	Partition int32
	Offset    int64
	Key       string // of an inverted record
	Why       string // one line

	event, other eventID // other is the event that came too early
	key          uint64
}

// Report is the result of [Run] and [RunHistory].
type Report struct {
	Events            int64     // committed events in the range
	FirstID, LastID   int64     // their outbox ids
	FirstAt, LastAt   time.Time // when they were recorded
	Records           int64     // records of the source of these events
	PhantomsSince     time.Time // phantoms are judged if all times of the record are not before this one
	Found             map[Kind]int64
	Findings          []Finding        // the first ones of each kind
	NotSent           map[string]int64 // events that need not be in Kafka, by state: pending, expired, or the status of outbox_failed
	Expired           int64            // events that are not in Kafka, which may have removed their records
	Older             int64            // events of records whose rows retention may have removed, or that are outside of the range
	Released          int64            // inversions of keys with events that were dead, or on which operators acted
	Foreign, Replayed int64            // records that were not judged: of other sources, and for one consumer group
	Took              time.Duration
}

// Problems returns the number of findings of some kinds.
func (r *Report) Problems(kinds ...Kind) (n int64) {
	for _, k := range kinds {
		n += r.Found[k]
	}
	return n
}

// check is one comparison. It belongs to one goroutine.
type check struct {
	cfg    Config
	report Report
	names  *names
	events *sorter // sightings
	keys   *sorter // arrivals
	step   Step
	ctx    context.Context // of the call that owns the check

	// window bounds the times of records whose events must be committed, as from <= time < to.
	from, to int64
	topics   map[uint32]topicState
	exists   func([]eventID) (map[eventID]bool, error) // looks for events that were not read; nil: all were read
	doubtful []sighting                                // records to look up by exists
}

// topicState is what is known of a topic.
type topicState struct {
	missing  bool
	keptFrom int64 // an event that was recorded earlier may have lost its record to Kafka's retention
}

// newCheck makes a temporary folder, which the function that it returns removes.
func newCheck(ctx context.Context, cfg Config) (*check, func(), error) {
	dir, err := os.MkdirTemp("", "outbox-verify-")
	if err != nil {
		return nil, nil, fmt.Errorf("make a folder for sorted files: %w", err)
	}
	cfg.memory = cmp.Or(cfg.memory, runBytes)
	c := &check{cfg: cfg, ctx: ctx, names: newNames(), topics: map[uint32]topicState{}, from: beginning, to: endless,
		report: Report{Found: map[Kind]int64{}, NotSent: map[string]int64{}}}
	c.events = newSorter(dir, "events", cfg.memory, c.tick)
	c.keys = newSorter(dir, "keys", cfg.memory, c.tick)
	return c, func() { os.RemoveAll(dir) }, nil
}

// begin begins a part of the work.
func (c *check) begin(what string, total int64) {
	c.step = Step{What: what, Total: total}
	c.show()
}

// add notes that more of the part is done.
func (c *check) add(n int) error {
	c.step.Done += int64(n)
	return c.tick()
}

// tick shows the progress, and returns an error if the work is to end.
func (c *check) tick() error {
	c.show()
	return context.Cause(c.ctx)
}

func (c *check) show() {
	if c.cfg.Progress != nil {
		c.cfg.Progress(c.step)
	}
}

// ErrNoRelay means that the relay has no position in the schema.
var ErrNoRelay = errors.New("the relay has no row in outbox_cursor")

// ErrOtherCluster means that the position of the relay was written by another cluster, and no relay has worked here
// yet.
var ErrOtherCluster = errors.New("the position of the relay belongs to another cluster: run the relay first")

// Run compares the events of a database with the records of Kafka. It changes nothing. It makes a Kafka client from
// opts and closes it. It returns ErrNoRelay, ErrOtherCluster, or an error of PostgreSQL, of Kafka or of the file
// system.
func Run(ctx context.Context, db *pgxpool.Pool, opts []kgo.Opt, cfg Config) (Report, error) {
	began := time.Now()
	cfg.Schema = cmp.Or(cfg.Schema, pg.DefaultSchema)
	c, remove, err := newCheck(ctx, cfg)
	if err != nil {
		return Report{}, err
	}
	defer remove()
	client, err := kafka.NewClient(kafka.Bounded(opts))
	if err != nil {
		return Report{}, fmt.Errorf("make Kafka client: %w", err)
	}
	defer client.Close()
	rows, records := &rows{check: c, db: db, sources: newNames()}, &records{check: c, client: client}
	err = errors.Join(rows.readFailed(), records.askEnds())
	if err == nil {
		err = rows.readAll()
	}
	if err == nil {
		err = records.readAll(rows.sources, rows.oldest)
	}
	if err == nil {
		err = c.classify()
	}
	if err == nil {
		err = rows.nameKeys()
	}
	c.report.Took = time.Since(began)
	return c.report, err
}
