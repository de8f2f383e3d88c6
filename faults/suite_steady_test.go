package faults

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/url"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
)

const (
	steadyRate    = 50 // events a second
	steadyWriters = 2
	steadyKeys    = 20 // in each partition
)

// steady is a second database on the server of a suite. A relay with default options, which is not
// disturbed itself and reaches the servers directly, sends its events to a topic of its own. Events are recorded at a
// steady rate, and how long each one takes is known.
type steady struct {
	*site
	marks *marks
	keys  []steadyKey
	// Times of what may delay every event: a server is down, or a backlog is being sent. The last one may have no end.
	excused []span
	beside  []span // times of disturbances that must not delay healthy events
}

type steadyKey struct {
	key       string
	partition int32
}

// span is a time between two moments, and what happens then. An end of zero is not known yet.
type span struct {
	from, to time.Time
	what     string
}

func (a span) overlaps(from, to time.Time) bool {
	return !to.Before(a.from) && (a.to.IsZero() || !from.After(a.to))
}

// isHealthy says whether a partition accepts everything while others of its topic do not.
func isHealthy(partition int32) bool { return partition%3 == 2 }

// healthyKeys returns the keys of healthy partitions.
func (d *steady) healthyKeys() (keys []string) {
	for _, k := range d.keys {
		if isHealthy(k.partition) {
			keys = append(keys, k.key)
		}
	}
	return keys
}

func newSteady(t *testing.T, s *suite) *steady {
	t.Helper()
	_, err := s.db.Exec(s.ctx, `CREATE DATABASE steady`)
	require.NoError(t, err)
	address, err := url.Parse(s.server.URL())
	require.NoError(t, err)
	address.Path = "/steady"
	d := &steady{site: newSiteBeside(t, s.server, address.String(), s.brokers), marks: newMarks()}
	_, err = d.db.Exec(s.ctx, `CREATE TABLE oracle_history (event_id text PRIMARY KEY)`)
	require.NoError(t, err)
	testenv.CreateTopic(t, d.brokers, d.topic, stayingPartitions, blockable...)
	partitioner := kgo.StickyKeyPartitioner(nil).ForTopic(d.topic)
	counts := make([]int, stayingPartitions)
	for i := 0; len(d.keys) < stayingPartitions*steadyKeys; i++ {
		k := steadyKey{key: fmt.Sprintf("steady-%d", i)}
		k.partition = int32(partitioner.Partition(&kgo.Record{Key: []byte(k.key)}, stayingPartitions))
		if counts[k.partition]++; counts[k.partition] <= steadyKeys {
			d.keys = append(d.keys, k)
		}
	}
	log := &tail{}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the last words of the relay with default options:\n%s", log)
		}
	})
	cfg := outbox.RelayConfig{Logger: slog.New(slog.NewTextHandler(log, nil))}
	if *faultExactly {
		cfg.ExactlyOnce = d.topic + "-cursors"
	}
	run(t, d.relayPool(t), []kgo.Opt{kgo.SeedBrokers(d.brokers...), kgo.WithHooks(d.marks)}, cfg)
	return d
}

// write records events until stop is called.
func (d *steady) write(t *testing.T, seed uint64) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var writing sync.WaitGroup
	for n := range steadyWriters {
		writing.Go(func() { d.recordSteadily(ctx, rand.New(rand.NewPCG(seed, 1<<40+uint64(n))), n) })
	}
	stop = sync.OnceFunc(func() {
		cancel()
		writing.Wait()
	})
	t.Cleanup(stop)
	return stop
}

// recordSteadily commits events of keys of its own: every other key for one of two writers.
func (d *steady) recordSteadily(ctx context.Context, rng *rand.Rand, writer int) {
	versions := map[string]int64{}
	steadily(ctx, steadyRate/steadyWriters, func() {
		k := d.keys[rng.IntN(len(d.keys)/steadyWriters)*steadyWriters+writer]
		versions[k.key]++
		e := oracle.Event{ID: uuid.NewString(), Key: k.key, Version: versions[k.key]}
		d.marks.beginIn(e.ID, k.partition)
		whole := context.WithoutCancel(ctx)
		if pgx.BeginFunc(whole, d.db, func(tx pgx.Tx) error { return d.record(whole, tx, e) }) == nil {
			d.marks.confirm(e.ID)
		}
	})
}

// excuse begins a time in which every event may be late. excuseEnds ends it: events that are made in the next
// moments tell whether the relay has recovered.
func (d *steady) excuse()     { d.excused = append(d.excused, span{from: time.Now()}) }
func (d *steady) excuseEnds() { d.excused[len(d.excused)-1].to = time.Now().Add(slow) }

// awaitAccepted waits until all events are accepted.
func (d *steady) awaitAccepted(t *testing.T, s *suite) {
	t.Helper()
	open := 0
	so := s.await(t, 2*stall, func() bool {
		_, open = d.marks.longest(time.Time{}, time.Now())
		return open == 0
	})
	if !so {
		t.Errorf("%d events of the relay with default options are not accepted after %v", open, 2*stall)
	}
}

// compareHistory adds the counts of this relay to the result, and sets those of healthy events.
func (d *steady) compareHistory(t *testing.T, s *suite, v *result) {
	t.Helper()
	d.awaitAccepted(t, s)
	o := d.compare(t, d.recorded(t))
	v.Events, v.Lost, v.Phantom = v.Events+o.Events, v.Lost+o.Lost, v.Phantom+o.Phantom
	v.Duplicates, v.Inversions = v.Duplicates+o.Duplicates, v.Inversions+o.Inversions
	if !s.await(t, stall, func() bool { return d.countFailed(t, `status <> 'resolved'`) == 0 }) {
		t.Errorf("%d events of the relay with default options still wait in outbox_failed", d.countFailed(t, `status <> 'resolved'`))
	}
	d.requireVerified(t)
	healthy := d.healthy()
	v.Healthy.measure(healthy, d.excused, d.beside)
	for _, one := range d.beside {
		var alone healthyResult
		alone.measure(healthy, d.excused, []span{one})
		t.Logf("%5.1f s to %5.1f s: beside %s: %+v", one.from.Sub(s.start).Seconds(), one.to.Sub(s.start).Seconds(), one.what, alone.Beside)
	}
	excused := untilRecovered(healthy, d.excused)
	for _, e := range healthy {
		during := func(one span) bool { return one.overlaps(e.made, e.accepted) }
		if took := e.accepted.Sub(e.made); took > slow && !slices.ContainsFunc(excused, during) {
			t.Logf("%5.1f s: an event of partition %d took %v", e.made.Sub(s.start).Seconds(), e.partition, took)
		}
	}
}

// healthy returns the events of healthy partitions that were accepted, in the order in which they were made.
func (d *steady) healthy() (all []mark) {
	d.marks.between(time.Time{}, time.Now(), func(one *mark) {
		if isHealthy(one.partition) && !one.accepted.IsZero() {
			all = append(all, *one)
		}
	})
	slices.SortFunc(all, func(a, b mark) int { return a.made.Compare(b.made) })
	return all
}
