package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"sync"
	"time"

	"github.com/outboxgo/outbox/bench/internal/processors"
	"github.com/outboxgo/outbox/bench/internal/stats"
)

// used is what some work cost its process.
type used struct {
	Events  int
	Elapsed time.Duration
	CPU     time.Duration // user and system
	Allocs  uint64
	Bytes   uint64
	Peak    uint64    // bytes of heap in use, at most
	Start   time.Time // of the work
	RSS     uint64    // bytes of memory that the process has at the end

	// Of an outage: the time from the return of Kafka to the first acknowledgement,
	// how often the breaker has opened, and how many events came again.
	Notice          time.Duration
	Opened, Repeats int
}

func (u used) rate() float64         { return float64(u.Events) / u.Elapsed.Seconds() }
func (u used) micros() float64       { return u.per(float64(u.Elapsed.Nanoseconds()) / 1000) }
func (u used) cpu() float64          { return u.per(float64(u.CPU.Nanoseconds()) / 1000) }
func (u used) allocs() float64       { return u.per(float64(u.Allocs)) }
func (u used) bytes() float64        { return u.per(float64(u.Bytes)) }
func (u used) notice() float64       { return u.Notice.Seconds() * 1000 }
func (u used) seconds() float64      { return u.Elapsed.Seconds() }
func (u used) resident() float64     { return float64(u.RSS) / (1 << 20) }
func (u used) peak() float64         { return float64(u.Peak) / (1 << 20) }
func (u used) per(x float64) float64 { return x / float64(u.Events) }

// each reads one quantity from all runs.
func each(runs []used, quantity func(used) float64) stats.Series {
	values := make(stats.Series, len(runs))
	for i, u := range runs {
		values[i] = quantity(u)
	}
	return values
}

// meter runs from startMeter to stop.
type meter struct {
	cpu     time.Duration
	memory  runtime.MemStats
	profile string
	file    *os.File
	start   time.Time
	heap    *heapWatch
}

// startMeter leaves no garbage of the preparations to the work. profile names
// files to write, without their extension; empty means none.
func startMeter(profile string) (*meter, error) {
	m := &meter{profile: profile}
	if profile != "" {
		f, err := os.Create(filepath.Clean(profile + ".cpu.pprof"))
		if err != nil {
			return nil, fmt.Errorf("profile: %w", err)
		}
		m.file = f
	}
	runtime.GC()
	if m.file != nil {
		if err := pprof.StartCPUProfile(m.file); err != nil {
			return nil, errors.Join(fmt.Errorf("profile: %w", err), m.file.Close())
		}
	}
	runtime.ReadMemStats(&m.memory)
	m.heap = watchHeap()
	m.cpu, m.start = processors.ProcessTime(), time.Now()
	return m, nil
}

func (m *meter) stop(events int) (used, error) {
	u := used{Events: events, Elapsed: time.Since(m.start), CPU: processors.ProcessTime() - m.cpu, Start: m.start}
	u.Peak, u.RSS = m.heap.stop(), residentMemory()
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	u.Allocs, u.Bytes = memory.Mallocs-m.memory.Mallocs, memory.TotalAlloc-m.memory.TotalAlloc
	return u, m.writeProfiles()
}

func (m *meter) writeProfiles() error {
	if m.file == nil {
		return nil
	}
	pprof.StopCPUProfile()
	allocs, err := os.Create(filepath.Clean(m.profile + ".allocs.pprof"))
	if err != nil {
		return errors.Join(fmt.Errorf("profile: %w", err), m.file.Close())
	}
	err = pprof.Lookup("allocs").WriteTo(allocs, 0)
	return errors.Join(err, allocs.Close(), m.file.Close())
}

// lateMeter measures all events from the first call of a handler on: starting takes as long as it takes. Or it measures
// some of them, after some time.
type lateMeter struct {
	j job

	mu    sync.Mutex
	first time.Time // call
	meter *meter
	count int // of events, since it began
	some  used
	err   error
}

func newLateMeter(j job) *lateMeter { return &lateMeter{j: j} }

// called notes that a handler is called.
func (m *lateMeter) called() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.first.IsZero() {
		m.first = time.Now()
	}
	if m.meter == nil && m.err == nil && time.Since(m.first) >= m.j.After {
		m.meter, m.err = startMeter(m.j.Profile)
	}
}

// handled notes that an event is handled.
func (m *lateMeter) handled() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.meter == nil || m.j.Measured == 0 {
		return
	}
	if m.count++; m.count == m.j.Measured {
		m.some, m.err = m.meter.stop(m.count)
	}
}

// finish returns what the measured events have cost. All are done.
func (m *lateMeter) finish() (used, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.err != nil:
		return used{}, m.err
	case m.j.Measured == 0:
		return m.meter.stop(m.j.Events)
	case m.count < m.j.Measured:
		return used{}, fmt.Errorf("only %d events came after %v, and not %d", m.count, m.j.After, m.j.Measured)
	}
	return m.some, nil
}
