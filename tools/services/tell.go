package main

import (
	"bytes"
	"fmt"
	"io"
	"sync"
)

// teller prints whole lines about the services.
type teller struct {
	mu      *sync.Mutex
	out     io.Writer
	quiet   bool
	verbose bool
	prefix  string
}

func newTeller(out io.Writer, o *options) teller {
	return teller{mu: &sync.Mutex{}, out: out, quiet: o.quiet, verbose: o.verbose, prefix: "services: "}
}

// about returns a teller that begins its lines with a service's name.
func (t teller) about(service string) teller {
	t.prefix = service + ": "
	return t
}

// step tells of progress.
func (t teller) step(format string, args ...any) {
	if !t.quiet {
		t.line(format, args...)
	}
}

// warn tells what must be seen even with -quiet.
func (t teller) warn(format string, args ...any) {
	t.line("WARNING: "+format, args...)
}

func (t teller) line(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	fmt.Fprintf(t.out, t.prefix+format+"\n", args...)
}

// steps is a writer whose lines are told as steps.
func (t teller) steps() io.Writer {
	if t.quiet {
		return io.Discard
	}
	return &lineWriter{teller: t}
}

// log is a writer for a service's log, nil unless it is wanted.
func (t teller) log() io.Writer {
	if !t.verbose {
		return nil
	}
	t.prefix = "  [" + t.prefix[:len(t.prefix)-2] + "] "
	return &lineWriter{teller: t}
}

// lineWriter tells each line as soon as it is whole.
type lineWriter struct {
	teller teller
	rest   []byte
}

func (w *lineWriter) Write(b []byte) (int, error) {
	w.rest = append(w.rest, b...)
	for {
		i := bytes.IndexByte(w.rest, '\n')
		if i < 0 {
			return len(b), nil
		}
		w.teller.line("%s", w.rest[:i])
		w.rest = w.rest[i+1:]
	}
}
