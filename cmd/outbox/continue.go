package main

import (
	"flag"
	"strings"
	"time"
)

// times are the bounds of a command that chooses by time. A relative time is resolved once, because the command that
// goes on, or does what a dry run has counted, would otherwise choose other events.
type times struct {
	since, until time.Time
	again        time.Time // before which a group handled what it handles again
	relative     bool      // one of them was given as a length of time before now
}

// timesOf resolves the flags --since and --until.
func timesOf(since, until when, now time.Time) times {
	return times{since: since.time(now), until: until.time(now), relative: since.ago > 0 || until.ago > 0}
}

// text returns the flags with absolute times.
func (t times) text() string {
	var flags []string
	if !t.since.IsZero() {
		flags = append(flags, "--since "+instant(t.since))
	}
	if !t.until.IsZero() {
		flags = append(flags, "--until "+instant(t.until))
	}
	if !t.again.IsZero() {
		flags = append(flags, "--again="+instant(t.again))
	}
	return strings.Join(flags, " ")
}

// instant writes a time exactly, as the flags take it.
func instant(t time.Time) string { return t.UTC().Format(time.RFC3339Nano) }

// needAbsolute refuses relative times beside a flag that says where to go on.
func needAbsolute(flag string, given map[string]when, now time.Time) error {
	for name, w := range given {
		if w.ago > 0 {
			return usagef("%s %v beside %s: want the absolute time that the first run has printed, such as %s", name, w.ago, flag, instant(w.time(now)))
		}
	}
	return nil
}

// showTimes prints absolute times for a run that does what a dry run has counted.
func (e *env) showTimes(t times) {
	if t.relative {
		e.printf("to choose the same, use these times: %s\n", t.text())
	}
}

// addTo adds the times to a document, if there are any.
func (t times) addTo(doc map[string]any) {
	if !t.since.IsZero() {
		doc["since"] = t.since.UTC()
	}
	if !t.until.IsZero() {
		doc["until"] = t.until.UTC()
	}
	if !t.again.IsZero() {
		doc["again_before"] = t.again.UTC()
	}
}

// commandLine returns a call of a command as text for a shell: with the flags that were given, or with those of
// replace in their place. The password in the URL of the database is masked.
func (e *env) commandLine(name string, own *flag.FlagSet, replace map[string]string) string {
	words := []string{"outbox", name}
	unset := newFlagSet()
	(&globals{timeout: defaultTimeout}).define(unset)
	own.VisitAll(func(f *flag.Flag) {
		value, replaced := replace[f.Name]
		if !replaced {
			value = f.Value.String()
		}
		usual := f.DefValue
		if global := unset.Lookup(f.Name); global != nil {
			usual = global.DefValue
		}
		switch {
		case value == usual:
		case isSwitch(f) && value == "true":
			words = append(words, "--"+f.Name)
		case isSwitch(f): // with a value
			words = append(words, "--"+f.Name+"="+word(value))
		case f.Name == "database":
			words = append(words, "--"+f.Name, word(e.mask(value)))
		default:
			words = append(words, "--"+f.Name, word(value))
		}
	})
	return strings.Join(words, " ")
}
