package outboxhttp_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/slogtest"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxhttp"
	"github.com/stretchr/testify/require"
)

const ownID = "0123456789ABCDEF"

var takenTests = []struct {
	name    string
	brought []string
	taken   bool
}{
	{"none", nil, false},
	{"one of ours", []string{ownID}, true},
	{"a UUID", []string{"5f0d2c1e-9a39-4d9b-8f0f-0b6f0b1a2c3d"}, true},
	{"a Base64 text", []string{"aGVsbG8+/w=="}, true},
	{"the longest", []string{strings.Repeat("a", 128)}, true},
	{"too long", []string{strings.Repeat("a", 129)}, false},
	{"empty", []string{""}, false},
	{"blank", []string{"a b"}, false},
	{"another line", []string{"a\nb"}, false},
	{"a quote", []string{`a"b`}, false},
	{"a control character of a terminal", []string{"a\x1b[2J"}, false},
	{"not ASCII", []string{"ä"}, false},
	{"two", []string{"a", "b"}, false},
}

// The id of a request is used if it may be written into logs; otherwise there is a new
// one. Response and context have the same id.
func TestTrace(t *testing.T) {
	t.Parallel()
	for _, tt := range takenTests {
		t.Run(tt.name, func(t *testing.T) {
			var within string
			h := outboxhttp.Trace(outboxhttp.TraceConfig{}, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				within = outbox.TraceID(r.Context())
				require.Equal(t, within, outbox.CorrelationID(r.Context()))
				require.Equal(t, within, w.Header().Get("X-Trace-Id"), "before the handler writes")
			}))
			r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
			r.Header["X-Trace-Id"] = tt.brought
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			require.Equal(t, within, w.Result().Header.Get("X-Trace-Id"))
			if tt.taken {
				require.Equal(t, tt.brought[0], within)
				return
			}
			require.NotContains(t, tt.brought, within)
			_, err := outboxhttp.TraceIDTime(within)
			require.NoError(t, err)
		})
	}
}

// The header and the ids can be configured.
func TestTraceConfig(t *testing.T) {
	t.Parallel()
	cfg := outboxhttp.TraceConfig{Header: "X-Request-Id", NewID: func() string { return "made" }}
	h := outboxhttp.Trace(cfg, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	for brought, want := range map[string]string{"": "made", "brought": "brought"} {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
		r.Header.Set("X-Request-Id", brought)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		require.Equal(t, want, w.Header().Get("X-Request-Id"))
		require.Empty(t, w.Header().Get("X-Trace-Id"))
	}
}

// Ids have 16 digits, sort in the order in which they were generated, and have its time.
func TestNewTraceID(t *testing.T) {
	t.Parallel()
	before := time.Now().Truncate(time.Millisecond)
	ids := make([]string, 10_000)
	for i := range ids {
		ids[i] = outboxhttp.NewTraceID()
		require.Regexp(t, `^[0-9A-F]{16}$`, ids[i])
	}
	require.True(t, slices.IsSorted(ids))
	require.Len(t, slices.Compact(slices.Clone(ids)), len(ids))
	for _, id := range []string{ids[0], ids[len(ids)-1]} {
		at, err := outboxhttp.TraceIDTime(id)
		require.NoError(t, err)
		require.WithinRange(t, at, before, time.Now().Add(10*time.Millisecond))
	}
	for _, id := range []string{"", ids[0][1:], strings.ToLower("0123456789ABCDEF"), "0123456789ABCDEG", "+123456789ABCDEF"} {
		_, err := outboxhttp.TraceIDTime(id)
		require.ErrorIs(t, err, outboxhttp.ErrNoTraceID, id)
	}
}

// No two ids of a process are the same, with many goroutines at the same time.
func TestNewTraceIDAtOnce(t *testing.T) {
	t.Parallel()
	const makers, each = 8, 2000
	var all [makers][each]string
	var wg sync.WaitGroup
	for m := range makers {
		wg.Go(func() {
			for i := range each {
				all[m][i] = outboxhttp.NewTraceID()
			}
		})
	}
	wg.Wait()
	seen := map[string]bool{}
	for _, ids := range all {
		for _, id := range ids {
			require.False(t, seen[id], id)
			seen[id] = true
		}
	}
}

// A line has the id of its context, outside of groups.
func TestLogTrace(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	plain := slog.NewTextHandler(&out, &slog.HandlerOptions{ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
		if len(groups) == 0 && (a.Key == slog.TimeKey || a.Key == slog.LevelKey) {
			return slog.Attr{}
		}
		return a
	}})
	log := slog.New(outboxhttp.LogTrace(plain))
	ctx := outbox.WithTraceID(outbox.WithCorrelationID(t.Context(), "flow-1"), ownID)
	log.InfoContext(outbox.WithCorrelationID(t.Context(), ownID), "in") // of an earlier release
	log.With("a", 1).WithGroup("").InfoContext(ctx, "with", "b", 2)
	log.With("a", 1).WithGroup("g").With("b", 2).WithGroup("h").InfoContext(ctx, "grouped", "c", 3)
	log.WithGroup("g").InfoContext(t.Context(), "without", "c", 3)
	require.Equal(t, []string{
		"msg=in trace_id=" + ownID,
		"msg=with a=1 trace_id=" + ownID + " b=2",
		"msg=grouped a=1 trace_id=" + ownID + " g.b=2 g.h.c=3",
		"msg=without g.c=3",
	}, strings.Split(strings.TrimSpace(out.String()), "\n"))
}

