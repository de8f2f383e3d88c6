package faults

import (
	"errors"
	"hash/fnv"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

const (
	viewAction = "VIEW_COUNT_INCREASED"
	likeAction = "LIKE_COUNT_CHANGED"
	// likeAttempts is how often a like is tried before it is DEAD.
	likeAttempts = 10
	// retryLimit is how long likes may take until all of them are done or DEAD: all their waits, and what members that
	// were killed have had for as long as their leases.
	retryLimit = 5 * time.Minute
)

// likeRetry returns how likes are tried again: the last attempt comes after a minute and a half, in the short form
// after some seconds.
func likeRetry() outbox.RetryPolicy {
	if *groupKills == 0 {
		return outbox.RetryPolicy{MaxRetries: likeAttempts - 1, RetryWait: 50 * time.Millisecond, MaxRetryWait: time.Second}
	}
	return outbox.RetryPolicy{MaxRetries: likeAttempts - 1, RetryWait: 400 * time.Millisecond, MaxRetryWait: 20 * time.Second}
}

// failures returns how many attempts on a like fail, by its id, so that all members and the shop say the same: one in
// a hundred likes fails, a third of these in all attempts, and the others in two to seven. A member that is killed in
// an attempt has used it up.
func failures(id string) int {
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(id)) // never fails
	switch sum := hash.Sum64(); sum % 300 {
	case 0:
		return likeAttempts
	case 1, 2:
		return 2 + int(sum/300%6)
	}
	return 0
}

// errDownstream is the error of a like that is to fail.
var errDownstream = errors.New("downstream fails")

func failDownstream(m outbox.Metadata) error {
	if m.Attempt <= failures(m.ID) {
		return errDownstream
	}
	return nil
}

// sequenceOf returns which event of the shop it is.
func sequenceOf(m outbox.Metadata) int64 {
	n, err := strconv.ParseInt(m.Extensions[sequence], 10, 64)
	if err != nil {
		panic(err) // each event of the shop says it
	}
	return n
}

// One in a hundred events fails, a third of these for ever.
func TestFailures(t *testing.T) {
	t.Parallel()
	s, failing, dead := newShop("t", 1), 0, 0
	for s.events = range 100_000 {
		switch n := failures(s.id()); {
		case n >= likeAttempts:
			dead++
		case n > 0:
			failing++
			require.True(t, n >= 2 && n <= 7)
		}
	}
	require.InDelta(t, 667, failing, 120)
	require.InDelta(t, 333, dead, 90)
}

// doneOrParked returns how many actions are done, parked or DEAD in PostgreSQL, as one snapshot has them. Rows of
// likes are enough: those of other actions are tried again at once.
func (g *group) doneOrParked(t *testing.T) (n int) {
	t.Helper()
	require.NoError(t, g.db.QueryRow(g.ctx, `
		SELECT (SELECT coalesce(sum(actions), 0) FROM product_statistic)
		     + (SELECT count(*) FROM event_delivery WHERE action = $1 AND status <> 'DONE')`, likeAction).Scan(&n))
	return n
}

// parked returns how many events have been parked, and how many of these are still to be handled.
func (g *group) parked(t *testing.T) (all, open int) {
	t.Helper()
	require.NoError(t, g.db.QueryRow(g.ctx, `SELECT count(*), count(*) FILTER (WHERE status NOT IN ('DONE', 'DEAD')) FROM event_delivery`).Scan(&all, &open))
	return all, open
}

// awaitRetried waits until all parked events are done or DEAD.
func (g *group) awaitRetried(t *testing.T) {
	t.Helper()
	began := time.Now()
	var sold time.Time
	g.shop.healthy = true
	done := func() bool {
		_, open := g.parked(t)
		if open > 0 && time.Since(sold) > time.Second { // a failure counts only if another like succeeds meanwhile
			g.shop.sell(t, 30)
			sold = time.Now()
		}
		return open == 0
	}
	if !g.await(t, retryLimit, done) {
		t.Errorf("parked events are open after %v", retryLimit)
	}
	g.awaitHandled(t) // what was sold meanwhile
	t.Logf("%5.1f s: all parked events done or dead after %v", time.Since(g.start).Seconds(), time.Since(began).Round(time.Millisecond))
}

// eventRange is a range of events of the shop.
type eventRange struct{ first, last int }

// sqlOvertaken reads the effects of likes and views that were committed behind one of a later event of their product.
// Events that PostgreSQL may have lost are left out: members have gone on behind them until the group was rewound.
const sqlOvertaken = `
SELECT e.action, e.product_id, e.sequence, e.highest
  FROM (SELECT action, product_id, sequence, max(sequence) OVER (PARTITION BY action, product_id ORDER BY n) AS highest FROM effect) AS e
 WHERE e.sequence < e.highest
   AND NOT EXISTS (SELECT FROM unnest($1::bigint[], $2::bigint[]) AS r (first, last) WHERE e.sequence BETWEEN r.first AND r.last)`

