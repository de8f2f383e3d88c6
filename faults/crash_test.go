package faults

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/tools/pgserver"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// A crash of PostgreSQL forgets transactions whose WAL was not flushed, and
// gives their ids to others. A snapshot from before the crash calls those
// visible: a relay that trusts it skips durable events.
func TestCrashReusesTransactionIDs(t *testing.T) {
	testenv.Long(t)
	// Not parallel: the server must be killed before it flushes its WAL by itself, after 10 s.
	for name, story := range map[string]func(*testing.T, *site){
		// The window of an event whose commit was not flushed is open, or just
		// closed, when the server dies.
		"after a window": func(t *testing.T, s *site) {
			s.burnIDs(t, 50)
			s.requireArrival(t, s.commit(t, "off", 1))
		},
		// The relay has only polled since its last durable cursor row.
		"after idle polls": func(t *testing.T, s *site) {
			s.burnIDs(t, 50)
			s.awaitPolls(t)
		},
		// Both, and ids burnt before and after.
		"after windows and polls": func(t *testing.T, s *site) {
			for range 5 {
				s.burnIDs(t, 20)
				s.requireArrival(t, s.commit(t, "off", 2))
			}
			s.burnIDs(t, 20)
			s.awaitPolls(t)
		},
	} {
		for crash, happens := range map[string]func(*site, *testing.T){
			"the server is killed":  (*site).killServer,
			"one backend is killed": (*site).killBackend, // the server keeps its start time
		} {
			t.Run(name+"/"+crash, func(t *testing.T) { requireIDsReused(t, story, happens) })
		}
	}
}

// requireIDsReused requires that events arrive that got transaction ids from before a crash.
func requireIDsReused(t *testing.T, story func(*testing.T, *site), crash func(*site, *testing.T)) {
	t.Helper()
	s := newSite(t)
	s.relay(t, slog.DiscardHandler)
	s.requireArrival(t, s.commit(t, "on", 3))
	s.awaitSaid(t)
	s.flush(t) // the cursor's row too
	story(t, s)
	before := s.nextID(t)
	reunite := s.keepApart(t) // or it would see the ids before they are given out again
	crash(s, t)
	require.Less(t, s.nextID(t), before, "the crash was meant to reuse ids")
	var events []oracle.Event
	for s.nextID(t) <= before { // each of them is given to a new event
		events = append(events, s.commit(t, "on", 1)...)
	}
	reunite()
	s.requireArrival(t, events)
}

func (s *site) killServer(t *testing.T) {
	t.Helper()
	require.NoError(t, s.server.Kill())
	require.NoError(t, s.server.Restart(t.Context()))
}

// site is a database of the test's own, with a reader of what its relays send.
type site struct {
	server  *pgserver.Server // of the test's own; nil in a guest
	url     string           // where clients find the database
	db      *pgxpool.Pool
	rec     *outbox.Recorder
	brokers []string
	as      []kgo.Opt // who reads, where the brokers ask
	topic   string
	reader  *oracle.Reader
	apart   *sync.RWMutex // read by relays before they connect, see keepApart
}

func newSite(t *testing.T) *site {
	t.Helper()
	server := startServer(t, nil)
	return newSiteOn(t, server, server.URL())
}

func newSiteOn(t *testing.T, server *pgserver.Server, url string) *site {
	t.Helper()
	return newSiteBeside(t, server, url, testenv.Brokers(t))
}

// newSiteBeside is newSiteOn with brokers of the test's own.
func newSiteBeside(t *testing.T, server *pgserver.Server, url string, brokers []string) *site {
	t.Helper()
	s := &site{server: server, url: url, brokers: brokers, topic: "faults-" + uuid.NewString()}
	s.open(t)
	return s
}

// guest is a site in a database of its own on the shared server, where nothing
// is done to the server itself.
func guest(t *testing.T, brokers []string, topic string, as ...kgo.Opt) *site {
	t.Helper()
	conn := testenv.OtherDatabase(t).Config().ConnConfig
	address, err := url.Parse(conn.ConnString())
	require.NoError(t, err)
	address.Path = conn.Database
	s := &site{url: address.String(), brokers: brokers, topic: topic, as: as}
	s.open(t)
	return s
}

