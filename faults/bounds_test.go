package faults

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

// relayMemory is the memory limit of the relay in deploy/, and relayHeap the GOMEMLIMIT beside it.
const (
	relayMemory = 256 << 20
	relayHeap   = "GOMEMLIMIT=230MiB"
)

// A poison row is stored in few bytes and prints many.
var boundsTests = []struct {
	name    string
	printed int // times 131,074 bytes
	starts  int
	code    string // of the INSERT
}{
	{"10 MB", 76, 3, ""},
	{"200 MB", 1_590, 3, ""},
	{"900 MB", 6_870, 1, "23514"},
}

// A relay in the memory that its manifest gives it lives beside rows of any size, also when it starts again: it sends
// the other events within 2 s, and rejects each huge row with its true size.
func TestBounds(t *testing.T) {
	testenv.Long(t)
	program := buildCommandLine(t)
	for _, test := range boundsTests {
		t.Run(test.name, func(t *testing.T) {
			s := guest(t, testenv.Brokers(t), "bounds-"+strings.ReplaceAll(test.name, " ", ""))
			testenv.CreateTopic(t, s.brokers, s.topic, 1)
			for start := range test.starts { // the relay that comes up again has the rows of before
				relay := s.limited(t, program)
				size, err := s.poison(test.printed)
				require.Equal(t, test.code, pg.Code(err), "%v", err)
				committed := time.Now()
				s.requireArrival(t, s.commit(t, "on", 1))
				took := time.Since(committed)
				if err == nil {
					s.requireRejected(t, size)
				}
				relay.stop(t)
				t.Logf("%s, start %d: %d bytes printed, the event behind arrived after %v, %d MiB of memory at most",
					test.name, start+1, size, took.Round(time.Millisecond), relay.peak.Load()>>20)
				require.Less(t, took, 2*time.Second)
			}
		})
	}
}

// poison inserts an event that prints about 131,074 bytes for each of some numbers, and returns its size.
func (s *site) poison(numbers int) (size int, err error) {
	err = s.db.QueryRow(context.Background(), `
		INSERT INTO outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, occurred_at)
		SELECT gen_random_uuid(), 'test.fault.happened.v1', 's', 'Key', gen_random_uuid()::text, jsonb_agg(1e131071), 'application/json', $1, now()
		  FROM generate_series(1, $2::int) RETURNING size`, s.topic, numbers).Scan(&size)
	return size, err
}

// requireRejected waits until the newest event of a size has its row, with its class and its size.
func (s *site) requireRejected(t *testing.T, size int) {
	t.Helper()
	require.Eventually(t, func() bool {
		var class, cause string
		var stored int
		err := s.db.QueryRow(context.Background(), `SELECT error_class, last_error, size FROM outbox_failed
			 WHERE outbox_id = (SELECT max(id) FROM outbox WHERE size = $1)`, size).Scan(&class, &cause, &stored)
		return err == nil && class == "message_too_large" && stored == size
	}, testenv.Patience, 10*time.Millisecond)
}

// limitedProcess is a process that is killed when it has more memory than it may have.
type limitedProcess struct {
	cmd  *exec.Cmd
	peak atomic.Int64 // bytes
	over atomic.Bool
	done chan struct{} // closed when its memory is not read any more
}

// limited starts `outbox relay` with the memory of the manifest.
func (s *site) limited(t *testing.T, program string) *limitedProcess {
	t.Helper()
	cmd := exec.Command(program, "relay", "--listen", "off", "--poll", "20ms")
	cmd.Env = []string{"DATABASE_URL=" + s.url, "KAFKA_BROKERS=" + strings.Join(s.brokers, ","), "PATH=" + os.Getenv("PATH"), relayHeap}
	cmd.Stderr = os.Stderr
	return bound(t, cmd, relayMemory)
}

// bound starts a process. It reads what the kernel says of its memory every few milliseconds, because a test without
// rights has no control group. The kernel keeps the peak, so no moment between two reads is missed.
func bound(t *testing.T, cmd *exec.Cmd, most int64) *limitedProcess {
	t.Helper()
	require.NoError(t, cmd.Start())
	p := &limitedProcess{cmd: cmd, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		for {
			status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", cmd.Process.Pid))
			peak := peakMemory.FindSubmatch(status)
			if err != nil || peak == nil { // it has ended
				return
			}
			kB, _ := strconv.ParseInt(string(peak[1]), 10, 64) // digits
			p.peak.Store(kB << 10)
			if kB<<10 > most && !p.over.Swap(true) {
				_ = cmd.Process.Kill()
			}
			time.Sleep(5 * time.Millisecond)
		}
	}()
	t.Cleanup(func() {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Kill() // it may just have ended
			_ = cmd.Wait()
		}
		<-p.done
	})
	return p
}

var peakMemory = regexp.MustCompile(`(?m)^VmHWM:\s+(\d+) kB$`)

// stop ends the process, and requires that it has lived within its memory.
func (p *limitedProcess) stop(t *testing.T) {
	t.Helper()
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have been killed
	err := p.cmd.Wait()
	<-p.done
	require.False(t, p.over.Load(), "it took %d MiB", p.peak.Load()>>20)
	require.NoError(t, err)
}
