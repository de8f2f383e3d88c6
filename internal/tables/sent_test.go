package tables

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func encodeSent(at time.Time, events []Sent) SentRow {
	var e SentEncoder
	for _, s := range events {
		e.Add(s, at)
	}
	return e.Row()
}

// What is read is what was written, whatever ids, partitions and offsets events have.
func TestSentRoundTrip(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	at := time.UnixMilli(1_800_000_000_123)
	for range 300 {
		sparse, topics, partitions := rng.IntN(3) == 0, 1+rng.IntN(4), 1+rng.IntN(40)
		id, next, sent := rng.Int64N(1<<62), map[string]int64{}, false
		var events []Sent
		for range 1 + rng.IntN(300) {
			id++
			if sparse {
				id += rng.Int64N(1 << 40)
			}
			s := Sent{OutboxID: id, Offset: -1}
			if rng.IntN(10) > 0 {
				sent = true
				s.Topic, s.Partition = fmt.Sprintf("topic-%d", rng.IntN(topics)), int32(rng.IntN(partitions))
				of := fmt.Sprint(s.Topic, s.Partition)
				if next[of] == 0 || rng.IntN(10) == 0 {
					next[of] = rng.Int64N(1 << 60)
				}
				if s.Offset = next[of]; rng.IntN(20) == 0 {
					s.Offset = -1
				}
				next[of]++
			} else if rng.IntN(2) == 0 {
				sent, s.Expired = true, true
			}
			events = append(events, s)
		}
		row := encodeSent(at, events)
		if !sent {
			require.Zero(t, row)
			continue
		}
		require.Equal(t, []int64{events[0].OutboxID, id}, []int64{row.From, row.To})
		got, when, err := row.Events()
		require.NoError(t, err)
		require.Equal(t, events, got)
		require.True(t, when.Equal(at))
	}
}

// An event usually takes one byte.
func TestSentIsSmall(t *testing.T) {
	t.Parallel()
	events := make([]Sent, 1000)
	for i := range events {
		events[i] = Sent{OutboxID: int64(1_000_000 + i), Topic: "order-events", Partition: int32(i % 12), Offset: int64(5_000_000 + i/12)}
	}
	for n, most := range map[int]int{1: 32, 10: 100, 1000: 1100} {
		require.Less(t, len(encodeSent(time.Now(), events[:n]).Bytes), most, n)
	}
}

// Bytes that were not written by us are an error, and take no more memory than they have.
func FuzzSent(f *testing.F) {
	row := encodeSent(time.UnixMilli(1_800_000_000_123), []Sent{{1, "a", 0, 7, false}, {2, "", 0, -1, false}, {9, "b", 3, -1, false}, {10, "a", 0, 9, false}})
	f.Add(row.From, row.To, row.Bytes)
	f.Add(int64(1), int64(1), []byte{1, 0, 255, 255, 255, 255, 15})
	f.Fuzz(func(t *testing.T, from, to int64, b []byte) {
		events, at, err := SentRow{from, to, b}.Events()
		require.LessOrEqual(t, len(events), len(b))
		if err != nil {
			require.Nil(t, events)
			return
		}
		require.Equal(t, to, events[len(events)-1].OutboxID)
		_ = at.UnixMilli()
	})
}

func BenchmarkSentEncoder(b *testing.B) {
	events := make([]Sent, 1000)
	for i := range events {
		events[i] = Sent{OutboxID: int64(1_000_000 + i), Topic: "order-events", Partition: int32(i % 12), Offset: int64(5_000_000 + i/12)}
	}
	at := time.Now()
	b.ReportAllocs()
	for b.Loop() {
		encodeSent(at, events)
	}
}
