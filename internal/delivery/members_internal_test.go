package delivery

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pauses"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/testenv"
)

// The row of a process is written and read in every mode of pgx, also behind PgBouncer.
func TestMemberRowInAllModes(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			_, schema := testenv.Migrated(t)
			db := testenv.PoolIn(t, mode)
			s := NewStore(db, schema, "g", "w", time.Minute)
			since := time.Unix(1_000, 0).UTC()
			says := Report{Kafka: time.Now().Add(-time.Minute), Skipped: map[string]int64{`a"b`: 7}, State: outage.State{
				Reasons:  []string{"it's\nbad"},
				Breakers: []outage.Breaker{{Action: "a", State: "open", Since: since}},
				Outages:  []outage.Outage{{What: "PostgreSQL", Class: "read_only", Since: since, Err: `it's "bad"`}},
			}}
			_, kafka, err := s.renewMember(t.Context(), []string{tables.Route("t", "s", "a")}, time.Second, says)
			require.NoError(t, err)
			require.Zero(t, kafka, "there is no other process")
			others, kafka, err := NewStore(db, schema, "g", "v", time.Minute).renewMember(t.Context(), []string{}, time.Second, Report{State: outage.State{Works: true}})
			require.NoError(t, err)
			require.Equal(t, [][]string{{tables.Route("t", "s", "a")}}, others)
			require.WithinDuration(t, says.Kafka, kafka, 10*time.Second)
			same, kafka, err := NewStore(db, schema, "g", "v", time.Minute).renewMember(t.Context(), []string{tables.Route("t", "s", "a")}, time.Second, Report{State: outage.State{Works: true}})
			require.NoError(t, err)
			require.Empty(t, same)
			require.WithinDuration(t, says.Kafka, kafka, 10*time.Second)
			members, err := tables.NewGroupReader(db, schema).Members(t.Context(), "g")
			require.NoError(t, err)
			require.Len(t, members, 2)
			for _, m := range members {
				if m.Works {
					require.Zero(t, m.KafkaAt)
					continue
				}
				require.Equal(t, tables.Skipped(says.Skipped), m.Skipped)
				require.Equal(t, says.Reasons, m.Reasons)
				require.Equal(t, outage.State{Breakers: says.Breakers, Outages: says.Outages}, m.State)
				require.WithinDuration(t, m.RenewedAt.Add(-time.Minute), m.KafkaAt, 10*time.Second)
			}
		})
	}
}

// After an outage of PostgreSQL no process has renewed its row for long, and the first one does not take the others for
// gone: they have handlers until this process has renewed its own row for as long as they may need.
func TestHandledElsewhereAfterAnOutage(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Migrated(t)
	s, other := NewStore(db, schema, "g", "w", time.Minute), NewStore(db, schema, "g", "v", time.Minute)
	renew := func(s *Store) {
		_, _, err := s.renewMember(t.Context(), []string{tables.Route("t", "s", "a")}, 20*time.Second, Report{})
		require.NoError(t, err)
	}
	handled := func() bool {
		elsewhere, err := s.handledElsewhere(t.Context(), "t", "s")
		require.NoError(t, err)
		return elsewhere
	}
	steady := func(since, last time.Duration) {
		s.renewals.since, s.renewals.last = time.Now().Add(-since), time.Now().Add(-last)
	}
	require.False(t, handled())
	renew(other)
	require.True(t, handled())
	_, err := db.Exec(t.Context(), pg.InSchema(`UPDATE {schema}.event_member SET renewed_at = now() - interval '1 hour'`, schema))
	require.NoError(t, err)
	require.True(t, handled(), "this process has not renewed its row")
	renew(s)
	require.True(t, handled(), "it has, for the first time")
	steady(85*time.Second, 10*time.Second)
	require.True(t, handled(), "the other one may still wait for a dead connection")
	steady(2*time.Minute, 10*time.Second)
	require.False(t, handled())
	steady(2*time.Minute, 41*time.Second)
	require.True(t, handled(), "the outage may have begun since")
	renew(s)
	require.True(t, handled(), "the outage is over")
	steady(2*time.Minute, 10*time.Second)
	renew(s)
	require.False(t, handled())
	ended, end := context.WithCancel(t.Context())
	end()
	_, _, err = s.renewMember(ended, nil, 20*time.Second, Report{})
	require.Error(t, err)
	renew(s)
	require.True(t, handled(), "there was an error")

	_, err = db.Exec(t.Context(), pg.InSchema(`UPDATE {schema}.event_member SET renewed_at = now() - interval '25 hours' WHERE member = 'v'`, schema))
	require.NoError(t, err)
	forget := func() {
		_, err := s.unhandled(t.Context())
		require.NoError(t, err)
	}
	forget()
	require.True(t, handled(), "an outage of a day")
	steady(2*time.Minute, 10*time.Second)
	forget()
	renew(s)
	steady(0, 0)
	require.False(t, handled(), "its row is removed")
	renew(other)
	require.True(t, handled())
	require.NoError(t, other.removeMember(t.Context()))
	require.False(t, handled(), "it has ended")
}

