package faults

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
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
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/tools/kafkaserver"
	"github.com/stretchr/testify/require"
)

// endWithTest ends a process of a test once that is no more, however it has ended.
func endWithTest() {
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(1)
	}()
}

// runAsChild runs a process of a test until SIGTERM, with a pool. The value of a variable of the environment is its
// spec as JSON, in which postgres points to the address of the database.
func runAsChild(variable, value string, spec any, postgres *string, run func(context.Context, *pgxpool.Pool) error) error {
	if err := json.Unmarshal([]byte(value), spec); err != nil {
		return fmt.Errorf("read %s: %w", variable, err)
	}
	endWithTest()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	db, err := pgxpool.New(ctx, *postgres)
	if err != nil {
		return err
	}
	defer db.Close()
	return run(ctx, db)
}

// crew is a number of processes that are killed and frozen.
type crew struct {
	ctx            context.Context // ends with Ctrl-C
	workers        []*worker       // that run, the frozen too
	log            *tail           // what they say
	started, kills int
	slow           []*span // when a process was frozen, or answers were under way for long
}

func newCrew(t *testing.T) *crew {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: needs servers of its own")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	t.Cleanup(stop)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends us at once, and the servers with us
	c := &crew{ctx: ctx, log: &tail{}}
	t.Cleanup(func() {
		if t.Failed() && c.started > 0 {
			t.Logf("the processes' last words:\n%s", c.log)
		}
	})
	return c
}

// worker is one of a crew.
type worker struct {
	cmd    *exec.Cmd
	stdin  io.Closer     // its end tells the process that we are gone
	asked  atomic.Bool   // it was told to end, or killed
	done   chan struct{} // closed when it has ended
	err    error         // written before
	crew   *crew
	frozen *span // in which it is now; nil for none
	mortal bool  // it may end itself with SIGKILL
}

// launch starts a process that TestMain makes what variable says.
func (c *crew) launch(t *testing.T, variable string, spec any) *worker {
	t.Helper()
	value, err := json.Marshal(spec)
	require.NoError(t, err)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(cmd.Environ(), variable+"="+string(value), "GORACE=halt_on_error=1 atexit_sleep_ms=0")
	cmd.Stdout, cmd.Stderr = c.log, c.log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	w := &worker{cmd: cmd, stdin: stdin, done: make(chan struct{}), crew: c}
	go func() {
		w.err = cmd.Wait()
		close(w.done)
	}()
	t.Cleanup(w.kill)
	c.workers = append(c.workers, w)
	return w
}

// kill ends a process at once. Those that are there already must take over.
func (c *crew) kill(victim *worker) {
	victim.kill()
	c.kills++
	c.workers = slices.DeleteFunc(c.workers, func(w *worker) bool { return w == victim })
}

// await waits until something is so. It returns false when that takes too long, and ends the test
// when a user interrupts it or a process has died by itself.
func (c *crew) await(t *testing.T, limit time.Duration, so func() bool) bool {
	t.Helper()
	for end := time.Now().Add(limit); !so(); {
		if time.Now().After(end) {
			return false
		}
		c.sleep(t, 10*time.Millisecond)
	}
	return true
}

func (c *crew) sleep(t *testing.T, d time.Duration) {
	t.Helper()
	select {
	case <-c.ctx.Done():
		require.Fail(t, "interrupted")
	case <-time.After(d):
	}
	for _, w := range c.workers {
		require.NoError(t, w.ended(), "a process ended by itself")
	}
}

// brokerConfig returns what brokers of a test's own have in common: the version that the environment chooses.
func brokerConfig(t *testing.T) kafkaserver.Config {
	t.Helper()
	return kafkaserver.Config{Version: os.Getenv("OUTBOX_KAFKA_VERSION"), Brief: true, Progress: t.Output()}
}

// startKafka starts a broker of the test's own. A process that is killed leaves what
// it wrote with the operating system, so that one replica is enough to keep what it
// has acknowledged.
func (c *crew) startKafka(t *testing.T, settings map[string]string) *kafkaserver.Server {
	t.Helper()
	cfg := brokerConfig(t)
	cfg.Settings = settings
	kafka, err := kafkaserver.Start(c.ctx, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, kafka.Stop(context.Background())) })
	return kafka
}

func (w *worker) kill() {
	w.asked.Store(true)
	_ = w.cmd.Process.Kill() // it may have ended
	<-w.done
	w.isThawed()
}

// ask tells a process to end.
func (w *worker) ask() {
	if !w.asked.Swap(true) {
		_ = w.cmd.Process.Signal(syscall.SIGTERM) // one that has ended says so when it is stopped
	}
}

// stop ends a process cleanly. It fails the test if that is not so, and lets it go
// on: the comparison is still to come.
func (w *worker) stop(t *testing.T) {
	t.Helper()
	w.ask()
	select {
	case <-w.done:
		if w.err != nil {
			t.Errorf("a process that was told to stop ended with: %v", w.err)
		}
	case <-time.After(testenv.Patience):
		t.Errorf("a process that was told to stop did not within %v", testenv.Patience)
	}
}

func (w *worker) freeze(t *testing.T) {
	t.Helper()
	if w.frozen != nil {
		return
	}
	w.frozen = &span{from: time.Now(), what: "frozen"}
	w.crew.slow = append(w.crew.slow, w.frozen)
	require.NoError(t, w.cmd.Process.Signal(syscall.SIGSTOP))
}

func (w *worker) thaw(t *testing.T) {
	t.Helper()
	if w.frozen != nil {
		require.NoError(t, w.cmd.Process.Signal(syscall.SIGCONT))
		w.isThawed()
	}
}

func (w *worker) isThawed() {
	if w.frozen != nil {
		w.frozen.to, w.frozen = time.Now(), nil
	}
}

// ended returns how a process has ended that was not told to end.
func (w *worker) ended() error {
	select {
	case <-w.done:
	default:
		return nil
	}
	if w.asked.Load() || w.mortal && w.killedItself() {
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
