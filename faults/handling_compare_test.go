package faults

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// A run is right if nothing is wrong and everything has happened.
func TestMarketResult(t *testing.T) {
	t.Parallel()
	right := func() marketResult {
		return marketResult{Events: 1, Bad: 1, Effects: 1, Dead: 1, Kills: 1, Freezes: 1, Cuts: 1, Inside: 1, Stops: 1, Releases: 1, Outages: 1, SetBack: 1}
	}
	require.NoError(t, right().Err())
	require.NoError(t, right().missing())
	for _, effect := range []func(*marketResult) *int{
		func(v *marketResult) *int { return &v.Events },
		func(v *marketResult) *int { return &v.Bad },
		func(v *marketResult) *int { return &v.Effects },
		func(v *marketResult) *int { return &v.Dead },
		func(v *marketResult) *int { return &v.Kills },
		func(v *marketResult) *int { return &v.Freezes },
		func(v *marketResult) *int { return &v.Cuts },
		func(v *marketResult) *int { return &v.Inside },
		func(v *marketResult) *int { return &v.Stops },
		func(v *marketResult) *int { return &v.Releases },
		func(v *marketResult) *int { return &v.Outages },
		func(v *marketResult) *int { return &v.SetBack },
	} {
		v := right()
		*effect(&v) = 0
		require.Error(t, v.missing())
	}
	for _, count := range []func(*marketResult) *int{
		func(v *marketResult) *int { return &v.WrongCounts },
		func(v *marketResult) *int { return &v.WrongNotes },
		func(v *marketResult) *int { return &v.Unseen },
		func(v *marketResult) *int { return &v.Disorder },
		func(v *marketResult) *int { return &v.Overtaken },
		func(v *marketResult) *int { return &v.WrongDead },
		func(v *marketResult) *int { return &v.Stuck },
	} {
		v := right()
		*count(&v) = 1
		require.Error(t, v.Err())
	}
}

const (
	// sqlDead has the deaths of a group and an action.
	sqlDead = ` FROM event_delivery AS d WHERE d.status = 'DEAD' AND d.consumer_group = o.consumer_group AND d.action = o.action AND d.event_id = o.event_id`

	// sqlDeadAlive counts bad events that are not dead, and sqlMissing others that have no effect.
	sqlDeadAlive = `SELECT count(*) FROM deal_owed AS o WHERE o.must AND o.bad <> '' AND NOT EXISTS (SELECT` + sqlDead + `)`
	sqlMissing   = `
SELECT count(*) FROM deal_owed AS o
 WHERE o.must AND o.bad = '' AND NOT EXISTS (SELECT FROM deal_effect AS e WHERE e.event_id = o.event_id AND e.consumer_group = o.consumer_group AND e.action = o.action)
   AND NOT EXISTS (SELECT` + sqlDead + `)`
	// sqlOpen counts what is to be handled, and what new handlers have still to read.
	sqlOpen = `SELECT (SELECT count(*) FROM event_delivery WHERE status IN ('PENDING', 'PARKED', 'PROCESSING')) + (SELECT count(*) FROM consumer_gap)`
)

