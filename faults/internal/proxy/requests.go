package proxy

import (
	"encoding/binary"
	"slices"
)

// Requests cuts connections to Kafka at requests of their clients.
type Requests struct {
	// Cut says whether the connection of a request is cut, by the key of its API. It may wait: until it returns, what
	// comes from the client is held. It is called by several goroutines at once.
	Cut func(key int16) bool
	// Answered lets Kafka have the request, and cuts the connection in front of the next answer. Without it Kafka
	// does not get the request.
	Answered bool
}

const (
	lengthOfHead = 6         // bytes of the length of a request and of its key
	maxRequest   = 256 << 20 // bytes; a longer one is of another protocol
)

// client follows what a client of Kafka sends, by the heads of requests. Only one goroutine uses it.
type client struct {
	head    []byte
	left    int  // of the body of a request, what has not come
	foreign bool // this is not Kafka's protocol
}

// asked returns the keys of the requests whose heads end in data.
func (c *client) asked(data []byte) (keys []int16) {
	for len(data) > 0 && !c.foreign {
		if n := min(c.left, len(data)); n > 0 {
			c.left, data = c.left-n, data[n:]
			continue
		}
		n := min(lengthOfHead-len(c.head), len(data))
		c.head, data = append(c.head, data[:n]...), data[n:]
		if len(c.head) < lengthOfHead {
			break
		}
		length := int(binary.BigEndian.Uint32(c.head)) + 4
		if c.foreign = length < lengthOfHead || length > maxRequest; !c.foreign {
			keys = append(keys, int16(binary.BigEndian.Uint16(c.head[4:])))
		}
		c.head, c.left = c.head[:0], length-lengthOfHead
	}
	return keys
}

// passRequests says whether data may go to Kafka, as the fault has it.
func (l *link) passRequests(data []byte) bool {
	keys := l.asker.asked(data)
	fault, _, _ := l.look()
	r := fault.Requests
	if r == nil || !slices.ContainsFunc(keys, r.Cut) {
		return true
	}
	if r.Answered {
		l.unanswered.Store(true)
	}
	return r.Answered
}
