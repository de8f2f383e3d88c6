package verify

import (
	"flag"
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/testenv"
)

var largeEvents = flag.Int("verify.events", 0, "how many events TestVerifyInLittleMemory compares; 0 means 200,000")

// Verifying needs at most 256 MiB, and finds the faults that are planted among many events.
func TestVerifyInLittleMemory(t *testing.T) {
	testenv.Long(t)
	f := newFixture(t)
	events := *largeEvents
	if events == 0 {
		events = 200_000
	}
	began := time.Now()
	f.insertMany(t, events)
	f.pass(t)
	t.Logf("%d events inserted in %v", events, time.Since(began).Round(time.Second))
	began = time.Now()
	f.sendMany(t, events)
	t.Logf("records sent in %v", time.Since(began).Round(time.Second))
	debug.FreeOSMemory() // of the producer
	resetPeak(t)
	cpu := cpuTime(t)
	what, since := "", time.Now()
	report := f.verify(t, Config{Progress: func(s Step) {
		if s.What != what {
			t.Logf("%6.1f s: %s", time.Since(since).Seconds(), s.What)
			what = s.What
		}
	}})
	t.Logf("%d events and %d records in %v, %v of CPU time; peak of the process: %d MiB", report.Events, report.Records,
		report.Took.Round(time.Millisecond), (cpuTime(t) - cpu).Round(time.Millisecond), peak(t)>>20)
	require.EqualValues(t, events, report.Events)
	require.Equal(t, map[Kind]int64{Lost: 1, Phantom: 1, Repeated: 1, Inverted: 1}, report.Found)
	most := int64(256 << 20)
	if testenv.RaceDetector {
		most *= 4
	}
	require.LessOrEqual(t, peak(t), most)
}

// insertMany inserts events of 1,000 keys. The UUID of an event is its number.
func (f *fixture) insertMany(t testing.TB, events int) {
	t.Helper()
	const atOnce, writers = 50_000, 4
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for first := 1 + w*atOnce; first <= events; first += writers * atOnce {
				f.insertRange(t, first, min(first+atOnce-1, events))
			}
		})
	}
	wg.Wait()
}

func (f *fixture) insertRange(t testing.TB, first, last int) {
	_, err := f.DB.Exec(background, f.in(`INSERT INTO {schema}.outbox (id, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, occurred_at)
		SELECT n, ('00000000-0000-4000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, 'test.thing.happened.v1', 'shop', 'Thing', 'key-' || n % 1000,
		       jsonb_build_object('number', n, 'text', repeat('x', 100)), 'application/json', $3, now()
		  FROM generate_series($1::int, $2::int) AS n ORDER BY n`), first, last, f.topic)
	if err != nil {
		t.Error(err)
	}
}

// sendMany sends what insertMany has inserted, but for a few planted faults.
func (f *fixture) sendMany(t testing.TB, events int) {
	t.Helper()
	client, err := kgo.NewClient(append(testenv.KafkaOpts(f.brokers), kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.MaxBufferedRecords(50_000), kgo.ProducerLinger(20*time.Millisecond))...)
	require.NoError(t, err)
	defer client.Close()
	value := []byte(`{"number": 1, "text": "` + strings.Repeat("x", 100) + `"}`)
	send := func(n int) {
		r := f.recordOf(stored{event: uuid.MustParse(fmt.Sprintf("00000000-0000-4000-8000-%012x", n)), key: fmt.Sprint("key-", n%1000)})
		r.Partition, r.Value = int32(n%2), value
		client.Produce(background, r, func(_ *kgo.Record, err error) {
			if err != nil {
				t.Error(err)
			}
		})
	}
	half := events / 2
	for n := 1; n <= events; n++ {
		switch n {
		case half: // lost
		case half + 1: // overtaken by the next event of its key
		case half + 1001:
			send(n)
			send(half + 1)
			send(n) // repeated
		default:
			send(n)
		}
	}
	send(events + 1) // of no event
	require.NoError(t, client.Flush(background))
}

// resetPeak makes peak count from now on.
func resetPeak(t testing.TB) {
	t.Helper()
	require.NoError(t, os.WriteFile("/proc/self/clear_refs", []byte("5"), 0))
}

// cpuTime returns what the process has used.
func cpuTime(t testing.TB) time.Duration {
	t.Helper()
	var usage syscall.Rusage
	require.NoError(t, syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// peak returns the largest resident set of the process in bytes.
func peak(t testing.TB) int64 {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	require.NoError(t, err)
	for line := range strings.Lines(string(status)) {
		if text, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kB, err := strconv.ParseInt(strings.Fields(text)[0], 10, 64)
			require.NoError(t, err)
			return kB << 10
		}
	}
	require.Fail(t, "no VmHWM")
	return 0
}
