package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/outboxgo/outbox/outboxdlq"
	"github.com/twmb/franz-go/pkg/kgo"
)

// letterFlags pick dead letters.
type letterFlags struct {
	group, action, class, key string

	since, until when
	from         offsets
}

func (l *letterFlags) define(fs *flag.FlagSet) {
	fs.StringVar(&l.group, "group", "", "`NAME` consumer group that could not handle it")
	fs.StringVar(&l.action, "action", "", "`NAME` action that failed")
	fs.StringVar(&l.class, "class", "", "`NAME` kind of error")
	fs.StringVar(&l.key, "key", "", "`KEY` of the record")
	fs.Var(&l.since, "since", "`TIME` given up from then on: 2h (ago), 2006-01-02")
	fs.Var(&l.until, "until", "`TIME` given up before")
	fs.Var(&l.from, "from", "`PARTITION:OFFSET,…` where to begin")
}

// choose returns what the flags say, as outboxdlq.ReplayConfig wants it.
func (l *letterFlags) choose(now time.Time) func(outboxdlq.DeadLetter) bool {
	since, until := l.since.time(now), l.until.time(now)
	is := func(want, have string) bool { return want == "" || want == have }
	return func(d outboxdlq.DeadLetter) bool {
		return is(l.group, d.Group) && is(l.action, d.Action) && is(l.class, d.Class) && is(l.key, string(d.Record.Key)) &&
			!d.FailedAt.Before(since) && (until.IsZero() || d.FailedAt.Before(until))
	}
}

// offsets is a flag for places in partitions.
type offsets map[int32]int64

func (o *offsets) String() string { return "" }

// Set implements flag.Value.
func (o *offsets) Set(text string) error {
	*o = offsets{}
	for _, place := range strings.Split(text, ",") {
		number, offset, _ := strings.Cut(place, ":")
		n, err := strconv.ParseInt(number, 10, 32)
		at, aerr := strconv.ParseInt(offset, 10, 64)
		if err != nil || aerr != nil || n < 0 || at < 0 {
			return fmt.Errorf("want PARTITION:OFFSET, 0:1200 for example")
		}
		(*o)[int32(n)] = at
	}
	return nil
}

// text writes them as the flag takes them.
func (o offsets) text() string {
	var places []string
	for _, n := range slices.Sorted(maps.Keys(o)) {
		places = append(places, fmt.Sprintf("%d:%d", n, o[n]))
	}
	return strings.Join(places, ",")
}

var dlqListCommand = command{
	name: "dlq list", synopsis: "TOPIC", min: 1, max: 1,
	summary: "dead letters in Kafka: what consumers gave up",
	about: `
Reads a dead-letter topic, order-events.dlq for example, to its end. It belongs
to no group and commits nothing.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var l dlqList
		l.pick.define(fs)
		fs.IntVar(&l.limit, "limit", 100, "`NUMBER` dead letters at most (100)")
		fs.BoolVar(&l.values, "values", false, "with their values, in --json")
		return l.run
	},
}

type dlqList struct {
	pick   letterFlags
	limit  int
	values bool
}

// letterJSON is a dead letter in the output.
type letterJSON struct {
	Partition         int32           `json:"partition"`
	Offset            int64           `json:"offset"`
	Key               string          `json:"key"`
	OriginalTopic     string          `json:"original_topic"`
	OriginalPartition int32           `json:"original_partition"`
	OriginalOffset    int64           `json:"original_offset"`
	Group             string          `json:"group"`
	Action            string          `json:"action"`
	Class             string          `json:"class"`
	Error             string          `json:"error"`
	Attempts          int             `json:"attempts"`
	FailedAt          *time.Time      `json:"failed_at"`
	ReplayOf          string          `json:"replay_of,omitempty"`
	ValueOmitted      int             `json:"value_omitted,omitempty"`
	Unreadable        string          `json:"unreadable,omitempty"`
	Value             json.RawMessage `json:"value,omitempty"`
	ValueBase64       []byte          `json:"value_base64,omitempty"`
}

func letterOf(d outboxdlq.DeadLetter, err error, values bool) letterJSON {
	l := letterJSON{Partition: d.Record.Partition, Offset: d.Record.Offset, Key: string(d.Record.Key), OriginalTopic: d.OriginalTopic,
		OriginalPartition: d.OriginalPartition, OriginalOffset: d.OriginalOffset, Group: d.Group, Action: d.Action, Class: d.Class,
		Error: d.Error, Attempts: d.Attempts, FailedAt: optional(d.FailedAt), ReplayOf: d.ReplayOf, ValueOmitted: d.ValueOmitted}
	if err != nil {
		l.Unreadable = err.Error()
	}
	if values && len(d.Record.Value) > 0 {
		l.Value, l.ValueBase64 = body(d.Record.Value)
	}
	return l
}

func (l *dlqList) run(ctx context.Context, e *env) error {
	if l.limit < 1 {
		return usagef("--limit %d: at least 1", l.limit)
	}
	kafka, err := e.kafkaOpts()
	if err != nil {
		return err
	}
	letters, more, err := l.read(ctx, e, kafka)
	if err != nil {
		return err
	}
	if e.json {
		return e.writeJSON(map[string]any{"topic": e.args[0], "dead_letters": letters, "more": more})
	}
	l.show(e, letters, more)
	return nil
}

func (l *dlqList) read(ctx context.Context, e *env, kafka []kgo.Opt) (letters []letterJSON, more bool, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	// --timeout is for getting somewhere: each record gives more time.
	stuck := e.watchdog(cancel)
	defer stuck.stop()
	chosen := l.pick.choose(e.now())
	letters = []letterJSON{}
	for d, err := range outboxdlq.Read(ctx, kafka, e.args[0], l.pick.from) {
		stuck.alive()
		if d.Record == nil {
			return nil, false, because(ctx, err)
		}
		if err == nil && !chosen(d) {
			continue
		}
		if len(letters) == l.limit {
			return letters, true, nil
		}
		letters = append(letters, letterOf(d, err, l.values))
	}
	return letters, false, nil
}

func (l *dlqList) show(e *env, letters []letterJSON, more bool) {
	if len(letters) == 0 {
		e.printf("No dead letters, or none like that.\n")
		return
	}
	t := table{head: []string{"PART", "OFFSET", "AGE", "TRIES", "GROUP", "ACTION", "KEY", "CLASS", "ERROR"}, flex: []int{4, 5, 6, 7, 8}}
	for _, d := range letters {
		failedAt := time.Time{}
		if d.FailedAt != nil {
			failedAt = *d.FailedAt
		}
		text := d.Error
		if d.Unreadable != "" {
			text = "no dead letter: " + d.Unreadable
		}
		t.add(strconv.Itoa(int(d.Partition)), strconv.FormatInt(d.Offset, 10), age(failedAt, e.now()), strconv.Itoa(d.Attempts),
			d.Group, d.Action, d.Key, d.Class, text)
	}
	e.writeTable(t)
	if more {
		e.printf("There is more: --limit, or --from PARTITION:OFFSET\n")
	}
}

var dlqReplayCommand = command{
	name: "dlq replay", synopsis: "TOPIC", min: 1, max: 1,
	summary: "send dead letters back to who could not handle them",
	about: `
Only the group and the action that failed take what is sent back, and what they
have handled meanwhile is skipped. It sends nothing unless --yes is given.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var r dlqReplay
		r.pick.define(fs)
		fs.BoolVar(&r.yes, "yes", false, "do it; without, they are only counted")
		return r.run
	},
}

