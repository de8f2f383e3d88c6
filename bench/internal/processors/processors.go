// Package processors tells what is used of the processors, by the machine and by this process, and runs rounds of a
// measurement again from which they were taken away.
package processors

import (
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Time is what has been used of the processors.
type Time struct {
	Machine time.Duration // by everything; 0 where it is not known
	Process time.Duration // by this process
	Stolen  time.Duration // that the machine wanted, and its host gave to others; 0 where it is not known
}

// Read returns what has been used since the machine, and this process, were started.
func Read() Time {
	machine, stolen := machineTime()
	return Time{machine, ProcessTime(), stolen}
}

// Since returns what was used since an earlier reading.
func (p Time) Since(before Time) Time {
	return Time{p.Machine - before.Machine, p.Process - before.Process, p.Stolen - before.Stolen}
}

// stolenShare returns the part of what the machine wanted that its host gave to others.
func (p Time) stolenShare() float64 {
	if p.Stolen <= 0 {
		return 0
	}
	return float64(p.Stolen) / float64(p.Machine+p.Stolen)
}

// machineTime returns how long the processors have been busy since the machine was started, and how long its host
// gave them to others, where /proc says so.
func machineTime() (busy, stolen time.Duration) {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, 0
	}
	line, _, _ := strings.Cut(string(stat), "\n")
	fields := strings.Fields(line)
	if len(fields) == 0 || fields[0] != "cpu" {
		return 0, 0
	}
	const tick = time.Second / 100 // of USER_HZ
	for i, field := range fields[1:] {
		const idle, ioWait, steal = 3, 4, 7
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return 0, 0
		}
		switch {
		case i == steal: // what is behind it is in user already
			return busy, time.Duration(n) * tick
		case i != idle && i != ioWait:
			busy += time.Duration(n) * tick
		}
	}
	return busy, 0
}

// ProcessTime is what this process has used so far.
func ProcessTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // it fails for bad arguments only
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
