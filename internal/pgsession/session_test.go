package pgsession_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pgsession"
	"github.com/outboxgo/outbox/internal/testenv"
)

var background = context.Background()

var quiet = slog.New(slog.DiscardHandler)

// process is what a process has of its own: a pool, and its session.
type process struct {
	*pgsession.Session
	db   *pgxpool.Pool
	name string // of its connections
}

func newProcess(t *testing.T, configure func(*pgxpool.Config)) *process {
	t.Helper()
	testenv.Direct(t)
	p := &process{name: "test " + uuid.NewString()}
	p.db = testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.ConnConfig.RuntimeParams["application_name"] = p.name
		if configure != nil {
			configure(cfg)
		}
	})
	p.Session = pgsession.Of(p.db)
	return p
}

// use keeps the session connected until the test ends.
func (p *process) use(t *testing.T, log *slog.Logger) {
	t.Helper()
	t.Cleanup(p.Use(log))
}

func (p *process) await(t *testing.T, want pgsession.State) {
	t.Helper()
	require.Eventually(t, func() bool { return p.State() == want }, testenv.Patience, time.Millisecond)
}

func (p *process) lock(t *testing.T, schema string) *pgsession.Lock {
	t.Helper()
	l, err := p.TryLock(background, schema, "relay")
	require.NoError(t, err)
	return l
}

func newSchema(t *testing.T) string {
	t.Helper()
	db, schema := testenv.Schema(t)
	require.NoError(t, outbox.Migrate(background, db, outbox.MigrateConfig{Schema: schema}))
	return schema
}

func heard(c <-chan struct{}) func() bool {
	return func() bool {
		select {
		case <-c:
			return true
		default:
			return false
		}
	}
}

// Notifications are received while there is a listener, also after the connection was lost. The
// listener is then told that it may have missed some.
func TestListen(t *testing.T) {
	t.Parallel()
	p, other := newProcess(t, nil), newProcess(t, nil)
	mine, foreign := "mine "+uuid.NewString(), "foreign "+uuid.NewString()
	signals, wakes := make(chan struct{}, 1), make(chan struct{}, 1)
	ear := p.Listen(mine, signals, wakes) // before it is connected
	p.use(t, quiet)
	require.Eventually(t, heard(signals), testenv.Patience, time.Millisecond, "something may have come before")
	for range 3 {
		require.NoError(t, other.Notify(background, false, foreign))
		require.Never(t, heard(signals), 50*time.Millisecond, time.Millisecond)
		require.NoError(t, other.Notify(background, false, mine))
		require.Eventually(t, heard(signals), testenv.Patience, time.Millisecond)
	}
	terminate(t, other.db, p.name)
	require.Eventually(t, heard(signals), testenv.Patience, time.Millisecond, "something may have come meanwhile")
	require.NoError(t, other.Notify(background, false, mine))
	require.Eventually(t, heard(signals), testenv.Patience, time.Millisecond)

	require.NoError(t, other.Notify(background, true, mine))
	require.Eventually(t, heard(wakes), testenv.Patience, time.Millisecond, "it is complete")
	require.False(t, heard(signals)())

	for _, complete := range []bool{false, true} {
		require.NoError(t, p.Notify(background, complete, mine))
		require.Never(t, func() bool { return heard(signals)() || heard(wakes)() }, 50*time.Millisecond, time.Millisecond, "it was sent through the same session")
	}

	ear.Close()
	late := make(chan struct{}, 1)
	defer p.Listen(foreign, late, nil).Close()
	require.Eventually(t, heard(late), testenv.Patience, time.Millisecond)
	require.NoError(t, other.Notify(background, false, mine))
	require.NoError(t, other.Notify(background, false, foreign))
	require.Eventually(t, heard(late), testenv.Patience, time.Millisecond)
	require.False(t, heard(signals)())
}

// A session knows which channels other sessions listen to, also if it listens to them itself.
func TestListenedElsewhere(t *testing.T) {
	t.Parallel()
	p, other := newProcess(t, nil), newProcess(t, nil)
	both, alone := "both "+uuid.NewString(), "alone "+uuid.NewString()
	_, err := p.ListenedElsewhere(background, []string{both})
	require.ErrorIs(t, err, pgsession.ErrUnavailable)
	elsewhere := func() string {
		found, err := p.ListenedElsewhere(background, []string{both, alone})
		if err != nil {
			return err.Error()
		}
		return strings.Join(found, " ")
	}
	signals := make(chan struct{}, 1)
	defer p.Listen(both, signals, nil).Close()
	defer p.Listen(alone, signals, nil).Close()
	p.use(t, quiet)
	require.Eventually(t, func() bool { return elsewhere() == "" }, testenv.Patience, time.Millisecond)
	ear := other.Listen(both, signals, nil)
	other.use(t, quiet)
	require.Eventually(t, func() bool { return elsewhere() == both }, testenv.Patience, time.Millisecond)
	ear.Close()
	require.Eventually(t, func() bool { return elsewhere() == "" }, testenv.Patience, time.Millisecond)
}

