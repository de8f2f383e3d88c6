package browser

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxadmin"
	"github.com/outboxgo/outbox/outboxadmin/internal/seed"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// tabTimeout is how long a tab may take for all it does.
const tabTimeout = 2 * time.Minute

// adminFixture is a page under a prefix, with the shop's events.
type adminFixture struct {
	db     *pgxpool.Pool
	schema string
	url    string // of the first page, with its slash

	outage atomic.Bool // Kafka is away
}

func newAdminFixture(t *testing.T, access outboxadmin.Access) *adminFixture {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: needs Chromium")
	}
	db, schema := testenv.Schema(t)
	require.NoError(t, outbox.Migrate(t.Context(), db, outbox.MigrateConfig{Schema: schema, PartitionRows: 1_000_000}))
	require.NoError(t, seed.Fill(t.Context(), db, schema))
	h := &adminFixture{db: db, schema: schema}
	handler, err := outboxadmin.New(db, outboxadmin.Config{
		Schema:    schema,
		Authorize: func(*http.Request) (outboxadmin.Access, error) { return access, nil },
		Health: func() []outbox.RelayHealth {
			if h.outage.Load() {
				return []outbox.RelayHealth{{Relay: "default", Live: true, Leading: true, Breaker: outbox.BreakerOpen,
					Reasons: []string{"nothing has moved for 1m34s, although there are events to send", "the circuit breaker is open"}}}
			}
			return []outbox.RelayHealth{{Relay: "default", Live: true, Ready: true, Works: true, Leading: true}}
		},
		Logger: slog.New(slog.DiscardHandler),
	})
	require.NoError(t, err)
	mux := http.NewServeMux()
	mux.Handle("/ops/outbox/", http.StripPrefix("/ops/outbox", handler))
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	h.url = server.URL + "/ops/outbox/"
	return h
}

// prepare makes the fixture be what a view is of: relays lead, or one does not and Kafka is
// away.
func (h *adminFixture) prepare(t *testing.T, v view) {
	t.Helper()
	h.outage.Store(v.outage)
	query[int](t, h, `WITH led AS (UPDATE {s}.outbox_lease SET expires_at = now() + interval '24 s' RETURNING name) SELECT count(*) FROM led`)
	if v.outage {
		query[int](t, h, `WITH lost AS (UPDATE {s}.outbox_lease SET expires_at = now() - interval '3 min' WHERE name = 'analytics' RETURNING name) SELECT count(*) FROM lost`)
	}
}

var operator = outboxadmin.Access{Operator: "sora.lim", Role: outboxadmin.Operator}

// query returns one value.
func query[T any](t *testing.T, h *adminFixture, sql string) (v T) {
	t.Helper()
	sql = strings.ReplaceAll(sql, "{s}", pgx.Identifier{h.schema}.Sanitize())
	require.NoError(t, h.db.QueryRow(t.Context(), sql).Scan(&v))
	return v
}

// life ends when all tests have.
var life, endLife = context.WithCancel(context.Background())

// chromium is started once, and ends with life.
var chromium = sync.OnceValues(func() (context.Context, error) {
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.DisableGPU)
	if os.Getuid() == 0 {
		options = append(options, chromedp.NoSandbox)
	}
	allocator, _ := chromedp.NewExecAllocator(life, options...)
	browser, _ := chromedp.NewContext(allocator)
	return browser, chromedp.Do(browser)
})

func TestMain(m *testing.M) {
	code := m.Run()
	if browser, err := chromium(); err == nil {
		_ = chromedp.Cancel(browser) // waits for its process
	}
	endLife()
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// newTab opens a tab, whose actions have their time.
func newTab(t *testing.T) context.Context {
	t.Helper()
	browser, err := chromium()
	require.NoError(t, err, "this test needs Chromium: tools/needs.sh test says how to install it")
	tab, end := chromedp.NewContext(browser)
	t.Cleanup(end)
	tab, endTime := context.WithTimeout(tab, tabTimeout)
	t.Cleanup(endTime)
	return tab
}

// do runs actions in a tab.
func do(t *testing.T, tab context.Context, actions ...chromedp.Action[chromedp.Void]) {
	t.Helper()
	require.NoError(t, chromedp.Do(tab, actions...))
}

// js returns the value of an expression.
func js[T any](t *testing.T, tab context.Context, expression string, opts ...chromedp.EvaluateOption) T {
	t.Helper()
	v, err := chromedp.Run(tab, chromedp.Evaluate[T](expression, opts...))
	require.NoError(t, err, expression)
	return v
}
