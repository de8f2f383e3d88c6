package itest

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// oldStep is a step of an earlier version.
type oldStep struct {
	Owner string `json:"owner"`
	Nth   int    `json:"nth"`
}

func (o oldStep) owner() string       { return o.Owner }
func (oldStep) OccurredAt() time.Time { return time.Unix(1, 0) }

// fail does what an account is named after.
func (o oldStep) fail() error {
	switch {
	case strings.HasSuffix(o.Owner, "fails"):
		return errTest
	case strings.HasSuffix(o.Owner, "panics"):
		panic("decode")
	case strings.HasSuffix(o.Owner, "exits"):
		runtime.Goexit()
	}
	return nil
}

// undecodables are what stands in outbox, and what the row of the event says then; "" if it is handled.
var undecodables = []struct{ account, payload, contentType, message string }{
	{"json", `{"account": "json", "n": 1}`, "", ""},
	{"json of a kind", `{"account": "json of a kind", "n": 1}`, "application/vnd.step+json", ""},
	{"text", "text", "text/plain", ""},
	{"null", `null`, "", "data is malformed: it is null"},
	{"empty", `{}`, "", "it has no member of"},
	{"another type", `{"account": 7}`, "", "data is malformed"},
	{"no codec", "x", "text/csv", "no codec for it"},
	{"no content type", "x", "-", "content-type"},
	{"codec fails", "codec fails", "text/plain", "no luck"},
	{"codec panics", "codec panics", "text/plain", "panic: decode"},
	{"codec exits", "codec exits", "text/plain", "has ended its goroutine"},
}

// What cannot be decoded is DEAD at its first attempt, no handler gets it, and what is behind it goes on.
func TestWorkerDecodes(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	f.events = must(outbox.NewRegistry("bank", outbox.Event("bank.account.stepped.v1", "Account", step.account), outbox.Event("bank.account.moved.v1", "Account", oldStep.owner)))
	f.rec = must(outbox.NewRecorder(f.events, outbox.RecorderConfig{Schema: f.schema}))
	dead := map[string]string{"upcaster panics": "panic: decode", "upcaster exits": "has ended its goroutine"}
	for _, tt := range undecodables {
		f.commit(step{tt.account, 1})
		testenv.UpdateEvents(t, f.db, f.sql(`UPDATE {schema}.outbox SET content_type = CASE $3 WHEN '' THEN content_type ELSE $3 END, payload = CASE WHEN $3 NOT LIKE 'text%' AND $3 <> '-' THEN $2::text::jsonb END,
			payload_bytes = CASE WHEN $3 LIKE 'text%' OR $3 = '-' THEN convert_to($2, 'UTF8') END WHERE aggregate_id = $1`), tt.account, tt.payload, tt.contentType)
		if tt.message != "" {
			dead[tt.account] = tt.message
		}
		f.commit(step{tt.account, 2})
	}
	for _, account := range []string{"upcast", "upcaster panics", "upcaster exits"} {
		require.NoError(t, pgx.BeginFunc(t.Context(), f.db, func(tx pgx.Tx) error { return f.rec.Record(t.Context(), tx, oldStep{account, 1}, step{account, 2}) }))
	}
	log := new(hookLog)
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 50 * time.Millisecond}
	cfg.Hooks = log.hooks()
	cfg.Codecs = []outbox.Codec{{ContentType: "text/plain", Encode: outbox.JSON().Encode, Decode: func(_ context.Context, data []byte, event any) error {
		*event.(*step) = step{string(data), 1}
		return oldStep{Owner: string(data)}.fail()
	}}}
	cfg.Upcasters = []outbox.Upcaster{outbox.Upcast(func(o oldStep) step {
		_ = o.fail()
		return step{o.Owner, o.Nth}
	})}
	f.start(cfg, f.effects("COUNTED", nil), outbox.HandleNoTx("SENT", func(context.Context, step, outbox.Metadata) error { return nil }))

	all := 2 * (len(undecodables) + 3)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status IN ('DONE', 'DEAD')`, 2*all)
	require.Equal(t, all-len(dead), f.count(`SELECT count(*) FROM {schema}.effect`))
	for account, message := range dead {
		require.Equal(t, 2, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD' AND attempt_count = 1 AND last_error_code = 'undecodable' AND aggregate_id = $1
			AND last_error_message LIKE '%' || $2 || '%'`, account, message), "%s: %s", account, f.text(`SELECT string_agg(concat_ws(' ', status, last_error_code, last_error_message), '; ') FROM {schema}.event_delivery WHERE aggregate_id = $1`, account))
		require.NotContains(t, strings.Join(log.of(account), " "), "Failed", "no handler has failed")
	}
}

