package outboxadmin

import (
	"io/fs"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

func TestConfig(t *testing.T) {
	t.Parallel()
	_, err := New(nil, Config{Schema: "$user"})
	require.ErrorIs(t, err, outbox.ErrNilArgument)
	require.ErrorContains(t, err, "Authorize")
	require.ErrorContains(t, err, "db")
	require.ErrorContains(t, err, "Schema")
	db := testenv.Pool(t, nil)
	_, err = New(db, Config{})
	require.ErrorIs(t, err, outbox.ErrNilArgument, "nothing is open by default")
	_, err = New(db, Config{Authorize: authorize})
	require.NoError(t, err)
}

// everything returns the routes with values for their wildcards, all assets, and some paths that do not
// exist.
func everything(t *testing.T) []route {
	t.Helper()
	fill := strings.NewReplacer("{$}", "", "consumers/{action}", "consumers/pause", "events/{id}", "events/1", "{id}", "event-1", "{action}", "retry", "{relay}", "default", "{group}", "stats")
	var all []route
	for _, rt := range routes {
		rt.path = fill.Replace(rt.path)
		if rt.path != "/assets/{name}" {
			all = append(all, rt)
		}
	}
	require.NoError(t, fs.WalkDir(assetFiles, "assets", func(path string, d fs.DirEntry, err error) error {
		if !d.IsDir() {
			all = append(all, route{method: http.MethodGet, path: "/" + path, role: Reader})
		}
		return err
	}))
	return append(all,
		route{method: http.MethodGet, path: "/nowhere", role: Reader}, route{method: http.MethodPost, path: "/nowhere", role: Reader},
		route{method: http.MethodGet, path: "/api/nowhere", role: Reader}, route{method: http.MethodDelete, path: "/failed/event-1", role: Reader},
		route{method: http.MethodGet, path: "/failed//event-1", role: Reader}, route{method: http.MethodGet, path: "/assets/../admin.go", role: Reader})
}

// Who is not known gets nothing, a reader changes nothing, and no user acts from
// another site.
func TestEveryRouteIsGuarded(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, func(c *Config) { c.Challenge = `Basic realm="outbox"` })
	before := h.fingerprint()
	var acting int
	for _, rt := range everything(t) {
		t.Run(rt.method+" "+rt.path, func(t *testing.T) {
			h.t = t
			ask := func(user string, header ...string) *httptest.ResponseRecorder {
				w := h.send(user, rt.method, rt.path, "application/x-www-form-urlencoded", "reason=because", header...)
				require.Equal(t, policy, w.Header().Get("Content-Security-Policy"))
				require.Equal(t, "nosniff", w.Header().Get("X-Content-Type-Options"))
				require.Equal(t, "no-store", w.Header().Get("Cache-Control"))
				require.Equal(t, "same-origin", w.Header().Get("Referrer-Policy"))
				return w
			}
			for _, user := range []string{"", "somebody"} {
				w := ask(user)
				require.Equal(t, http.StatusUnauthorized, w.Code)
				require.Equal(t, `Basic realm="outbox"`, w.Header().Get("WWW-Authenticate"))
				require.NotContains(t, w.Body.String(), "session", "why is not shown")
			}
			require.Equal(t, http.StatusForbidden, ask("nameless").Code)
			if rt.role == Operator {
				acting++
				require.Equal(t, http.StatusForbidden, ask("reader").Code)
			} else {
				require.NotContains(t, []int{http.StatusUnauthorized, http.StatusForbidden}, ask("reader").Code)
			}
			if rt.method == http.MethodPost {
				require.Equal(t, http.StatusForbidden, ask("operator", "Sec-Fetch-Site", "cross-site").Code)
				require.Equal(t, http.StatusForbidden, ask("operator", "Sec-Fetch-Site", "same-site").Code)
				require.Equal(t, http.StatusForbidden, ask("operator", "Origin", "https://evil.example").Code)
			}
		})
	}
	h.t = t
	require.Equal(t, before, h.fingerprint(), "nothing was done")
	require.Equal(t, 19, acting)
	require.Contains(t, h.log.String(), "the session has ended")
	require.Equal(t, http.StatusSeeOther, h.send("operator", http.MethodPost, "/failed/event-1/retry", "application/x-www-form-urlencoded", "reason=because",
		"Sec-Fetch-Site", "same-origin", "Origin", "http://ops.example").Code, "what was refused above is possible")
}

// GET never calls a method that acts.
func TestOnlyPostsAct(t *testing.T) {
	t.Parallel()
	for _, rt := range routes {
		if rt.method == http.MethodPost {
			require.Equal(t, Operator, rt.role, rt.path)
		} else {
			require.Equal(t, http.MethodGet, rt.method, rt.path)
		}
	}
}