// overtaken returns how many effects were overtaken by a later event of their key.
func (g *group) overtaken(t *testing.T) (n int) {
	t.Helper()
	first, last := make([]int, len(g.repeated)), make([]int, len(g.repeated))
	for i, r := range g.repeated {
		first[i], last[i] = r.first, r.last
	}
	rows, err := g.db.Query(g.ctx, sqlOvertaken, first, last)
	require.NoError(t, err)
	var action, product string
	var event, highest int
	histories := map[[2]string]bool{}
	_, err = pgx.ForEachRow(rows, []any{&action, &product, &event, &highest}, func() error {
		n++
		histories[[2]string{action, product}] = true
		t.Logf("overtaken: %s of event %d of %s is behind that of event %d", action, event, product, highest)
		return nil
	})
	require.NoError(t, err)
	for of := range histories {
		g.showHistory(t, of[0], of[1])
	}
	return n
}

// sqlHistory reads the effects of a key in their order, and what is known of their events if they were parked.
const sqlHistory = `
SELECT concat_ws(' ', 'effect', e.n, 'of event', e.sequence, coalesce(
       (SELECT concat_ws(' ', 'row', d.id, d.status, 'attempts', d.attempt_count, 'put back', d.put_back, 'made', d.created_at::time, 'done', d.processed_at::time,
                         'partition', d.record_partition, 'offset', d.position, d.last_error_code, d.last_error_message)
          FROM event_delivery AS d WHERE d.event_id = i.id AND d.action = e.action ORDER BY d.id DESC LIMIT 1), 'without a row'))
  FROM effect AS e JOIN unnest($3::bigint[], $4::uuid[]) AS i (sequence, id) USING (sequence)
 WHERE e.action = $1 AND e.product_id = $2 ORDER BY e.n`

// showHistory logs it.
func (g *group) showHistory(t *testing.T, action, product string) {
	t.Helper()
	rows, err := g.db.Query(g.ctx, `SELECT sequence FROM effect WHERE action = $1 AND product_id = $2`, action, product)
	require.NoError(t, err)
	sequences, err := pgx.CollectRows(rows, pgx.RowTo[int])
	require.NoError(t, err)
	ids := make([]string, len(sequences))
	for i, event := range sequences {
		ids[i] = eventID(event)
	}
	rows, err = g.db.Query(g.ctx, sqlHistory, action, product, sequences, ids)
	require.NoError(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	for _, line := range lines {
		t.Logf("%s of %s: %s", action, product, line)
	}
}

// wrongDead returns how many dead letters there are, and how many events are DEAD though they were not meant to be,
// or not DEAD though they were, or have more than one row; and as many of which that is true of dead letters. There
// may be several of these.
func (g *group) wrongDead(t *testing.T) (deadLetters, wrong int) {
	t.Helper()
	rows, err := g.db.Query(g.ctx, `SELECT event_id::text, action, attempt_count, coalesce(last_error_code, ''), coalesce(last_error_message, '') FROM event_delivery WHERE status = 'DEAD'`)
	require.NoError(t, err)
	dead := map[string]int{}
	var id, action, code, message string
	var attempts int
	_, err = pgx.ForEachRow(rows, []any{&id, &action, &attempts, &code, &message}, func() error {
		if dead[id]++; action != likeAction || !g.shop.dead[id] || dead[id] > 1 {
			wrong++
			t.Logf("dead: %s of event %s after %d attempts: %s: %s", action, id, attempts, code, message)
		}
		return nil
	})
	require.NoError(t, err)
	sent := g.deadLetters(t)
	for id, n := range sent {
		deadLetters += n
		if !g.shop.dead[id] {
			wrong++
			t.Logf("dead: event %s has %d dead letters, and was not to have one", id, n)
		}
	}
	for id := range g.shop.dead {
		if dead[id] == 0 || sent[id] == 0 {
			wrong++
			t.Logf("dead: event %s has %d rows that are DEAD, and %d dead letters", id, dead[id], sent[id])
		}
	}
	return deadLetters, wrong
}

// deadLetters returns how many dead letters of likes there are, by the id of their event, and all others under "".
func (g *group) deadLetters(t *testing.T) map[string]int {
	t.Helper()
	topic := outbox.DeadLetterTopic(g.spec.Topic)
	left := g.ends(t, topic)[0]
	client, err := kgo.NewClient(kgo.SeedBrokers(g.spec.Brokers...), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: {0: kgo.NewOffset().AtStart()}}))
	require.NoError(t, err)
	defer client.Close()
	sent := map[string]int{}
	for left > 0 {
		fetches := client.PollFetches(g.ctx)
		require.NoError(t, fetches.Err())
		fetches.EachRecord(func(r *kgo.Record) {
			left--
			said := map[string]string{}
			for _, h := range r.Headers {
				said[h.Key] = string(h.Value)
			}
			if said[outbox.DeadLetterAction] != likeAction {
				said["ce_id"] = ""
			}
			sent[said["ce_id"]]++
		})
	}
	return sent
}
