package verify

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"math"
	"time"

	"github.com/google/uuid"
)

// itemSize is the size of an item in bytes, in memory and in files.
const itemSize = 50

// item is what is known of an event or a record, as bytes that are compared to sort items. The first sort has items of
// [sighting], the second one items of [arrival].
type item [itemSize]byte

// side says what a sighting is. The sides of an event are read in this order.
type side byte

const (
	sideFailed side = iota // a row of outbox_failed, or an event that an operator has resolved
	sideEvent              // a row of outbox or of outbox_archive
	sideRecord             // a record in Kafka
)

// eventID identifies an event: its UUID, or a digest of another id, which only a history has.
type eventID [16]byte

func idOf(text string) eventID {
	if id, err := uuid.Parse(text); err == nil && len(text) == 36 {
		return eventID(id)
	}
	sum := sha256.Sum256([]byte(text))
	return eventID(sum[:16])
}

// sighting is an event or a record that was read.
type sighting struct {
	event     eventID
	side      side
	topic     uint32 // number of the topic
	partition int32  // of a record
	position  int64  // outbox id, or offset of a record
	key       uint64 // hash of the record key, of an event
	at        int64  // when it was recorded, in microseconds; of a record the earliest time that it names
	state     state  // of an event, or of a failed event
}

// state says where an event must be.
type state byte

const (
	stateSent    state = iota // in Kafka
	statePending              // the relay has not come to it
	stateExpired              // it may have expired before the relay came to it
	stateWaiting              // the following ones are those of outbox_failed
	stateFailed
	stateParked
	stateDead
	stateResolved
	states
)

var stateNames = [states]string{"sent", "pending", "expired", "waiting", "failed", "parked", "dead", "resolved"}

// sign maps int64 to uint64 in the same order.
const sign = 1 << 63

func (s *sighting) item() (it item) {
	copy(it[:], s.event[:])
	it[16] = byte(s.side)
	binary.BigEndian.PutUint32(it[17:], s.topic)
	binary.BigEndian.PutUint32(it[21:], uint32(s.partition))
	binary.BigEndian.PutUint64(it[25:], uint64(s.position)^sign)
	binary.BigEndian.PutUint64(it[33:], s.key)
	binary.BigEndian.PutUint64(it[41:], uint64(s.at))
	it[49] = byte(s.state)
	return it
}

func sightingOf(it *item) (s sighting) {
	copy(s.event[:], it[:])
	s.side, s.topic = side(it[16]), binary.BigEndian.Uint32(it[17:])
	s.partition = int32(binary.BigEndian.Uint32(it[21:]))
	s.position = int64(binary.BigEndian.Uint64(it[25:]) ^ sign)
	s.key, s.at = binary.BigEndian.Uint64(it[33:]), int64(binary.BigEndian.Uint64(it[41:]))
	s.state = state(it[49])
	return s
}

// arrival is the first record of an event in a partition, or a mark: a key whose order ended when an event became dead.
// The marks of a key come before its records.
type arrival struct {
	topic     uint32
	key       uint64
	partition int32 // marked: a mark
	offset    int64
	position  int64 // outbox id
	event     eventID
}

const marked = -1

func (a *arrival) item() (it item) {
	binary.BigEndian.PutUint32(it[:], a.topic)
	binary.BigEndian.PutUint64(it[4:], a.key)
	binary.BigEndian.PutUint32(it[12:], uint32(a.partition+1))
	binary.BigEndian.PutUint64(it[16:], uint64(a.offset))
	binary.BigEndian.PutUint64(it[24:], uint64(a.position))
	copy(it[32:], a.event[:])
	return it
}

func arrivalOf(it *item) (a arrival) {
	a.topic, a.key = binary.BigEndian.Uint32(it[:]), binary.BigEndian.Uint64(it[4:])
	a.partition = int32(binary.BigEndian.Uint32(it[12:])) - 1
	a.offset, a.position = int64(binary.BigEndian.Uint64(it[16:])), int64(binary.BigEndian.Uint64(it[24:]))
	copy(a.event[:], it[32:])
	return a
}

// names numbers topics or sources.
type names struct {
	numbers map[string]uint32
	texts   []string
}

func newNames() *names { return &names{numbers: map[string]uint32{}} }

// maxNames bounds the names that are kept in memory.
const maxNames = 50_000

// number returns the number of a name. It allocates only for a new one.
func (n *names) number(name []byte) (uint32, error) {
	number, known := n.numbers[string(name)]
	switch {
	case known:
		return number, nil
	case len(n.texts) == maxNames:
		return 0, fmt.Errorf("there are more than %d topics or sources", maxNames)
	}
	number = uint32(len(n.texts))
	n.numbers[string(name)], n.texts = number, append(n.texts, string(name))
	return number, nil
}

func (n *names) has(name []byte) bool {
	_, known := n.numbers[string(name)]
	return known
}

// seed makes hashes of keys unpredictable, so that writers cannot choose keys with the same hash.
var seed = maphash.MakeSeed()

func hashKey(key []byte) uint64 { return maphash.Bytes(seed, key) }

// Times of items, in microseconds.
const (
	beginning = math.MinInt64
	endless   = math.MaxInt64
)

// microsOf returns a time of an item, or other for the zero time.
func microsOf(t time.Time, other int64) int64 {
	if t.IsZero() {
		return other
	}
	return t.UnixMicro()
}
