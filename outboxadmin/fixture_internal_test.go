package outboxadmin

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxadmin/internal/seed"
	"github.com/stretchr/testify/require"
)

var background = context.Background()

// prefix is where the tests mount the page.
const prefix = "/ops/outbox"

// adminFixture is a page with the shop's events. Who asks is in the header X-User: reader,
// operator, or none.
type adminFixture struct {
	t       *testing.T
	db      *pgxpool.Pool
	schema  string
	handler http.Handler
	log     testenv.Buffer
}

func authorize(r *http.Request) (Access, error) {
	switch user := r.Header.Get("X-User"); user {
	case "reader":
		return Access{Operator: "r.reader", Role: Reader}, nil
	case "operator":
		return Access{Operator: "o.operator", Role: Operator}, nil
	case "nameless":
		return Access{Role: Operator}, nil
	case "":
		return Access{}, nil
	default:
		return Access{Operator: user, Role: Operator}, errors.New("the session has ended")
	}
}

func newAdminFixture(t *testing.T, configure func(*Config)) *adminFixture {
	t.Helper()
	db, schema := testenv.Schema(t)
	return newAdminFixtureIn(t, db, schema, configure)
}

// newAdminFixtureIn is [newAdminFixture] in a schema without tables.
func newAdminFixtureIn(t *testing.T, db *pgxpool.Pool, schema string, configure func(*Config)) *adminFixture {
	t.Helper()
	require.NoError(t, outbox.Migrate(t.Context(), db, outbox.MigrateConfig{Schema: schema, PartitionRows: 1_000_000}))
	require.NoError(t, seed.Fill(t.Context(), db, schema))
	h := &adminFixture{t: t, db: db, schema: schema}
	cfg := Config{Authorize: authorize, Schema: schema, Logger: slog.New(slog.NewTextHandler(&h.log, nil)),
		Health: func() []outbox.RelayHealth {
			return []outbox.RelayHealth{{Relay: "default", Live: true, Leading: true, Breaker: outbox.BreakerOpen, Reasons: []string{"the circuit breaker is open"}}}
		}}
	if configure != nil {
		configure(&cfg)
	}
	handler, err := New(db, cfg)
	require.NoError(t, err)
	h.handler = http.StripPrefix(prefix, handler)
	return h
}

// send returns the answer to a request, in which path begins behind the prefix.
func (h *adminFixture) send(user, method, path, contentType, body string, header ...string) *httptest.ResponseRecorder {
	h.t.Helper()
	r := httptest.NewRequest(method, "http://ops.example"+prefix+path, strings.NewReader(body))
	r.Header.Set("X-User", user)
	if contentType != "" {
		r.Header.Set("Content-Type", contentType)
	}
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	h.handler.ServeHTTP(w, r)
	return w
}

// get returns a page as an operator sees it.
func (h *adminFixture) get(path string) string {
	h.t.Helper()
	w := h.send("operator", http.MethodGet, path, "", "")
	require.Equal(h.t, http.StatusOK, w.Code, "%s: %s", path, w.Body)
	return w.Body.String()
}

// post sends a form as an operator.
func (h *adminFixture) post(path string, pairs ...string) *httptest.ResponseRecorder {
	h.t.Helper()
	form := url.Values{}
	for i := 0; i+1 < len(pairs); i += 2 {
		form.Set(pairs[i], pairs[i+1])
	}
	return h.send("operator", http.MethodPost, path, "application/x-www-form-urlencoded", form.Encode())
}

// call sends JSON as an operator.
func (h *adminFixture) call(path string, body any) *httptest.ResponseRecorder {
	h.t.Helper()
	data, err := json.Marshal(body)
	require.NoError(h.t, err)
	return h.send("operator", http.MethodPost, path, "application/json", string(data))
}

// query returns one value.
func query1[T any](h *adminFixture, sql string, args ...any) (v T) {
	h.t.Helper()
	sql = strings.ReplaceAll(sql, "{s}", pgx.Identifier{h.schema}.Sanitize())
	require.NoError(h.t, h.db.QueryRow(h.t.Context(), sql, args...).Scan(&v))
	return v
}

func (h *adminFixture) status(id int64) string {
	return query1[string](h, `SELECT status || CASE WHEN held THEN ' and held' ELSE '' END FROM {s}.outbox_failed WHERE id = $1`, id)
}
