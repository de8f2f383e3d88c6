package outboxotel

import "sync"

// cache keeps attributes that are used again and again: to sort and to compare them
// costs more than to count. There are as many as the metric has series.
type cache[K comparable, V any] struct{ values sync.Map }

func (c *cache[K, V]) get(key K, fresh func() V) V {
	if value, ok := c.values.Load(key); ok {
		return value.(V)
	}
	value, _ := c.values.LoadOrStore(key, fresh())
	return value.(V)
}