// What an action is done once for is the event, or what its key says; a key that cannot be had is an error of the
// handler, and one that cannot be stored is no use to try again.
func TestWorkerOncePer(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	once := outbox.OncePer(f.effects("LISTED", nil), func(s step, _ outbox.Metadata) (string, string) {
		_ = oldStep{Owner: s.Account}.fail()
		switch s.Account {
		case "NUL":
			return "Account", "a\x00b"
		case "empty":
			return "Account", ""
		}
		return "Account", s.Account
	})
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 50 * time.Millisecond}
	cfg.Retry.RetryWait, cfg.Retry.MaxRetries = time.Millisecond, 1
	cfg.Retry.MaxOutage = -1
	var steps []step
	for n := 1; n <= 5; n++ {
		steps = append(steps, step{"a", n}, step{"b", n})
	}
	f.commit(append(steps, step{"NUL", 1}, step{"empty", 1}, step{"panics", 1}, step{"exits", 1}, step{"c", 1})...)
	f.start(cfg, once)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status IN ('DONE', 'DEAD')`, 15)
	require.Equal(t, "a1,b1,c1", f.text(`SELECT string_agg(account || n, ',' ORDER BY account, n) FROM {schema}.effect`))
	require.Equal(t, "NUL 1 permanent,empty 1 permanent,exits 2 goexit,panics 2 panic",
		f.text(`SELECT string_agg(concat_ws(' ', aggregate_id, attempt_count, last_error_code), ',' ORDER BY aggregate_id COLLATE "C") FROM {schema}.event_delivery WHERE status = 'DEAD'`))
	require.Equal(t, 3, f.count(`SELECT count(*) FROM {schema}.event_handled`))
}

// A handler of batches gets what arrived together, without repeats and in order, and alone what it has failed with.
func TestWorkerHandleBatch(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	const accounts, each, bad = 5, 20, 7
	for n := 1; n <= each; n++ {
		var steps []step
		for a := range accounts {
			steps = append(steps, step{fmt.Sprint("a", a), n})
		}
		f.commit(steps...)
	}
	f.commit(step{"single", 1})
	var mu sync.Mutex
	largest, alone := 0, 0
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Concurrency: 1}, PollInterval: 50 * time.Millisecond}
	cfg.Retry.RetryWait, cfg.Retry.MaxRetries = time.Millisecond, 1
	cfg.Retry.MaxOutage = -1
	totals := outbox.HandleBatch("TOTALS", func(ctx context.Context, tx pgx.Tx, all []outbox.Received[step]) error {
		mu.Lock()
		defer mu.Unlock()
		largest = max(largest, len(all))
		for _, r := range all {
			if r.Event.N == bad && r.Event.Account == "a1" {
				if len(all) == 1 {
					alone++
				}
				return errors.New("bad step")
			}
			if _, err := tx.Exec(ctx, f.sql(`INSERT INTO {schema}.effect (action, account, n) VALUES ('TOTALS', $1, $2)`), r.Event.Account, r.Event.N); err != nil {
				return err
			}
		}
		return nil
	})
	f.start(cfg, totals, f.effects("COUNTED", nil))
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND attempt_count = 1`, 2*(accounts*each+1)-1)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD' AND attempt_count = 2 AND aggregate_id = 'a1' AND last_error_message = 'bad step'`, 1)
	require.Equal(t, 2*(accounts*each+1)-1, f.count(`SELECT count(*) FROM {schema}.effect`))
	require.Zero(t, f.count(`SELECT count(*) FROM (SELECT n, lag(n) OVER (PARTITION BY account, action ORDER BY id) AS before FROM {schema}.effect) AS e WHERE n <= before`))
	mu.Lock()
	defer mu.Unlock()
	require.Greater(t, largest, 10)
	require.Contains(t, []int{2, 3}, alone, "its two attempts, and one in a transaction with events of others")
}

// The wait before another attempt is that of its stream, or what the handler says. No other event of the stream waits
// for it, but for those of its key.
func TestWorkerWaits(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 50 * time.Millisecond, Streams: map[string]outbox.RetryPolicy{"account-events": {RetryWait: time.Hour}}}
	cfg.Retry.RetryWait, cfg.Retry.MaxRetries = time.Millisecond, 1
	cfg.Retry.MaxOutage = -1
	f.commit(step{"usual", 1}, step{"usual", 2}, step{"later", 1}, step{"ever", 1}, step{"at once", 1}, step{"before", 1}, step{"permanent", 1}, step{"fine", 1})
	f.start(cfg, f.effects("COUNTED", func(s step, _ outbox.Metadata) error {
		switch s.Account {
		case "usual":
			return errTest
		case "later":
			return fmt.Errorf("outer: %w", outbox.RetryAfter(outbox.RetryAfter(errTest, time.Minute), 3*time.Hour))
		case "ever":
			return outbox.RetryAfter(errTest, 1<<63-1)
		case "at once":
			return outbox.RetryAfter(errTest, 0)
		case "before":
			return outbox.RetryAfter(errTest, -time.Hour)
		case "permanent":
			return outbox.RetryAfter(outbox.Permanent(errTest), 3*time.Hour)
		}
		return nil
	}))
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD' AND attempt_count = 2 AND aggregate_id IN ('at once', 'before')`, 2)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD' AND attempt_count = 1 AND aggregate_id = 'permanent'`, 1)
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'PENDING' AND attempt_count = 1`, 3)
	f.await(1)
	const waits = `SELECT count(*) FROM {schema}.event_delivery WHERE status = 'PENDING' AND aggregate_id = $1 AND next_retry_at - updated_at BETWEEN $2::interval - interval '1 s' AND $3::interval`
	require.Equal(t, 1, f.count(waits, "usual", 48*time.Minute, 72*time.Minute), "an hour, a fifth more or less")
	require.Equal(t, 1, f.count(waits, "later", 3*time.Hour, 3*time.Hour))
	require.Equal(t, 1, f.count(waits, "ever", 290*365*24*time.Hour, time.Duration(1<<63-1)))
	require.Equal(t, 1, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'PARKED' AND attempt_count = 0 AND aggregate_id = 'usual'`))
}
