package faults

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// boundVar makes this test's program a worker or a consumer: it holds a boundSpec as JSON.
const boundVar = "OUTBOX_FAULTS_BOUND"

// handlingMemory is the memory limit of the processes with handlers, and handlingHeap the GOMEMLIMIT beside it.
const (
	handlingMemory = 512 << 20
	handlingHeap   = "GOMEMLIMIT=460MiB"
)

type boundSpec struct {
	Postgres     string
	Brokers      []string // none for a worker
	Topic, Group string
}

// runBound is the whole life of the process. Its handler has an effect for each event.
func runBound(value string) error {
	var s boundSpec
	return runAsChild(boundVar, value, &s, &s.Postgres, s.run)
}

func (s *boundSpec) run(ctx context.Context, db *pgxpool.Pool) error {
	events, err := outbox.NewRegistry("faults", outbox.Event("test.fault.happened.v1", "Key", oracle.Event.Aggregate).Topic(s.Topic))
	if err != nil {
		return err
	}
	handler := outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e oracle.Event, m outbox.Metadata) error {
		if len(e.Filler) > 1<<20 {
			time.Sleep(time.Second) // others would take their memory meanwhile
		}
		_, err := tx.Exec(ctx, `INSERT INTO bound_effect (event_id) VALUES ($1)`, m.ID)
		return err
	})
	cfg := outbox.HandlerConfig{From: outbox.FromStart, Concurrency: 8}
	if len(s.Brokers) == 0 {
		w, err := outbox.NewWorker(db, events, s.Group, outbox.WorkerConfig{HandlerConfig: cfg}, handler)
		if err != nil {
			return err
		}
		return w.Run(ctx)
	}
	c, err := outbox.NewConsumer(db, testenv.KafkaOpts(s.Brokers), events, s.Group, outbox.ConsumerConfig{HandlerConfig: cfg}, handler)
	if err != nil {
		return err
	}
	return c.Run(ctx)
}

// buildUnraced builds this test's program without the race detector, which takes memory and time that a user's
// process does not take.
func buildUnraced(t *testing.T) (program string) {
	t.Helper()
	program = filepath.Join(t.TempDir(), "faults")
	out, err := exec.CommandContext(t.Context(), "go", "test", "-c", "-race=false", "-o", program, ".").CombinedOutput()
	require.NoError(t, err, "%s", out)
	return program
}

// handling starts a worker, or with brokers a consumer, with little memory.
func (s *site) handling(t *testing.T, program string, brokers ...string) *limitedProcess {
	t.Helper()
	spec, err := json.Marshal(boundSpec{Postgres: s.url, Brokers: brokers, Topic: s.topic, Group: "bound"})
	require.NoError(t, err)
	cmd := exec.Command(program)
	cmd.Env = append(cmd.Environ(), boundVar+"="+string(spec), handlingHeap)
	cmd.Stderr = os.Stderr
	life, err := cmd.StdinPipe()
	require.NoError(t, err)
	t.Cleanup(func() { _ = life.Close() }) // the process may have ended
	return bound(t, cmd, handlingMemory)
}

func newBoundSite(t *testing.T, name string) *site {
	t.Helper()
	s := guest(t, testenv.Brokers(t), "bound-"+strings.ReplaceAll(name, " ", "-")+"-"+uuid.NewString())
	_, err := s.db.Exec(t.Context(), `CREATE TABLE bound_effect (event_id text NOT NULL)`)
	require.NoError(t, err)
	return s
}

// requireEffect waits until the handler of a process has had an effect for an event.
func (s *site) requireEffect(t *testing.T, id string, in *limitedProcess) {
	t.Helper()
	require.Eventually(t, func() bool {
		require.False(t, in.over.Load(), "it took %d MiB", in.peak.Load()>>20)
		return s.hasEffect(t, id)
	}, testenv.Patience, 5*time.Millisecond)
}

