package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/outboxdlq"
)

// deadLetterFlags choose dead letters.
type deadLetterFlags struct {
	topic, group, action, class, key string

	since, until when
	times        times // set by choose
	from         offsets
}

func (f *deadLetterFlags) define(fs *flag.FlagSet) {
	fs.StringVar(&f.topic, "topic", "", "`NAME` original topic")
	fs.StringVar(&f.group, "group", "", "`NAME` consumer group that failed")
	fs.StringVar(&f.action, "action", "", "`NAME` action that failed")
	fs.StringVar(&f.class, "class", "", "`NAME` class of the error")
	fs.StringVar(&f.key, "key", "", "`KEY` of the record")
	fs.Var(&f.since, "since", "`TIME` failed at or after: 2h (ago), 2006-01-02")
	fs.Var(&f.until, "until", "`TIME` failed before")
	fs.Var(&f.from, "from", "`PARTITION:OFFSET,…` where to begin")
}

// choose returns the flags as a function for outboxdlq.ReplayConfig.
func (f *deadLetterFlags) choose(now time.Time) func(outboxdlq.DeadLetter) bool {
	f.times = timesOf(f.since, f.until, now)
	since, until := f.times.since, f.times.until
	is := func(want, have string) bool { return want == "" || want == have }
	return func(d outboxdlq.DeadLetter) bool {
		return is(f.topic, d.OriginalTopic) && is(f.group, d.Group) && is(f.action, d.Action) && is(f.class, d.Class) && is(f.key, string(d.Record.Key)) &&
			!d.FailedAt.Before(since) && (until.IsZero() || d.FailedAt.Before(until))
	}
}

// offsets is a flag for offsets in partitions.
type offsets map[int32]int64

func (o *offsets) String() string { return "" }

// Set implements flag.Value.
func (o *offsets) Set(text string) error {
	*o = offsets{}
	for _, pair := range strings.Split(text, ",") {
		number, offset, _ := strings.Cut(pair, ":")
		n, err := strconv.ParseInt(number, 10, 32)
		at, aerr := strconv.ParseInt(offset, 10, 64)
		if err != nil || aerr != nil || n < 0 || at < 0 {
			return fmt.Errorf("want PARTITION:OFFSET, 0:1200 for example")
		}
		(*o)[int32(n)] = at
	}
	return nil
}

// text returns the offsets as the flag takes them.
func (o offsets) text() string {
	var pairs []string
	for _, n := range slices.Sorted(maps.Keys(o)) {
		pairs = append(pairs, fmt.Sprintf("%d:%d", n, o[n]))
	}
	return strings.Join(pairs, ",")
}

