package faults

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/tools/pgserver"
	"github.com/stretchr/testify/require"
)

// A database is copied into another cluster while events are unsent, some of a
// window that was half drained and some of transactions that were open when the
// relay looked last. The relay goes on there: nothing is lost, nothing is sent
// twice, and nothing out of order.
func TestRestoredElsewhere(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	for _, copying := range []struct {
		name   string
		server func(*testing.T) *pgserver.Server
		copy   func(t *testing.T, from, to *site)
		parts  int64 // ids in a partition; 0: a plain table
	}{
		// pg_dump may be newer than the server, but not older.
		{"dumped by pg_dump", func(t *testing.T) *pgserver.Server { return startVersion(t, "14", nil) }, dump, 0},
		{"with partitions, dumped by pg_dump", func(t *testing.T) *pgserver.Server { return startVersion(t, "14", nil) }, dump, 100},
		{"its rows dumped by pg_dump", func(t *testing.T) *pgserver.Server { return startVersion(t, "14", nil) }, dumpRows, 0},
		{"copied table by table", func(t *testing.T) *pgserver.Server { return startServer(t, nil) }, copyTables, 0},
	} {
		for name, ahead := range map[string]bool{"into lower transaction ids": false, "into higher transaction ids": true} {
			t.Run(copying.name+" "+name, func(t *testing.T) {
				t.Parallel()
				seed := rand.Uint64()
				t.Logf("seed %d", seed)
				server := copying.server(t)
				from := newSiteOn(t, server, server.URL())
				require.NoError(t, outbox.Migrate(context.Background(), from.db, outbox.MigrateConfig{PartitionRows: copying.parts}))
				to := from.elsewhere(t, copying.server(t))
				if ahead {
					to.outrun(t, from)
				} else {
					from.burnIDs(t, 2000)
				}

				stop := from.relay(t, slog.DiscardHandler)
				written := make(chan error, 1)
				go func() { written <- from.writeAll(seed) }()
				from.awaitArrivals(t, 1+rand.New(rand.NewPCG(seed, 0)).IntN(800))
				stop() // in the middle
				require.NoError(t, <-written)

				copying.copy(t, from, to)
				log := new(warnings)
				to.relay(t, log)
				require.NoError(t, to.writeAll(seed+1))
				committed, err := oracle.Committed(context.Background(), to.db, "public")
				require.NoError(t, err)
				v := to.compare(t, committed)
				t.Logf("%s", v)
				require.NoError(t, v.Err())
				require.Equal(t, "outbox: database was restored from another cluster, the cursor is moved to this one", log.String())
			})
		}
	}
}

