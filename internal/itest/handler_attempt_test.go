package itest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// attemptPlays are what a handler does with an event, call by call: + succeeds, - fails, p fails for good, r says when
// to try again, 4 meets a deadlock, s sends a statement that fails, c sends COMMIT, ! panics, x ends its goroutine.
// Calls says what hooks are called, with the number of the attempt. There are two retries.
var attemptPlays = []struct{ play, calls, outcome string }{
	{"+", "handled 1", "noted"},
	{"-+", "failed 1, retried 1, handled 2", "noted"},
	{"--+", "failed 1, retried 1, failed 2, retried 2, handled 3", "noted"},
	{"---", "failed 1, retried 1, failed 2, retried 2, failed 3, dead 3", "DEAD 3 handler"},
	{"p", "failed 1, dead 1", "DEAD 1 permanent"},
	{"-p", "failed 1, retried 1, failed 2, dead 2", "DEAD 2 permanent"},
	{"rr+", "failed 1, retried 1, failed 2, retried 2, handled 3", "noted"},
	{"44+", "conflicted 1, conflicted 1, handled 1", "noted"},
	{"-4+", "failed 1, retried 1, conflicted 2, handled 2", "noted"},
	{"s+", "failed 1, retried 1, handled 2", "noted"},
	{"sss", "failed 1, retried 1, failed 2, retried 2, failed 3, dead 3", "DEAD 3 postgres_22012"},
	{"ccc", "failed 1, retried 1, failed 2, retried 2, failed 3, dead 3", "DEAD 3 transaction_ended"},
	{"!+", "failed 1, retried 1, handled 2", "noted"},
	{"!!!", "failed 1, retried 1, failed 2, retried 2, failed 3, dead 3", "DEAD 3 panic"},
	{"xx+", "failed 1, retried 1, failed 2, retried 2, handled 3", "noted"},
}

// attemptNotes has what is heard of the events of a consumer or a worker, whose subjects are plays.
type attemptNotes struct {
	mu    sync.Mutex
	made  map[string]int      // calls of the handler
	hooks map[string][]string // with the number of the attempt
	lines map[string][]string // level, message and attributes
}

func newAttemptNotes() *attemptNotes {
	return &attemptNotes{made: map[string]int{}, hooks: map[string][]string{}, lines: map[string][]string{}}
}

// handle is the handler.
func (n *attemptNotes) handle(ctx context.Context, tx pgx.Tx, e sale, _ outbox.Metadata) error {
	n.mu.Lock()
	at := n.made[e.Product]
	n.made[e.Product]++
	n.mu.Unlock()
	failed := errors.New("not today")
	switch e.Product[at] {
	case '-':
		return failed
	case 'p':
		return outbox.Permanent(failed)
	case 'r':
		return outbox.RetryAfter(failed, time.Millisecond)
	case '4':
		return &pgconn.PgError{Code: "40P01", Message: "deadlock detected"}
	case 's':
		return runSQL("SELECT 1/0")(ctx, tx)
	case 'c':
		return ignoreSQL("COMMIT")(ctx, tx)
	case '!':
		panic("spilled")
	case 'x':
		runtime.Goexit()
	}
	return nil
}

