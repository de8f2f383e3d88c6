package outboxadmin

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// gate is a page whose requests are not answered from the database.
func gate(t *testing.T, authorize func(*http.Request) (Access, error)) (http.Handler, *testenv.Buffer) {
	t.Helper()
	log := &testenv.Buffer{}
	handler, err := New(testenv.Pool(t, nil), Config{Authorize: authorize, Logger: slog.New(slog.NewTextHandler(log, nil))})
	require.NoError(t, err)
	return handler, log
}

// An application that gives the page an operator without a name that can be read gets no access for that user: the
// audit would not say who it was.
func TestUsersOfThePageHaveNames(t *testing.T) {
	t.Parallel()
	var access Access
	handler, log := gate(t, func(*http.Request) (Access, error) { return access, nil })
	ask := func() int {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/nothing", nil))
		return w.Code
	}
	var taken []string
	for _, role := range []Role{Reader, Operator} {
		for _, name := range []string{"", "\t", "\u200b", "\u00a0", "\u3164", "...", "kim\n", "k\u200bim", "kim\u202e", strings.Repeat("x", 101)} {
			access = Access{Operator: name, Role: role}
			if code := ask(); code != http.StatusForbidden {
				taken = append(taken, fmt.Sprintf("%s %+.20q: %d", role, name, code))
			}
		}
		access = Access{Operator: "Жанна Lee", Role: role}
		require.Equal(t, http.StatusNotFound, ask())
	}
	require.Empty(t, taken)
	require.Contains(t, log.String(), "is no name")
}

// Who guesses passwords is in the log, with the name and the address, once a minute: the log does not grow by guesses.
func TestFailedLoginsAreLogged(t *testing.T) {
	t.Parallel()
	handler, log := gate(t, func(*http.Request) (Access, error) { return Access{}, errors.New("wrong name or password") })
	synctest.Test(t, func(t *testing.T) {
		guess := func(name, address string) {
			r := httptest.NewRequest(http.MethodGet, "/", nil)
			r.RemoteAddr = address
			r.Header.Set("X-Forwarded-For", "203.0.113.9")
			r.SetBasicAuth(name, "hunter22")
			w := httptest.NewRecorder()
			handler.ServeHTTP(w, r)
			require.Equal(t, http.StatusUnauthorized, w.Code)
		}
		lines := func() []string { return strings.Split(strings.TrimSpace(log.String()), "\n") }
		for port := range 100 {
			guess("kim\n\x1b[2J\u202e"+strings.Repeat("x", 1000), fmt.Sprint("192.0.2.7:", 1024+port))
		}
		require.Len(t, lines(), 1, "the first of an address")
		for _, text := range []string{"level=WARN", "name=kim··[2J·xxx", "address=192.0.2.7", "forwarded=203.0.113.9", "count=1", "wrong name or password"} {
			require.Contains(t, lines()[0], text)
		}
		require.Less(t, len(log.String()), 500)
		guess("lee", "[2001:db8::1]:80")
		require.Len(t, lines(), 2, "another address")
		require.Contains(t, lines()[1], "address=2001:db8::1")

		time.Sleep(time.Minute + time.Second)
		synctest.Wait()
		require.Len(t, lines(), 3, "what came within the minute")
		require.Contains(t, lines()[2], "count=99")
		guess("kim", "192.0.2.7:1")
		require.Len(t, lines(), 3, "no sooner than a minute later")
		time.Sleep(3 * time.Minute)
		synctest.Wait()
		require.Len(t, lines(), 4)
		guess("kim", "192.0.2.7:1")
		require.Len(t, lines(), 5)
		require.Contains(t, lines()[4], "count=1")

		for n := range 5000 {
			guess("kim", fmt.Sprintf("10.0.%d.%d:1", n/250, n%250))
		}
		require.Less(t, len(lines()), 110, "addresses are bounded, too")
		time.Sleep(3 * time.Minute)
		synctest.Wait()
		require.Less(t, len(lines()), 110)
		require.Contains(t, log.String(), "address=others")
		require.NotContains(t, log.String(), "hunter22")
	})
}
