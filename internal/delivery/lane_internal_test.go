package delivery

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/pauses"
	"github.com/outboxgo/outbox/internal/pg"
)

// An item waits because its stream is paused, or because its action fails, and that ends a moment later. Later items of
// its key must not be handled before it.
func TestLaterItemsOfTheKeyWait(t *testing.T) {
	t.Parallel()
	l := &lane{laneParts: laneParts{cfg: &Rules{}, pauses: pauses.NewSet()}}
	item := func(key int64, ordered bool) laneItem {
		return laneItem{Delivery: Delivery{Stream: "items", Key: Key{key, ordered}}}
	}
	batch := []laneItem{item(1, true), item(0, false), item(1, true), item(2, true), item(0, false)}
	l.begin(make([]Delivery, 1))
	l.pauses.Pause("items")
	require.True(t, l.mustWait(&batch[0]))
	require.True(t, l.mustWait(&batch[1]))
	l.pauses.Resume("items")
	require.True(t, l.mustWait(&batch[2]), "the first one of its key waits")
	require.False(t, l.mustWait(&batch[3]))
	require.False(t, l.mustWait(&batch[4]), "it has no order")
	l.begin(make([]Delivery, 1))
	require.False(t, l.mustWait(&batch[2]), "of the next batch")
}

// An event of a row without headers is that of its record, whatever the row has.
func TestPlainMessage(t *testing.T) {
	t.Parallel()
	texts := []string{"", "k", "a b", "é주문", "with \x00", "no UTF-8 \xff", "application/cloudevents+json", "a.b.c.v1"}
	times := []time.Time{
		{}, time.Date(2026, 2, 3, 4, 5, 6, 789_012_000, time.UTC), time.Date(2026, 2, 3, 4, 5, 6, 0, time.FixedZone("", 3600)),
		time.Date(1, 1, 1, 0, 0, 0, 1000, time.UTC), time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(-5, 1, 1, 0, 0, 0, 0, time.UTC),
	}
	payloads, headers := [][]byte{nil, {}, []byte(`{"n":1}`)}, [][]byte{nil, []byte(`{}`), []byte(`{"traceparent":"x"}`), []byte(`[]`)}
	seed := uint64(time.Now().UnixNano())
	t.Log("seed", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	one := func() string { return texts[random.IntN(len(texts))] }
	plain := 0
	for range 200_000 {
		d := &Delivery{EventID: "id", Type: "a.b.c.v1", Source: "s", AggregateType: "Order", AggregateID: "k", ContentType: "application/json", OccurredAt: times[1]}
		for range random.IntN(3) {
			*[]*string{&d.EventID, &d.Type, &d.Source, &d.AggregateType, &d.AggregateID, &d.ContentType}[random.IntN(6)] = one()
		}
		d.OccurredAt, d.Payload, d.Headers = times[random.IntN(len(times))], payloads[random.IntN(len(payloads))], headers[random.IntN(len(headers))]
		var about envelope.Received
		want, err := messageOfRecord(d, &about)
		if got := plainMessage(d); got != nil {
			plain++
			require.NoError(t, err, "%+v", d)
			require.Equal(t, want, got, "%+v", d)
			require.Equal(t, about.Tombstone, got.Data == nil)
			require.Nil(t, about.Headers)
		}
	}
	require.Greater(t, plain, 2000)
}

// Rows that follow each other share the copy of a text, and each has its own text.
func TestRepeatedTexts(t *testing.T) {
	t.Parallel()
	var text string
	var got []string
	for _, next := range [][]byte{[]byte("a"), []byte("a"), nil, []byte("b"), {}, []byte("a")} {
		require.NoError(t, (*pg.Repeated)(&text).ScanBytes(next))
		clear(next) // pgx uses the bytes again
		got = append(got, text)
	}
	require.Equal(t, []string{"a", "a", "", "b", "", "a"}, got)
}