// LogTrace passes the tests of the standard library for handlers.
func TestLogTraceIsAHandler(t *testing.T) {
	t.Parallel()
	var out testenv.Buffer
	slogtest.Run(t, func(t *testing.T) slog.Handler {
		out = testenv.Buffer{}
		return outboxhttp.LogTrace(slog.NewJSONHandler(&out, nil))
	}, func(t *testing.T) map[string]any { return lineOf(t, out.String()) })
}

// happened is the event of these tests.
type happened struct {
	ID     string    `json:"id"`
	At     time.Time `json:"at"`
	Filler []byte    `json:"filler"`
}

func (h happened) OccurredAt() time.Time { return h.At }
func (h happened) key() string           { return h.ID }

// Its event, in Kafka and in a consumer's handler, has the id of a request, and so have
// the log lines of both.
func TestTraceReachesHandler(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // a relay behind PgBouncer logs that it is
	db, schema := testenv.Schema(t)
	require.NoError(t, outbox.Migrate(t.Context(), db, outbox.MigrateConfig{Schema: schema}))
	topic, brokers := "test-"+uuid.NewString(), testenv.Brokers(t)
	testenv.CreateTopic(t, brokers, topic, 1, "max.message.bytes", "2000")
	testenv.CreateTopic(t, brokers, topic+".dlq", 1)
	events, err := outbox.NewRegistry("test", outbox.Event("test.trace.happened.v1", "Trace", happened.key).Topic(topic))
	require.NoError(t, err)
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{Schema: schema, Headers: outboxhttp.TraceHeaders})
	require.NoError(t, err)
	var out testenv.Buffer
	log := slog.New(outboxhttp.LogTrace(slog.NewJSONHandler(&out, nil)))
	relay, err := outbox.NewRelay(db, testenv.KafkaOpts(brokers), outbox.RelayConfig{Schema: schema, Logger: log, RetryInterval: time.Hour})
	require.NoError(t, err)

	tries := 0
	handled := make(chan string, 1)
	c, err := outbox.NewConsumer(db, testenv.KafkaOpts(brokers), events,
		topic, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Schema: schema, Retry: outbox.RetryPolicy{RetryWait: time.Millisecond, MaxOutage: -1}, Logger: log, From: outbox.FromStart}},
		outbox.Handle("SEEN", func(ctx context.Context, tx pgx.Tx, e happened, m outbox.Metadata) error {
			if tries++; tries < 3 { // together with others, then alone
				return context.Canceled
			}
			log.InfoContext(ctx, "handled")
			handled <- outbox.TraceID(ctx) + " " + outbox.CorrelationID(ctx) + " " + m.Extensions["traceid"] + " " + m.Header("X-Trace-Id")
			return nil
		}))
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { require.NoError(t, relay.Run(ctx)) })
	running.Go(func() { require.NoError(t, c.Run(ctx)) })
	defer running.Wait()
	defer stop()

	h := outboxhttp.Trace(outboxhttp.TraceConfig{}, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		log.InfoContext(r.Context(), "recorded")
		require.NoError(t, pgx.BeginFunc(r.Context(), db, func(tx pgx.Tx) error {
			tooLarge := make([]byte, 4000)
			_, _ = rand.Read(tooLarge)
			return rec.Record(r.Context(), tx, happened{"1", time.Now(), nil}, happened{"2", time.Now(), tooLarge})
		}))
	}))
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", nil)
	r = r.WithContext(outbox.WithCorrelationID(r.Context(), "flow-1")) // which another middleware has set
	r.Header.Set("X-Trace-Id", ownID)
	h.ServeHTTP(httptest.NewRecorder(), r)
	select {
	case id := <-handled:
		require.Equal(t, strings.Join([]string{ownID, "flow-1", ownID, ownID}, " "), id)
	case <-time.After(testenv.Patience):
		t.Fatal("the event did not come")
	}
	var stored string
	require.NoError(t, db.QueryRow(t.Context(), `SELECT DISTINCT headers->>'x-trace-id' FROM `+pgx.Identifier{schema, "outbox"}.Sanitize()).Scan(&stored))
	require.Equal(t, ownID, stored)
	require.Eventually(t, func() bool { return strings.Contains(out.String(), "event rejected") }, testenv.Patience, 10*time.Millisecond)
	logged := map[string]any{}
	for line := range strings.Lines(out.String()) {
		l := lineOf(t, line)
		logged[l["msg"].(string)] = l["trace_id"]
	}
	require.Equal(t, map[string]any{"recorded": ownID, "outbox: event rejected": ownID,
		"outbox: handler failed, trying again": ownID, "handled": ownID}, logged)
}
