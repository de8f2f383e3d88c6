package outboxotel

import (
	"iter"
	"sync"
)

// cache keeps attributes for reuse, because sorting and comparing them costs more than
// counting. It has one entry for each series of the metric.
type cache[K comparable, V any] struct{ values sync.Map }

func (c *cache[K, V]) get(key K, fresh func() V) V {
	if value, ok := c.values.Load(key); ok {
		return value.(V)
	}
	value, _ := c.values.LoadOrStore(key, fresh())
	return value.(V)
}

// all returns what it has.
func (c *cache[K, V]) all() iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		c.values.Range(func(key, value any) bool { return yield(key.(K), value.(V)) })
	}
}
