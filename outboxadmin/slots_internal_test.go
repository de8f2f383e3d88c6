package outboxadmin

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// serviceFixture is a page that shares the pool of a service.
type serviceFixture struct {
	*adminFixture
	pool *pgxpool.Pool
}

func newServiceFixture(t *testing.T, conns int32, configure func(*Config)) serviceFixture {
	t.Helper()
	h := newAdminFixture(t, nil)
	s := serviceFixture{h, testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.MaxConns, cfg.ConnConfig.RuntimeParams["application_name"] = conns, h.schema
	})}
	cfg := Config{Authorize: authorize, Schema: h.schema}
	if configure != nil {
		configure(&cfg)
	}
	handler, err := New(s.pool, cfg)
	require.NoError(t, err)
	h.handler = http.StripPrefix(prefix, handler)
	return s
}

// lock has every search wait until release is called.
func (h *adminFixture) lock() (release func()) {
	h.t.Helper()
	tx, err := h.db.Begin(h.t.Context())
	require.NoError(h.t, err)
	_, err = tx.Exec(h.t.Context(), `LOCK TABLE "`+h.schema+`".outbox, "`+h.schema+`".outbox_failed`)
	require.NoError(h.t, err)
	release = sync.OnceFunc(func() { _ = tx.Rollback(background) })
	h.t.Cleanup(release)
	return release
}

// While 40 searches run for a long time, the service still gets connections of its pool: its own statement
// is as quick as before. PostgreSQL ends the searches that take too long.
func TestSearchesLeaveThePool(t *testing.T) {
	testenv.Long(t)
	// Not parallel: it measures time.
	testenv.Direct(t) // PgBouncer cancels nothing once its client is gone
	h := newServiceFixture(t, 8, func(c *Config) { c.QueryTimeout = 2 * time.Second })
	h.lock()
	var searches sync.WaitGroup
	answers := make([]*httptest.ResponseRecorder, 40)
	for i := range answers {
		searches.Go(func() { answers[i] = h.send("reader", http.MethodGet, "/events?type=x", "", "") })
	}
	require.Eventually(t, func() bool { return h.pool.Stat().AcquiredConns() > 0 }, 10*time.Second, time.Millisecond)
	var longest time.Duration
	most := int32(0)
	for end := time.Now().Add(1500 * time.Millisecond); time.Now().Before(end); {
		most = max(most, h.pool.Stat().AcquiredConns())
		began := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		_, err := h.pool.Exec(ctx, "SELECT 1")
		cancel()
		require.NoError(t, err)
		longest = max(longest, time.Since(began))
	}
	searches.Wait()
	t.Logf("SELECT 1 took %v at most, the page had %d connections", longest, most)
	require.Less(t, longest, time.Second)
	require.LessOrEqual(t, most, int32(2), "a quarter of the pool")
	busy, late := 0, 0
	for _, w := range answers {
		switch w.Code {
		case http.StatusServiceUnavailable:
			busy++
			require.Equal(t, "2", w.Header().Get("Retry-After"))
			require.Contains(t, w.Body.String(), "Too much is asked at once")
		case http.StatusGatewayTimeout:
			late++
		default:
			require.Fail(t, "an answer", "%d %s", w.Code, w.Body)
		}
	}
	require.NotZero(t, late)
	require.Equal(t, 40, busy+late)
	require.Eventually(t, func() bool {
		return query1[int](h.adminFixture, `SELECT count(*) FROM pg_stat_activity WHERE application_name = $1 AND state = 'active'`, h.schema) == 0
	}, 5*time.Second, 20*time.Millisecond, "PostgreSQL goes on with what nobody waits for")
}

// While readers take all that they may have, an operator can act.
func TestActionsHaveAConnection(t *testing.T) {
	t.Parallel()
	h := newServiceFixture(t, 8, func(c *Config) { c.QueryTimeout = 3 * time.Second })
	tx, err := h.db.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(background) }()
	_, err = tx.Exec(t.Context(), `LOCK TABLE "`+h.schema+`".outbox`)
	require.NoError(t, err)
	var searches sync.WaitGroup
	for range 10 {
		searches.Go(func() { h.send("reader", http.MethodGet, "/events", "", "") })
	}
	defer searches.Wait()
	require.Eventually(t, func() bool { return h.pool.Stat().AcquiredConns() > 0 }, 10*time.Second, time.Millisecond)
	w := h.post("/failed/event-1/retry", "reason", "because")
	require.Equal(t, http.StatusSeeOther, w.Code, w.Body)
	require.NoError(t, tx.Rollback(t.Context()))
}

// A client that hangs up does not cost the service a connection of its pool, as a statement
// that is cancelled would.
func TestHangingUpKeepsTheConnection(t *testing.T) {
	testenv.Direct(t) // of a session
	t.Parallel()
	h := newServiceFixture(t, 1, nil)
	pid := func() (pid int) {
		require.NoError(t, h.pool.QueryRow(t.Context(), "SELECT pg_backend_pid()").Scan(&pid))
		return pid
	}
	for range 10 {
		before := pid()
		if took := h.hangUp(); took < abandonedFor/2 {
			require.Equal(t, before, pid())
			return
		}
		// PostgreSQL was still working when the time was over: the machine is busy.
	}
	require.Fail(t, "the machine is too busy")
}

