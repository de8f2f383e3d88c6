package starts

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/goleak"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(testenv.Main(m)) }

// storeFixture is the store of a group whose topic is listed.
func storeFixture(t *testing.T) (*Store, kafka.TopicID) {
	t.Helper()
	db, schema := testenv.Migrated(t)
	s, id := NewStore(db, schema, "g"), kafka.TopicID{1}
	require.NoError(t, s.list(t.Context(), map[string]topic{"sales": {id: id, partitions: map[int32]partition{0: {start: 3, position: None}, 1: {start: 0, position: 7}}}}))
	return s, id
}

func requireGaps(t *testing.T, s *Store, want ...int64) []Gap {
	t.Helper()
	gaps, err := s.gaps(t.Context(), []string{"sales"})
	require.NoError(t, err)
	var got []int64
	for _, g := range gaps {
		got = append(got, g.From)
	}
	require.ElementsMatch(t, want, got)
	return gaps
}

var sum, count = Handler{"sales", "SUM", "made"}, Handler{"sales", "COUNT", "made"}

// The handlers of the first member of a topic have missed nothing. Later ones have missed what the group has read.
func TestRegister(t *testing.T) {
	t.Parallel()
	s, id := storeFixture(t)
	offsets := map[int32]int64{0: 5, 1: 9}
	require.NoError(t, s.register(t.Context(), "sales", id, []Handler{count}, offsets))
	requireGaps(t, s)
	require.NoError(t, s.register(t.Context(), "sales", id, []Handler{count, sum}, offsets))
	for _, g := range requireGaps(t, s, 5, 9) {
		require.Equal(t, sum, g.Handler)
	}
	require.NoError(t, s.register(t.Context(), "sales", id, []Handler{count, sum}, map[int32]int64{0: 50, 1: 90}), "another member was faster")
	requireGaps(t, s, 5, 9)
	registered, err := s.handlers(t.Context(), []string{"sales", "other"})
	require.NoError(t, err)
	require.Equal(t, map[Handler]bool{count: true, sum: true}, registered)
}

// A member that has read a gap, and has lost its partition since to a member without the handler, must not remove what
// this one has opened.
func TestGapIsExtendedMeanwhile(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			s, id := storeFixture(t)
			s.db = testenv.PoolIn(t, mode)
			testGapIsExtendedMeanwhile(t, s, id)
		})
	}
}

func testGapIsExtendedMeanwhile(t *testing.T, s *Store, id kafka.TopicID) {
	require.NoError(t, s.register(t.Context(), "sales", id, []Handler{count, sum}, nil))
	require.NoError(t, s.open(t.Context(), []Gap{{Handler: sum, Number: 0, From: 5, id: id}}))
	read := requireGaps(t, s, 5)
	require.NoError(t, s.open(t.Context(), []Gap{{Handler: sum, Number: 0, From: 10, id: id}}))
	read[0].From = 8
	require.NoError(t, s.pass(t.Context(), read, 10))
	requireGaps(t, s, 5)
	read[0].From = 10
	require.NoError(t, s.pass(t.Context(), read, 10))
	read = requireGaps(t, s, 5)

	read[0].From = 8
	require.NoError(t, s.pass(t.Context(), read, 10))
	read = requireGaps(t, s, 8)
	read[0].From = 10
	require.NoError(t, s.pass(t.Context(), read, 10))
	requireGaps(t, s)
}

// A member stands still between the committed offset and the gaps, and loses its partition meanwhile. Its successor
// extends the gap. The member must not remove it, although its version is the one that it has read.
func TestGapOfLostPartitionStays(t *testing.T) {
	t.Parallel()
	s, id := storeFixture(t)
	require.NoError(t, s.register(t.Context(), "sales", id, []Handler{count, sum}, nil))
	require.NoError(t, s.open(t.Context(), []Gap{{Handler: sum, Number: 0, From: 5, id: id}}))
	var expelled error = kerr.UnknownMemberID
	m := &Member{cfg: Config{Store: s, Commit: func(context.Context, map[kafka.Partition]kgo.EpochOffset) error { return expelled }}}
	at := kafka.Partition{Topic: "sales", Number: 0}
	_, err := m.beginGaps(t.Context(), at, start{at: 5, known: true}, requireGaps(t, s, 5))
	require.ErrorIs(t, err, expelled)
	expelled = nil
	left, err := m.beginGaps(t.Context(), at, start{at: 5, known: true}, requireGaps(t, s, 5))
	require.NoError(t, err)
	require.Empty(t, left)
	requireGaps(t, s)
}

