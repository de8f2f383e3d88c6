package starts

import (
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/kafka"
)

// Unclean ends at one offset add up over all memberships. Progress sets them back, and a clean end does not count.
func TestUncleanEnds(t *testing.T) {
	t.Parallel()
	s, id := storeFixture(t)
	at := kafka.Partition{Topic: "sales", Number: 1}
	assign := func(member string, offset int64) Assignment {
		t.Helper()
		got, err := s.assign(t.Context(), member, []Offset{{Partition: at, Topic: id, At: offset}, {Partition: kafka.Partition{Topic: "sales", Number: 9}, Topic: id}})
		require.NoError(t, err)
		require.Len(t, got, 1, "a partition without a row has none")
		return got[at]
	}
	end := func(member string) {
		require.NoError(t, s.end(t.Context(), member, []Offset{{Partition: at, Topic: id}}))
	}
	a, b := uuid.NewString(), uuid.NewString()
	require.Equal(t, Assignment{}, assign(a, 7), "the first one")
	require.Equal(t, 0, assign(a, 7).UncleanEnds, "the same membership once more")
	require.Equal(t, 1, assign(b, 7).UncleanEnds, "behind an unclean end of another member")
	end(a)
	require.Equal(t, 2, assign(a, 7).UncleanEnds, "a late note of a clean end is not that of the last membership")
	end(a)
	require.Equal(t, 2, assign(b, 7).UncleanEnds, "behind a clean end")
	require.Equal(t, Assignment{UncleanEnds: MostUncleanEnds}, assign(a, 7))
	require.Equal(t, 0, assign(b, 8).UncleanEnds, "behind a record that was handled")
	require.Equal(t, 1, assign(a, 8).UncleanEnds)
	require.Equal(t, 0, assign(b, 5).UncleanEnds, "behind a rewind")
}

// A record that is noted again has ended a process since, unless the note was taken back by a stop. The count belongs
// to one record, and goes when later ones are committed.
func TestSuspect(t *testing.T) {
	t.Parallel()
	s, id := storeFixture(t)
	at := kafka.Partition{Topic: "sales", Number: 1}
	note := func(offset int64, stopped bool) int {
		t.Helper()
		ends, err := s.suspect(t.Context(), Offset{Partition: at, Topic: id, At: offset}, stopped)
		require.NoError(t, err)
		return ends
	}
	suspected := func(offset int64) bool {
		t.Helper()
		got, err := s.assign(t.Context(), uuid.NewString(), []Offset{{Partition: at, Topic: id, At: offset}})
		require.NoError(t, err)
		return got[at].Suspected
	}
	require.False(t, suspected(7))
	require.Equal(t, 0, note(8, false))
	require.True(t, suspected(7))
	require.Equal(t, 1, note(8, false))
	note(8, true)
	require.Equal(t, 1, note(8, false), "it was taken back")
	require.Equal(t, 2, note(8, false))
	require.Equal(t, 0, note(9, false), "another record")
	require.Equal(t, 0, note(8, true), "late")
	require.True(t, suspected(9))
	require.False(t, suspected(10), "behind it")
	require.Equal(t, 0, note(9, false))
	note(None, false)
	require.False(t, suspected(7))
	ends, err := s.suspect(t.Context(), Offset{Partition: kafka.Partition{Topic: "gone"}, Topic: id, At: 3}, false)
	require.NoError(t, err)
	require.Zero(t, ends)
}