// marketChecks find what is wrong. Each row is a group, an action, an event and what is wrong with it.
var marketChecks = []struct {
	name  string
	count func(*marketResult) *int
	sql   string
}{
	{"effects made more than once, or of an event that is bad or was not committed", func(v *marketResult) *int { return &v.WrongCounts }, `
		SELECT e.consumer_group, e.action, e.event_id::text, count(*) || ' effects of event ' || e.sequence || ' of ' || e.key
		  FROM deal_effect AS e LEFT JOIN deal_owed AS o USING (event_id, consumer_group, action)
		 GROUP BY 1, 2, e.event_id, e.sequence, e.key, o.event_id, o.bad HAVING count(*) > 1 OR o.event_id IS NULL OR o.bad <> ''`},
	{"totals that are not those of the committed events", func(v *marketResult) *int { return &v.WrongCounts }, `
		SELECT consumer_group, action, key, concat('total ', s.effects, ' of ', s.amount, ', and not ', w.effects, ' of ', w.amount)
		  FROM deal_total AS s
		  FULL JOIN (SELECT o.consumer_group, o.action, o.key, count(*) AS effects, sum(o.amount) AS amount FROM deal_owed AS o
		              WHERE EXISTS (SELECT FROM deal_effect AS e WHERE e.event_id = o.event_id AND e.consumer_group = o.consumer_group AND e.action = o.action)
		              GROUP BY 1, 2, 3) AS w USING (consumer_group, action, key)
		 WHERE (s.effects, s.amount) IS DISTINCT FROM (w.effects, w.amount)`},
	{"notes without effect, or effects without note", func(v *marketResult) *int { return &v.WrongNotes }, `
		SELECT consumer_group, action, event_id, CASE WHEN h.n IS NULL THEN 'an effect without a note' ELSE 'a note without an effect' END
		  FROM (SELECT consumer_group, action, aggregate_id AS event_id, count(*) AS n FROM event_handled GROUP BY 1, 2, 3) AS h
		  FULL JOIN (SELECT consumer_group, action, event_id::text AS event_id, count(*) AS n FROM deal_effect GROUP BY 1, 2, 3) AS e USING (consumer_group, action, event_id)
		 WHERE h.n IS DISTINCT FROM 1 OR e.n IS NULL`},
	{"committed events that were not seen", func(v *marketResult) *int { return &v.Unseen }, `
		SELECT o.consumer_group, o.action, o.event_id::text, concat('event ', o.sequence, ' of ', o.key, ', recorded ', o.at::time, ' ', o.bad)
		  FROM deal_owed AS o
		 WHERE o.must
		   AND NOT EXISTS (SELECT FROM deal_effect AS e WHERE e.event_id = o.event_id AND e.consumer_group = o.consumer_group AND e.action = o.action)
		   AND NOT EXISTS (SELECT FROM event_delivery AS d WHERE d.event_id = o.event_id AND d.consumer_group = o.consumer_group AND d.action IN (o.action, '') AND d.status <> 'DONE')
		 ORDER BY o.at`},
	{"effects behind one of a later event", func(v *marketResult) *int { return &v.Disorder }, sqlLate + `AND NOT parked`},
	{"effects of parked events behind one of a later event", func(v *marketResult) *int { return &v.Overtaken }, sqlLate + `AND parked`},
	{"effects in front of the death of an earlier event", func(v *marketResult) *int { return &v.Overtaken }, `
		SELECT o.consumer_group, o.action, o.event_id::text, concat('event ', o.sequence, ' of ', o.key, ' is dead since ', d.processed_at::time, ', and ', e.sequence, ' had its effect ', e.at::time)
		  FROM event_delivery AS d JOIN deal_owed AS o ON o.event_id = d.event_id AND o.consumer_group = d.consumer_group AND o.action = d.action
		  JOIN deal_effect AS e ON e.consumer_group = o.consumer_group AND e.action = o.action AND e.key = o.key AND e.sequence > o.sequence AND e.at < d.processed_at
		 WHERE d.status = 'DEAD'`},
	{"dead though healthy", func(v *marketResult) *int { return &v.WrongDead }, `
		SELECT d.consumer_group, d.action, d.event_id::text, concat(d.last_error_code, ' ', d.last_error_message)
		  FROM event_delivery AS d LEFT JOIN deal_owed AS o USING (event_id, consumer_group, action)
		 WHERE d.status = 'DEAD' AND coalesce(o.bad, '') = ''`},
	{"bad and not dead once", func(v *marketResult) *int { return &v.WrongDead }, `
		SELECT o.consumer_group, o.action, o.event_id::text, concat('event ', o.sequence, ' of ', o.key, ': ', o.bad)
		  FROM deal_owed AS o WHERE o.must AND o.bad <> '' AND (SELECT count(*)` + sqlDead + `) <> 1`},
	{"dead in " + feedGroup + " and without a dead letter, or the other way round", func(v *marketResult) *int { return &v.WrongDead }, `
		SELECT '` + feedGroup + `', action, event_id, CASE WHEN d.event_id IS NULL THEN 'a dead letter of an event that is not dead' ELSE 'dead without a dead letter' END
		  FROM (SELECT DISTINCT event_id::text, action FROM event_delivery WHERE status = 'DEAD' AND consumer_group = '` + feedGroup + `') AS d
		  FULL JOIN (SELECT DISTINCT event_id, action FROM deal_letter) AS l USING (event_id, action) WHERE d.event_id IS NULL OR l.event_id IS NULL`},
	{"open rows", func(v *marketResult) *int { return &v.Stuck }, `
		SELECT consumer_group, action, event_id::text, status::text FROM event_delivery WHERE status IN ('PENDING', 'PARKED', 'PROCESSING') ORDER BY id`},
	{"gaps that were not read", func(v *marketResult) *int { return &v.Stuck }, `
		SELECT consumer_group, action, concat(topic, '/', partition), concat('from ', from_offset) FROM consumer_gap`},
}

// sqlLate finds effects behind one of a later event of their key. An event that was tried again, or has a row though it
// came from Kafka, was parked.
const sqlLate = `
SELECT consumer_group, action, event_id::text, concat('event ', sequence, ' of ', key, ' had its effect ', at::time, ' behind that of ', highest)
  FROM (SELECT e.*, max(e.sequence) OVER (PARTITION BY e.consumer_group, e.action, e.key ORDER BY e.n) AS highest,
               EXISTS (SELECT FROM event_delivery AS d WHERE d.event_id = e.event_id AND d.consumer_group = e.consumer_group AND d.action = e.action
                          AND (d.record IS NOT NULL OR d.failed_at IS NOT NULL)) AS parked
          FROM deal_effect AS e) AS e
 WHERE sequence < highest `

