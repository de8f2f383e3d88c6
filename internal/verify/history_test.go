package verify

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var background = context.Background()

// writeHistory writes lines into a file.
func writeHistory(t testing.TB, lines []Line) string {
	t.Helper()
	var b strings.Builder
	enc := json.NewEncoder(&b)
	for _, line := range lines {
		require.NoError(t, enc.Encode(line))
	}
	path := filepath.Join(t.TempDir(), "history.jsonl")
	require.NoError(t, os.WriteFile(path, []byte(b.String()), 0o600))
	return path
}

func event(id string, position int64, key, state string) Line {
	return Line{Event: &EventLine{ID: id, Position: position, Key: key, Topic: "t", State: state}}
}

func record(id string, partition int32, offset int64) Line {
	return Line{Record: &RecordLine{ID: id, Topic: "t", Partition: partition, Offset: offset}}
}

var historyTests = []struct {
	name  string
	lines []Line
	want  []string // kind, event and place of each finding
}{
	{"all arrived", []Line{event("a", 1, "k", ""), event("b", 2, "k", ""), record("a", 0, 0), record("b", 0, 1)}, nil},
	{"an event is lost", []Line{event("a", 1, "k", ""), event("b", 2, "k", ""), record("b", 0, 1)}, []string{"lost a -1/0 the relay has passed it, and no record has it"}},
	{"events that wait are not lost", []Line{event("a", 1, "k", "pending"), event("b", 2, "k", "dead"), event("c", 3, "k", "parked")}, nil},
	{"a record is of no event", []Line{event("a", 1, "k", ""), record("a", 0, 0), record("x", 1, 7)}, []string{"phantom x 1/7 no committed event has this id"}},
	{"a record comes twice", []Line{event("a", 1, "k", ""), record("a", 0, 0), record("a", 0, 5)}, []string{"repeated a 0/5 its event is in t/0/0, too"}},
	{"a record comes twice in two partitions", []Line{event("a", 1, "k", ""), record("a", 1, 3), record("a", 0, 5)}, []string{"repeated a 1/3 its event is in t/0/5, too"}},
	{"an event overtakes another of its key", []Line{event("a", 1, "k", ""), event("b", 2, "k", ""), record("b", 0, 0), record("a", 0, 1)},
		[]string{"inverted a 0/1 event 2 of its key came before it, at offset 0"}},
	{"other keys have no order", []Line{event("a", 1, "k", ""), event("b", 2, "l", ""), record("b", 0, 0), record("a", 0, 1)}, nil},
	{"a repeat behind later events is no inversion", []Line{event("a", 1, "k", ""), event("b", 2, "k", ""), record("a", 0, 0), record("b", 0, 1), record("a", 0, 2)},
		[]string{"repeated a 0/2 its event is in t/0/0, too"}},
	{"a pending event may have been sent already", []Line{event("a", 1, "k", "pending"), record("a", 0, 0)}, nil},
}

func texts(findings []Finding) (all []string) {
	for _, f := range findings {
		all = append(all, fmt.Sprintf("%s %s %d/%d %s", f.Kind, f.EventID, f.Partition, f.Offset, f.Why))
	}
	return all
}

// Each kind of fault is found, with its event and its place, and nothing else is.
func TestHistory(t *testing.T) {
	t.Parallel()
	for _, tt := range historyTests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			report, err := RunHistory(background, writeHistory(t, tt.lines), Config{Findings: 20})
			require.NoError(t, err)
			require.Equal(t, tt.want, texts(report.Findings))
			require.EqualValues(t, len(tt.want), report.Problems(Kinds...))
		})
	}
}

// A line that is not what the format says is named.
func TestBadHistory(t *testing.T) {
	t.Parallel()
	for line, says := range map[string]string{
		`{}`: "want", `{"event":{},"record":{}}`: "want", `{"event":{"state":"gone"}}`: "no state", `x`: "invalid character",
		`{"evnt":{}}`: "unknown field", `{"record":{}} {}`: "more than one", `{"event":{"id":"` + strings.Repeat("x", maxLine) + `"}}`: "too long",
	} {
		path := filepath.Join(t.TempDir(), "history.jsonl")
		require.NoError(t, os.WriteFile(path, []byte("\n"+line+"\n"), 0o600))
		_, err := RunHistory(background, path, Config{})
		require.ErrorContains(t, err, says, line)
	}
	_, err := RunHistory(background, filepath.Join(t.TempDir(), "none"), Config{})
	require.ErrorIs(t, err, os.ErrNotExist)
}

