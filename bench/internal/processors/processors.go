// Package processors tells what is used of the processors, by the machine and by this process.
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
}

// Read returns what has been used since the machine, and this process, were started.
func Read() Time { return Time{machineTime(), ProcessTime()} }

// Since returns what was used since an earlier reading.
func (p Time) Since(before Time) Time {
	return Time{p.Machine - before.Machine, p.Process - before.Process}
}

// machineTime returns how long the processors have been busy since the machine was started, where /proc says so.
func machineTime() time.Duration {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	line, _, _ := strings.Cut(string(stat), "\n")
	fields := strings.Fields(line)
	if len(fields) == 0 || fields[0] != "cpu" {
		return 0
	}
	const tick = time.Second / 100 // of USER_HZ
	busy := time.Duration(0)
	for i, field := range fields[1:] {
		const idle, ioWait, steal = 3, 4, 7
		if i == idle || i == ioWait {
			continue
		}
		if i >= steal { // what is behind it is in user already
			break
		}
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return 0
		}
		busy += time.Duration(n) * tick
	}
	return busy
}

// ProcessTime is what this process has used so far.
func ProcessTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // it fails for bad arguments only
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
