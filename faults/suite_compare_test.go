package faults

import (
	"bytes"
	"context"
	"hash/fnv"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/internal/verify"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// What the topic refuses: a record without a key, because it is compacted, and
// a batch of more than this.
const maxMessageBytes = 512 << 10

// refusing are the settings of the topic. Nothing is compacted while the test runs.
var refusing = append([]string{
	"cleanup.policy", "compact",
	"min.compaction.lag.ms", strconv.FormatInt((24 * time.Hour).Milliseconds(), 10),
	"max.message.bytes", strconv.Itoa(maxMessageBytes),
}, blockable...)

// The fillers of events that Kafka refuses.
var (
	tooLarge = strings.Repeat("too large ", maxMessageBytes/10+1) // and not for the client
	keyless  = "loses its key"
)

// poison makes one in a thousand events one that the broker refuses: half of
// them are too large for the topic, half lose their key on the way.
func poison(e oracle.Event) oracle.Event {
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(e.ID)) // never fails
	switch hash.Sum32() % 2000 {
	case 0:
		e.Filler = tooLarge
	case 1:
		e.Filler = keyless
	}
	return e
}

// dropKey takes the key from records that are to be refused, as the host's own
// hook may do, so that the client accepts them and the broker does not.
type dropKey struct{}

// OnProduceRecordBuffered implements kgo.HookProduceRecordBuffered.
func (dropKey) OnProduceRecordBuffered(r *kgo.Record) {
	if bytes.Contains(r.Value, []byte(keyless)) {
		r.Key = nil
	}
}

// compare sets the counts of the result, after a time in which nothing is disturbed: what
// has committed must have arrived, or stand in outbox_failed because of an event
// that Kafka refuses.
func (s *suite) compare(t *testing.T, v *result) {
	t.Helper()
	committed, err := oracle.Committed(s.ctx, s.db, "public")
	require.NoError(t, err)
	s.awaitArrivals(t, committed)
	s.awaitExpiring(t)
	for _, w := range s.workers {
		w.stop(t)
	}
	require.True(t, s.await(t, testenv.Patience, func() bool {
		caughtUp, err := s.topics.CaughtUp(s.ctx)
		require.NoError(t, err)
		return caughtUp
	}), "the readers lag behind")
	arrived, err := s.topics.Arrived()
	require.NoError(t, err)

	failed := s.failed(t)
	t.Logf("outbox_failed: %v", countByStatus(failed))
	released := releasedKeys(t, failed)
	ordered := slices.Clone(arrived)
	for i, e := range arrived {
		if strings.HasPrefix(e.Filler, "too large ") || e.Filler == keyless {
			t.Errorf("event %s was to be refused, and was delivered", e.ID)
		}
		if released[e.Key] {
			ordered[i].Key = e.ID // alone in its order
		}
	}
	expired := s.compareExpiring(t, &v.Expired, s.late(t, arrived, &v.Expired))
	expected := s.expected(committed, failed, expired)
	s.releaseExpired(t, ordered, &v.Expired)
	var o, strict oracle.Result
	o.Compare(expected, ordered)
	strict.Compare(expected, arrived)
	t.Logf("%d keys were released; inversions of theirs, which are allowed: %d", len(released), strict.Inversions-o.Inversions)
	if *faultExactly {
		s.describeRepeats(t, arrived)
	}
	v.Events, v.Lost, v.Phantom, v.Duplicates, v.Inversions = len(committed), o.Lost, o.Phantom, o.Duplicates, o.Inversions
	s.classify(t, committed, ordered, failed, expired, *v)
}

// classify writes the history and requires that outbox verify finds in it what the oracle has found.
func (s *suite) classify(t *testing.T, committed map[string]struct{}, ordered []oracle.Event, failed []failedEvent, expired map[string]bool, v result) {
	t.Helper()
	states := map[string]string{}
	for id := range expired {
		states[id] = "expired"
	}
	for _, f := range failed {
		if f.Status != "resolved" {
			states[f.ID] = f.Status
		}
	}
	h := newHistory(t)
	h.add(t, committed, ordered, s.topics.Places(), func(id string) string { return states[id] }, func(e oracle.Event) string { return e.Key })
	report := h.classify(t)
	require.Equal(t, map[verify.Kind]int64{verify.Lost: int64(v.Lost), verify.Phantom: int64(v.Phantom), verify.Repeated: int64(v.Duplicates), verify.Inverted: int64(v.Inversions)},
		countsOf(report), "%s", v)
}

// countsOf returns the findings by kind, with zeros.
func countsOf(r verify.Report) map[verify.Kind]int64 {
	counts := map[verify.Kind]int64{}
	for _, kind := range verify.Kinds {
		counts[kind] = r.Found[kind]
	}
	return counts
}

