package starts

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/testenv"
)

// Positions that could not be saved are saved once PostgreSQL works, and not only at the next interval: until then the
// consumer says that it does not work.
func TestSavingIsTriedAgain(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Migrated(t)
	s, id := NewStore(db, schema, "g"), kafka.TopicID{1}
	var log testenv.Buffer
	m := NewMember(Config{Store: s, Outages: outage.NewLogs(slog.New(slog.NewTextHandler(&log, nil)))})
	m.ids["sales"] = id
	m.Committed(kafka.Partition{Topic: "sales", Number: 0}, 4)
	rename := func(from, to string) {
		_, err := s.db.Exec(t.Context(), "ALTER TABLE "+pgx.Identifier{schema, from}.Sanitize()+" RENAME TO "+pgx.Identifier{to}.Sanitize())
		require.NoError(t, err)
	}
	says := func(text string) func() bool { return func() bool { return strings.Contains(log.String(), text) } }
	rename("consumer_start", "elsewhere")
	const interval = 2 * time.Second
	testenv.Run(t, func(ctx context.Context) error { m.keepSaving(ctx, interval); return nil })
	require.Eventually(t, says("saving positions fails"), testenv.Patience, time.Millisecond)
	rename("elsewhere", "consumer_start")
	works := time.Now()
	require.Eventually(t, says("saving positions works again"), testenv.Patience, time.Millisecond)
	require.Less(t, time.Since(works), interval/2)
}

// What is found lost while a save fails is added to what could not be saved, in either order.
func TestPositionIsPutBack(t *testing.T) {
	t.Parallel()
	at := kafka.Partition{Topic: "sales", Number: 0}
	for name, tt := range map[string]struct{ newer, unsaved, want position }{
		"lost meanwhile":              {position{offset: None, lost: 7}, position{offset: 4, lost: 0}, position{offset: 4, lost: 7}},
		"lost before and meanwhile":   {position{offset: None, lost: 7}, position{offset: 4, lost: 2}, position{offset: 4, lost: 9}},
		"committed meanwhile":         {position{offset: 5, lost: 0}, position{offset: None, lost: 7}, position{offset: 5, lost: 7}},
		"both meanwhile":              {position{offset: 5, lost: 1}, position{offset: 4, lost: 7}, position{offset: 5, lost: 8}},
		"set back before":             {position{offset: 5}, position{offset: 4, setBack: true}, position{offset: 5, setBack: true}},
		"lost twice, and no position": {position{offset: None, lost: 1}, position{offset: None, lost: 7}, position{offset: None, lost: 8}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := NewMember(Config{})
			m.note(at, tt.newer)
			m.putBack(at, tt.unsaved)
			require.Equal(t, tt.want, m.positions[at])
		})
	}
	m := NewMember(Config{})
	m.putBack(at, position{offset: 4, lost: 0})
	m.note(at, position{offset: None, lost: 7})
	require.Equal(t, position{offset: 4, lost: 7}, m.positions[at], "lost afterwards")
}

// Kafka has lost records, and new ones have their offsets. The position follows, also where records that were fetched
// before are committed afterwards. What a member that has lost the partition has not saved, the next one does.
func TestPositionIsSetBack(t *testing.T) {
	t.Parallel()
	s, id := storeFixture(t)
	at := kafka.Partition{Topic: "sales", Number: 1}
	saved := func() int64 {
		topics, err := s.topics(t.Context(), map[string]kafka.TopicID{"sales": id})
		require.NoError(t, err)
		return topics["sales"].partitions[at.Number].position
	}
	member := func(committed int64) *Member {
		log := slog.New(slog.DiscardHandler)
		m := NewMember(Config{Store: s, Log: log, Outages: outage.NewLogs(log), Lost: func(kafka.Partition, int64) {}})
		m.ids["sales"] = id
		_, err := s.assign(t.Context(), m.id.String(), []Offset{{Partition: at, Topic: id, At: committed}})
		require.NoError(t, err)
		m.begun(at, committed, partition{position: saved()})
		return m
	}
	requireSaved := func(m *Member, want int64, why string) {
		t.Helper()
		m.SavePositions(t.Context())
		require.Equal(t, want, saved(), why)
	}
	m := member(7)
	m.Committed(at, 1_000)
	requireSaved(m, 1_000, "as always")
	m.Truncated(at, 2_000, kerr.OffsetOutOfRange)
	requireSaved(m, 1_000, "records that are lost behind it")
	m.Truncated(at, 600, kerr.OffsetOutOfRange)
	requireSaved(m, 600, "nothing was committed since")
	m.Committed(at, 1_000)
	requireSaved(m, 1_000, "records that were fetched before")
	m.Committed(at, 650)
	m.Committed(at, 700)
	requireSaved(m, 700, "new records")
	m.Committed(at, 1_000)
	requireSaved(m, 1_000, "new records again")
	m.Truncated(at, 800, kerr.OffsetOutOfRange)
	next := member(800)
	requireSaved(m, 1_000, "it has lost the partition")
	requireSaved(next, 800, "its successor begins there")
	next.Committed(at, 900)
	requireSaved(next, 900, "and goes on")
}
