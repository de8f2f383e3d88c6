package faults

import (
	"context"
	"net/url"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/outboxgo/outbox/tools/pgserver"
	"github.com/stretchr/testify/require"
)

// pooledDisturbances are those of relays behind PgBouncer. The short form has what differs there;
// that of [disturbances] has the rest.
func pooledDisturbances() []disturbance {
	longOnly := func(all []disturbance, except ...string) []disturbance {
		for i := range all {
			if !slices.Contains(except, all[i].kind) {
				all[i].kind = ""
			}
		}
		return all
	}
	return slices.Concat(
		[]disturbance{
			{what: "end all connections between PgBouncer and PostgreSQL", kind: "terminate", times: 2, begin: (*suite).terminateAll},
			{what: "end some connections between PgBouncer and PostgreSQL", kind: "terminate", times: 2, begin: (*suite).terminateSome},
			{
				what: "freeze the leader and end all connections between PgBouncer and PostgreSQL", times: 2,
				min: time.Second, max: 2 * lease, begin: (*suite).freezeTerminated, end: (*suite).thaw,
			},
			{
				what: "kill PgBouncer", kind: "crash PgBouncer", times: 3, max: 3 * time.Second,
				begin: (*suite).killBouncer, end: (*suite).restartBouncer, outage: true,
			},
			{
				what: "kill PostgreSQL", times: 1, max: 3 * time.Second,
				begin: (*suite).killPostgres, end: (*suite).restartPostgres, outage: true,
			},
			{
				what: "kill Kafka", times: 1, max: 5 * time.Second,
				begin: (*suite).killKafka, end: (*suite).restartKafka, outage: true,
			},
			{
				what: "delete a topic", times: 1, min: time.Second, max: 2 * lease,
				begin: (*suite).deleteTopic, end: (*suite).createTopic,
			},
		},
		longOnly(processes(), "kill"),
		longOnly(network("PgBouncer", toPostgres), "cut"),
		longOnly(writes("PgBouncer")),
		longOnly(network("Kafka", toKafka)),
		longOnly(besides()),
		apart(
			companion{kind: "apart", do: func(*suite, *testing.T, step, *worker) {}},
			companion{what: ", and end all connections between PgBouncer and PostgreSQL", kind: "apart, terminate", do: func(s *suite, t *testing.T, p step, _ *worker) { s.terminateAll(t, p) }},
			companion{what: ", and freeze it", kind: "apart, freeze", do: func(_ *suite, t *testing.T, _ step, w *worker) { w.freeze(t) }, others: true},
			companion{what: ", and cut its way to PgBouncer", kind: "apart from both", do: (*suite).cutFromPostgres, others: true},
		),
	)
}

// startBouncer starts a PgBouncer in transaction mode in front of a server. Where there is none
// installed, the test fails.
func (s *suite) startBouncer(t *testing.T, server *pgserver.Server) {
	t.Helper()
	var err error
	s.bouncer, err = pgserver.StartBouncer(s.ctx, pgserver.BouncerConfig{URL: server.URL()})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.bouncer.Stop(context.Background())) })
}

func (s *suite) killBouncer(t *testing.T, _ step) {
	t.Helper()
	require.NoError(t, syscall.Kill(s.bouncer.PID(), syscall.SIGKILL))
	<-s.bouncer.Done()
}

// restartBouncer starts another one in the place of the one that was killed. It has another port.
func (s *suite) restartBouncer(t *testing.T, _ step) {
	t.Helper()
	require.NoError(t, s.bouncer.Stop(context.Background())) // its files
	another, err := pgserver.StartBouncer(s.ctx, pgserver.BouncerConfig{URL: s.server.URL()})
	require.NoError(t, err)
	s.bouncer = another
	address, err := url.Parse(s.bouncer.URL())
	require.NoError(t, err)
	s.toPostgres.LeadTo(address.Host)
}

// terminateAll ends all sessions of PgBouncer. Relays share them.
func (s *suite) terminateAll(t *testing.T, _ step) {
	t.Helper()
	s.terminate(t, `application_name LIKE 'relay-%'`)
}

func (s *suite) terminateSome(t *testing.T, p step) {
	t.Helper()
	s.terminate(t, `application_name LIKE 'relay-%' AND pid % 2 = $1`, p.chance%2)
}

func (s *suite) freezeTerminated(t *testing.T, p step) {
	t.Helper()
	s.freezeLeader(t, p)
	s.terminateAll(t, p)
}

// requireNoLock requires that no relay has ever taken a lock for its own, so no relay could be
// taken for gone.
func (s *suite) requireNoLock(t *testing.T) {
	t.Helper()
	var locked int
	require.NoError(t, s.db.QueryRow(s.ctx, `SELECT count(*) FROM lease_history WHERE (became).locked_epoch IS NOT NULL`).Scan(&locked))
	require.Zero(t, locked, "leases with a lock, through PgBouncer")
}
