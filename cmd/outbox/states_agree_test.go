package main

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxadmin"
)

// statesFixture is a relay, a consumer group and a group of workers, whose handlers do as keys of events say, and an
// operators' page in another process.
type statesFixture struct {
	*commandFixture
	group    string
	relay    *outbox.Relay
	consumer *outbox.Consumer
	worker   *outbox.Worker
	page     http.Handler
	stop     map[string]func()
}

// happenedHandler fails for the keys that say so.
func happenedHandler(_ context.Context, _ pgx.Tx, h happened, _ outbox.Metadata) error {
	switch what, _, _ := strings.Cut(h.Key, "-"); what {
	case "fails":
		return errors.New("no luck")
	case "permanent":
		return outbox.Permanent(errors.New("never"))
	}
	return nil
}

const statesAction = "COUNTED"

func newStatesFixture(t *testing.T, deadLetters bool) *statesFixture {
	t.Helper()
	f := &statesFixture{commandFixture: newClinic(t), stop: map[string]func(){}}
	f.group = "states-" + uuid.NewString()
	testenv.CreateTopic(t, f.brokers, f.topic, 1)
	if deadLetters {
		testenv.CreateTopic(t, f.brokers, f.topic+".dlq", 1)
	}
	events, err := outbox.NewRegistry("test", outbox.Event("test.thing.happened.v1", "Thing", happened.aggregateID).Topic(f.topic))
	require.NoError(t, err)
	handlers := outbox.HandlerConfig{Schema: f.schema, From: outbox.FromStart, Logger: slog.New(slog.DiscardHandler)}
	handlers.Retry.RetryWait, handlers.Retry.MaxRetryWait = time.Hour, time.Hour
	f.relay, err = outbox.NewRelay(f.db, testenv.KafkaOpts(f.brokers), outbox.RelayConfig{Schema: f.schema, PollInterval: 10 * time.Millisecond, Logger: handlers.Logger})
	require.NoError(t, err)
	opts := []kgo.Opt{kgo.SeedBrokers(f.brokers...), kgo.MetadataMinAge(50 * time.Millisecond), kgo.UnknownTopicRetries(1)} // which create no topics
	f.consumer, err = outbox.NewConsumer(f.db, opts, events, f.group+"-c", outbox.ConsumerConfig{HandlerConfig: handlers}, outbox.Handle(statesAction, happenedHandler))
	require.NoError(t, err)
	f.worker, err = outbox.NewWorker(f.db, events, f.group+"-w", outbox.WorkerConfig{HandlerConfig: handlers, Lease: 3 * time.Second, PollInterval: 20 * time.Millisecond}, outbox.Handle(statesAction, happenedHandler))
	require.NoError(t, err)
	f.page, err = outboxadmin.New(f.db, outboxadmin.Config{Schema: f.schema, Authorize: func(*http.Request) (outboxadmin.Access, error) {
		return outboxadmin.Access{Operator: "kim", Role: outboxadmin.Reader}, nil
	}})
	require.NoError(t, err)
	f.stop["relay"] = testenv.Run(t, f.relay.Run)
	f.stop["consumer"] = testenv.Run(t, f.consumer.Run)
	f.stop["worker"] = testenv.Run(t, f.worker.Run)
	require.Eventually(t, func() bool { return f.relay.Health().Works && f.consumer.Health().Works && f.worker.Health().Works }, testenv.Patience, 10*time.Millisecond)
	f.record(t, "first")
	require.Eventually(t, func() bool {
		var handled int
		err := f.db.QueryRow(background, `SELECT count(*) FROM `+pgx.Identifier{f.schema, "event_handled"}.Sanitize()).Scan(&handled)
		return err == nil && handled == 2
	}, testenv.Patience, 10*time.Millisecond, "by both groups")
	return f
}

// viewSays are the sentences of each view about what is wrong.
type viewSays map[string][]string

func (s viewSays) String() string {
	var b strings.Builder
	for _, view := range []string{"Health", "page", "status", "doctor"} {
		fmt.Fprintf(&b, "%s:\n", view)
		for _, line := range s[view] {
			fmt.Fprintf(&b, "    %s\n", line)
		}
	}
	return b.String()
}