// What Health says of the group's events and pauses is as old as the database says, although the clock of this host is
// ahead.
func TestHealthReasonsByAnotherClock(t *testing.T) {
	t.Parallel()
	_, schema := testenv.Migrated(t)
	db := testenv.OtherClock(t, -6*time.Minute)
	_, err := db.Exec(t.Context(), pg.InSchema(`
		INSERT INTO {schema}.event_delivery (position, order_key, attempt_count, max_attempts, next_retry_at, created_at, updated_at, occurred_at, recorded_at,
		       event_id, status, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, payload)
		VALUES (1, 1, 0, 3, now(), now(), now(), now(), now(), gen_random_uuid(), 'PENDING', 'g', 'a', 's', 't', '/s', 't', 'k', 'application/json', '{}')`, schema))
	require.NoError(t, err)
	_, err = db.Exec(t.Context(), pg.InSchema(`INSERT INTO {schema}.consumer_pause (consumer_group, topic, operator, reason, paused_at)
		VALUES ('g', 's', 'kim', 'stock', now() - interval '2 hours')`, schema))
	require.NoError(t, err)
	m := &members{store: NewStore(db, schema, "g", "w", time.Minute), every: time.Minute, groups: tables.NewGroupReader(db, schema)}
	m.look(t.Context(), slog.New(slog.DiscardHandler))
	counts, reasons := m.waiting()
	require.Len(t, counts, 1)
	require.Empty(t, reasons, "the event was recorded a moment ago")
	stored, err := pauses.NewStore(db, schema, "g").Read(t.Context())
	require.NoError(t, err)
	set := pauses.NewSet()
	set.SetStored(stored)
	require.Contains(t, handling.PauseReasons(set, "worker")[0], "topic s is paused by kim since 2h0m")
}

// A process takes owed dead letters of its own streams, and none of those that wait.
func TestOwedDeadLettersOfStreams(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Migrated(t)
	for n, stream := range []string{"foreign", "down", "up"} {
		_, err := db.Exec(t.Context(), pg.InSchema(`
			INSERT INTO {schema}.event_delivery (position, attempt_count, max_attempts, next_retry_at, created_at, updated_at, processed_at, occurred_at, recorded_at, event_id, status,
			       dead_letter_owed, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, payload_bytes, record_partition, record_id, record_digest, record)
			VALUES ($1, 3, 3, now() - interval '1 hour', now(), now(), now(), now(), now(), gen_random_uuid(), 'DEAD',
			       true, 'g', 'a', $2::text, 't', '/s', 't', 'k', 'application/json', '\x', 0, $2::text, sha256($2::text::bytea), '{}')`, schema), n, stream)
		require.NoError(t, err)
	}
	s := NewStore(db, schema, "g", "w", time.Minute).ForRecords()
	take := func(streams ...string) (got []string) {
		taken, _, err := s.takeDeadLetter(t.Context(), streams)
		require.NoError(t, err)
		for _, d := range taken {
			got = append(got, d.Stream)
		}
		return got
	}
	require.Empty(t, take())
	require.Equal(t, []string{"up"}, take("up"))
	require.Equal(t, []string{"down"}, take("up", "down"))
	require.Empty(t, take("up", "down"), "they are with this process")
}

// An owed dead letter of a row that PostgreSQL cannot read is taken without the value, and holds up no other.
func TestOwedDeadLetterOfADamagedRow(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Migrated(t)
	for n := range 2 {
		_, err := db.Exec(t.Context(), pg.InSchema(`
			INSERT INTO {schema}.event_delivery (position, attempt_count, max_attempts, next_retry_at, created_at, updated_at, processed_at, occurred_at, recorded_at, event_id, status,
			       dead_letter_owed, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, payload_bytes, size, record_partition, record_digest, record)
			SELECT $1::int, 3, 3, now() - interval '1 hour' + $1::int * interval '1 min', now(), now(), now(), now(), now(), gen_random_uuid(), 'DEAD',
			       true, 'g', 'a', 'up', 't', '/s', 't', 'k', 'application/json', string_agg(sha256(i::text::bytea), ''::bytea), 32000, 0, sha256($1::int::text::bytea), '{}'
			  FROM generate_series(1, 1000) AS i`, schema), n)
		require.NoError(t, err)
		if n == 0 {
			testenv.Damage(t, db, schema, "event_delivery")
		}
	}
	s := NewStore(db, schema, "g", "w", time.Minute).ForRecords()
	for n, bare := range []bool{true, false} {
		taken, until, err := s.takeDeadLetter(t.Context(), []string{"up"})
		require.NoError(t, err)
		require.Len(t, taken, 1)
		d := taken[0]
		require.Equal(t, []any{int64(n), bare, bare}, []any{d.Position, d.Bare, len(d.Payload) == 0})
		require.NoError(t, s.deadLetterTried(t.Context(), &d, until, true, ""))
	}
	taken, _, err := s.takeDeadLetter(t.Context(), []string{"up"})
	require.NoError(t, err)
	require.Empty(t, taken)
}

