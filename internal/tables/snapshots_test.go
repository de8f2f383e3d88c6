package tables_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/tables"
)

// A snapshot adds something if it sees the end of a transaction that the other one does not, and that is not one's own.
func TestSnapshotAdds(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		before, after, own, begun string
		adds                      bool
	}{
		"the same":                                   {"10:10:", "10:10:", "", "", false},
		"the same, with others in progress":          {"5:10:5,7", "5:10:5,7", "", "", false},
		"one has begun and ended":                    {"10:10:", "11:11:", "", "", true},
		"one's own has":                              {"10:10:", "11:11:", "10", "", false},
		"one's own, and another":                     {"10:10:", "12:12:", "10", "", true},
		"one's own, while another has begun":         {"10:10:", "11:12:11", "10", "", false},
		"one has begun":                              {"10:10:", "10:11:10", "", "", false},
		"one that was in progress has ended":         {"5:10:5,7", "7:10:7", "", "", true},
		"the last one that was in progress has":      {"5:10:5", "10:10:", "", "", true},
		"one's own that was in progress has":         {"5:10:5,7", "5:10:5", "7", "", false},
		"another has ended beside one in progress":   {"5:10:5", "5:12:5,10", "", "", true},
		"far apart":                                  {"10:10:", "10:1000:10", "", "", true},
		"another server is behind":                   {"10:10:", "9:9:", "", "", true},
		"no snapshot before":                         {"", "9:9:", "", "", true},
		"no snapshot after":                          {"9:9:", "", "", "", true},
		"numbers that are no words of each other":    {"1:10:1", "1:11:1", "10", "", false},
		"one whose number is part of another's has":  {"1:13:1,12", "1:13:12", "", "", true},
		"one has begun since and ended":              {"10:10:", "11:11:", "", "10", false},
		"one that had begun has ended":               {"10:10:", "12:12:", "", "11", true},
		"one that had begun has not ended":           {"5:10:5", "5:100:5", "", "10", false},
		"far apart, and none of them had begun":      {"10:10:", "1000:1000:", "", "10", false},
		"far apart, and one had begun and has ended": {"5:10:5", "1000:1000:", "", "10", true},
		"far apart, and all had begun":               {"10:10:", "10:1000:10", "", "900", true},
		"one in progress that had not begun has":     {"20:30:20", "31:31:", "", "10", false},
		"a bound that is none":                       {"10:10:", "11:11:", "", "x", true},
	} {
		require.Equal(t, tt.adds, tables.SnapshotAdds(tt.before, tt.after, tt.own, tt.begun), name)
	}
}

// A text is taken for a snapshot where PostgreSQL takes it for one.
func TestIsSnapshot(t *testing.T) {
	t.Parallel()
	for text, is := range map[string]bool{
		"1:1:": true, "5:10:5,7,9": true, "5:10:7": true, "5:5:": true, "10:30:10,12,12": true,
		"": false, "1": false, "1:1": false, "1:1:1": false, "0:1:": false, "2:1:": false, "5:10:4": false, "5:10:10": false, "5:10:7,6": false, "5:10:7,": false,
		"5:10:7:8": false, "a:b:": false, "+5:10:": false, "5:10:,": false, "5:99999999999999999999:": false,
	} {
		require.Equal(t, is, tables.IsSnapshot(text), text)
	}
}

func TestSnapshotMax(t *testing.T) {
	t.Parallel()
	require.Equal(t, "1", tables.SnapshotMax("1:1:"))
	require.Equal(t, "30", tables.SnapshotMax("10:30:10,12,29"))
	require.Empty(t, tables.SnapshotInProgress("1:1:"))
	require.Equal(t, []string{"10", "12", "29"}, tables.SnapshotInProgress("10:30:10,12,29"))
}