// look reads all views.
func (f *statesFixture) look(t *testing.T) viewSays {
	t.Helper()
	s := viewSays{}
	add := func(view, about string, reasons []string) {
		for _, r := range reasons {
			s[view] = append(s[view], about+": "+r)
		}
	}
	if r := f.relay.Health(); f.stop["relay"] != nil {
		add("Health", "relay "+r.Relay, r.Reasons)
	}
	if c := f.consumer.Health(); f.stop["consumer"] != nil {
		add("Health", "group "+c.Group, c.Reasons)
	}
	if w := f.worker.Health(); f.stop["worker"] != nil {
		add("Health", "group "+w.Group, w.Reasons)
	}
	answer := httptest.NewRecorder()
	f.page.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/api/overview", nil))
	require.Equal(t, http.StatusOK, answer.Code, answer.Body)
	var page struct{ Notices []struct{ Text string } }
	require.NoError(t, json.Unmarshal(answer.Body.Bytes(), &page))
	for _, n := range page.Notices {
		s["page"] = append(s["page"], n.Text)
	}
	for view, args := range map[string][]string{"status": {"status"}, "doctor": {"doctor", "--only", "relay,delivery,failed,transaction"}} {
		var doc struct{ Problems, Findings []finding }
		require.NoError(t, json.Unmarshal([]byte(f.call(t, append(args, "--json")...).out), &doc))
		for _, p := range append(doc.Problems, doc.Findings...) {
			s[view] = append(s[view], p.What)
		}
	}
	return s
}

// says reports whether one sentence of a view has all of these words.
func (s viewSays) says(view string, words []string) bool {
	for _, line := range s[view] {
		has := true
		for _, w := range words {
			has = has && strings.Contains(line, w)
		}
		if has {
			return true
		}
	}
	return false
}

// waiting returns what the views count of a group, by view and status.
func (f *statesFixture) waiting(t *testing.T, group string) map[string]map[string]int {
	t.Helper()
	counts := map[string]map[string]int{"Health": {}, "page": {}, "status": {}}
	for _, health := range [][]outbox.EventCount{f.consumer.Health().Waiting, f.worker.Health().Waiting} {
		for _, c := range health {
			if c.Group == group {
				counts["Health"][c.Status] += c.Events
			}
		}
	}
	answer := httptest.NewRecorder()
	f.page.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/api/consumers", nil))
	var page struct {
		Waiting []struct {
			Group, Status string
			Events        int
		}
	}
	require.NoError(t, json.Unmarshal(answer.Body.Bytes(), &page))
	for _, c := range page.Waiting {
		if c.Group == group {
			counts["page"][c.Status] += c.Events
		}
	}
	var status struct{ Groups []groupStateJSON }
	require.NoError(t, json.Unmarshal([]byte(f.call(t, "status", "--json").out), &status))
	for _, g := range status.Groups {
		for _, c := range g.Waiting {
			if g.Group == group {
				counts["status"][c.Status] += c.Events
			}
		}
	}
	return counts
}

// of returns words and the group of consumers or workers.
func (f *statesFixture) of(side string, words ...string) []string {
	return append([]string{f.group + side}, words...)
}

