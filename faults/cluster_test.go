package faults

import (
	"context"
	"flag"
	"math/rand/v2"
	"os/exec"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

var faultSeed = flag.Uint64("faults.seed", 0, "seed of TestTenProcesses, TestFaults, TestFaultsThroughPgBouncer, TestClusterFaults and TestStops; 0 draws one")

// Ten relays run at once. The leader is killed, stopped cleanly or frozen, again and again. The
// frozen go on later, when others have taken over.
func TestTenProcesses(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	seed := seedOf(t)
	s := newSite(t)
	s.auditLease(t)
	c := &cluster{site: s, rng: rand.New(rand.NewPCG(seed, 0))}
	for range 10 {
		c.running = append(c.running, s.process(t))
	}
	stop := s.stream(t)
	start := time.Now()
	for n, disturbance := range c.plan() {
		c.disturb(t, disturbance)
		c.leader(t) // another one
		s.awaitArrivals(t, 1+c.rng.IntN(200))
		c.thaw(t, c.rng.IntN(len(c.frozen)+1))
		t.Logf("disturbance %d: %s, and the relay works after %v", n, disturbance, time.Since(start).Round(time.Millisecond))
	}
	c.thaw(t, len(c.frozen))
	s.awaitArrivals(t, 200)
	s.requireRight(t, stop())
	s.requireEpochsInOrder(t)
	require.GreaterOrEqual(t, s.requireOneHolder(t), len(c.plan()))
}

// cluster is a number of relays in processes of their own.
type cluster struct {
	*site
	rng             *rand.Rand
	running, frozen []*exec.Cmd
}

// What befalls a leader.
const (
	kill   = "killed"
	end    = "stopped"
	freeze = "frozen"
)

// plan returns four disturbances of each kind in random order.
func (c *cluster) plan() []string {
	plan := slices.Repeat([]string{kill, end, freeze}, 4)
	c.rng.Shuffle(len(plan), func(i, j int) { plan[i], plan[j] = plan[j], plan[i] })
	return plan
}

// disturb does this to the leader. A process that ended is replaced.
func (c *cluster) disturb(t *testing.T, disturbance string) {
	t.Helper()
	i := c.leader(t)
	leader := c.running[i]
	c.running = slices.Delete(c.running, i, i+1)
	switch disturbance {
	case freeze:
		require.NoError(t, leader.Process.Signal(syscall.SIGSTOP))
		c.frozen = append(c.frozen, leader)
		return
	case kill:
		require.NoError(t, leader.Process.Kill())
		_ = leader.Wait() // killed
	case end:
		require.NoError(t, leader.Process.Signal(syscall.SIGTERM))
		require.NoError(t, leader.Wait())
	}
	c.running = append(c.running, c.process(t))
}

// thaw lets n of the frozen go on.
func (c *cluster) thaw(t *testing.T, n int) {
	t.Helper()
	for range n {
		i := c.rng.IntN(len(c.frozen))
		require.NoError(t, c.frozen[i].Process.Signal(syscall.SIGCONT))
		c.running = append(c.running, c.frozen[i])
		c.frozen = slices.Delete(c.frozen, i, i+1)
	}
}

// leader waits until one of the running holds the lease and returns which.
func (c *cluster) leader(t *testing.T) (i int) {
	t.Helper()
	require.Eventually(t, func() bool {
		pid, err := strconv.Atoi(c.holder(t))
		i = slices.IndexFunc(c.running, func(cmd *exec.Cmd) bool { return err == nil && cmd.Process.Pid == pid })
		return i >= 0
	}, testenv.Patience, 5*time.Millisecond, "nobody leads")
	return i
}

// holder returns the process id in the lease that is held, or "".
func (s *site) holder(t *testing.T) (pid string) {
	t.Helper()
	require.NoError(t, s.db.QueryRow(context.Background(), `
		SELECT coalesce(max(split_part(holder, '/', 2)), '') FROM outbox_lease WHERE expires_at > clock_timestamp()`).Scan(&pid))
	return pid
}

// auditLease notes every change of the lease, in lease_history.
func (s *site) auditLease(t *testing.T) {
	t.Helper()
	_, err := s.db.Exec(context.Background(), `
		CREATE TABLE lease_history (
			id bigserial PRIMARY KEY, at timestamptz NOT NULL DEFAULT clock_timestamp(), was outbox_lease, became outbox_lease);
		CREATE FUNCTION note_lease() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			INSERT INTO lease_history (was, became) VALUES (CASE WHEN TG_OP = 'UPDATE' THEN OLD END, NEW);
			RETURN NULL;
		END $$;
		CREATE TRIGGER note AFTER INSERT OR UPDATE ON outbox_lease FOR EACH ROW EXECUTE FUNCTION note_lease()`)
	require.NoError(t, err)
}

// requireOneHolder requires of the lease's history that no relay took the lease before it had
// expired by the database's clock, unless the lock of the holder was free. No relay gave itself
// more time than the lease has, and every holder came under a new epoch. It returns how often the
// holder changed.
func (s *site) requireOneHolder(t *testing.T) (changes int) {
	t.Helper()
	var early, long, epochs int
	require.NoError(t, s.db.QueryRow(context.Background(), `
		SELECT count(*) FILTER (WHERE (was).holder <> (became).holder),
		       count(*) FILTER (WHERE (was).holder <> (became).holder AND (was).expires_at > at
		                         AND ((was).locked_epoch IS DISTINCT FROM (was).epoch OR (became).exclusive_at IS DISTINCT FROM greatest((was).exclusive_at, (was).expires_at))),
		       count(*) FILTER (WHERE (became).expires_at > at + $1::interval),
		       count(*) FILTER (WHERE (became).epoch < (was).epoch OR ((was).holder <> (became).holder) <> ((became).epoch > (was).epoch))
		  FROM lease_history`, lease).Scan(&changes, &early, &long, &epochs))
	require.Zero(t, early, "takeovers of a lease that was held, and whose holder had no lock; or without a word of it")
	require.Zero(t, long, "leases of more than %v", lease)
	require.Zero(t, epochs, "wrong epochs")
	return changes
}