// Without its sequence a copy would give new events the ids of those that were
// sent. The relay says how to set it, and goes on when that is done.
func TestRestoredWithoutSequence(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	from := newSite(t)
	stop := from.relay(t, slog.DiscardHandler)
	from.requireArrival(t, from.commit(t, "on", 50))
	stop()
	to := from.elsewhere(t, startServer(t, nil))
	copyRows(t, from, to)

	relay, err := outbox.NewRelay(to.db, testenv.KafkaOpts(to.brokers), outbox.RelayConfig{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	err = relay.Run(context.Background())
	require.ErrorIs(t, err, outbox.ErrSequenceBehind)
	_, remedy, found := strings.Cut(err.Error(), "then: ")
	require.True(t, found, err.Error())
	_, err = to.db.Exec(context.Background(), remedy)
	require.NoError(t, err)

	to.relay(t, slog.DiscardHandler)
	to.requireArrival(t, to.commit(t, "on", 50))
	arrived, err := to.reader.Arrived()
	require.NoError(t, err)
	require.Len(t, arrived, 100, "each once")
}

// elsewhere is the same service with another, empty server.
func (s *site) elsewhere(t *testing.T, server *pgserver.Server) *site {
	t.Helper()
	there := *s
	there.server, there.url = server, server.URL()
	there.db = there.pool(t)
	return &there
}

// outrun takes transaction ids until the server's are well above another's.
func (s *site) outrun(t *testing.T, other *site) {
	t.Helper()
	for s.nextID(t) < other.nextID(t)+10_000 {
		s.burnIDs(t, 1000)
	}
}

// writeAll commits events under transactions of every kind.
func (s *site) writeAll(seed uint64) error {
	return oracle.Write(context.Background(), oracle.Writers{
		DB: s.db, Schema: "public", Seed: seed, Events: 1000, Writers: 16, Keys: 50, Pause: 5 * time.Millisecond, Open: 2,
		Record: s.record,
	})
}

// dump copies a database as an operator does.
func dump(t *testing.T, from, to *site) {
	t.Helper()
	sql, err := exec.Command("pg_dump", "--dbname="+from.server.URL()).Output()
	require.NoError(t, err, "this test needs pg_dump and psql: tools/needs.sh test says how to install them")
	restore := exec.Command("psql", "--quiet", "--set=ON_ERROR_STOP=1", "--dbname="+to.server.URL())
	restore.Stdin = bytes.NewReader(sql)
	out, err := restore.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// copyTables copies rows and sequences.
func copyTables(t *testing.T, from, to *site) {
	t.Helper()
	copyRows(t, from, to)
	for _, table := range []string{"outbox", "outbox_cursor"} {
		var last int64
		sequence := table + "_id_seq"
		require.NoError(t, from.db.QueryRow(context.Background(), `SELECT last_value FROM `+sequence).Scan(&last))
		_, err := to.db.Exec(context.Background(), `SELECT setval($1::text::regclass, $2)`, sequence, last)
		require.NoError(t, err)
	}
}

// dumpRows is dump for tables that are there already.
func dumpRows(t *testing.T, from, to *site) {
	t.Helper()
	require.NoError(t, outbox.Migrate(context.Background(), to.db, outbox.MigrateConfig{}))
	_, err := to.db.Exec(context.Background(), `TRUNCATE outbox_migration;
		CREATE TABLE oracle_key (key text PRIMARY KEY, version bigint NOT NULL); CREATE TABLE oracle_history (event_id text PRIMARY KEY)`)
	require.NoError(t, err)
	rows, err := exec.Command("pg_dump", "--data-only", "--format=custom", "--dbname="+from.server.URL()).Output()
	require.NoError(t, err)
	restore := func(options string) (string, error) {
		cmd := exec.Command("pg_restore", "--exit-on-error", "--dbname="+to.server.URL())
		cmd.Env = append(os.Environ(), "PGOPTIONS="+options)
		cmd.Stdin = bytes.NewReader(rows)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	out, err := restore("")
	require.Error(t, err, "transaction ids of another cluster")
	require.Contains(t, out, "outbox_xid_is_of_this_transaction")
	_, err = to.db.Exec(context.Background(), `TRUNCATE event_handled, outbox_migration, oracle_key, oracle_history`)
	require.NoError(t, err)
	out, err = restore("-c outbox.keep_xid=on")
	require.NoError(t, err, out)
}

// copyRows copies all tables, and leaves the sequences at their beginning.
func copyRows(t *testing.T, from, to *site) {
	t.Helper()
	ctx := context.Background()
	require.NoError(t, outbox.Migrate(ctx, to.db, outbox.MigrateConfig{}))
	_, err := to.db.Exec(ctx, `CREATE TABLE oracle_key (key text PRIMARY KEY, version bigint NOT NULL); CREATE TABLE oracle_history (event_id text PRIMARY KEY)`)
	require.NoError(t, err)
	source, err := from.db.Acquire(ctx)
	require.NoError(t, err)
	defer source.Release()
	target, err := to.db.Acquire(ctx)
	require.NoError(t, err)
	defer target.Release()
	_, err = target.Exec(ctx, `SET outbox.keep_xid = 'on'`)
	require.NoError(t, err)
	for _, table := range []string{"outbox", "outbox_cursor", "outbox_lease", "outbox_failed", "oracle_key", "oracle_history"} {
		var exists bool
		require.NoError(t, source.QueryRow(ctx, `SELECT to_regclass($1) IS NOT NULL`, table).Scan(&exists))
		if !exists {
			continue
		}
		var rows bytes.Buffer
		_, err := source.Conn().PgConn().CopyTo(ctx, &rows, fmt.Sprintf("COPY %s TO STDOUT", table))
		require.NoError(t, err)
		_, err = target.Conn().PgConn().CopyFrom(ctx, &rows, fmt.Sprintf("COPY %s FROM STDIN", table))
		require.NoError(t, err)
	}
}