// A run that is interrupted returns the error and leaves no file.
func TestInterrupted(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	ctx, cancel := context.WithCancel(background)
	var lines []Line
	for i := range 3 * tickEvery {
		lines = append(lines, event(fmt.Sprint(i), int64(i), "k", ""))
	}
	path := writeHistory(t, lines)
	_, err := RunHistory(ctx, path, Config{memory: 10_000 * itemSize, Progress: func(s Step) {
		if s.What == "events compared" && s.Done > 0 {
			cancel()
		}
	}})
	require.ErrorIs(t, err, context.Canceled)
	left, err := filepath.Glob(filepath.Join(dir, "outbox-verify-*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

// Random histories, with faults of all kinds, are judged as a judge does that keeps everything in memory, also if each
// sort needs many files and several levels of them.
func TestRandomHistories(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for n := range 60 {
		size := rng.IntN(100)
		if n%10 == 0 {
			size = 2000 + rng.IntN(1000)
		}
		lines := randomHistory(rng, size)
		want := naive(lines)
		memory := []int{20 * itemSize, 300 * itemSize, 1 << 20}[rng.IntN(3)]
		report, err := RunHistory(background, writeHistory(t, lines), Config{Findings: 1 << 20, memory: memory})
		require.NoError(t, err)
		have := map[string]int{}
		for _, f := range report.Findings {
			place := fmt.Sprintf("%s %s %s/%d/%d", f.Kind, f.EventID, f.Topic, f.Partition, f.Offset)
			if f.Kind == Phantom || f.Kind == Lost {
				place = fmt.Sprintf("%s %s", f.Kind, f.EventID)
			}
			have[place]++
		}
		require.Equal(t, want, have, "history %d of seed %d, memory %d", n, seed, memory)
	}
}

// randomHistory sends events of a few keys and plants faults.
func randomHistory(rng *rand.Rand, events int) (lines []Line) {
	topics := []string{"t", "u"}
	offsets := map[string]int64{}
	send := func(id, topic string, partition int32) {
		place := fmt.Sprint(topic, partition)
		offsets[place] += 1 + rng.Int64N(2)
		lines = append(lines, Line{Record: &RecordLine{ID: id, Topic: topic, Partition: partition, Offset: offsets[place]}})
	}
	type sent struct {
		id, topic string
		partition int32
	}
	var waiting, all []sent
	for i := range events {
		key := rng.IntN(10)
		e := sent{fmt.Sprintf("event-%d", i), topics[key%2], int32(key % 3)}
		state := ""
		outcome := rng.IntN(100)
		if outcome < 3 {
			state = stateNames[1+rng.IntN(int(states)-1)]
		}
		lines = append(lines, Line{Event: &EventLine{ID: e.id, Position: int64(i) - 50, Key: fmt.Sprint(key), Topic: e.topic, State: state}})
		switch {
		case outcome < 6: // lost, or it waits
		case outcome < 12: // late
			waiting = append(waiting, e)
		default:
			send(e.id, e.topic, e.partition)
			all = append(all, e)
		}
		if rng.IntN(20) == 0 && len(all) > 0 {
			again := all[rng.IntN(len(all))]
			send(again.id, again.topic, int32(rng.IntN(3)))
		}
		if rng.IntN(30) == 0 {
			send(fmt.Sprintf("phantom-%d", i), "t", int32(rng.IntN(3)))
		}
		if rng.IntN(5) == 0 {
			for _, e := range waiting {
				send(e.id, e.topic, e.partition)
				all = append(all, e)
			}
			waiting = nil
		}
	}
	rng.Shuffle(len(lines), func(i, j int) { lines[i], lines[j] = lines[j], lines[i] })
	return lines
}

// naive judges a history in memory.
func naive(lines []Line) map[string]int {
	found := map[string]int{}
	events, records := map[string]*EventLine{}, []*RecordLine{}
	for _, line := range lines {
		if line.Event != nil {
			events[line.Event.ID] = line.Event
		} else {
			records = append(records, line.Record)
		}
	}
	slices.SortFunc(records, func(a, b *RecordLine) int {
		return cmp.Or(cmp.Compare(a.Partition, b.Partition), cmp.Compare(a.Offset, b.Offset))
	})
	type line struct {
		topic, key string
		partition  int32
	}
	number := map[string]int{} // of the topic, as it was read first
	for _, l := range lines {
		var topic string
		if l.Event != nil {
			topic = l.Event.Topic
		} else {
			topic = l.Record.Topic
		}
		if _, known := number[topic]; !known {
			number[topic] = len(number)
		}
	}
	slices.SortStableFunc(records, func(a, b *RecordLine) int { return cmp.Compare(number[a.Topic], number[b.Topic]) })
	seen, seenThere, newest := map[string]bool{}, map[string]bool{}, map[line]int64{}
	for _, r := range records {
		e, committed := events[r.ID]
		place := fmt.Sprintf("%s/%d/%d", r.Topic, r.Partition, r.Offset)
		switch {
		case !committed:
			found["phantom "+r.ID] = 1
			continue
		case seen[r.ID]:
			found["repeated "+r.ID+" "+place]++
		}
		seen[r.ID] = true
		there := fmt.Sprint(r.ID, r.Topic, r.Partition)
		if seenThere[there] {
			continue
		}
		seenThere[there] = true
		l := line{r.Topic, e.Key, r.Partition}
		if highest, has := newest[l]; has && highest > e.Position {
			found["inverted "+r.ID+" "+place]++
		} else {
			newest[l] = e.Position
		}
	}
	for id, e := range events {
		if !seen[id] && e.State == "" {
			found["lost "+id] = 1
		}
	}
	return found
}
