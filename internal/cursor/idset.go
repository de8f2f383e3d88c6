package cursor

import (
	"math/bits"
	"slices"
)

const (
	chunkBits = 16 // of an id, which say where it is in its chunk
	chunkIDs  = 1 << chunkBits
	// maxSparse is up to how many ids a chunk holds them as numbers of 16 bits; more take
	// more space than a bit for each id of the chunk.
	maxSparse = chunkIDs / 16
)

// IDSet is a set of ids that lie close together: ten million of them without a gap take 1.25 MB. The zero value is
// empty.
type IDSet struct {
	chunks []*chunk // by first, ascending
	count  int
}

// chunk holds the ids from first<<chunkBits on that are in the set, in one of two forms.
type chunk struct {
	first  int64
	count  int
	sparse []uint16 // ascending, if dense is nil
	dense  []uint64 // a bit for each id
}

// Len returns how many ids the set has.
func (s *IDSet) Len() int { return s.count }

// Add adds an id. It is fastest where ids come almost in their order.
func (s *IDSet) Add(id int64) {
	c := s.chunk(id >> chunkBits)
	if c.add(uint16(id & (chunkIDs - 1))) {
		s.count++
	}
}

// chunk returns the chunk that begins at first, which may be new.
func (s *IDSet) chunk(first int64) *chunk {
	if n := len(s.chunks); n > 0 && s.chunks[n-1].first == first {
		return s.chunks[n-1]
	}
	at, found := slices.BinarySearchFunc(s.chunks, first, func(c *chunk, first int64) int {
		return int(min(1, max(-1, c.first-first)))
	})
	if !found {
		s.chunks = slices.Insert(s.chunks, at, &chunk{first: first})
	}
	return s.chunks[at]
}

// add returns false if the id was there already.
func (c *chunk) add(low uint16) bool {
	if c.dense == nil {
		if n := len(c.sparse); n > 0 && c.sparse[n-1] >= low || n == maxSparse {
			return c.addOutOfOrder(low)
		}
		c.sparse = append(c.sparse, low)
		c.count++
		return true
	}
	word, bit := &c.dense[low/64], uint64(1)<<(low%64)
	if *word&bit != 0 {
		return false
	}
	*word |= bit
	c.count++
	return true
}

// addOutOfOrder adds to a sparse chunk that is full or has higher ids.
func (c *chunk) addOutOfOrder(low uint16) bool {
	at, found := slices.BinarySearch(c.sparse, low)
	if found {
		return false
	}
	if len(c.sparse) == maxSparse {
		c.makeDense()
		return c.add(low)
	}
	c.sparse = slices.Insert(c.sparse, at, low)
	c.count++
	return true
}

func (c *chunk) makeDense() {
	c.dense = make([]uint64, chunkIDs/64)
	for _, low := range c.sparse {
		c.dense[low/64] |= 1 << (low % 64)
	}
	c.sparse = nil
}

// First returns the n lowest ids in their order, or all if there are fewer.
func (s *IDSet) First(n int) []int64 {
	ids := make([]int64, 0, min(n, s.count))
	for _, c := range s.chunks {
		if len(ids) >= n {
			break
		}
		ids = c.appendFirst(ids, n)
	}
	return ids
}

// appendFirst appends ids up to a length of n.
func (c *chunk) appendFirst(ids []int64, n int) []int64 {
	base := c.first << chunkBits
	if c.dense == nil {
		for _, low := range c.sparse[:min(len(c.sparse), n-len(ids))] {
			ids = append(ids, base|int64(low))
		}
		return ids
	}
	for i, word := range c.dense {
		for ; word != 0; word &= word - 1 {
			if len(ids) == n {
				return ids
			}
			ids = append(ids, base|int64(i*64+bits.TrailingZeros64(word)))
		}
	}
	return ids
}

// RemoveThrough removes all ids up to last, and frees what they took.
func (s *IDSet) RemoveThrough(last int64) {
	gone := 0
	for _, c := range s.chunks {
		if c.first > last>>chunkBits {
			break
		}
		before := c.count
		if c.first < last>>chunkBits {
			c.count = 0
		} else {
			c.removeThrough(uint16(last & (chunkIDs - 1)))
		}
		s.count -= before - c.count
		if c.count > 0 {
			break
		}
		gone++
	}
	s.chunks = slices.Delete(s.chunks, 0, gone)
}

func (c *chunk) removeThrough(last uint16) {
	if c.dense == nil {
		at, found := slices.BinarySearch(c.sparse, last)
		if found {
			at++
		}
		c.sparse = c.sparse[at:]
		c.count = len(c.sparse)
		return
	}
	word := int(last / 64)
	clear(c.dense[:word])
	c.dense[word] &^= 2<<(last%64) - 1 // all of them, if last is the word's highest
	c.count = 0
	for _, word := range c.dense {
		c.count += bits.OnesCount64(word)
	}
}
