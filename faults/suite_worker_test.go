package faults

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// workerVar makes this test's program a relay of the suite: it holds a
// workerSpec as JSON.
const workerVar = "OUTBOX_FAULTS_WORKER"

// workerSpec says how a relay of the suite reaches the servers.
type workerSpec struct {
	Postgres string   // address of the database
	Brokers  []string // as they advertise themselves
	KafkaVia string   // where connections to any of them really go
}

// batch is the most that a relay of the suite sends before it moves its cursor.
const batch = 200

// runWorker is the whole life of a relay of the suite.
func runWorker(spec string) error {
	var s workerSpec
	if err := json.Unmarshal([]byte(spec), &s); err != nil {
		return fmt.Errorf("read %s: %w", workerVar, err)
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(1) // however the suite has ended, it is no more
	}()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	db, err := pgxpool.New(ctx, s.Postgres)
	if err != nil {
		return err
	}
	defer db.Close()
	relay, err := outbox.NewRelay(db, s.kafkaOpts(), outbox.RelayConfig{
		PollInterval: 20 * time.Millisecond, BatchSize: batch,
		DeliveryTimeout: time.Second, SendTimeout: 2 * time.Second, Lease: lease,
		// Failed events are given up within the time of a test, and released.
		RetryInterval: time.Second / 2, MaxRetries: 5, Breaker: outbox.BreakerConfig{OpenFor: 2 * time.Second},
	})
	if err != nil {
		return err
	}
	return relay.Run(ctx)
}

func (s workerSpec) kafkaOpts() []kgo.Opt {
	return append(testenv.KafkaOpts(s.Brokers),
		kgo.Dialer(func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, s.KafkaVia)
		}),
		kgo.ProducerBatchCompression(kgo.NoCompression()), // what is too large stays so
		kgo.WithHooks(dropKey{}),
	)
}

// worker is a relay of the suite in a process of its own.
type worker struct {
	cmd    *exec.Cmd
	stdin  io.Closer     // its end tells the process that we are gone
	asked  atomic.Bool   // it was told to end, or killed
	done   chan struct{} // closed when it has ended
	err    error         // written before
	frozen bool
}

// startWorker starts one more, and waits until it has a connection to
// PostgreSQL. It is killed when the test ends, if it still runs. It leads a
// process group of its own, so that Ctrl-C does not reach it.
func (s *suite) startWorker(t *testing.T) {
	t.Helper()
	s.started++
	name := fmt.Sprintf("relay-%d", s.started)
	spec := s.spec
	spec.Postgres += "&application_name=" + name
	s.workers = append(s.workers, s.launch(t, spec))
	connected := func() (is bool) {
		require.NoError(t, s.db.QueryRow(s.ctx, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = $1)`, name).Scan(&is))
		return is
	}
	require.True(t, s.await(t, patience, connected), "a relay does not come up")
}

func (s *suite) launch(t *testing.T, spec workerSpec) *worker {
	t.Helper()
	value, err := json.Marshal(spec)
	require.NoError(t, err)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(cmd.Environ(), workerVar+"="+string(value))
	cmd.Stdout, cmd.Stderr = s.log, s.log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	w := &worker{cmd: cmd, stdin: stdin, done: make(chan struct{})}
	go func() {
		w.err = cmd.Wait()
		close(w.done)
	}()
	t.Cleanup(w.kill)
	return w
}

// kill ends a relay at once. Those that are there already must take over.
func (s *suite) kill(victim *worker) {
	victim.kill()
	s.kills++
	s.workers = slices.DeleteFunc(s.workers, func(w *worker) bool { return w == victim })
}

// replace starts relays for those that were killed.
func (s *suite) replace(t *testing.T) {
	t.Helper()
	for len(s.workers) < workers {
		s.startWorker(t)
	}
}

func (w *worker) kill() {
	w.asked.Store(true)
	_ = w.cmd.Process.Kill() // it may have ended
	<-w.done
}

// stop ends a relay cleanly. It fails the test if that is not so, and lets it go
// on: the verdict is still to come.
func (w *worker) stop(t *testing.T) {
	t.Helper()
	w.asked.Store(true)
	_ = w.cmd.Process.Signal(syscall.SIGTERM) // one that has ended says so below
	select {
	case <-w.done:
		if w.err != nil {
			t.Errorf("a relay that was told to stop ended with: %v", w.err)
		}
	case <-time.After(patience):
		t.Errorf("a relay that was told to stop did not within %v", patience)
	}
}

func (w *worker) freeze(t *testing.T) {
	t.Helper()
	require.NoError(t, w.cmd.Process.Signal(syscall.SIGSTOP))
	w.frozen = true
}

func (w *worker) thaw(t *testing.T) {
	t.Helper()
	if w.frozen {
		require.NoError(t, w.cmd.Process.Signal(syscall.SIGCONT))
		w.frozen = false
	}
}

// ended returns how a relay has ended that nobody told to.
func (w *worker) ended() error {
	select {
	case <-w.done:
	default:
		return nil
	}
	if w.asked.Load() {
		return nil
	}
	return fmt.Errorf("process %d: %v", w.cmd.Process.Pid, w.cmd.ProcessState)
}

// tail keeps the last of what is written to it.
type tail struct {
	mu   sync.Mutex
	text []byte
}

const maxTail = 16 << 10

// Write never fails.
func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, b...)
	if len(t.text) > 2*maxTail {
		t.text = bytes.Clone(t.text[len(t.text)-maxTail:])
	}
	return len(b), nil
}

// String returns it.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.text)
}
