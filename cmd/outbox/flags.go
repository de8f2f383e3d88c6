package main

import (
	"flag"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/outboxgo/outbox/outboxops"
)

// globals are the flags that all commands take, before their name or behind it.
type globals struct {
	database, schema string

	kafka, kafkaCA, kafkaCert, kafkaKey   string
	kafkaMechanism, kafkaUser, kafkaToken string
	kafkaTLS                              bool

	json, noColor bool
	timeout       time.Duration
}

const defaultTimeout = 30 * time.Second

// define binds the flags. Their defaults are the values that were parsed so far.
func (g *globals) define(fs *flag.FlagSet) {
	fs.StringVar(&g.database, "database", g.database, "`URL` of PostgreSQL; else $DATABASE_URL, $PGHOST …")
	fs.StringVar(&g.schema, "schema", g.schema, "`NAME` schema of the tables; else $OUTBOX_SCHEMA, public")
	fs.StringVar(&g.kafka, "kafka", g.kafka, "`HOST:PORT,…` brokers; else $KAFKA_BROKERS")
	fs.BoolVar(&g.kafkaTLS, "kafka-tls", g.kafkaTLS, "TLS with Kafka; else $KAFKA_TLS")
	fs.StringVar(&g.kafkaCA, "kafka-ca", g.kafkaCA, "`FILE` CA certificates (PEM), for TLS; else $KAFKA_CA")
	fs.StringVar(&g.kafkaCert, "kafka-cert", g.kafkaCert, "`FILE` client certificate (PEM); else $KAFKA_CERT")
	fs.StringVar(&g.kafkaKey, "kafka-key", g.kafkaKey, "`FILE` its private key (PEM); else $KAFKA_KEY")
	fs.StringVar(&g.kafkaUser, "kafka-user", g.kafkaUser, "`NAME` SASL user; else $KAFKA_USER; with $KAFKA_PASSWORD")
	fs.StringVar(&g.kafkaMechanism, "kafka-mechanism", g.kafkaMechanism, "`NAME` SASL mechanism; else $KAFKA_MECHANISM, scram-sha-256")
	fs.StringVar(&g.kafkaToken, "kafka-token", g.kafkaToken, "`FILE` token for oauthbearer; else $KAFKA_TOKEN")
	fs.BoolVar(&g.json, "json", g.json, "one JSON document; with tail and --watch, one per line")
	fs.BoolVar(&g.noColor, "no-color", g.noColor, "no colors; else $NO_COLOR")
	fs.DurationVar(&g.timeout, "timeout", g.timeout, "`TIME` limit; in long commands, of each step (30s); 0: none")
}

