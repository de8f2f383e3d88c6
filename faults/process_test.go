package faults

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// relayVar makes this test's program a relay: it holds the database's address.
const relayVar = "OUTBOX_FAULTS_RELAY"

func TestMain(m *testing.M) {
	for name, run := range map[string]func(string) error{relayVar: runRelay, workerVar: runWorker, memberVar: runMember, busVar: runBus, marketVar: runMarket, endingVar: runEnding, boundVar: runBound, viewsVar: runViewsService} {
		value := os.Getenv(name)
		if value == "" {
			continue
		}
		fmt.Fprintln(os.Stdout, time.Now().Format(time.RFC3339Nano)) // by its own clock
		if err := run(value); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// lease is short, so that a test need not wait long for it to expire.
const lease = 3 * time.Second

func runRelay(url string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	db, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer db.Close()
	brokers := strings.Split(os.Getenv(testenv.BrokersVar), ",")
	relay, err := outbox.NewRelay(db, testenv.KafkaOpts(brokers), outbox.RelayConfig{
		PollInterval: 20 * time.Millisecond, BatchSize: 20,
		DeliveryTimeout: time.Second, Lease: lease,
	})
	if err != nil {
		return err
	}
	return relay.Run(ctx)
}

// process starts a relay in a process of its own. It is killed when the test
// ends, if it still runs.
func (s *site) process(t *testing.T) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	s.start(t, cmd)
	return cmd
}

// start starts a build of this test's program as a relay.
func (s *site) start(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	cmd.Env = append(cmd.Environ(), relayVar+"="+s.url, testenv.BrokersVar+"="+strings.Join(s.brokers, ","))
	cmd.Stderr = os.Stderr
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Kill() // it may just have ended
			_ = cmd.Wait()
		}
	})
}

// leads waits until a process holds the lease and returns its epoch.
func (s *site) leads(t *testing.T, cmd *exec.Cmd) (epoch int64) {
	t.Helper()
	require.Eventually(t, func() bool {
		err := s.db.QueryRow(context.Background(), `SELECT epoch FROM outbox_lease WHERE holder LIKE $1 AND expires_at > now()`,
			fmt.Sprintf("%%/%d/%%", cmd.Process.Pid)).Scan(&epoch)
		require.True(t, err == nil || errors.Is(err, pgx.ErrNoRows), "%v", err)
		return err == nil
	}, testenv.Patience, 5*time.Millisecond, "process %d does not lead", cmd.Process.Pid)
	return epoch
}

// requireEpochsInOrder requires that no relay moved the cursor under an epoch that was over.
func (s *site) requireEpochsInOrder(t *testing.T) {
	t.Helper()
	var late int
	require.NoError(t, s.db.QueryRow(context.Background(), `
		SELECT count(*) FROM (SELECT epoch < max(epoch) OVER (ORDER BY id) AS late FROM outbox_cursor) AS c WHERE late`).Scan(&late))
	require.Zero(t, late)
}

// A leader that is killed in the middle of its work: the standby takes over once
// the lease has expired, and nothing is lost.
func TestKilledLeader(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	leader := s.process(t)
	first := s.leads(t, leader)
	standby := s.process(t)
	for range 20 {
		s.commit(t, "on", 50)
	}
	require.NoError(t, leader.Process.Kill())
	_ = leader.Wait() // killed
	killed := time.Now()
	events := s.commit(t, "on", 5)
	require.Greater(t, s.leads(t, standby), first)
	t.Logf("taken over %v after the kill, with a lease of %v", time.Since(killed).Round(time.Millisecond), lease)
	s.requireArrival(t, events)
	s.requireAll(t)
	s.requireEpochsInOrder(t)
}

// requireAll requires that everything in outbox arrives.
func (s *site) requireAll(t *testing.T) {
	t.Helper()
	committed := s.recorded(t)
	require.Eventually(t, func() bool { return s.reader.Missing(committed) == 0 }, testenv.Patience, 10*time.Millisecond)
}

// A leader that is stopped past its lease and goes on: it must not move the
// cursor, and becomes the standby of the one that took over.
func TestStoppedLeader(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	s := newSite(t)
	old := s.process(t)
	s.leads(t, old)
	successor := s.process(t)
	s.requireArrival(t, s.commit(t, "on", 50))
	for range 20 {
		s.commit(t, "on", 50) // so that it is at work when it stops
	}
	require.NoError(t, old.Process.Signal(syscall.SIGSTOP))
	s.leads(t, successor)
	s.requireArrival(t, s.commit(t, "on", 50))
	require.NoError(t, old.Process.Signal(syscall.SIGCONT))
	for range 20 {
		s.requireArrival(t, s.commit(t, "on", 5))
	}
	s.requireAll(t)
	s.requireEpochsInOrder(t)

	require.NoError(t, successor.Process.Signal(syscall.SIGTERM))
	require.NoError(t, successor.Wait())
	s.leads(t, old) // at once: the lease was released
	s.requireArrival(t, s.commit(t, "on", 5))
	s.requireEpochsInOrder(t)
}