var dlqListCommand = command{
	name: "dlq list", synopsis: "TOPIC", min: 1, max: 1,
	summary: "dead letters in Kafka: what consumers could not handle",
	about: `
Reads a dead-letter topic to its end. It joins no group and commits nothing.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var l dlqList
		l.filter.define(fs)
		fs.IntVar(&l.limit, "limit", 100, "`NUMBER` of dead letters (100)")
		fs.BoolVar(&l.values, "values", false, "with values, in --json")
		return l.run
	},
}

type dlqList struct {
	filter deadLetterFlags
	limit  int
	values bool
}

// deadLetterJSON is a dead letter in the output.
type deadLetterJSON struct {
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
	EditedFrom        string          `json:"edited_from,omitempty"`
	ValueOmitted      int             `json:"value_omitted,omitempty"`
	KeyOmitted        int             `json:"key_omitted,omitempty"`
	HeadersOmitted    int             `json:"headers_omitted,omitempty"`
	Unreadable        string          `json:"unreadable,omitempty"`
	Value             json.RawMessage `json:"value,omitempty"`
	ValueBase64       []byte          `json:"value_base64,omitempty"`
}

func toDeadLetterJSON(d outboxdlq.DeadLetter, err error, values bool) deadLetterJSON {
	l := deadLetterJSON{Partition: d.Record.Partition, Offset: d.Record.Offset, Key: string(d.Record.Key), OriginalTopic: d.OriginalTopic,
		OriginalPartition: d.OriginalPartition, OriginalOffset: d.OriginalOffset, Group: d.Group, Action: d.Action, Class: d.Class,
		Error: short.Text(d.Error, maxText), Attempts: d.Attempts, FailedAt: optional(d.FailedAt), ReplayOf: d.ReplayOf, EditedFrom: d.EditedFrom,
		ValueOmitted: d.ValueOmitted, KeyOmitted: d.KeyOmitted, HeadersOmitted: d.HeadersOmitted}
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
	deadLetters, more, err := l.read(ctx, e, kafka)
	if err != nil {
		return err
	}
	if e.json {
		return e.writeJSON(map[string]any{"topic": e.args[0], "dead_letters": deadLetters, "more": more})
	}
	l.show(e, deadLetters, more)
	return nil
}

func (l *dlqList) read(ctx context.Context, e *env, kafka []kgo.Opt) (deadLetters []deadLetterJSON, more bool, err error) {
	// --timeout bounds the time without progress: each record starts it again.
	ctx, watchdog := e.watchdog(ctx)
	defer watchdog.stop()
	chosen := l.filter.choose(e.now())
	deadLetters = []deadLetterJSON{}
	for d, err := range outboxdlq.Read(ctx, kafka, e.args[0], l.filter.from) {
		watchdog.reset()
		if d.Record == nil {
			return nil, false, withCause(ctx, err)
		}
		if err == nil && !chosen(d) {
			continue
		}
		if len(deadLetters) == l.limit {
			return deadLetters, true, nil
		}
		deadLetters = append(deadLetters, toDeadLetterJSON(d, err, l.values))
	}
	return deadLetters, false, nil
}

func (l *dlqList) show(e *env, deadLetters []deadLetterJSON, more bool) {
	if len(deadLetters) == 0 {
		e.printf("No dead letters, or none like that.\n")
		return
	}
	t := table{head: []string{"PART", "OFFSET", "AGE", "TRIES", "TOPIC", "GROUP", "ACTION", "KEY", "CLASS", "ERROR"}, flex: []int{4, 5, 6, 7, 8, 9}}
	for _, d := range deadLetters {
		failedAt := time.Time{}
		if d.FailedAt != nil {
			failedAt = *d.FailedAt
		}
		text := d.Error
		if d.Unreadable != "" {
			text = "no dead letter: " + d.Unreadable
		}
		t.add(strconv.Itoa(int(d.Partition)), strconv.FormatInt(d.Offset, 10), age(failedAt, e.now()), strconv.Itoa(d.Attempts),
			d.OriginalTopic, d.Group, d.Action, d.Key, d.Class, text)
	}
	e.writeTable(t)
	if more {
		e.printf("There is more: --limit, or --from PARTITION:OFFSET\n")
	}
}

var dlqReplayCommand = command{
	name: "dlq replay", synopsis: "TOPIC", min: 1, max: 1,
	summary: "send dead letters back to the group that failed",
	about: `
Only the group and action that failed handle them, unless they have done so
meanwhile. Danger: any client that may write to the dead-letter topic can name
any topic in it. Only topics in --to get records.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var r dlqReplay
		r.filter.define(fs)
		fs.StringVar(&r.to, "to", "", "`TOPIC,…` allowed topics ({topic} of {topic}.dlq)")
		fs.BoolVar(&r.yes, "yes", false, yesUsage)
		r.why.define(fs)
		return r.run
	},
}

type dlqReplay struct {
	filter deadLetterFlags
	to     string
	yes    bool
	why    auditFlags
	topics map[string]int // number of dead letters by their target topic
}

func (r *dlqReplay) run(ctx context.Context, e *env) error {
	kafka, err := e.kafkaOpts()
	if err != nil {
		return err
	}
	if len(r.filter.from) > 0 {
		if err := needAbsolute("--from", map[string]when{"--since": r.filter.since, "--until": r.filter.until}, e.now()); err != nil {
			return err
		}
	}
	cfg := outboxdlq.ReplayConfig{Topic: e.args[0], From: r.filter.from, DryRun: true, Schema: e.schema}
	if r.yes {
		if cfg.Audit, err = r.why.info(e); err != nil {
			return err
		}
		if cfg.DB, err = e.connect(ctx); err != nil {
			return err
		}
	}
	ctx, watchdog := e.watchdog(ctx)
	defer watchdog.stop()
	if r.to != "" {
		cfg.To = strings.Split(r.to, ",")
	}
	chosen := r.filter.choose(e.now())
	cfg.Choose = func(d outboxdlq.DeadLetter) bool { watchdog.reset(); return chosen(d) }
	cfg.Progress = r.counter()
	report, err := outboxdlq.Replay(ctx, kafka, cfg)
	counted := err == nil
	if r.yes && counted {
		p, sent, counter := e.progress("sent", report.Sent), 0, r.counter()
		cfg.DryRun, cfg.Progress = false, func(d outboxdlq.DeadLetter, err error) {
			watchdog.reset()
			if counter(d, err); err == nil {
				sent++
				p.show(sent)
			}
		}
		report, err = outboxdlq.Replay(ctx, kafka, cfg)
		p.end()
	}
	// A run that has not begun has nothing to report but its error, whatever its dry run has counted.
	if err != nil && (report.Read == 0 || r.yes && !counted) {
		return withCause(ctx, err)
	}
	goBack(report, err)
	if serr := r.show(e, report); err == nil {
		return serr
	}
	return withCause(ctx, err)
}

// goBack has another run begin with the first record that was not sent because of the error that has ended a run.
func goBack(report outboxdlq.ReplayReport, err error) {
	for _, f := range report.Failed {
		if errors.Is(err, f.Err) {
			report.Next[f.Partition] = min(report.Next[f.Partition], f.Offset)
		}
	}
}

