package short_test

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/short"
)

// named returns how many of n topics of a prefix are named.
func named(topics *short.Topics, prefix string, n int, taken bool) (count int) {
	for i := range n {
		if topic := fmt.Sprint(prefix, i); topics.Name(topic, taken) == topic {
			count++
		}
	}
	return count
}

// Thousands of topics that Kafka does not have take no room from those that it has. A topic that Kafka has stays named
// where an event of it fails.
func TestTopicsAreBounded(t *testing.T) {
	t.Parallel()
	topics := short.NewTopics(nil)
	require.Equal(t, "orders", topics.Name("orders", true))
	require.Equal(t, 100, named(topics, "unknown", 3_000, false))
	require.Equal(t, 999, named(topics, "known", 3_000, true), "but for orders")
	require.Equal(t, "orders", topics.Name("orders", false))
	require.Equal(t, "known7", topics.Name("known7", false))
	require.Equal(t, short.Other, topics.Name("late", true))
	require.Empty(t, topics.Name("", true))

	topics = short.NewTopics(nil)
	require.Equal(t, 1_000, named(topics, "known", 3_000, true))
	require.Equal(t, 100, named(topics, "unknown", 3_000, false))
	require.Equal(t, "unknown7", topics.Name("unknown7", true), "it keeps its name, although there is no room")

	topics = short.NewTopics(nil)
	require.Equal(t, 100, named(topics, "new", 100, false))
	require.Equal(t, 100, named(topics, "new", 100, true), "Kafka has them now")
	require.Equal(t, 100, named(topics, "unknown", 3_000, false), "of the room that they have left")
	require.Equal(t, 100, named(topics, "new", 100, false))
}

// What was not used for an hour makes room, once there is none. Without a function it stays.
func TestLabelsMakeRoom(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var gone []string
		topics := short.NewTopics(func(topic string) { gone = append(gone, topic) })
		kept := short.NewTopics(nil)
		for _, all := range []*short.Topics{topics, kept} {
			require.Equal(t, 100, named(all, "unknown", 3_000, false))
		}
		time.Sleep(time.Hour)
		for _, all := range []*short.Topics{topics, kept} {
			require.Equal(t, "unknown0", all.Name("unknown0", false))
		}
		time.Sleep(time.Minute)
		require.Equal(t, "other", topics.Name("other", false))
		require.Len(t, gone, 99)
		require.NotContains(t, gone, "unknown0")
		require.Equal(t, short.Other, kept.Name("other", false))

		lately := short.NewLabels(10, func(int) {})
		for i := range 20 {
			require.Equal(t, i < 10, lately.Use(i))
		}
		time.Sleep(time.Hour)
		require.True(t, lately.Use(3))
		require.Len(t, lately.Lately(), 10)
		time.Sleep(time.Second)
		require.Equal(t, []int{3}, lately.Lately())
	})
}

// A type that is not named does not hide the topic.
func TestTypesAreBounded(t *testing.T) {
	t.Parallel()
	types := short.NewTypes(nil)
	var names []string
	for i := range 3_000 {
		names = append(names, types.Name("orders", fmt.Sprint("type", i)))
	}
	slices.Sort(names)
	require.Len(t, slices.Compact(names), 201)
	require.Equal(t, "type7", types.Name("orders", "type7"))
	require.Equal(t, short.Other, types.Name("bills", "type7"))
	require.Equal(t, short.Other, short.NewTypes(nil).Name(short.Other, "type7"))
	require.Empty(t, types.Name("bills", ""))
}