func (s *site) open(t *testing.T) {
	t.Helper()
	s.apart = new(sync.RWMutex)
	s.db = s.pool(t)
	require.NoError(t, outbox.Migrate(t.Context(), s.db, outbox.MigrateConfig{}))
	s.publish(t)
}

// publish makes the recorder of the events of s.topic and follows that.
func (s *site) publish(t *testing.T) {
	t.Helper()
	events, err := outbox.NewRegistry("faults", outbox.Event("test.fault.happened.v1", "Key", oracle.Event.Aggregate).Topic(s.topic))
	require.NoError(t, err)
	s.rec, err = outbox.NewRecorder(events, outbox.RecorderConfig{})
	require.NoError(t, err)
	s.reader = s.follow(t)
}

// follow reads the topic from its beginning until the test ends.
func (s *site) follow(t *testing.T) *oracle.Reader {
	t.Helper()
	return s.followTopic(t, s.topic)
}

func (s *site) followTopic(t *testing.T, topic string) *oracle.Reader {
	t.Helper()
	reader, err := oracle.Follow(s.brokers, topic, nil, s.as...)
	require.NoError(t, err)
	t.Cleanup(reader.Close)
	return reader
}

// sideBySide is the same database, whose events of another topic are looked at.
func (s *site) sideBySide(t *testing.T, topic string) *site {
	t.Helper()
	other := *s
	other.topic = topic
	other.publish(t)
	return &other
}

// relay runs one in this process until the test ends, or stop is called.
func (s *site) relay(t *testing.T, log slog.Handler) (stop func()) {
	t.Helper()
	return run(t, s.relayPool(t), testenv.KafkaOpts(s.brokers), outbox.RelayConfig{
		PollInterval: 5 * time.Millisecond, Logger: slog.New(log),
	})
}

// run runs a relay in this process until the test ends, or stop is called.
func run(t *testing.T, db *pgxpool.Pool, kafka []kgo.Opt, cfg outbox.RelayConfig) (stop func()) {
	t.Helper()
	relay, err := outbox.NewRelay(db, kafka, cfg)
	require.NoError(t, err)
	return testenv.Run(t, relay.Run)
}

// startServer starts a server that flushes WAL only when a commit demands it. It
// replicates primary unless that is nil.
func startServer(t *testing.T, primary *pgserver.Server) *pgserver.Server {
	t.Helper()
	return startVersion(t, os.Getenv("OUTBOX_POSTGRES_VERSION"), primary)
}

// startVersion starts a server of one version; empty means the newest.
func startVersion(t *testing.T, version string, primary *pgserver.Server) *pgserver.Server {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: needs a PostgreSQL of its own")
	}
	bin, err := pgserver.Embedded(context.Background(), version, nil)
	require.NoError(t, err)
	server, err := pgserver.Start(context.Background(), pgserver.Config{BinDir: bin, Primary: primary, Settings: map[string]string{
		"wal_writer_delay": "10s", "wal_writer_flush_after": "1GB", "bgwriter_delay": "10s", "checkpoint_timeout": "1h", "autovacuum": "off",
		"max_prepared_transactions": "20", // more than an oracle has writers
	}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop(context.Background())) })
	return server
}

func (s *site) pool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	return openPool(t, s.poolConfig(t))
}

// relayPool is a pool whose connections wait while relays are blocked.
func (s *site) relayPool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	cfg := s.poolConfig(t)
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		s.apart.RLock()
		defer s.apart.RUnlock()
		return dial(ctx, network, address)
	}
	return openPool(t, cfg)
}

// keepApart keeps relays from connecting again until reunite is called.
func (s *site) keepApart(t *testing.T) (reunite func()) {
	t.Helper()
	s.apart.Lock()
	reunite = sync.OnceFunc(s.apart.Unlock)
	t.Cleanup(reunite)
	return reunite
}

func (s *site) poolConfig(t *testing.T) *pgxpool.Config {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(s.url)
	require.NoError(t, err)
	cfg.MaxConns = 30 // writers that wait for each other's locks must not wait for connections
	return cfg
}