// A gap that ends, and is opened again while the member that has read the first one notes its progress, is another gap.
func TestGapIsOpenedAgain(t *testing.T) {
	t.Parallel()
	s, id := storeFixture(t)
	require.NoError(t, s.register(t.Context(), "sales", id, []Handler{count, sum}, nil))
	again := []Gap{{Handler: sum, Number: 0, From: 5, id: id}}
	require.NoError(t, s.open(t.Context(), again))
	slow, fast := requireGaps(t, s, 5), requireGaps(t, s, 5)
	fast[0].From, slow[0].From = 10, 10
	require.NoError(t, s.pass(t.Context(), fast, 10))
	requireGaps(t, s)
	require.NoError(t, s.open(t.Context(), again))
	require.NoError(t, s.pass(t.Context(), slow, 10))
	requireGaps(t, s, 5)
}

// A member without a handler begins at offset 9. Kafka has written records from offset 5 on in place of lost ones, and
// the member handles them. The handler gets them later.
func TestLackingHandlersGetRecordsWrittenAnew(t *testing.T) {
	t.Parallel()
	s, id := storeFixture(t)
	require.NoError(t, s.register(t.Context(), "sales", id, []Handler{count, sum}, nil))
	at := kafka.Partition{Topic: "sales", Number: 1}
	m := NewMember(Config{Store: s, Handlers: []Handler{count}})
	m.ids["sales"] = id
	require.NoError(t, s.open(t.Context(), []Gap{{Handler: sum, Number: 1, From: 9, id: id}}))
	require.NoError(t, m.OpenGaps(t.Context(), at, 5))
	gaps := requireGaps(t, s, 5)
	require.Equal(t, Gap{Handler: sum, Number: 1, From: 5, id: id, version: gaps[0].version}, gaps[0])
	require.NoError(t, m.OpenGaps(t.Context(), at, 7))
	requireGaps(t, s, 5)

	m.cfg.Handlers = []Handler{count, sum}
	require.NoError(t, m.OpenGaps(t.Context(), at, 3))
	requireGaps(t, s, 5)
	require.NoError(t, NewMember(Config{}).OpenGaps(t.Context(), at, 3), "without a store")
}

// A topic that was created again has no record that an action could lack of the deleted one.
func TestGapsOfDeletedTopicGo(t *testing.T) {
	t.Parallel()
	s, id := storeFixture(t)
	require.NoError(t, s.open(t.Context(), []Gap{{Handler: sum, Number: 0, From: 5, id: id}}))
	require.NoError(t, s.list(t.Context(), map[string]topic{"sales": {id: kafka.TopicID{2}}}))
	requireGaps(t, s)
}

// The log may have been cut before the gap, and be longer again. The client finds that out by the epoch of the
// committed offset.
func TestGapIsReadWithEpoch(t *testing.T) {
	t.Parallel()
	at := kafka.Partition{Topic: "sales", Number: 1}
	committed := map[string]map[int32]kgo.Offset{at.Topic: {at.Number: kgo.NewOffset().At(9).WithEpoch(4)}}
	decided := (&Member{}).decideAll(committed, nil, map[string]topic{at.Topic: {partitions: map[int32]partition{at.Number: {position: 9}}}})
	require.Equal(t, kgo.EpochOffset{Epoch: 4, Offset: 9}, decided[at].epochOffset())
	offsets := offsetsFor(committed, decided, map[kafka.Partition]int64{at: 5}, nil)
	require.Equal(t, kgo.EpochOffset{Epoch: 4, Offset: 5}, offsets[at.Topic][at.Number].EpochOffset())
}