// A row that was requeued, with another payload perhaps, and is DEAD once more keeps its value, and its dead letter is
// still owed, when a process has sent the dead letter of the first death.
func TestOwedDeadLetterOfAnEarlierDeath(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Migrated(t)
	var id int64
	require.NoError(t, db.QueryRow(t.Context(), pg.InSchema(`
		INSERT INTO {schema}.event_delivery (position, attempt_count, max_attempts, next_retry_at, created_at, updated_at, processed_at, occurred_at, recorded_at, event_id, status,
		       dead_letter_owed, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, payload_bytes, size, record_partition, record_digest, record)
		VALUES (1, 3, 3, now() - interval '1 hour', now(), now(), now(), now(), now(), gen_random_uuid(), 'DEAD',
		       true, 'g', 'a', 'up', 't', '/s', 't', 'k', 'application/json', 'old', 100000, 0, 'x', '{}') RETURNING id`, schema)).Scan(&id))
	s := NewStore(db, schema, "g", "w", time.Minute).ForRecords()
	for _, again := range []bool{true, false} {
		taken, until, err := s.takeDeadLetter(t.Context(), []string{"up"})
		require.NoError(t, err)
		require.Len(t, taken, 1)
		if again {
			_, err := db.Exec(t.Context(), pg.InSchema(`UPDATE {schema}.event_delivery SET payload_bytes = 'new', next_retry_at = now() - interval '1 min'`, schema))
			require.NoError(t, err)
		}
		require.NoError(t, s.deadLetterTried(t.Context(), &taken[0], until, true, "up.dlq-0-7"))
		var payload, place string
		var owed bool
		require.NoError(t, db.QueryRow(t.Context(), pg.InSchema(`
			SELECT convert_from(payload_bytes, 'UTF8'), coalesce(dead_letter, ''), dead_letter_owed FROM {schema}.event_delivery WHERE id = $1`, schema), id).Scan(&payload, &place, &owed))
		if again {
			require.Equal(t, []any{"new", "", true}, []any{payload, place, owed})
		} else {
			require.Equal(t, []any{"", "up.dlq-0-7", false}, []any{payload, place, owed})
		}
	}
}

// What a group has to handle is counted at the same cost while an old transaction keeps the index entries of all
// deliveries that were with a process since.
func TestCountsWalkNoOldLeases(t *testing.T) {
	testenv.Long(t)
	// Not parallel: it counts the buffers that PostgreSQL touches.
	f := newPlans(t)
	const done = 100_000
	f.exec(`ALTER TABLE {schema}.event_delivery SET (autovacuum_enabled = false)`)
	f.exec(`
		INSERT INTO {schema}.event_delivery (position, order_key, attempt_count, max_attempts, next_retry_at, created_at, updated_at, occurred_at, recorded_at, locked_by, locked_until,
		       event_id, status, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, payload)
		SELECT n, n, 0, 3, now(), now(), now(), now(), now(), 'w', now() - interval '1 hour',
		       gen_random_uuid(), 'PROCESSING', CASE WHEN n % 2 = 0 THEN 'g' ELSE 'another' END, 'a', 's', 't', '/s', 't', 'k', 'application/json', '{}'
		  FROM generate_series(1, $1::bigint) AS n`, done)
	f.exec(`UPDATE {schema}.event_delivery SET status = 'DONE', locked_by = NULL, locked_until = NULL, processed_at = now()`)
	f.prepare("waiting", "text[], text, text, text, text, text, text, text, timestamptz, timestamptz, bool, text, text, int, int", tables.SQLWaitingOfGroup)
	f.inTx(func(tx pgx.Tx) {
		buffers, plan := f.buffersOf(tx, "waiting", `'{PENDING,PARKED,DEAD}', 'g', '', '', '', '', '', '', NULL, NULL, NULL, '', '', 1000, 10000`)
		t.Logf("%d buffers", buffers)
		require.LessOrEqual(t, buffers, 200, plan)
	})
}
