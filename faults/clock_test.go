package faults

import (
	"bufio"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

// Relays whose clocks are an hour ahead and an hour behind, in turns: the lease
// is kept and ends by the clock of the database, which is right.
func TestClocksDisagree(t *testing.T) {
	testenv.Long(t)
	// Not parallel: it builds a whole program, on all processors, and measures how long a takeover takes.
	program := buildWithClockShift(t)
	s := newSite(t)
	s.auditLease(t)
	stop := s.stream(t)
	leader := s.shifted(t, program, time.Hour)
	s.leads(t, leader)
	for _, shift := range []time.Duration{-time.Hour, time.Hour} {
		standby := s.shifted(t, program, shift)
		s.awaitRenewals(t, 5) // longer than a lease
		require.Equal(t, strconv.Itoa(leader.Process.Pid), s.holder(t), "the standby took a lease that was held")

		require.NoError(t, leader.Process.Kill())
		_ = leader.Wait() // killed
		killed := time.Now()
		s.leads(t, standby)
		took := time.Since(killed)
		t.Logf("clock off by %v: taken over %v after the kill, with a lease of %v", shift, took.Round(time.Millisecond), lease)
		require.Less(t, took, lease+10*time.Second)
		s.awaitArrivals(t, 50)
		leader = standby
	}
	s.requireRight(t, stop())
	s.requireEpochsInOrder(t)
	require.Equal(t, 2, s.requireOneHolder(t))
}

// shiftVar holds by how much the clock of a program from buildWithClockShift is wrong.
const shiftVar = "OUTBOX_FAULTS_CLOCK_SHIFT"

// shifted starts a relay with a wrong clock, and makes sure that it is wrong.
func (s *site) shifted(t *testing.T, program string, shift time.Duration) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(program)
	cmd.Env = append(os.Environ(), shiftVar+"="+shift.String())
	said, err := cmd.StdoutPipe()
	require.NoError(t, err)
	s.start(t, cmd)
	line, err := bufio.NewReader(said).ReadString('\n')
	require.NoError(t, err)
	its, err := time.Parse(time.RFC3339Nano, strings.TrimSpace(line))
	require.NoError(t, err)
	require.WithinDuration(t, time.Now().Add(shift), its, time.Minute, "its clock is not shifted by %v", shift)
	return cmd
}

// awaitRenewals waits until the lease has been renewed n times.
func (s *site) awaitRenewals(t *testing.T, n int) {
	t.Helper()
	renewals := func() (n int) {
		require.NoError(t, s.db.QueryRow(context.Background(),
			`SELECT count(*) FROM lease_history WHERE (was).epoch = (became).epoch`).Scan(&n))
		return n
	}
	first := renewals()
	require.Eventually(t, func() bool { return renewals() >= first+n }, testenv.Patience, 10*time.Millisecond)
}

// buildWithClockShift builds this test's program once more, with a standard
// library whose time.Now is off by shiftVar. The monotonic clock, and with it
// timers and differences of times, stays right: as on a machine with a wrong clock.
func buildWithClockShift(t *testing.T) (program string) {
	t.Helper()
	out, err := exec.Command("go", "env", "GOROOT").Output()
	require.NoError(t, err)
	library := filepath.Join(strings.TrimSpace(string(out)), "src", "time")
	source, err := os.ReadFile(filepath.Join(library, "time.go"))
	require.NoError(t, err)
	const reading = "\tsec, nsec, mono := runtimeNow()\n"
	require.Equal(t, 1, strings.Count(string(source), "func Now() Time {\n"+reading),
		"this version of Go reads the clock in another way: see time.Now in its source, and teach buildWithClockShift")

	dir := t.TempDir()
	write := func(name, content string) (path string) {
		path = filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
		return path
	}
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": {
		filepath.Join(library, "time.go"):        write("time.go", strings.ReplaceAll(string(source), reading, reading+"\tsec += clockShift\n")),
		filepath.Join(library, "clock_shift.go"): write("clock_shift.go", clockShift),
	}})
	require.NoError(t, err)
	program = filepath.Join(dir, "relay")
	start := time.Now()
	build := exec.Command("go", "test", "-c", "-overlay", write("overlay.json", string(overlay)), "-o", program, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	said, err := build.CombinedOutput()
	require.NoError(t, err, "%s", said)
	t.Logf("built in %v", time.Since(start).Round(time.Millisecond))
	return program
}

// clockShift is an extra file of package time. Were the variable not understood, the clock would
// silently be right.
const clockShift = `package time

import "syscall"

var clockShift = readClockShift()

func readClockShift() int64 {
	value, _ := syscall.Getenv("` + shiftVar + `")
	shift, err := ParseDuration(value)
	if err != nil {
		panic(err)
	}
	return int64(shift / Second)
}
`
