package main

import (
	"context"
	"flag"
	"strconv"
	"time"

	"github.com/outboxgo/outbox/internal/verify"
)

var verifyCommand = command{
	name:    "verify",
	summary: "compare PostgreSQL with Kafka: lost, phantom, inverted, repeated",
	about: `
Finds events without a record (lost), and records without an event (phantom),
out of order (inverted) or repeated: docs/watch.md. It exits with 3 if it finds
any. Relays and writers may run. It needs up to 300 bytes for each event in
$TMPDIR.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		v := verification{flags: fs}
		fs.StringVar(&v.cfg.Relay, "relay", "default", "`NAME` of the relay (default: default)")
		fs.StringVar(&v.cfg.Archive, "archive", "", "`NAME` schema of outbox_archive, to include it")
		fs.Var(&v.since, "since", "`TIME` recorded at or after: 2h (ago), 2006-01-02")
		fs.Var(&v.until, "until", "`TIME` recorded before")
		fs.Int64Var(&v.cfg.After, "after", 0, "`NUMBER` only after this outbox id")
		fs.Int64Var(&v.cfg.Before, "before", 0, "`NUMBER` only before this outbox id")
		fs.IntVar(&v.cfg.Findings, "limit", 20, "`NUMBER` to show of each kind (20)")
		fs.BoolVar(&v.repeats, "allow-repeats", false, "repeated records are no finding")
		fs.StringVar(&v.history, "history", "", "`FILE` recorded history (JSON lines) to check instead")
		return v.run
	},
}

type verification struct {
	flags        *flag.FlagSet
	cfg          verify.Config
	since, until when
	repeats      bool
	history      string
	times        times
}

func (v *verification) run(ctx context.Context, e *env) error {
	if v.cfg.Findings < 0 {
		return usagef("--limit %d: must not be negative", v.cfg.Findings)
	}
	var ignored []string
	v.flags.Visit(func(f *flag.Flag) {
		switch f.Name {
		case "relay", "archive", "since", "until", "after", "before":
			ignored = append(ignored, f.Name)
		}
	})
	if v.history != "" && len(ignored) > 0 {
		return usagef("--history and --%s: only one of them", ignored[0])
	}
	now, err := e.nowFor(ctx, v.since, v.until)
	if err != nil {
		return err
	}
	v.times = timesOf(v.since, v.until, now)
	v.cfg.Schema, v.cfg.Since, v.cfg.Until = e.schema, v.times.since, v.times.until
	ctx, watchdog := e.watchdog(ctx)
	defer watchdog.stop()
	var p *progress
	v.cfg.Progress = func(s verify.Step) {
		watchdog.reset()
		if p == nil || p.what != s.What {
			if p != nil {
				p.end()
			}
			p = e.progress(s.What, int(s.Total))
		}
		p.total = int(s.Total)
		p.show(int(s.Done))
	}
	report, err := v.compare(ctx, e)
	if p != nil {
		p.end()
	}
	if err != nil {
		return withCause(ctx, err)
	}
	if err := v.show(e, report); err != nil {
		return err
	}
	if report.Problems(verify.Lost, verify.Phantom, verify.Inverted) > 0 || !v.repeats && report.Problems(verify.Repeated) > 0 {
		return errProblems
	}
	return nil
}

func (v *verification) compare(ctx context.Context, e *env) (verify.Report, error) {
	if v.history != "" {
		return verify.RunHistory(ctx, v.history, v.cfg)
	}
	kafka, err := e.kafkaOpts()
	if err != nil {
		return verify.Report{}, err
	}
	db, err := e.connect(ctx)
	if err != nil {
		return verify.Report{}, err
	}
	return verify.Run(ctx, db, kafka, v.cfg)
}

// discrepancyJSON is a finding of verify in the output.
type discrepancyJSON struct {
	Kind      verify.Kind `json:"kind"`
	EventID   string      `json:"event_id"`
	OutboxID  int64       `json:"outbox_id,omitempty"`
	Topic     string      `json:"topic"`
	Partition *int32      `json:"partition,omitempty"`
	Offset    *int64      `json:"offset,omitempty"`
	Key       string      `json:"key,omitempty"`
	Why       string      `json:"why"`
}

func (v *verification) show(e *env, r verify.Report) error {
	if e.json {
		return v.showJSON(e, r)
	}
	if len(r.Findings) > 0 {
		t := table{head: []string{"FOUND", "EVENT", "OUTBOX-ID", "PLACE", "KEY", "WHY"}, flex: []int{3, 4, 5}}
		for _, f := range r.Findings {
			place, id := f.Topic, "-"
			if f.Partition >= 0 {
				place += "/" + strconv.Itoa(int(f.Partition)) + "/" + strconv.FormatInt(f.Offset, 10)
			}
			if f.OutboxID != 0 {
				id = strconv.FormatInt(f.OutboxID, 10)
			}
			t.add(string(f.Kind), f.EventID, id, place, f.Key, f.Why)
		}
		e.writeTable(t)
	}
	e.printf("%s events", count(r.Events))
	if !r.FirstAt.IsZero() {
		e.printf(" (ids %d to %d, recorded %s to %s)", r.FirstID, r.LastID, clock(r.FirstAt), clock(r.LastAt))
	}
	e.printf(", %s records, in %s\n", count(r.Records), length(r.Took))
	for _, n := range []struct {
		n    int64
		what string
	}{
		{r.NotSent["pending"], "events that the relay has not come to"},
		{r.NotSent["waiting"] + r.NotSent["failed"] + r.NotSent["parked"], "events in outbox_failed that are tried again, or behind one that is"},
		{r.NotSent["expired"], "events without a record that have expired"},
		{r.NotSent["dead"], "events in outbox_failed that are dead"},
		{r.NotSent["resolved"], "events that an operator has resolved without a record"},
		{r.Expired, "events without a record, of a time of which Kafka may have removed records"},
		{r.Older, "events of records, older than what outbox keeps or outside of the range: not judged"},
		{r.Released, "events behind later ones of a key that was dead, or on which an operator acted: allowed"},
		{r.Foreign, "records of other sources: not judged"},
		{r.Replayed, "records that were sent again for one group: not judged"},
	} {
		if n.n > 0 {
			e.printf("%s %s\n", count(n.n), n.what)
		}
	}
	for _, kind := range verify.Kinds {
		e.printf("%s %s  ", kind, count(r.Found[kind]))
	}
	e.printf("\n")
	return nil
}

func (v *verification) showJSON(e *env, r verify.Report) error {
	findings := []discrepancyJSON{}
	for _, f := range r.Findings {
		d := discrepancyJSON{Kind: f.Kind, EventID: f.EventID, OutboxID: f.OutboxID, Topic: f.Topic, Key: f.Key, Why: f.Why}
		if f.Partition >= 0 {
			d.Partition, d.Offset = &f.Partition, &f.Offset
		}
		findings = append(findings, d)
	}
	found := map[verify.Kind]int64{}
	for _, kind := range verify.Kinds {
		found[kind] = r.Found[kind]
	}
	doc := map[string]any{"events": r.Events, "first_id": r.FirstID, "last_id": r.LastID, "records": r.Records, "found": found, "findings": findings,
		"not_sent": r.NotSent, "expired": r.Expired, "older": r.Older, "released": r.Released, "foreign": r.Foreign, "replayed": r.Replayed,
		"first_at": optional(r.FirstAt), "last_at": optional(r.LastAt), "phantoms_since": optional(r.PhantomsSince), "seconds": r.Took.Round(time.Millisecond).Seconds()}
	v.times.addTo(doc)
	return e.writeJSON(doc)
}