func (s *site) hasEffect(t *testing.T, id string) (has bool) {
	t.Helper()
	require.NoError(t, s.db.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM bound_effect WHERE event_id = $1)`, id).Scan(&has))
	return has
}

// A worker lives beside events of any size, several at once. It handles those that a recorder may record, and an event
// behind them within 2 s. The others are DEAD, with their sizes.
func TestBoundsOfWorker(t *testing.T) {
	testenv.Long(t)
	program := buildUnraced(t)
	for _, test := range []struct {
		name   string
		insert func(s *site) (size int, err error)
		events int // at once
		starts int
		code   string
		dead   bool
	}{
		{"10 MB of numbers", func(s *site) (int, error) { return s.poison(76) }, 8, 2, "", true},
		{"40 MB", func(s *site) (int, error) { return s.large(40_000_000) }, 8, 2, "", false},
		{"200 MB of numbers", func(s *site) (int, error) { return s.poison(1_590) }, 2, 2, "", true},
		{"900 MB of numbers", func(s *site) (int, error) { return s.poison(6_870) }, 1, 1, "23514", true},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newBoundSite(t, test.name)
			inserted := 0
			for start := range test.starts {
				worker := s.handling(t, program)
				size := 0
				for range test.events {
					var err error
					size, err = test.insert(s)
					require.Equal(t, test.code, pg.Code(err), "%v", err)
					if err == nil {
						inserted++
					}
				}
				id, committed := s.recordOne(t), time.Now()
				s.requireEffect(t, id, worker)
				took := time.Since(committed)
				status, code := "DONE", ""
				if test.dead {
					status, code = "DEAD", "undecodable"
				}
				require.Eventually(t, func() bool {
					require.False(t, worker.over.Load(), "it took %d MiB", worker.peak.Load()>>20)
					var n int
					require.NoError(t, s.db.QueryRow(t.Context(), `SELECT count(*) FROM event_delivery
						 WHERE status = $1 AND coalesce(last_error_code, '') = $2 AND size = $3`, status, code, size).Scan(&n))
					return n == inserted
				}, testenv.Patience, 20*time.Millisecond)
				worker.stop(t)
				t.Logf("%s, start %d: the event behind was handled after %v, %d MiB of memory at most",
					test.name, start+1, took.Round(time.Millisecond), worker.peak.Load()>>20)
				require.Less(t, took, 2*time.Second)
			}
		})
	}
}

// large inserts an event of the fixture with a filler of some bytes, and returns its size.
func (s *site) large(filler int) (size int, err error) {
	err = s.db.QueryRow(context.Background(), `
		INSERT INTO outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, occurred_at)
		SELECT gen_random_uuid(), 'test.fault.happened.v1', 's', 'Key', gen_random_uuid()::text,
		       jsonb_build_object('id', 'i', 'key', 'k', 'version', 1, 'filler', repeat('x', $2::int)), 'application/json', $1, now()
		RETURNING size`, s.topic, filler).Scan(&size)
	return size, err
}

// recordOne commits an event and returns its id.
func (s *site) recordOne(t *testing.T) (id string) {
	t.Helper()
	s.commit(t, "on", 1)
	require.NoError(t, s.db.QueryRow(t.Context(), `SELECT event_id::text FROM outbox ORDER BY id DESC LIMIT 1`).Scan(&id))
	return id
}

// A consumer lives beside records that decompress to 100 MB, have 100,000 headers or a key of 1 MB, and handles the
// record behind within 2 s. What it cannot handle is DEAD, with a dead letter that says how long the value was.
func TestBoundsOfConsumer(t *testing.T) {
	testenv.Long(t)
	program := buildUnraced(t)
	const huge = 100 << 20
	for _, test := range []struct {
		name   string
		change func(r *kgo.Record)
		dead   bool
	}{
		{"value of 100 MB", func(r *kgo.Record) { r.Value = make([]byte, huge) }, true},
		{"100,000 headers", func(r *kgo.Record) {
			for n := range 100_000 {
				r.Headers = append(r.Headers, kgo.RecordHeader{Key: "h" + strconv.Itoa(n), Value: []byte("v")})
			}
		}, false},
		{"key of 1 MB", func(r *kgo.Record) { r.Key = make([]byte, 1<<20) }, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newBoundSite(t, "consumer")
			testenv.CreateTopic(t, s.brokers, s.topic, 1, "max.message.bytes", "20000000")
			testenv.CreateTopic(t, s.brokers, s.topic+".dlq", 1)
			producer, err := kgo.NewClient(append(testenv.KafkaOpts(s.brokers), kgo.RecordPartitioner(kgo.ManualPartitioner()),
				kgo.ProducerBatchCompression(kgo.ZstdCompression()), kgo.ProducerBatchMaxBytes(1<<30), kgo.BrokerMaxWriteBytes(1<<30))...)
			require.NoError(t, err)
			defer producer.Close()
			for start := range 2 {
				consumer := s.handling(t, program, s.brokers...)
				first := s.boundRecord(t)
				require.NoError(t, producer.ProduceSync(t.Context(), first).FirstErr())
				s.requireEffect(t, idOf(first), consumer) // the group has joined
				bad, good := s.boundRecord(t), s.boundRecord(t)
				test.change(bad)
				require.NoError(t, producer.ProduceSync(t.Context(), bad).FirstErr())
				require.NoError(t, producer.ProduceSync(t.Context(), good).FirstErr())
				sent := time.Now()
				s.requireEffect(t, idOf(good), consumer)
				took := time.Since(sent)
				if test.dead {
					s.requireOmitted(t, start+1, huge)
				} else {
					s.requireEffect(t, idOf(bad), consumer)
				}
				consumer.stop(t)
				t.Logf("%s, start %d: the record behind was handled after %v, %d MiB of memory at most",
					test.name, start+1, took.Round(time.Millisecond), consumer.peak.Load()>>20)
				require.Less(t, took, 2*time.Second)
			}
		})
	}
}

// boundRecord returns the record of an event.
func (s *site) boundRecord(t *testing.T) *kgo.Record {
	t.Helper()
	value, err := json.Marshal(oracle.Event{})
	require.NoError(t, err)
	r := &kgo.Record{Topic: s.topic, Key: []byte("k"), Value: value}
	for name, v := range map[string]string{"ce_specversion": "1.0", "ce_id": uuid.NewString(), "ce_source": "faults", "ce_type": "test.fault.happened.v1", "content-type": "application/json"} {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: name, Value: []byte(v)})
	}
	return r
}

// idOf returns the id of the event of a record.
func idOf(r *kgo.Record) string {
	for _, h := range r.Headers {
		if h.Key == "ce_id" {
			return string(h.Value)
		}
	}
	return ""
}

// requireOmitted requires that n records are DEAD, and that their dead letters have the size of the value.
func (s *site) requireOmitted(t *testing.T, n, size int) {
	t.Helper()
	client, err := kgo.NewClient(append(testenv.KafkaOpts(s.brokers), kgo.ConsumeTopics(s.topic+".dlq"), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))...)
	require.NoError(t, err)
	defer client.Close()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	for found := 0; found < n; {
		require.NoError(t, ctx.Err(), "%d of %d dead letters", found, n)
		client.PollFetches(ctx).EachRecord(func(r *kgo.Record) {
			found++
			for _, h := range r.Headers {
				if h.Key == outbox.DeadLetterValueOmitted {
					require.Equal(t, strconv.Itoa(size), string(h.Value))
					return
				}
			}
			t.Errorf("a dead letter does not say how long its value was: %v", r.Headers)
		})
	}
}
