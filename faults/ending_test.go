package faults

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// endingVar makes this test's program a consumer that one record ends: it holds an endingSpec as JSON.
const endingVar = "OUTBOX_FAULTS_ENDING"

// endingSpec says how the consumer reaches the servers, and where a record ends its process.
type endingSpec struct {
	Postgres     string
	Brokers      []string
	Topic, Group string
	InDecode     bool // in Decode; otherwise in a handler
}

// stepTaken is an event whose number counts the events of its key.
type stepTaken struct {
	Key    string
	Number int
	Ends   bool // the process
}

func (s stepTaken) key() string           { return s.Key }
func (s stepTaken) OccurredAt() time.Time { return shopTime }

const (
	stepType = "test.step.taken.v1"
	endsMark = `"Ends":true`
)

func (s endingSpec) events() (*outbox.Registry, error) {
	return outbox.NewRegistry("steps", outbox.Event(stepType, "Step", stepTaken.key).Topic(s.Topic))
}

// runEnding is the whole life of the consumer.
func runEnding(value string) error {
	var s endingSpec
	return runAsChild(endingVar, value, &s, &s.Postgres, s.run)
}

func (s *endingSpec) run(ctx context.Context, db *pgxpool.Pool) error {
	events, err := s.events()
	if err != nil {
		return err
	}
	handle := func(ctx context.Context, tx pgx.Tx, action string, e stepTaken) error {
		if e.Ends {
			os.Exit(1)
		}
		_, err := tx.Exec(ctx, `INSERT INTO step_effect (action, key, number) VALUES ($1, $2, $3)`, action, e.Key, e.Number)
		return err
	}
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, MaxPoll: 10, Retry: outbox.RetryPolicy{MaxRetries: 1}}}
	cfg.Decode = func(r *kgo.Record) (*outbox.Message, error) {
		if s.InDecode && strings.Contains(string(r.Value), endsMark) {
			os.Exit(1)
		}
		return outbox.DecodeCloudEvent(r)
	}
	opts := append(testenv.KafkaOpts(s.Brokers), kgo.SessionTimeout(6*time.Second), kgo.HeartbeatInterval(time.Second))
	consumer, err := outbox.NewConsumer(db, opts, events, s.Group, cfg,
		outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e stepTaken, _ outbox.Metadata) error {
			return handle(ctx, tx, "COUNTED", e)
		}),
		outbox.Handle("LISTED", func(ctx context.Context, tx pgx.Tx, e stepTaken, _ outbox.Metadata) error {
			return handle(ctx, tx, "LISTED", e)
		}),
	)
	if err != nil {
		return err
	}
	return consumer.Run(ctx)
}

// A record that ends each process that decodes or handles it. The partition moves between two members, which both end
// and are started again. The record becomes a dead letter, and the group handles all others in their order.
func TestRecordThatEndsTheProcess(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	for _, inDecode := range []bool{false, true} {
		name := "in a handler"
		if inDecode {
			name = "in Decode"
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			brokers := testenv.Brokers(t)
			s := guest(t, brokers, "ending-"+uuid.NewString())
			testenv.CreateTopic(t, brokers, s.topic, 1)
			testenv.CreateTopic(t, brokers, s.topic+".dlq", 1)
			_, err := s.db.Exec(t.Context(), `CREATE TABLE step_effect (n bigserial, action text NOT NULL, key text NOT NULL, number int NOT NULL)`)
			require.NoError(t, err)
			const keys, of, most = 4, 15, 14
			s.produceSteps(t, keys, of)
			r := &restarts{spec: endingSpec{Postgres: s.url, Brokers: brokers, Topic: s.topic, Group: "ending-" + uuid.NewString(), InDecode: inDecode}, most: most}
			r.run(t, 2)
			const wanted = 2 * (keys*of - 1)
			require.Eventually(t, func() bool { return s.countSteps(t) >= wanted || r.starts.Load() > most }, 5*time.Minute, 100*time.Millisecond)
			t.Logf("%d starts", r.starts.Load())
			require.LessOrEqual(t, r.starts.Load(), int32(most), "starts, with %d of %d effects", s.countSteps(t), wanted)
			s.requireDeadLetters(t, 1)
			s.produceSteps(t, keys, 1, of) // which are handled directly
			require.Eventually(t, func() bool { return s.countSteps(t) >= wanted+2*keys }, testenv.Patience, 100*time.Millisecond)
			r.stop(t)
			var wrong int
			require.NoError(t, s.db.QueryRow(t.Context(), `SELECT count(*) FROM (
				SELECT number <= max(number) OVER (PARTITION BY action, key ORDER BY n ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS late FROM step_effect) AS e WHERE late`).Scan(&wrong))
			require.Zero(t, wrong, "effects that are repeated, or behind a later one of their key")
			require.Equal(t, wanted+2*keys, s.countSteps(t))
			var open, dead int
			require.NoError(t, s.db.QueryRow(t.Context(), `SELECT count(*) FILTER (WHERE status NOT IN ('DONE', 'DEAD')), count(*) FILTER (WHERE status = 'DEAD') FROM event_delivery`).Scan(&open, &dead))
			require.Zero(t, open)
			require.Equal(t, 1, dead)
		})
	}
}