type dlqReplay struct {
	pick letterFlags
	yes  bool
}

func (r *dlqReplay) run(ctx context.Context, e *env) error {
	kafka, err := e.kafkaOpts()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stuck := e.watchdog(cancel)
	defer stuck.stop()
	cfg := outboxdlq.ReplayConfig{Topic: e.args[0], From: r.pick.from, DryRun: true}
	chosen := r.pick.choose(e.now())
	cfg.Choose = func(d outboxdlq.DeadLetter) bool { stuck.alive(); return chosen(d) }
	report, err := outboxdlq.Replay(ctx, kafka, cfg)
	if r.yes && err == nil {
		p, done := e.progress("sent", report.Sent), 0
		cfg.DryRun, cfg.Progress = false, func(outboxdlq.DeadLetter, error) { stuck.alive(); done++; p.show(done) }
		report, err = outboxdlq.Replay(ctx, kafka, cfg)
		p.end()
	}
	if serr := r.show(e, report); err == nil {
		return serr
	}
	return because(ctx, err)
}

// show says what was done, or would be.
func (r *dlqReplay) show(e *env, report outboxdlq.ReplayReport) error {
	if e.json {
		type failure struct {
			Partition int32  `json:"partition"`
			Offset    int64  `json:"offset"`
			Error     string `json:"error"`
		}
		failures := make([]failure, 0, len(report.Failed))
		for _, f := range report.Failed {
			failures = append(failures, failure{f.Partition, f.Offset, f.Err.Error()})
		}
		return e.writeJSON(map[string]any{"topic": e.args[0], "dry_run": !r.yes, "read": report.Read, "sent": report.Sent,
			"failed": failures, "next": offsets(report.Next)})
	}
	for _, f := range report.Failed {
		e.printf("partition %d, offset %d: %s\n", f.Partition, f.Offset, visible(errorText(f.Err)))
	}
	if !r.yes {
		e.printf("read %s, would send %s", count(report.Read), count(report.Sent))
		if report.Sent > 0 {
			e.printf("; --yes does it")
		}
	} else {
		e.printf("read %s, sent %s, not sent %s", count(report.Read), count(report.Sent), count(len(report.Failed)))
	}
	if len(report.Next) > 0 {
		e.printf(" (next: --from %s)", offsets(report.Next).text())
	}
	e.printf("\n")
	return nil
}

// watchdog ends what makes no progress for as long as --timeout.
type watchdog struct {
	timer *time.Timer
	every time.Duration
}

func (e *env) watchdog(cancel context.CancelCauseFunc) *watchdog {
	if e.timeout == 0 {
		return &watchdog{}
	}
	return &watchdog{time.AfterFunc(e.timeout, func() { cancel(context.DeadlineExceeded) }), e.timeout}
}

func (w *watchdog) alive() {
	if w.timer != nil {
		w.timer.Reset(w.every)
	}
}

func (w *watchdog) stop() {
	if w.timer != nil {
		w.timer.Stop()
	}
}

// because names what ended ctx beside what followed from it.
func because(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && err != nil {
		return fmt.Errorf("%w: %w", err, cause)
	}
	return err
}
