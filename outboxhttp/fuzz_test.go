package outboxhttp_test

import (
	"bytes"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxhttp"
)

// Whatever a client sends as its trace id, the response, the events and the log have an id of a few plain characters:
// that of the client if it is one, or else a new one.
func FuzzTrace(f *testing.F) {
	for _, id := range []string{"", "0123456789ABCDEF", "a b", "a\r\nX-Admin: 1", "é", strings.Repeat("x", 129), "-_.:/+=@", "FFFFFFFFFFFFFFFF", "+123456789ABCDEF", "0x12345678", "\xff"} {
		f.Add(id, "")
		f.Add("a", id)
	}
	f.Fuzz(func(t *testing.T, id, second string) {
		var log bytes.Buffer
		logger := slog.New(outboxhttp.LogTrace(slog.NewJSONHandler(&log, nil)))
		var used string
		handler := outboxhttp.Trace(outboxhttp.TraceConfig{}, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			used = outbox.TraceID(r.Context())
			require.Equal(t, used, outbox.CorrelationID(r.Context()))
			require.Equal(t, map[string]string{"x-trace-id": used}, outboxhttp.TraceHeaders(r.Context(), nil))
			logger.InfoContext(r.Context(), "done")
		}))
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header[outboxhttp.TraceHeader] = []string{id}
		if second != "" {
			r.Header.Add(outboxhttp.TraceHeader, second)
		}
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		require.Regexp(t, `^[A-Za-z0-9_.:/+=@-]{1,128}$`, used)
		require.NotContains(t, used, "\n")
		require.Equal(t, []string{used}, w.Result().Header.Values(outboxhttp.TraceHeader))
		require.Equal(t, used, lineOf(t, log.String())[outboxhttp.TraceKey])
		require.Equal(t, 1, strings.Count(log.String(), "\n"))
		if used != id {
			at, err := outboxhttp.TraceIDTime(used)
			require.NoError(t, err)
			require.WithinDuration(t, time.Now(), at, time.Minute)
		}
		at, err := outboxhttp.TraceIDTime(id)
		if err != nil {
			require.ErrorIs(t, err, outboxhttp.ErrNoTraceID)
			require.Less(t, len(err.Error()), 1_000)
			return
		}
		require.Regexp(t, `^[0-9A-F]{16}$`, id)
		require.True(t, at.Year() >= 2020 && at.Year() < 2160, "%v", at)
	})
}
