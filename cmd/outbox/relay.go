package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxalert"
)

var relayCommand = command{
	name:    "relay",
	summary: "relay events to Kafka, until SIGTERM",
	about: `
Run several: one leads, the others stand by. Each flag can be a variable:
--max-retries is $OUTBOX_MAX_RETRIES. Alerts are logged, and sent to Slack
($OUTBOX_SLACK_URL) and PagerDuty ($OUTBOX_PAGERDUTY_KEY). It stops within 5 s;
a second signal ends it at once.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		r := &relayProcess{}
		r.define(fs)
		fs.VisitAll(func(f *flag.Flag) { r.own = append(r.own, f.Name) })
		return func(ctx context.Context, e *env) error {
			var err error
			if r.variables, err = fromVariables(e, fs, r.own); err != nil {
				return err
			}
			if text := unknownVariables(e, r.own); text != "" {
				r.logger(e).Warn("outbox: variables are not known and have no effect", "variables", text)
			}
			return r.run(ctx, e)
		}
	},
}

// relayProcess is a relay with the other parts of its process.
type relayProcess struct {
	own       []string          // the names of its flags, without those that all commands take
	variables map[string]string // variables of flags that were not given, by the names of the flags

	relay                string
	structured, holdDead bool
	headers              string // IDHeader and TraceHeader
	exactly, end         string // cursor topic; where to read how far the relay has come, to end the mode
	batch, maxRetries    int
	poll, lease, stale   time.Duration
	published, handled   span
	listen, page         string
	log                  string
	level                slog.Level
}

// The default address: its port is usual for metrics in the text format of Prometheus.
const defaultListen = ":9464"

// The values of --end-mode.
const (
	endKafka    = "kafka"
	endPostgres = "postgres"
)

// The values of --log, and the value of --listen for no listener.
const (
	logText   = "text"
	logJSON   = "json"
	listenOff = "off"
)

func (r *relayProcess) define(fs *flag.FlagSet) {
	fs.StringVar(&r.relay, "relay", "", "`NAME` name (default: default); each name sends every event")
	fs.IntVar(&r.batch, "batch", 0, "`N` events in a batch (5000)")
	fs.DurationVar(&r.poll, "poll", 0, "`TIME` between polls of an idle relay (500ms)")
	fs.DurationVar(&r.lease, "lease", 0, "`TIME` standby's wait for an unreachable host (30s; min. 3s)")
	fs.IntVar(&r.maxRetries, "max-retries", 0, "`N` retries before an event is dead (10)")
	fs.BoolVar(&r.holdDead, "hold-dead", false, "dead events block their keys until an operator acts")
	fs.BoolVar(&r.structured, "structured", false, "structured CloudEvents, not binary")
	fs.StringVar(&r.headers, "headers", "", "`ID[,TRACE]` extra headers for event id and trace id")
	fs.StringVar(&r.exactly, "exactly-once", "", "`TOPIC` cursor topic: send each event exactly once")
	fs.StringVar(&r.end, "end-mode", "", "`LIST` kafka,postgres end --exactly-once at its position, exit")
	fs.Var(&r.published, "published-for", "`TIME` how long published rows stay in outbox (7d)")
	fs.Var(&r.handled, "handled-for", "`TIME` how long rows stay in event_handled (31d)")
	fs.DurationVar(&r.stale, "stale-after", 0, "`TIME` age at which waiting events cause an alert (5m)")
	fs.StringVar(&r.listen, "listen", defaultListen, "`HOST:PORT` of /livez, /readyz, /metrics ("+defaultListen+"), or "+listenOff)
	fs.StringVar(&r.page, "page", "", "`FILE` lines ROLE NAME PASSWORD: operators' page /outbox/")
	fs.StringVar(&r.log, "log", logText, "`LIST` text,json log format on stderr (text; --json: json)")
	fs.TextVar(&r.level, "log-level", slog.LevelInfo, "`LEVEL` debug, info, warn, error (info)")
}

// fromVariables sets flags that were not given from variables, and returns the variables.
func fromVariables(e *env, fs *flag.FlagSet, names []string) (set map[string]string, err error) {
	given := map[string]bool{}
	fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
	set = map[string]string{}
	for _, name := range names {
		variable := variableOf(name)
		value := e.getenv(variable)
		if given[name] || value == "" {
			continue
		}
		if err := fs.Set(name, value); err != nil {
			return nil, usagef("$%s %q: %v", variable, value, err)
		}
		set[name] = "$" + variable
	}
	return set, nil
}

// called returns the name of a flag as it was given: the flag or its variable.
func (r *relayProcess) called(name string) string { return cmp.Or(r.variables[name], "--"+name) }

// check refuses values that the relay would understand differently.
func (r *relayProcess) check() error {
	if err := oneOf(r.called("log"), r.log, []string{logText, logJSON}); err != nil {
		return err
	}
	if r.end != "" {
		if err := oneOf(r.called("end-mode"), r.end, []string{endKafka, endPostgres}); err != nil {
			return err
		}
		if r.exactly == "" {
			return usagef("%s: which topic? --exactly-once TOPIC", r.called("end-mode"))
		}
	}
	for name, d := range map[string]time.Duration{"poll": r.poll, "lease": r.lease, "stale-after": r.stale} {
		if d < 0 {
			return usagef("%s %v: must not be negative", r.called(name), d)
		}
	}
	for name, n := range map[string]int{"batch": r.batch, "max-retries": r.maxRetries} {
		if n < 0 {
			return usagef("%s %d: must not be negative", r.called(name), n)
		}
	}
	switch {
	case r.lease > 0 && r.lease < minLease:
		return usagef("%s %v: at least %v", r.called("lease"), r.lease, minLease)
	case r.page != "" && r.listen == listenOff:
		return usagef("%s wants an address to %s at", r.called("page"), r.called("listen"))
	}
	return nil
}

// The least --lease, and the times that outbox.RelayConfig has by default.
const (
	minLease        = 3 * time.Second
	defaultDelivery = 10 * time.Second
)

// config returns the config of the relay. A short lease shortens the times that must be below it.
func (r *relayProcess) config(e *env, log *slog.Logger) (outbox.RelayConfig, error) {
	cfg := outbox.RelayConfig{
		Schema: e.schema, Name: r.relay, BatchSize: r.batch, PollInterval: r.poll, Lease: r.lease, Retry: outbox.RetryPolicy{MaxRetries: r.maxRetries}, HoldDead: r.holdDead,
		ExactlyOnce: r.exactly,
		Retention:   outbox.RetentionConfig{PublishedFor: time.Duration(r.published), HandledFor: time.Duration(r.handled)},
		Alerts:      outbox.AlertConfig{StaleAfter: r.stale}, Logger: log,
	}
	if r.lease > 0 {
		cfg.DeliveryTimeout = min(defaultDelivery, r.lease/3)
	}
	cfg.IDHeader, cfg.TraceHeader, _ = strings.Cut(r.headers, ",")
	if r.structured {
		cfg.Mode = outbox.Structured
	}
	alerter, err := alerterOf(e, log)
	cfg.Alerts.Alerter = alerter
	return cfg, err
}

// alerterOf returns who gets alerts, or nil for the log alone.
func alerterOf(e *env, log *slog.Logger) (outbox.Alerter, error) {
	slackURL, pagerDutyKey := e.getenv(slackVariable), e.getenv(pagerDutyVariable)
	if slackURL == "" && pagerDutyKey == "" {
		return nil, nil
	}
	e.secret(slackURL)
	e.secret(pagerDutyKey)
	// The relay logs dead events and the state of its breaker itself.
	to := []outbox.Alerter{outboxalert.Only(outbox.LogAlerter{Logger: log}, outbox.AlertDeadDeliveries, outbox.AlertManyDead, outbox.AlertStale,
		outbox.AlertNoLeader, outbox.AlertLost, outbox.AlertReport)}
	if slackURL != "" {
		slack, err := outboxalert.Slack(slackURL, nil)
		if err != nil {
			return nil, usagef("$OUTBOX_SLACK_URL: %v", err)
		}
		to = append(to, slack)
	}
	if pagerDutyKey != "" {
		pagerDuty, err := outboxalert.PagerDuty(pagerDutyKey, alertSource(e), outboxalert.PagerDutyConfig{})
		if err != nil {
			return nil, usagef("$OUTBOX_PAGERDUTY_KEY: %v", err)
		}
		to = append(to, pagerDuty)
	}
	return outboxalert.All(to...), nil
}

// alertSource says to PagerDuty which database an alert is about. All processes of one say the same.
func alertSource(e *env) string {
	_, database, _ := strings.Cut(e.databaseName(), "@")
	return fmt.Sprintf("outbox, %s, schema %s", database, e.schemaName())
}