// describeRepeats logs the events that have arrived again: where in the order of arrivals, and how many rows of outbox
// each has.
func (s *suite) describeRepeats(t *testing.T, arrived []oracle.Event) {
	t.Helper()
	first := map[string]int{}
	for i, e := range arrived {
		at, again := first[e.ID]
		if !again {
			first[e.ID] = i
			continue
		}
		var rows string
		require.NoError(t, s.db.QueryRow(s.ctx, `SELECT coalesce(string_agg(id || ' at ' || created_at, ', '), 'none') FROM outbox WHERE payload->>'id' = $1`, e.ID).Scan(&rows))
		t.Logf("arrived again: %s, version %d of %s, fleeting %t, as number %d and %d of %d; rows of outbox: %s",
			e.ID, e.Version, e.Key, oracle.GoesToFleeting(e), at, i, len(arrived), rows)
	}
}

// requireOneLeader is requireOneHolder where a relay may lose the lease and take
// it again before anybody else does.
func (s *suite) requireOneLeader(t *testing.T) {
	t.Helper()
	var early, long, epochs int
	require.NoError(t, s.db.QueryRow(s.ctx, `
		SELECT count(*) FILTER (WHERE (was).holder <> (became).holder AND (was).expires_at > at
		                         AND ((was).locked_epoch IS DISTINCT FROM (was).epoch OR (became).exclusive_at IS DISTINCT FROM greatest((was).exclusive_at, (was).expires_at))),
		       count(*) FILTER (WHERE (became).expires_at > at + $1::interval),
		       count(*) FILTER (WHERE (became).epoch < (was).epoch OR (was).holder <> (became).holder AND (became).epoch = (was).epoch)
		  FROM lease_history`, lease).Scan(&early, &long, &epochs))
	require.Zero(t, early, "takeovers of a lease that was held, and whose holder had no lock; or without a word of it")
	require.Zero(t, long, "leases of more than %v", lease)
	require.Zero(t, epochs, "wrong epochs")
}

// awaitArrivals waits until the committed events are where they must be, or no more
// arrive.
func (s *suite) awaitArrivals(t *testing.T, committed map[string]struct{}) {
	t.Helper()
	missing, progress := len(committed)+1, time.Now()
	expiring := map[string]bool{} // awaitExpiring is for these
	for _, e := range s.expiring(t) {
		expiring[e.ID] = true
	}
	for missing > 0 && time.Since(progress) < testenv.Patience {
		failed := s.failed(t)
		now := s.topics.Missing(s.expected(committed, failed, expiring)) + countByStatus(failed)["waiting"]
		if now < missing {
			missing, progress = now, time.Now()
		}
		s.sleep(t, 200*time.Millisecond)
	}
}

// expected returns what has committed and must arrive: not what Kafka refuses, nor what need not, unless it has.
func (s *suite) expected(committed map[string]struct{}, failed []failedEvent, needNot map[string]bool) map[string]struct{} {
	expected := maps.Clone(committed)
	for id := range needNot {
		if !s.topics.Has(id) {
			delete(expected, id)
		}
	}
	for _, f := range failed {
		if f.Status != "resolved" && !s.topics.Has(f.ID) {
			delete(expected, f.ID)
		}
	}
	return expected
}

// failedEvent is a row of outbox_failed.
type failedEvent struct {
	ID, Key, Status string
	Poison          bool
}

func (s *suite) failed(t *testing.T) []failedEvent {
	t.Helper()
	rows, err := s.db.Query(context.Background(), `
		SELECT payload->>'id', aggregate_id, status, (payload->>'filler')::text = ANY($1) FROM outbox_failed`, []string{tooLarge, keyless})
	require.NoError(t, err)
	failed, err := pgx.CollectRows(rows, pgx.RowToStructByPos[failedEvent])
	require.NoError(t, err)
	return failed
}

func countByStatus(failed []failedEvent) map[string]int {
	counts := map[string]int{}
	for _, f := range failed {
		counts[f.Status]++
	}
	return counts
}

// releasedKeys returns the keys that were released when an event of theirs became dead: they have
// no order any more. It fails the test if a good event was blamed.
func releasedKeys(t *testing.T, failed []failedEvent) (released map[string]bool) {
	t.Helper()
	released = map[string]bool{}
	for _, f := range failed {
		if (f.Status == "failed" || f.Status == "dead") && !f.Poison {
			t.Errorf("event %s of %s is %s, and nothing is wrong with it", f.ID, f.Key, f.Status)
		}
		if f.Status == "dead" {
			released[f.Key] = true
		}
	}
	return released
}
