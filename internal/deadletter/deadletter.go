// Package deadletter holds what the package outbox, which writes dead letters, and the
// package outboxdlq, which reads them and sends them back, must agree on.
package deadletter

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
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
	sum := sha256.New()
	add := func(b []byte) {
		size := uint64(0) // of no value; an empty one has another
		if b != nil {
			size = uint64(len(b)) + 1
		}
		var prefix [8]byte
		binary.BigEndian.PutUint64(prefix[:], size)
		sum.Write(prefix[:])
		sum.Write(b)
	}
	add(r.Key)
	add(r.Value)
	for _, h := range r.Headers {
		if !IsOwn(h.Key) {
			add([]byte(h.Key))
			add(h.Value)
		}
	}
	return hex.EncodeToString(sum.Sum(nil))
}