func openPool(t *testing.T, cfg *pgxpool.Config) *pgxpool.Pool {
	t.Helper()
	db, err := pgxpool.NewWithConfig(context.Background(), cfg)
	require.NoError(t, err)
	t.Cleanup(db.Close)
	return db
}

// commit records n events in one transaction and returns them. Connections may
// have died with the server, so it tries until one lives. With "off" the transaction may
// really be lost.
func (s *site) commit(t *testing.T, synchronous string, n int) []oracle.Event {
	t.Helper()
	ctx := context.Background()
	events := make([]oracle.Event, n)
	for i := range events {
		events[i] = oracle.Event{ID: uuid.NewString(), Key: "key"}
	}
	require.Eventually(t, func() bool {
		return pgx.BeginFunc(ctx, s.db, func(tx pgx.Tx) error {
			if err := setCommit(ctx, tx, synchronous); err != nil {
				return err
			}
			return s.record(ctx, tx, events...)
		}) == nil
	}, testenv.Patience, 10*time.Millisecond)
	return events
}

// setCommit sets synchronous_commit for a transaction that records events.
func setCommit(ctx context.Context, tx pgx.Tx, synchronous string) error {
	_, err := tx.Exec(ctx, `SELECT set_config('synchronous_commit', $1, true), set_config('outbox.allow_async_commit', 'on', true)`, synchronous)
	return err
}

// add records events in one transaction.
func (s *site) add(t *testing.T, events ...oracle.Event) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), s.db, func(tx pgx.Tx) error { return s.record(t.Context(), tx, events...) }))
}

// record is an oracle.Record.
func (s *site) record(ctx context.Context, tx pgx.Tx, events ...oracle.Event) error {
	all := make([]outbox.DomainEvent, len(events))
	for i, e := range events {
		all[i] = e
	}
	return s.rec.Record(ctx, tx, all...)
}

func (s *site) requireArrival(t *testing.T, events []oracle.Event) {
	t.Helper()
	for _, e := range events {
		require.Eventually(t, func() bool { return s.reader.Has(e.ID) }, testenv.Patience, time.Millisecond, "a durable event was skipped")
	}
}

// burnIDs takes transaction ids and rolls back, in another database: nothing
// of that is flushed.
func (s *site) burnIDs(t *testing.T, n int) {
	t.Helper()
	ctx := context.Background()
	cfg, err := pgx.ParseConfig(s.url)
	require.NoError(t, err)
	cfg.Database = "template1"
	conn, err := pgx.ConnectConfig(ctx, cfg)
	require.NoError(t, err)
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, fmt.Sprintf(`
		DO $$BEGIN
			FOR i IN 1..%d LOOP
				PERFORM pg_current_xact_id();
				ROLLBACK;
			END LOOP;
		END$$`, n))
	require.NoError(t, err)
}

// awaitSaid waits until the relay has written that it works: a durable statement that it makes once, whenever that is.
func (s *site) awaitSaid(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() (said bool) {
		err := s.db.QueryRow(context.Background(), `SELECT state @> '{"works": true}' FROM outbox_lease`).Scan(&said)
		return err == nil && said
	}, testenv.Patience, 10*time.Millisecond)
}

// flush makes everything durable that was committed so far.
func (s *site) flush(t *testing.T) {
	t.Helper()
	_, err := s.db.Exec(context.Background(), `CHECKPOINT`)
	require.NoError(t, err)
}

// awaitPolls waits until the relay has looked again a few times.
func (s *site) awaitPolls(t *testing.T) {
	t.Helper()
	polls := func() (n int64) {
		require.NoError(t, s.db.QueryRow(context.Background(),
			`SELECT seq_scan + coalesce(idx_scan, 0) FROM pg_stat_user_tables WHERE relname = 'outbox'`).Scan(&n))
		return n
	}
	first := polls()
	require.Eventually(t, func() bool { return polls() > first+10 }, testenv.Patience, 10*time.Millisecond)
}

// nextID returns the transaction id that is given out next.
func (s *site) nextID(t *testing.T) (id int64) {
	t.Helper()
	require.Eventually(t, func() bool {
		return s.db.QueryRow(context.Background(), `SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint`).Scan(&id) == nil
	}, testenv.Patience, 10*time.Millisecond)
	return id
}