// All views of a state name the same group, action, topic and number, and count the same. None says nothing while
// another reports. The page, the commands and the tables are read by other processes than the one that has the state.
func TestStatesAgree(t *testing.T) {
	testenv.Long(t)
	testenv.Direct(t)
	t.Parallel()
	keys := func(what string, n int) (all []string) {
		for i := range n {
			all = append(all, fmt.Sprintf("%s-%d", what, i))
		}
		return all
	}
	for _, state := range []struct {
		name string
		// begin brings the state about. It returns the words that each view must have in one sentence, for each fact.
		begin func(*testing.T, *statesFixture) [][]string
		// counts are of the group of consumers and of the group of workers.
		consumers, workers map[string]int
		withoutDLQ         bool
		without            string // a process that is gone, and has no Health
	}{
		{name: "healthy", begin: func(t *testing.T, f *statesFixture) [][]string {
			f.record(t, "a", "b")
			return nil
		}},
		{name: "a handler fails for one event", begin: func(t *testing.T, f *statesFixture) [][]string {
			f.record(t, "fails-0", "fails-0", "fails-0", "well")
			return [][]string{f.of("-c", statesAction, f.topic, "1 "), f.of("-w", statesAction, f.topic, "1 ")}
		}, consumers: map[string]int{"failed": 1, "parked": 2}, workers: map[string]int{"failed": 1, "parked": 2}},
		{name: "what a handler needs is away", begin: func(t *testing.T, f *statesFixture) [][]string {
			f.record(t, keys("fails", 120)...)
			const breaker = "the breaker of action " + statesAction + " is "
			return [][]string{f.of("-c", breaker), f.of("-w", breaker)}
		}},
		{name: "dead events", begin: func(t *testing.T, f *statesFixture) [][]string {
			f.record(t, keys("permanent", 3)...)
			return [][]string{f.of("-c", "dead", statesAction, f.topic, "3 "), f.of("-w", "dead", statesAction, f.topic, "3 ")}
		}, consumers: map[string]int{"dead": 3}, workers: map[string]int{"dead": 3}},
		{name: "another session holds a lock", begin: func(t *testing.T, f *statesFixture) [][]string {
			stranger, err := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["application_name"] = "stranger" }).Acquire(background)
			require.NoError(t, err)
			t.Cleanup(stranger.Release)
			sum := sha256.Sum256([]byte("outbox.event_subscription." + f.schema + "." + f.group + "-w"))
			_, err = stranger.Exec(background, `SELECT pg_advisory_lock($1)`, int64(binary.BigEndian.Uint64(sum[:8])))
			require.NoError(t, err)
			t.Cleanup(func() { _, _ = stranger.Exec(background, `SELECT pg_advisory_unlock_all()`) })
			f.record(t, "a")
			return [][]string{f.of("-w", `application "stranger"`, fmt.Sprint("session ", stranger.Conn().PgConn().PID()))}
		}, workers: map[string]int{"pending": 1}},
		{name: "an action has missed events", begin: func(t *testing.T, f *statesFixture) [][]string {
			f.record(t, "a")
			f.exec(t, `INSERT INTO {s}.consumer_gap (consumer_group, topic, topic_id, partition, action, event_type, from_offset)
				SELECT consumer_group, topic, topic_id, partition, 'SUMMED', 'test.thing.happened.v1', 0 FROM {s}.consumer_start WHERE partition >= 0 AND consumer_group = $1`, f.group+"-c")
			f.exec(t, `UPDATE {s}.consumer_start SET position = 7, saved_at = now() WHERE partition >= 0 AND consumer_group = $1`, f.group+"-c")
			return [][]string{f.of("-c", "SUMMED", f.topic)}
		}, consumers: map[string]int{"missed": 7}},
		{name: "a cut has left a group behind", begin: func(t *testing.T, f *statesFixture) [][]string {
			f.stop["relay"]()
			delete(f.stop, "relay")
			f.exec(t, `UPDATE {s}.outbox_lease SET holder = 'outbox cut', expires_at = 'infinity' WHERE name = 'default'`)
			return [][]string{f.of("-c", "relay default has ended by a cut")}
		}},
		{name: "the dead-letter topic takes nothing", begin: func(t *testing.T, f *statesFixture) [][]string {
			f.record(t, "permanent-0")
			return [][]string{f.of("-c", "dead-letter topic "+f.topic+".dlq has been failing")}
		}, withoutDLQ: true},
		{name: "a worker is frozen", begin: func(t *testing.T, f *statesFixture) [][]string {
			f.stop["worker"]()
			delete(f.stop, "worker")
			f.exec(t, `INSERT INTO {s}.event_member (consumer_group, member, from_kafka, renewed_at, renewed_every, routes)
				VALUES ($1, 'far/1/x', false, now() - interval '1 min', '1 s', '{}')`, f.group+"-w")
			f.record(t, "a", "b")
			return [][]string{f.of("-w", "worker far/1/x", "has not renewed its row for"), f.of("-w", "no process runs", "2 events wait")}
		}, workers: map[string]int{"pending": 2}, without: "worker"},
	} {
		t.Run(state.name, func(t *testing.T) {
			t.Parallel()
			f := newStatesFixture(t, !state.withoutDLQ)
			facts := state.begin(t, f)
			var views viewSays
			agree := func() bool {
				views = f.look(t)
				for _, view := range []string{"Health", "page", "status", "doctor"} {
					if view == "Health" && state.without != "" {
						continue
					}
					if len(facts) == 0 && len(views[view]) > 0 {
						return false
					}
					for _, words := range facts {
						if !views.says(view, words) {
							return false
						}
					}
				}
				return true
			}
			if !awaitTrue(2*testenv.Patience, agree) {
				t.Fatalf("the views do not agree about %q:\n%v", facts, views)
			}
			if state.consumers == nil && state.workers == nil {
				return
			}
			var counts map[string]map[string]int
			for side, want := range map[string]map[string]int{"-c": state.consumers, "-w": state.workers} {
				if !awaitTrue(testenv.Patience, func() bool {
					counts = f.waiting(t, f.group+side)
					for view, got := range counts {
						if (view != "Health" || state.without == "") && fmt.Sprint(got) != fmt.Sprint(orEmpty(want)) {
							return false
						}
					}
					return true
				}) {
					t.Fatalf("group %s: want %v, got %v", f.group+side, want, counts)
				}
			}
		})
	}
}

func orEmpty(m map[string]int) map[string]int {
	if m == nil {
		return map[string]int{}
	}
	return m
}

// awaitTrue waits until f is true, and returns false if that takes too long.
func awaitTrue(most time.Duration, f func() bool) bool {
	for end := time.Now().Add(most); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if f() {
			return true
		}
	}
	return false
}
