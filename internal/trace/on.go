//go:build outbox_trace

package trace

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// On says that steps are written.
const On = true

// DirVar names the directory into which each process writes a file PID.jsonl. Without it nothing is written.
const DirVar = "OUTBOX_TRACE"

var file = sync.OnceValue(func() *os.File {
	dir := os.Getenv(DirVar)
	if dir == "" {
		return nil
	}
	f, err := os.OpenFile(filepath.Join(dir, strconv.Itoa(os.Getpid())+".jsonl"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		panic(fmt.Sprintf("trace: %v", err))
	}
	return f
})

var steps atomic.Int64

// Step is a step that has begun.
type Step struct{ n int64 }

// line is one of the two lines of a step. All processes of a run have one clock, that of PostgreSQL.
type line struct {
	Step      int64          `json:"step"`
	Do        string         `json:"do,omitempty"`        // at the beginning
	Goroutine int            `json:"goroutine,omitempty"` // at the beginning
	At        int64          `json:"at"`                  // ns
	Values    map[string]any `json:"values"`
}

// Begin begins a step. Its arguments are names and values.
func Begin(do string, values ...any) Step {
	s := Step{steps.Add(1)}
	write(line{Step: s.n, Do: do, Goroutine: goroutine(), At: time.Now().UnixNano(), Values: named(values)})
	return s
}

// End ends the step. Its arguments are names and values.
func (s Step) End(values ...any) {
	write(line{Step: s.n, At: time.Now().UnixNano(), Values: named(values)})
}

// write writes a line at once, so that a process that is killed leaves all lines that it has written.
func write(l line) {
	f := file()
	if f == nil {
		return
	}
	b, err := json.Marshal(l)
	if err == nil {
		_, err = f.Write(append(b, '\n'))
	}
	if err != nil {
		panic(fmt.Sprintf("trace: %v", err))
	}
}

func named(values []any) map[string]any {
	m := map[string]any{}
	for i := 0; i+1 < len(values); i += 2 {
		m[values[i].(string)] = values[i+1]
	}
	return m
}

// goroutine returns the number of the goroutine that calls.
func goroutine() int {
	stack := make([]byte, 64)
	fields := bytes.Fields(stack[:runtime.Stack(stack, false)])
	n, err := strconv.Atoi(string(fields[1]))
	if err != nil {
		panic(fmt.Sprintf("trace: %v", err))
	}
	return n
}
