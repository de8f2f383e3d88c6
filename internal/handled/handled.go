// Package handled has the identity of events, and names it in the table event_handled, in columns of limited length.
package handled

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/outboxgo/outbox/internal/check"
)

// MaxKey is how many characters of a key event_handled.aggregate_id holds.
const MaxKey = 255

const (
	maxSource    = 255 // characters of event_handled.event_source
	digestPrefix = "sha256:"
)

// Identity identifies an event everywhere: in notes, claims and parked rows, for rewinds, replays and dead letters.
// It is made of the event's source, its id, and the type with which it arrived, never the type to which it is upcast.
// So the same id sent as two types is two events, and a release that upcasts to another type finds what the release
// before it has noted. Two events have the same identity if their values are equal.
type Identity struct {
	Type   string // event_handled.aggregate_type
	ID     string // event_handled.aggregate_id: the event's id, or a text made of its source and its id
	Source string // event_handled.event_source: the event's source, or its digest
}

// Event returns the identity of an event, by the type with which it arrived.
func Event(eventType, source, id string) Identity {
	return Identity{Type: eventType, ID: eventKey(source, id), Source: sourceKey(source)}
}

// EventAt returns the identity of an event that goes by its position in a topic, where the id of the topic is known:
// a topic that is created again under the same name has the same positions.
func EventAt(eventType, source, id string, topic [16]byte) Identity {
	e := Event(eventType, source, id)
	if topic != [16]byte{} {
		e.Source = sourceKey(source + "@" + uuid.UUID(topic).String())
	}
	return e
}

// Beside returns event_handled.aggregate_id of an event if an event of another source has its own already.
func (e Identity) Beside() string { return KeyWithSource(e.Source, e.ID) }

// Digest returns event_delivery.record_digest of the event.
func (e Identity) Digest() [16]byte { return digestOf("event", e.Type, e.Source, e.ID) }

// PlaceDigest returns event_delivery.record_digest of a record that could not be read, so that only its place
// identifies it: the id of its topic, and the name of its topic, partition and offset.
func PlaceDigest(topic [16]byte, origin string) [16]byte {
	return digestOf("place", string(topic[:]), origin)
}

// digestOf returns a digest of texts and of where each ends.
func digestOf(parts ...string) (digest [16]byte) {
	var all []byte
	for _, part := range parts {
		all = append(binary.AppendUvarint(all, uint64(len(part))), part...)
	}
	sum := sha256.Sum256(all)
	copy(digest[:], sum[:])
	return digest
}

// eventKey names an event by its id, or by its source and its id. Together with
// sourceKey, no two events of a type have the same name.
func eventKey(source, id string) string {
	if _, err := uuid.Parse(id); err == nil {
		return id
	}
	key := source + " " + id
	if utf8.RuneCountInString(key) <= MaxKey && check.Text(key, math.MaxInt) == nil {
		return key
	}
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}

// sourceKey names a source.
func sourceKey(source string) string {
	if check.Text(source, maxSource) == nil && !strings.HasPrefix(source, digestPrefix) {
		return source
	}
	return digest(source)
}

// KeyWithSource names an event if an event of another source has its own key already. The source is that of an
// [Identity].
func KeyWithSource(source, key string) string {
	return digest(strconv.Itoa(len(source)) + ":" + source + key)
}

func digest(text string) string {
	sum := sha256.Sum256([]byte(text))
	return digestPrefix + hex.EncodeToString(sum[:])
}
