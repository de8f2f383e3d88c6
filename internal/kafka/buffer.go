package kafka

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// Buffer says how many records and bytes a client may buffer.
type Buffer struct {
	records, bytes int
	largest        int // bytes of the user in a record; 0: any
}

// maxBuffered is how many bytes a client gets at once, ahead of the answers. It keeps a few
// requests in flight, and is written quickly when a relay is told to stop.
const maxBuffered = 4 << 20

// MaxCursorRecord bounds the bytes of the record that goes along with the events of a transaction.
const MaxCursorRecord = 1 << 18

// BufferOf returns the room of a client: maxBuffered, or less if the client would refuse
// more. A client with transactions has room for a cursor record besides, see [TransactionOpts].
func BufferOf(client *kgo.Client) Buffer {
	records, bytes := limitsOf(client)
	if id, _ := client.OptValue(kgo.TransactionalID).(string); id != "" {
		records, bytes = records-1, bytes-MaxCursorRecord
	}
	room := Buffer{records: 10_000, bytes: maxBuffered}
	if records > 0 {
		room.records = records
	}
	if bytes > 0 {
		room.bytes, room.largest = min(room.bytes, bytes), bytes
	}
	return room
}

// limitsOf returns how many records and bytes a client buffers at most. No bytes means any.
func limitsOf(client *kgo.Client) (records, bytes int) {
	r, _ := client.OptValue(kgo.MaxBufferedRecords).(int64)
	b, _ := client.OptValue(kgo.MaxBufferedBytes).(int64)
	return int(r), int(b)
}

// cursorRoom returns options for a client that buffers a cursor record besides what the host lets it buffer. Behind as
// many events as fit, it would refuse that record each time.
func cursorRoom(host []kgo.Opt) (opts []kgo.Opt) {
	_ = CheckOpts(host, func(o HostOpts) { // NewRelay reports the error
		records, bytes := limitsOf(o.Client)
		opts = append(opts, kgo.MaxBufferedRecords(min(records, math.MaxInt-1)+1))
		if bytes > 0 {
			opts = append(opts, kgo.MaxBufferedBytes(min(bytes, math.MaxInt-MaxCursorRecord)+MaxCursorRecord))
		}
	})
	return opts
}

// TooLarge reports whether a record is larger than the host lets a client buffer. A client without transactions says so
// itself.
func (b Buffer) TooLarge(r *kgo.Record) bool {
	return b.largest > 0 && userSize(r) > b.largest
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
