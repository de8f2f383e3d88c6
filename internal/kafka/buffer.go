package kafka

import (
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// Buffer counts records in the hands of a client, or says how many these may be.
type Buffer struct{ records, bytes int }

// maxBuffered is how many bytes a client gets ahead of the answers. It keeps a few
// requests in flight, and is written quickly when a relay is told to stop.
const maxBuffered = 4 << 20

// BufferOf returns the room of a client: maxBuffered, or less if the client would make
// its caller wait.
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

// Add counts another record, if there is room for it or it is the only one.
func (b *Buffer) Add(r *kgo.Record, room Buffer) bool {
	size := recordSize(r)
	if b.records > 0 && (b.records >= room.records || b.bytes+size > room.bytes) {
		return false
	}
	b.records++
	b.bytes += size
	return true
}

// Remove counts one record less.
func (b *Buffer) Remove(r *kgo.Record) {
	b.records--
	b.bytes -= recordSize(r)
}

// InFlight is a hook that counts the produce requests that a client has written and that
// no broker has answered.
type InFlight struct{ n atomic.Int64 }

// Any reports whether there are such requests.
func (f *InFlight) Any() bool { return f.n.Load() > 0 }

// OnBrokerWrite implements [kgo.HookBrokerWrite].
func (f *InFlight) OnBrokerWrite(_ kgo.BrokerMetadata, key int16, bytes int, _, _ time.Duration, _ error) {
	if key == kmsg.Produce.Int16() && bytes > 0 {
		f.n.Add(1)
	}
}

// OnBrokerE2E implements [kgo.HookBrokerE2E].
func (f *InFlight) OnBrokerE2E(_ kgo.BrokerMetadata, key int16, e kgo.BrokerE2E) {
	if key == kmsg.Produce.Int16() && e.BytesWritten > 0 {
		f.n.Add(-1)
	}
}
