// Package handled names events in the table event_handled, in columns of limited length.
package handled

import (
	"crypto/sha256"
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

// EventKey names an event by its id, or by its source and its id. Together with
// [SourceKey], no two events have the same name.
func EventKey(source, id string) string {
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

// SourceKey names a source.
func SourceKey(source string) string {
	if check.Text(source, maxSource) == nil && !strings.HasPrefix(source, digestPrefix) {
		return source
	}
	return digest(source)
}

// SourceKeyIn names the source of an event that goes by its position in a topic, where the id of
// the topic is known: one that is created again under the same name has the same positions.
func SourceKeyIn(source string, topic [16]byte) string {
	if topic == [16]byte{} {
		return SourceKey(source)
	}
	return SourceKey(source + "@" + uuid.UUID(topic).String())
}

// KeyWithSource names an event if an event of another source has its own key already. The source is a name of
// [SourceKey] or [SourceKeyIn].
func KeyWithSource(source, key string) string {
	return digest(strconv.Itoa(len(source)) + ":" + source + key)
}

func digest(text string) string {
	sum := sha256.Sum256([]byte(text))
	return digestPrefix + hex.EncodeToString(sum[:])
}