// hangUp asks for a view that waits for a lock, goes away, and returns how long the statements
// went on then.
func (h serviceFixture) hangUp() time.Duration {
	release := h.lock()
	ctx, hangUp := context.WithCancel(h.t.Context())
	var asked sync.WaitGroup
	asked.Go(func() {
		r := httptest.NewRequestWithContext(ctx, http.MethodGet, prefix+"/events", nil)
		r.Header.Set("X-User", "reader")
		h.handler.ServeHTTP(httptest.NewRecorder(), r)
	})
	require.Eventually(h.t, func() bool { return h.pool.Stat().AcquiredConns() > 0 }, 10*time.Second, time.Millisecond)
	time.Sleep(50 * time.Millisecond) // the statement is on its way
	hungUp := time.Now()
	hangUp()
	time.Sleep(50 * time.Millisecond)
	release()
	asked.Wait()
	return time.Since(hungUp)
}

// Between two parts of a long action, other requests get the connection.
func TestSlotsOfALongAction(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		slots := newSlots(1)
		action, err := slots.take(t.Context(), route{method: http.MethodPost})
		require.NoError(t, err)
		w := newWork(t.Context(), time.Minute, action)
		defer w.end()
		var order []string
		go func() {
			view, err := slots.take(t.Context(), route{method: http.MethodGet})
			if err == nil {
				order = append(order, "view")
				time.Sleep(time.Second)
				view.end()
			}
		}()
		synctest.Wait()
		for range 3 {
			w.pause()
			order = append(order, "part")
			time.Sleep(40 * time.Second) // each has its own minute
		}
		require.NoError(t, w.ctx.Err())
		require.Equal(t, []string{"view", "part", "part", "part"}, order)
		time.Sleep(21 * time.Second)
		require.ErrorIs(t, context.Cause(w.ctx), context.DeadlineExceeded)
		action.end()
		require.Empty(t, slots.all)
	})
}

// pipes is a listener whose connections are in memory, so that time in a bubble passes.
type pipes struct {
	conns chan net.Conn
	end   chan struct{}
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.end:
		return nil, net.ErrClosed
	}
}
func (p *pipes) Close() error   { close(p.end); return nil }
func (p *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipe"} }

// A client may send a body slowly, or read an answer slowly. It keeps neither a connection nor the server's
// goroutine for longer than 30 s, even if the server has no timeouts.
func TestSlowClients(t *testing.T) {
	t.Parallel()
	handler, err := New(testenv.Pool(t, nil), Config{Authorize: authorize})
	require.NoError(t, err)
	slots := handler.(*admin).slots
	const slowBody = "POST /failed/event-1/retry HTTP/1.1\r\nHost: x\r\nX-User: operator\r\nContent-Type: application/x-www-form-urlencoded\r\nContent-Length: 100\r\n\r\nreason="
	const slowReader = "GET /api/openapi.json HTTP/1.1\r\nHost: x\r\nX-User: reader\r\n\r\n"
	for name, request := range map[string]string{"body": slowBody, "answer": slowReader} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				listener := &pipes{make(chan net.Conn), make(chan struct{})}
				var took time.Duration
				server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					began := time.Now()
					handler.ServeHTTP(w, r)
					took = time.Since(began)
				})}
				go func() { _ = server.Serve(listener) }()
				client, conn := net.Pipe()
				listener.conns <- conn
				_, err := client.Write([]byte(request))
				require.NoError(t, err)
				synctest.Wait()
				require.Empty(t, slots.all, "it has no slot yet, or none any more")
				if name == "body" {
					answer := make([]byte, 100)
					n, err := client.Read(answer)
					require.NoError(t, err)
					require.True(t, strings.HasPrefix(string(answer[:n]), "HTTP/1.1 408 "), string(answer[:n]))
				}
				time.Sleep(time.Minute)
				synctest.Wait()
				require.Equal(t, 30*time.Second, took.Round(time.Second))
				require.NoError(t, client.Close())
				require.NoError(t, server.Close())
			})
		})
	}
}

func TestLimitsOfConnections(t *testing.T) {
	t.Parallel()
	for pool, want := range map[int32]int{1: 1, 4: 1, 8: 2, 16: 4, 100: 4} {
		db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.MaxConns = pool })
		require.Equal(t, want, Config{}.withDefaults(db).MaxConns, "%d", pool)
	}
	db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.MaxConns = 4 })
	_, err := New(db, Config{Authorize: authorize, MaxConns: 5, QueryTimeout: -1, TrustedOrigins: []string{"ops.example"}})
	require.ErrorContains(t, err, "MaxConns is 5: at most 4")
	require.ErrorContains(t, err, "QueryTimeout")
	require.ErrorContains(t, err, "TrustedOrigins")
}
