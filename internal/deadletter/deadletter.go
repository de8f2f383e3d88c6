// Package deadletter holds what the package outbox, which writes dead letters, and the
// package outboxdlq, which reads them and sends them back, must agree on.
package deadletter

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash"
	"math"
	"strings"

	"github.com/twmb/franz-go/pkg/kgo"
)

// Prefix begins the name of every header that a record gets in a dead-letter topic.
const Prefix = "dlq_"

// TopicSuffix ends the name of a dead-letter topic, behind the name of the original topic.
const TopicSuffix = ".dlq"

// Headers of a record that was sent back from a dead-letter topic. The package outbox
// exports them and describes them there.
const (
	ReplayOf     = "replay_of"
	ReplayGroup  = "replay_group"
	ReplayAction = "replay_action"
	ReplayFrom   = "replay_from"
)

// Headers of a dead letter that name its original record and the cause. The package outbox exports
// them, too.
const (
	OriginalTopic     = Prefix + "original_topic"
	OriginalPartition = Prefix + "original_partition"
	OriginalOffset    = Prefix + "original_offset"
	OriginalTimestamp = Prefix + "original_timestamp"
	OriginalDigest    = Prefix + "digest"
	Group             = Prefix + "group"
	Action            = Prefix + "action"
	Error             = Prefix + "error"
	ErrorClass        = Prefix + "error_class"
	Attempts          = Prefix + "attempts"
	FailedAt          = Prefix + "failed_at"
	ValueOmitted      = Prefix + "value_omitted"
	KeyOmitted        = Prefix + "key_omitted"
	HeadersOmitted    = Prefix + "headers_omitted"
	EditedFrom        = Prefix + "edited_from"
	Unread            = Prefix + "unread" // why nothing of the original could be read
)

// A dead letter of ClassReplay names the group of a record that outboxreplay sends: no handler has failed. No partition
// of Kafka has the number NoPartition, so no dead letter of a consumer is taken for one.
const (
	ClassReplay = "replay"
	NoPartition = math.MaxInt32
)

// Topic returns the name of the topic for the dead letters of another.
func Topic(topic string) string { return topic + TopicSuffix }

// IsOwn reports whether a header is one of a dead letter or of a replay, and not of the
// original. Some decoders do not distinguish upper and lower case, so this does not. It
// is called for every header of every record.
func IsOwn(name string) bool {
	switch {
	case name == "":
		return false
	case name[0]|' ' == 'd':
		return len(name) >= len(Prefix) && strings.EqualFold(name[:len(Prefix)], Prefix)
	}
	return IsReplay(name)
}

// IsReplay reports whether a header is one of a replay. It does not distinguish upper and lower
// case either.
func IsReplay(name string) bool {
	const prefix = len("replay_")
	if len(name) <= prefix || name[0]|' ' != 'r' || name[prefix-1] != '_' {
		return false
	}
	return strings.EqualFold(name, ReplayOf) || strings.EqualFold(name, ReplayGroup) || strings.EqualFold(name, ReplayAction) ||
		strings.EqualFold(name, ReplayFrom)
}

// Origin names a record by its position in Kafka: topic-partition-offset.
func Origin(topic string, partition int32, offset int64) string {
	return fmt.Sprintf("%s-%d-%d", topic, partition, offset)
}

// Digest returns the SHA-256 of what a record is, wherever it is: its key, value and
// headers, but for those of dead letters and replays.
func Digest(r *kgo.Record) string {
	d := NewDigester()
	d.Add(r.Key)
	d.Add(r.Value)
	for _, h := range r.Headers {
		d.AddHeader(h)
	}
	return d.Sum()
}

// Digester computes the [Digest] of a record that is not in memory as a whole.
type Digester struct{ sum hash.Hash }

// NewDigester returns the digester of a record of which nothing was added. Its parts are added in the order key, value,
// headers.
func NewDigester() Digester { return Digester{sha256.New()} }

// Add adds a key or a value. It is nil for none.
func (d Digester) Add(part []byte) {
	size := -1
	if part != nil {
		size = len(part)
	}
	d.Begin(size)
	d.Write(part)
}

// AddHeader adds a header, unless it is one of a dead letter or a replay.
func (d Digester) AddHeader(h kgo.RecordHeader) {
	if !IsOwn(h.Key) {
		d.Add([]byte(h.Key))
		d.Add(h.Value)
	}
}

// Begin adds the size of a part that [Digester.Write] adds in pieces: -1 for none, another size than for an empty one.
func (d Digester) Begin(size int) {
	var prefix [8]byte
	binary.BigEndian.PutUint64(prefix[:], uint64(size+1))
	d.sum.Write(prefix[:])
}

// Write adds a piece of a part.
func (d Digester) Write(piece []byte) { d.sum.Write(piece) }

// Sum returns the digest of what was added.
func (d Digester) Sum() string { return hex.EncodeToString(d.sum.Sum(nil)) }