// mostShown is how many events of each kind are shown that are wrong.
const mostShown = 20

// compare sets the counts of the result.
func (m *market) compare(t *testing.T, v *marketResult) {
	t.Helper()
	v.Seconds, v.DoneAfter = time.Since(m.start).Seconds(), m.doneAfter.Milliseconds()
	v.Kills, v.Freezes, v.Cuts, v.Inside, v.Stops, v.Releases, v.Outages, v.SetBack = m.kills, m.freezes, m.cuts, m.inside, m.stops, m.releases, m.outages, m.setBack
	v.Events = m.number(t, `SELECT count(*) FROM deal_history`)
	v.Bad = m.number(t, `SELECT count(*) FROM deal_history WHERE bad <> ''`)
	v.Effects = m.number(t, `SELECT count(*) FROM deal_effect`)
	v.Dead = m.number(t, `SELECT count(*) FROM event_delivery WHERE status = 'DEAD'`)
	m.readDeadLetters(t)
	for _, check := range marketChecks {
		rows, err := m.db.Query(m.ctx, check.sql)
		require.NoError(t, err, check.name)
		n := 0
		var group, action, event, text string
		var shown [][2]string
		_, err = pgx.ForEachRow(rows, []any{&group, &action, &event, &text}, func() error {
			if n++; n <= mostShown {
				shown = append(shown, [2]string{event, fmt.Sprintf("%s: %s %s %s: %s", check.name, group, action, event, text)})
			}
			return nil
		})
		require.NoError(t, err, check.name)
		*check.count(v) += n
		for _, of := range shown {
			t.Log(of[1])
			m.show(t, of[0])
		}
	}
}

// sqlMarketRows reads all that is known of an event.
const sqlMarketRows = `
SELECT 'event_delivery ' || (to_jsonb(d) - '{payload,payload_bytes,record,headers,record_digest,order_key,source,content_type,aggregate_type,aggregate_id}'::text[])::text FROM event_delivery AS d WHERE event_id::text = $1
 UNION ALL SELECT 'event_handled ' || to_jsonb(h)::text FROM event_handled AS h WHERE aggregate_id = $1
 UNION ALL SELECT 'effect ' || to_jsonb(e)::text FROM deal_effect AS e WHERE event_id::text = $1
 UNION ALL SELECT 'outbox ' || to_jsonb(o)::text FROM (SELECT id, xid, created_at FROM outbox WHERE event_id::text = $1) AS o
 UNION ALL SELECT 'gap ' || to_jsonb(g)::text FROM consumer_gap AS g`

// show logs the rows of an event, and what members have said of it.
func (m *market) show(t *testing.T, event string) {
	t.Helper()
	rows, err := m.db.Query(m.ctx, sqlMarketRows, event)
	require.NoError(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	for _, line := range append(lines, m.logLines(event, mostShown)...) {
		t.Log("    ", line)
	}
}

func (m *market) number(t *testing.T, sql string) (n int) {
	t.Helper()
	require.NoError(t, m.db.QueryRow(m.ctx, sql).Scan(&n), sql)
	return n
}

// readDeadLetters puts the dead letters into deal_letter.
func (m *market) readDeadLetters(t *testing.T) {
	t.Helper()
	from, left := map[string]map[int32]kgo.Offset{}, 0
	for _, topic := range m.topics.all() {
		topic = outbox.DeadLetterTopic(topic)
		if end := m.endOf(t, topic); end > 0 {
			from[topic], left = map[int32]kgo.Offset{0: kgo.NewOffset().AtStart()}, left+int(end)
		}
	}
	if left == 0 {
		return
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(m.brokers...), kgo.ConsumePartitions(from))
	require.NoError(t, err)
	defer client.Close()
	for left > 0 {
		fetches := client.PollFetches(m.ctx)
		require.NoError(t, fetches.Err())
		fetches.EachRecord(func(r *kgo.Record) {
			left--
			said := map[string]string{}
			for _, h := range r.Headers {
				said[h.Key] = string(h.Value)
			}
			_, err := m.db.Exec(m.ctx, `INSERT INTO deal_letter VALUES ($1, $2)`, said["ce_id"], said[outbox.DeadLetterAction])
			require.NoError(t, err)
		})
	}
}

// endOf returns the end of a topic with one partition.
func (m *market) endOf(t *testing.T, topic string) int64 {
	t.Helper()
	ends, err := oracle.Ends(m.ctx, m.brokers, topic)
	require.NoError(t, err)
	return ends[0]
}