func newFlagSet() *flag.FlagSet {
	fs := flag.NewFlagSet("outbox", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	return fs
}

// parse sets flags and returns the other words. If mixed is set, it also parses flags behind the first
// other word, which the package flag does not do. For a mistyped flag, it suggests a similar one.
func parse(fs *flag.FlagSet, args []string, mixed bool) (words []string, err error) {
	for i := 0; i < len(args); i++ {
		arg := args[i]
		switch {
		case arg == "--":
			return append(words, args[i+1:]...), nil
		case len(arg) < 2 || arg[0] != '-':
			if !mixed {
				return args[i:], nil
			}
			words = append(words, arg)
			continue
		}
		name, value, hasValue := strings.Cut(strings.TrimPrefix(arg[1:], "-"), "=")
		f, err := lookup(fs, name)
		if err != nil {
			return nil, err
		}
		if !hasValue && isSwitch(f) {
			value, hasValue = "true", true
		}
		if !hasValue {
			if i++; i == len(args) {
				return nil, usagef("--%s wants a value", name)
			}
			value = args[i]
		}
		if err := fs.Set(name, value); err != nil {
			return nil, usagef("--%s %q: %v", name, value, err)
		}
	}
	return words, nil
}

func lookup(fs *flag.FlagSet, name string) (*flag.Flag, error) {
	if name == "h" || name == "help" {
		return nil, flag.ErrHelp
	}
	f := fs.Lookup(name)
	if f == nil {
		var names []string
		fs.VisitAll(func(f *flag.Flag) { names = append(names, f.Name) })
		hint := suggest(name, names)
		return nil, usagef("there is no flag --%s%s", name, strings.Replace(hint, `"`, `"--`, 1))
	}
	return f, nil
}

func isSwitch(f *flag.Flag) bool {
	b, ok := f.Value.(interface{ IsBoolFlag() bool })
	return ok && b.IsBoolFlag()
}

// when is a flag for a point in time: how long ago, or a date with or without a time.
type when struct {
	ago time.Duration
	at  time.Time
}

func (w *when) String() string { return "" }

// Set implements flag.Value.
func (w *when) Set(text string) error {
	for _, layout := range []string{time.RFC3339, "2006-01-02 15:04:05", "2006-01-02 15:04", time.DateOnly} {
		if t, err := time.ParseInLocation(layout, text, time.Local); err == nil {
			*w = when{at: t}
			return nil
		}
	}
	d, err := parseDuration(text)
	if err != nil || d <= 0 {
		return fmt.Errorf("want how long ago (90m, 7d) or a time (2006-01-02, 2006-01-02T15:04:05Z)")
	}
	*w = when{ago: d}
	return nil
}

// time returns the time, which is zero if none was given.
func (w when) time(now time.Time) time.Time {
	if w.ago > 0 {
		return now.Add(-w.ago)
	}
	return w.at
}

// again is a switch that may have a point in time as its value.
type again struct {
	when

	on bool
}

// IsBoolFlag makes it a switch.
func (a *again) IsBoolFlag() bool { return true }

// Set implements flag.Value.
func (a *again) Set(text string) error {
	*a = again{on: true}
	if on, err := strconv.ParseBool(text); err == nil {
		a.on = on
		return nil
	}
	return a.when.Set(text)
}

// parseDuration also takes days.
func parseDuration(text string) (time.Duration, error) {
	if days, ok := strings.CutSuffix(text, "d"); ok {
		n, err := strconv.ParseFloat(days, 64)
		return time.Duration(n * 24 * float64(time.Hour)), err
	}
	return time.ParseDuration(text)
}

// span is a flag for a time that may be days.
type span time.Duration

func (s *span) String() string { return "" }

// Set implements flag.Value.
func (s *span) Set(text string) error {
	d, err := parseDuration(text)
	if err != nil || d <= 0 {
		return fmt.Errorf("want a time such as 90s, 12h or 7d")
	}
	*s = span(d)
	return nil
}

// aggregate is a flag for the aggregate of an event.
type aggregate struct{ kind, id string }

func (a *aggregate) String() string { return strings.TrimSuffix(a.kind+"/"+a.id, "/") }

// Set implements flag.Value.
func (a *aggregate) Set(text string) error {
	a.kind, a.id, _ = strings.Cut(text, "/")
	if a.kind == "" {
		return fmt.Errorf("want TYPE or TYPE/ID")
	}
	return nil
}

// failureIDs is a flag with the ids that the last list ended with, at most one of each kind.
type failureIDs []outboxops.FailureID

func (f *failureIDs) String() string {
	var texts []string
	for _, id := range *f {
		texts = append(texts, id.String())
	}
	return strings.Join(texts, ",")
}

// Set implements flag.Value.
func (f *failureIDs) Set(text string) error {
	*f = nil
	for _, one := range strings.Split(text, ",") {
		id, err := outboxops.ParseFailureID(one)
		if err != nil || slices.ContainsFunc(*f, func(other outboxops.FailureID) bool { return other.Kind == id.Kind }) {
			return fmt.Errorf("want the ids that the last list ended with, such as event-17,delivery-4")
		}
		*f = append(*f, id)
	}
	return nil
}

// oneOf refuses a value that is not among those possible.
func oneOf(flag, value string, possible []string) error {
	for _, p := range possible {
		if p == value {
			return nil
		}
	}
	return usagef("%s %q: want %s%s", flag, value, strings.Join(possible, ", "), suggest(value, possible))
}