// A stranger who has the lock of the listeners for himself neither keeps a session from listening, nor ends it with
// its other locks. The session says so once, with the holder, and takes the lock when it is free.
func TestListenBesideHolderOfTheLock(t *testing.T) {
	t.Parallel()
	p, other, stranger := newProcess(t, nil), newProcess(t, nil), newProcess(t, nil)
	channel := "held " + uuid.NewString()
	holder, err := stranger.db.Acquire(background)
	require.NoError(t, err)
	defer holder.Release()
	_, err = holder.Exec(background, `SELECT pg_advisory_lock(hashtextextended('outbox.listens.' || $1::text, 0))`, channel)
	require.NoError(t, err)

	var log testenv.Buffer
	signals := make(chan struct{}, 1)
	p.use(t, slog.New(slog.NewTextHandler(&log, nil)))
	p.await(t, pgsession.Works)
	relay := p.lock(t, newSchema(t))
	require.NotNil(t, relay)
	defer p.Listen(channel, signals, nil).Close()
	require.Eventually(t, heard(signals), testenv.Patience, time.Millisecond, "it listens")
	for range 3 {
		require.NoError(t, other.Notify(background, false, channel))
		require.Eventually(t, heard(signals), testenv.Patience, time.Millisecond)
	}
	held := fmt.Sprintf("pid %d of role ", holder.Conn().PgConn().PID())
	require.Eventually(t, func() bool { return strings.Contains(log.String(), held) }, testenv.Patience, time.Millisecond)

	other.use(t, quiet)
	other.await(t, pgsession.Works)
	_, err = holder.Exec(background, `SELECT pg_advisory_unlock_all()`)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		found, err := other.ListenedElsewhere(background, []string{channel})
		return err == nil && len(found) == 1 && strings.Contains(log.String(), "works again")
	}, testenv.Patience, 10*time.Millisecond)
	select {
	case <-relay.Lost():
		t.Fatal("the lock of the relay is lost")
	default:
	}
	require.Equal(t, 2, strings.Count(log.String(), "level=WARN"), log.String())
	require.Contains(t, log.String(), channel)
}