// counter begins to count to which topics dead letters go back.
func (r *dlqReplay) counter() func(outboxdlq.DeadLetter, error) {
	r.topics = map[string]int{}
	return func(d outboxdlq.DeadLetter, err error) {
		if err == nil {
			r.topics[d.OriginalTopic]++
		}
	}
}

// show prints the report.
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
		doc := map[string]any{"topic": e.args[0], "dry_run": !r.yes, "read": report.Read, "sent": report.Sent,
			"topics": r.topics, "failed": failures, "absent_groups": append([]string{}, report.Absent...), "next": offsets(report.Next)}
		r.filter.times.addTo(doc)
		return e.writeJSON(doc)
	}
	for _, f := range report.Failed {
		e.printf("partition %d, offset %d: %s\n", f.Partition, f.Offset, visible(errorText(f.Err)))
	}
	for _, group := range report.Absent {
		e.printf("group %s has read nothing of the topic: nobody handles what is sent for it\n", visible(short.Text(group, maxText)))
	}
	e.showTopics(r.topics)
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
	e.showTimes(r.filter.times)
	return nil
}

var dlqEditCommand = command{
	name: "dlq edit", synopsis: "TOPIC PARTITION:OFFSET", min: 2, max: 2,
	summary: "give a dead letter another value and send it back",
	about: `
Writes a copy with the new value to the dead-letter topic, and sends it to the
group and action that failed. Use it for groups without a database and values
that only the dead letter has; otherwise outbox failures edit. The old dead
letter stays in the topic: exclude it from later replays, for example by --from.
outbox_audit keeps the old value.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var d dlqEdit
		fs.StringVar(&d.file, "payload", "", "`FILE` new payload; - is standard input")
		fs.StringVar(&d.to, "to", "", "`TOPIC,…` allowed topics ({topic} of {topic}.dlq)")
		fs.BoolVar(&d.yes, "yes", false, yesUsage)
		d.why.define(fs)
		return d.run
	},
}

type dlqEdit struct {
	file, to string
	yes      bool
	why      auditFlags
}

func (d *dlqEdit) run(ctx context.Context, e *env) (err error) {
	var at offsets
	if err := at.Set(e.args[1]); err != nil || len(at) != 1 || strings.Contains(e.args[1], ",") {
		return usagef("%q is no place of a dead letter: want PARTITION:OFFSET, 0:1200 for example", e.args[1])
	}
	cfg := outboxdlq.ReplayConfig{Topic: e.args[0], DryRun: !d.yes, Schema: e.schema}
	if d.to != "" {
		cfg.To = strings.Split(d.to, ",")
	}
	if cfg.Audit, err = d.why.info(e); err != nil {
		return err
	}
	value, err := readPayload(e, d.file)
	if err != nil {
		return err
	}
	kafka, err := e.kafkaOpts()
	if err != nil {
		return err
	}
	if cfg.DB, err = e.connect(ctx); err != nil {
		return err
	}
	for partition, offset := range at {
		before, after, err := outboxdlq.Edit(ctx, kafka, cfg, partition, offset, value)
		if err != nil {
			return err
		}
		return d.show(e, before, after)
	}
	return nil
}

// show prints the values of a dry run, or the place of the copy.
func (d *dlqEdit) show(e *env, before, after outboxdlq.DeadLetter) error {
	doc := map[string]any{"action": "edit", "dry_run": !d.yes, "topic": after.OriginalTopic, "group": after.Group}
	if !d.yes {
		return e.showEdit("bytes", before.Record.Value, nil, after.Record.Value, doc)
	}
	if e.json {
		doc["partition"], doc["offset"] = after.Record.Partition, after.Record.Offset
		return e.writeJSON(doc)
	}
	e.printf("edited as %s, partition %d, offset %d, and sent to %s for group %s\n", after.Record.Topic, after.Record.Partition, after.Record.Offset,
		visible(after.OriginalTopic), visible(after.Group))
	return nil
}

// watchdog cancels a context after --timeout without progress.
type watchdog struct {
	cancel  context.CancelCauseFunc
	timer   *time.Timer // nil without a timeout
	timeout time.Duration
}

func (e *env) watchdog(ctx context.Context) (context.Context, *watchdog) {
	ctx, cancel := context.WithCancelCause(ctx)
	w := &watchdog{cancel: cancel, timeout: e.timeout}
	if e.timeout > 0 {
		w.timer = time.AfterFunc(e.timeout, func() { cancel(context.DeadlineExceeded) })
	}
	return ctx, w
}

// reset gives another --timeout.
func (w *watchdog) reset() {
	if w.timer != nil {
		w.timer.Reset(w.timeout)
	}
}

// stop stops the watchdog and cancels its context.
func (w *watchdog) stop() {
	w.cancel(nil)
	if w.timer != nil {
		w.timer.Stop()
	}
}

// withCause adds to an error the cause for which ctx ended.
func withCause(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && err != nil {
		return fmt.Errorf("%w: %w", err, cause)
	}
	return err
}