// The prefix without its slash redirects to the first page, under any prefix.
func TestPrefixWithoutSlash(t *testing.T) {
	t.Parallel()
	handler, err := New(testenv.Pool(t, nil), Config{Authorize: authorize})
	require.NoError(t, err)
	r := httptest.NewRequest(http.MethodGet, "/ops/outbox?x=1", nil)
	r.Header.Set("X-User", "reader")
	w := httptest.NewRecorder()
	http.StripPrefix("/ops/outbox", handler).ServeHTTP(w, r)
	require.Equal(t, http.StatusPermanentRedirect, w.Code)
	require.Equal(t, "outbox/", w.Header().Get("Location"))
}

// Behind a proxy that gives requests another Host, the origin that browsers see can be
// named; then, and only then, its forms are taken.
func TestTrustedOrigins(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, func(c *Config) { c.TrustedOrigins = []string{"https://admin.example"} })
	ask := func(header ...string) int {
		return h.send("operator", http.MethodPost, "/failed/event-99999/retry", formType, "reason=because", header...).Code
	}
	require.Equal(t, http.StatusNotFound, ask("Origin", "https://admin.example"))
	require.Equal(t, http.StatusNotFound, ask("Origin", "https://admin.example", "Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "document"))
	for _, origin := range []string{"http://admin.example", "https://admin.example:444", "https://admin.example.evil.example", "https://evil.example", "null"} {
		require.Equal(t, http.StatusForbidden, ask("Origin", origin), origin)
		require.Equal(t, http.StatusForbidden, ask("Origin", origin, "Sec-Fetch-Site", "cross-site"), origin)
	}
}

// Another site can link here, but cannot make a browser send other requests. Otherwise the database would
// search for it, and the audit would say that its user has read a payload.
func TestOtherSitesOnlyLink(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, func(c *Config) { c.AuditReads = true })
	for _, tt := range []struct {
		site, mode, dest string
		code             int
	}{
		{"cross-site", "navigate", "document", 200},
		{"same-site", "navigate", "document", 200},
		{"same-origin", "cors", "empty", 200},
		{"same-origin", "no-cors", "style", 200},
		{"none", "navigate", "document", 200},
		{"", "", "", 200},
		{"cross-site", "no-cors", "image", 403},
		{"cross-site", "no-cors", "script", 403},
		{"cross-site", "cors", "empty", 403},
		{"cross-site", "navigate", "iframe", 403},
		{"cross-site", "navigate", "embed", 403},
		{"same-site", "navigate", "frame", 403},
		{"same-site", "no-cors", "image", 403},
		{"cross-site", "", "", 403},
	} {
		before := len(h.reads())
		for _, path := range []string{"/failed/event-1", "/api/events/4099001"} {
			w := h.send("operator", http.MethodGet, path, "", "", "Sec-Fetch-Site", tt.site, "Sec-Fetch-Mode", tt.mode, "Sec-Fetch-Dest", tt.dest)
			require.Equal(t, tt.code, w.Code, "%+v %s", tt, path)
		}
		require.Equal(t, tt.code == http.StatusOK, len(h.reads()) > before, "%+v", tt)
	}
}

// A mask that panics shows nothing, and keeps neither a connection nor a place in the queue.
func TestMaskPanics(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	handler, err := New(h.db, Config{Authorize: authorize, Schema: h.schema, Mask: func(Text) []byte { panic("mask") }})
	require.NoError(t, err)
	h.handler = http.StripPrefix(prefix, handler)
	for range maxViews + 1 {
		require.PanicsWithValue(t, "mask", func() { h.send("reader", http.MethodGet, "/failed/event-1", "", "") })
	}
	slots := handler.(*admin).slots
	require.Empty(t, slots.all)
	require.Empty(t, slots.viewing)
	require.Empty(t, slots.views)
	require.Zero(t, h.db.Stat().AcquiredConns())
}

// A page without a Schema is one of the schema public, in all its parts.
func TestDefaultSchema(t *testing.T) {
	t.Parallel()
	h := newAdminFixtureIn(t, testenv.OtherDatabase(t), "public", func(c *Config) { c.Schema = "" })
	for _, rt := range routes {
		if rt.method == http.MethodGet && !strings.Contains(rt.path, "{") {
			answer := h.send("reader", rt.method, rt.path, "", "")
			require.Less(t, answer.Code, http.StatusInternalServerError, "%s: %s", rt.path, answer.Body)
		}
	}
}
