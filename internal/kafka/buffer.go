package kafka

import (
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// Buffer says how many records and bytes a client may buffer.
type Buffer struct{ records, bytes int }

// maxBuffered is how many bytes a client gets at once, ahead of the answers. It keeps a few
// requests in flight, and is written quickly when a relay is told to stop.
const maxBuffered = 4 << 20

// BufferOf returns the room of a client: maxBuffered, or less if the client would refuse
// more.
func BufferOf(client *kgo.Client) Buffer {
	room := Buffer{records: 10_000, bytes: maxBuffered}
	if most, _ := client.OptValue(kgo.MaxBufferedRecords).(int64); most > 0 {
		room.records = int(most)
	}
	if most, _ := client.OptValue(kgo.MaxBufferedBytes).(int64); most > 0 {
		room.bytes = min(room.bytes, int(most))
	}
	return room
}

// Fitting returns for how many records, from the first on, there is room. There is for a single
// one, whatever its size. Records with an error do not count.
func (b Buffer) Fitting(records []kgo.Record, errs []error) int {
	var n, bytes int
	for i := range records {
		if errs[i] != nil {
			continue
		}
		size := recordSize(&records[i])
		if n > 0 && (n >= b.records || bytes+size > b.bytes) {
			return i
		}
		n++
		bytes += size
	}
	return len(records)
}

// InFlight is a hook that counts the produce requests that a client has written and that
// no broker has answered.
type InFlight struct {
	n       atomic.Int64
	written atomic.Bool
}

// Any reports whether there are such requests.
func (f *InFlight) Any() bool { return f.n.Load() > 0 }

// HasWritten reports whether the client has ever written a produce request: it knew its producer id by then, and a
// broker of a partition had answered it.
func (f *InFlight) HasWritten() bool { return f.written.Load() }

// OnBrokerWrite implements [kgo.HookBrokerWrite].
func (f *InFlight) OnBrokerWrite(_ kgo.BrokerMetadata, key int16, bytes int, _, _ time.Duration, _ error) {
	if key == kmsg.Produce.Int16() && bytes > 0 {
		f.n.Add(1)
		f.written.Store(true)
	}
}

// OnBrokerE2E implements [kgo.HookBrokerE2E].
func (f *InFlight) OnBrokerE2E(_ kgo.BrokerMetadata, key int16, e kgo.BrokerE2E) {
	if key == kmsg.Produce.Int16() && e.BytesWritten > 0 {
		f.n.Add(-1)
	}
}