// produceSteps produces steps of some keys, with numbers from after on. Among the first ones, one step ends the
// process, and some records have a type without a handler.
func (s *site) produceSteps(t *testing.T, keys, of int, after ...int) {
	t.Helper()
	client, err := kgo.NewClient(append(testenv.KafkaOpts(s.brokers), kgo.RecordPartitioner(kgo.ManualPartitioner()))...)
	require.NoError(t, err)
	defer client.Close()
	first := 0
	for _, n := range after {
		first = n
	}
	var records []*kgo.Record
	for n := range of {
		for k := range keys {
			e := stepTaken{Key: fmt.Sprint("k", k), Number: first + n, Ends: first == 0 && n == of/2 && k == 1}
			records = append(records, stepRecord(t, s.topic, stepType, e))
		}
		if n%5 == 0 {
			records = append(records, stepRecord(t, s.topic, "test.other.v1", stepTaken{Key: "k1", Number: n}))
		}
	}
	require.NoError(t, client.ProduceSync(t.Context(), records...).FirstErr())
}

func stepRecord(t *testing.T, topic, eventType string, e stepTaken) *kgo.Record {
	t.Helper()
	value, err := json.Marshal(e)
	require.NoError(t, err)
	r := &kgo.Record{Topic: topic, Key: []byte(e.Key), Value: value}
	for name, v := range map[string]string{"ce_specversion": "1.0", "ce_id": uuid.NewString(), "ce_source": "steps", "ce_type": eventType, "content-type": "application/json"} {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: name, Value: []byte(v)})
	}
	return r
}

func (s *site) countSteps(t *testing.T) (n int) {
	t.Helper()
	require.NoError(t, s.db.QueryRow(t.Context(), `SELECT count(*) FROM step_effect`).Scan(&n))
	return n
}

// requireDeadLetters requires that the dead-letter topic has a number of records, and no more.
func (s *site) requireDeadLetters(t *testing.T, n int) {
	t.Helper()
	client, err := kgo.NewClient(append(testenv.KafkaOpts(s.brokers), kgo.ConsumeTopics(s.topic+".dlq"), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))...)
	require.NoError(t, err)
	defer client.Close()
	got := 0
	for _, patience := range []time.Duration{testenv.Patience, time.Second} {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		for ctx.Err() == nil && (got < n || patience == time.Second) {
			client.PollFetches(ctx).EachRecord(func(r *kgo.Record) {
				got++
				require.Contains(t, string(r.Value), endsMark)
			})
		}
		cancel()
	}
	require.Equal(t, n, got, "dead letters")
}

// restarts runs consumers, and starts each one again that has ended.
type restarts struct {
	spec    endingSpec
	most    int32
	starts  atomic.Int32
	ending  atomic.Bool
	members sync.WaitGroup
	mu      sync.Mutex
	running map[*exec.Cmd]bool
	failed  []string // how members have ended that were stopped
}

func (r *restarts) run(t *testing.T, members int) {
	t.Helper()
	r.running = map[*exec.Cmd]bool{}
	value, err := json.Marshal(r.spec)
	require.NoError(t, err)
	for range members {
		r.members.Go(func() {
			for !r.ending.Load() && r.starts.Add(1) <= r.most {
				r.runOne(string(value))
			}
		})
	}
	t.Cleanup(func() {
		r.signal(syscall.SIGKILL)
		r.members.Wait()
	})
}

// runOne runs a consumer until its process ends.
func (r *restarts) runOne(value string) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(cmd.Environ(), endingVar+"="+value, "GORACE=atexit_sleep_ms=0")
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err == nil {
		r.mu.Lock()
		if err = cmd.Start(); err == nil {
			r.running[cmd] = true
		}
		r.mu.Unlock()
	}
	if err == nil {
		err = cmd.Wait()
		_ = stdin.Close() // Wait has closed it
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.running, cmd)
	if r.ending.Load() && err != nil {
		r.failed = append(r.failed, err.Error())
	}
}

func (r *restarts) signal(s syscall.Signal) {
	r.ending.Store(true)
	r.mu.Lock()
	defer r.mu.Unlock()
	for cmd := range r.running {
		_ = cmd.Process.Signal(s) // it may just have ended
	}
}

// stop stops the consumers, which must end cleanly.
func (r *restarts) stop(t *testing.T) {
	t.Helper()
	r.signal(syscall.SIGTERM)
	r.members.Wait()
	require.Empty(t, r.failed)
}