// terminate ends the connections of a process.
func terminate(t *testing.T, db *pgxpool.Pool, name string) {
	t.Helper()
	_, err := db.Exec(background, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1`, name)
	require.NoError(t, err)
}

// One process has a lock, and only one user of it. Another one gets it when it is given back, and when PostgreSQL has
// freed it because the connection is gone; then the first learns that.
func TestLock(t *testing.T) {
	t.Parallel()
	schema := newSchema(t)
	p, other := newProcess(t, nil), newProcess(t, nil)
	_, err := p.TryLock(background, schema, "relay")
	require.ErrorIs(t, err, pgsession.ErrUnavailable, "it is not connected")
	p.use(t, quiet)
	other.use(t, quiet)
	p.await(t, pgsession.Works)
	other.await(t, pgsession.Works)
	first := p.lock(t, schema)
	require.NotNil(t, first)
	require.Nil(t, p.lock(t, schema), "PostgreSQL would give it to the same session twice")
	require.Nil(t, other.lock(t, schema))
	first.Unlock(background)
	require.True(t, isClosed(first.Lost()))

	second := other.lock(t, schema)
	require.NotNil(t, second)
	require.Nil(t, p.lock(t, schema))
	require.NoError(t, second.Do(background, func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "SELECT 1")
		return err
	}))
	terminate(t, p.db, other.name)
	require.Eventually(t, func() bool { return isClosed(second.Lost()) }, testenv.Patience, time.Millisecond)
	require.ErrorIs(t, second.Do(background, func(context.Context, *pgx.Conn) error { return nil }), pgsession.ErrUnavailable)
	require.Eventually(t, func() bool { return p.lock(t, schema) != nil }, testenv.Patience, time.Millisecond, "PostgreSQL frees it")
	other.await(t, pgsession.Works)
	require.Nil(t, other.lock(t, schema))
	second.Unlock(background) // which it has not any more
	require.Nil(t, other.lock(t, schema))
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// A lock that was taken after its caller had left is given back.
func TestAbandonedLock(t *testing.T) {
	t.Parallel()
	schema := newSchema(t)
	p, other := newProcess(t, nil), newProcess(t, nil)
	p.use(t, quiet)
	other.use(t, quiet)
	p.await(t, pgsession.Works)
	other.await(t, pgsession.Works)
	for n := range 200 {
		ctx, cancel := context.WithTimeout(background, time.Duration(n)*10*time.Microsecond)
		l, err := p.TryLock(ctx, schema, "relay")
		cancel()
		if err != nil {
			require.ErrorIs(t, err, context.DeadlineExceeded)
		} else if l != nil { // nil while the last one is being given back
			l.Unlock(background)
		}
	}
	require.Eventually(t, func() bool {
		l := other.lock(t, schema)
		if l != nil {
			l.Unlock(background)
		}
		return l != nil
	}, testenv.Patience, 10*time.Millisecond)
}

// A session ends with its last user, and another use makes a new one.
func TestUse(t *testing.T) {
	t.Parallel()
	schema := newSchema(t)
	p, other := newProcess(t, nil), newProcess(t, nil)
	other.use(t, quiet)
	other.await(t, pgsession.Works)
	for range 5 {
		stop, again := p.Use(quiet), p.Use(quiet)
		p.await(t, pgsession.Works)
		l := p.lock(t, schema)
		require.NotNil(t, l)
		stop()
		stop() // which counts once
		require.Equal(t, pgsession.Works, p.State())
		require.False(t, isClosed(l.Lost()))
		again()
		require.Equal(t, pgsession.Unknown, p.State())
		require.True(t, isClosed(l.Lost()))
		require.Eventually(t, func() bool {
			l := other.lock(t, schema)
			if l != nil {
				l.Unlock(background)
			}
			return l != nil
		}, testenv.Patience, time.Millisecond)
	}
}

// The session connects as the pool does, and says once that it cannot.
func TestConnectsAsThePool(t *testing.T) {
	t.Parallel()
	log := new(testenv.Buffer)
	var rejected atomic.Int64
	p := newProcess(t, func(cfg *pgxpool.Config) {
		cfg.BeforeConnect = func(_ context.Context, cfg *pgx.ConnConfig) error {
			if rejected.Add(1) <= 3 {
				return net.ErrClosed
			}
			cfg.RuntimeParams["application_name"] += " before"
			return nil
		}
		cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `SELECT set_config('application_name', current_setting('application_name') || ' after', false)`)
			return err
		}
	})
	other := newProcess(t, nil)
	p.use(t, slog.New(slog.NewTextHandler(log, nil)))
	p.await(t, pgsession.Works)
	n := 0
	require.NoError(t, other.db.QueryRow(background, `SELECT count(*) FROM pg_stat_activity WHERE application_name = $1`, p.name+" before after").Scan(&n))
	require.Equal(t, 1, n)
	require.Regexp(t, `(?s)^[^\n]*a session with PostgreSQL[^\n]* fails[^\n]*BeforeConnect[^\n]*\n[^\n]*works again[^\n]*\n$`, log.String())
}

// A pooler that shares connections is recognised by the number that it invents, and by notifications that do not
// arrive. Then nothing is locked.
func TestPoolerIsRecognised(t *testing.T) {
	t.Parallel()
	schema := newSchema(t)
	for name, change := range map[string]func(pgproto3.BackendMessage) bool{
		"another process": func(m pgproto3.BackendMessage) bool {
			if key, ok := m.(*pgproto3.BackendKeyData); ok {
				key.ProcessID++
			}
			return true
		},
		"no notifications": func(m pgproto3.BackendMessage) bool {
			_, notification := m.(*pgproto3.NotificationResponse)
			return !notification
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			log := new(testenv.Buffer)
			p := newProcess(t, func(cfg *pgxpool.Config) { throughProxy(t, cfg, change) })
			p.use(t, slog.New(slog.NewTextHandler(log, nil)))
			for p.State() != pgsession.Pooled {
				_, err := p.TryLock(background, schema, "relay")
				require.ErrorIs(t, err, pgsession.ErrUnavailable)
				time.Sleep(time.Millisecond)
			}
			require.Regexp(t, `^[^\n]*level=INFO[^\n]*behind a pooler[^\n]*\n$`, log.String())
			_, err := p.TryLock(background, schema, "relay")
			require.ErrorIs(t, err, pgsession.ErrUnavailable)
		})
	}
	through := testenv.Pool(t, nil) // PgBouncer, if the tests run through it
	s := pgsession.Of(through)
	t.Cleanup(s.Use(quiet))
	require.Eventually(t, func() bool { return s.State() != pgsession.Unknown }, testenv.Patience, time.Millisecond)
	require.Equal(t, testenv.ThroughPgBouncer(), s.State() == pgsession.Pooled)
}

// throughProxy has connections pass a proxy that may change what the server sends, or leave it out.
func throughProxy(t *testing.T, cfg *pgxpool.Config, change func(pgproto3.BackendMessage) bool) {
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		server, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		client, near := net.Pipe()
		go func() {
			defer server.Close()
			for buf := make([]byte, 1<<12); ; {
				n, err := near.Read(buf)
				if err != nil {
					return
				}
				if _, err := server.Write(buf[:n]); err != nil {
					return
				}
			}
		}()
		go func() {
			defer near.Close()
			from := pgproto3.NewFrontend(server, server)
			for {
				m, err := from.Receive()
				if err != nil {
					return
				}
				if !change(m) {
					continue
				}
				encoded, err := m.Encode(nil)
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := near.Write(encoded); err != nil {
					return
				}
			}
		}()
		return client, nil
	}
}