func (n *attemptNotes) config(schema string) outbox.HandlerConfig {
	note := func(name string, m outbox.Metadata, action string) {
		n.mu.Lock()
		defer n.mu.Unlock()
		if action != "ACTED" {
			name += " of " + action
		}
		n.hooks[m.Subject] = append(n.hooks[m.Subject], fmt.Sprint(name, " ", m.Attempt))
	}
	return outbox.HandlerConfig{
		Schema: schema, From: outbox.FromStart, MaxPoll: 1, Logger: slog.New(slog.NewJSONHandler(n, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Retry: outbox.RetryPolicy{MaxRetries: 2, RetryWait: time.Millisecond, MaxRetryWait: time.Millisecond, MaxOutage: -1},
		Hooks: outbox.ConsumerHooks{
			Handled:    func(m outbox.Metadata, action string, _ time.Duration) { note("handled", m, action) },
			Conflicted: func(m outbox.Metadata, action string, _ error) { note("conflicted", m, action) },
			Failed: func(m outbox.Metadata, action string, _ error, retry bool) {
				note("failed", m, action)
				if retry {
					note("retried", m, action)
				}
			},
			Repeated:     func(m outbox.Metadata, action string) { note("repeated", m, action) },
			DeadLettered: func(m outbox.Metadata, action, _ string, _ error) { note("dead", m, action) },
		},
	}
}

// Write takes a line of the log. It keeps lines about an event: the names of all attributes, and the values of those
// that are the same for a consumer and a worker.
func (n *attemptNotes) Write(line []byte) (int, error) {
	var attrs map[string]any
	if err := json.NewDecoder(bytes.NewReader(line)).Decode(&attrs); err != nil {
		return 0, err
	}
	subject, _ := attrs["aggregate_id"].(string)
	for _, place := range []string{"time", "group", "topic", "partition", "offset", "stream", "delivery_id", "dead_letter_topic"} {
		delete(attrs, place)
	}
	names := slices.Sorted(maps.Keys(attrs))
	text := fmt.Sprint(attrs["level"], " ", attrs["msg"], " ", attrs["action"], " ", attrs["attempt"], " ", attrs["error_code"], " ", attrs["error"], " ", names)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lines[subject] = append(n.lines[subject], text)
	return len(line), nil
}

// of returns the hooks and the lines of an event.
func (n *attemptNotes) of(play string) (hooks string, lines []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return strings.Join(n.hooks[play], ", "), slices.Clone(n.lines[play])
}

// A consumer and a worker decide alike about each kind of outcome of a handler: they count the same attempts, call the
// same hooks, log the same lines, and leave the same rows. So does a consumer that retries in its partition.
func TestAttemptsOfConsumerAndWorker(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	var sales []sale
	for _, tt := range attemptPlays {
		sales = append(sales, sale{Product: tt.play, Amount: 1})
	}
	s.sell(t, sales...)
	testenv.Run(t, s.relay(t, outbox.RelayConfig{}).Run)
	run := func(group string) *attemptNotes {
		n := newAttemptNotes()
		cfg, h := n.config(s.schema), outbox.Handle("ACTED", n.handle)
		if group == "worker" {
			w, err := outbox.NewWorker(s.db, s.events, group, outbox.WorkerConfig{HandlerConfig: cfg}, h)
			require.NoError(t, err)
			testenv.Run(t, w.Run)
			return n
		}
		if group == "in-place" {
			h = outbox.RetryInPlace(h)
		}
		c, err := outbox.NewConsumer(s.db, testenv.KafkaOpts(s.brokers), s.events, group+s.topic, outbox.ConsumerConfig{HandlerConfig: cfg}, h)
		require.NoError(t, err)
		testenv.Run(t, c.Run)
		return n
	}
	groups := []string{"worker", "parking", "in-place"}
	notes := map[string]*attemptNotes{}
	for _, group := range groups {
		notes[group] = run(group)
	}
	for _, tt := range attemptPlays {
		t.Run(tt.play, func(t *testing.T) {
			for _, group := range groups {
				n, name := notes[group], group
				if group != "worker" {
					name += s.topic
				}
				require.Eventually(t, func() bool { hooks, _ := n.of(tt.play); return hooks == tt.calls }, 10*time.Second, time.Millisecond,
					"%s: %v", group, n)
				require.Eventually(t, func() bool { return s.outcomeOf(t, name, tt.play) == tt.outcome }, testenv.Patience, time.Millisecond, group)
				_, want := notes["worker"].of(tt.play)
				_, got := n.of(tt.play)
				require.Equal(t, want, got, group)
			}
		})
	}
}

// outcomeOf returns what the tables say about the event of a play: it is noted as handled, or has a dead delivery.
func (s *consumerFixture) outcomeOf(t *testing.T, group, play string) (outcome string) {
	t.Helper()
	require.NoError(t, s.db.QueryRow(background, s.sql(`
SELECT concat_ws(', ',
       (SELECT 'noted' FROM {s}.event_handled AS h JOIN {s}.outbox AS o ON h.aggregate_id = o.event_id::text
         WHERE h.consumer_group = $1 AND h.action = 'ACTED' AND o.aggregate_id = $2),
       (SELECT concat_ws(' ', status, attempt_count, last_error_code) FROM {s}.event_delivery
         WHERE consumer_group = $1 AND aggregate_id = $2 AND status <> 'DONE'))`), group, play).Scan(&outcome))
	return outcome
}
