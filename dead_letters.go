package outbox

import "github.com/outboxgo/outbox/internal/deadletter"

// The headers of a dead letter, beside those of the record itself, whose key and
// value it has as well.
const (
	// DeadLetterOriginalTopic, …Partition, …Offset and …Timestamp say where the
	// record was: the numbers in decimal, the timestamp in RFC 3339, UTC, to the
	// millisecond.
	DeadLetterOriginalTopic     = deadletter.OriginalTopic
	DeadLetterOriginalPartition = deadletter.OriginalPartition
	DeadLetterOriginalOffset    = deadletter.OriginalOffset
	DeadLetterOriginalTimestamp = deadletter.OriginalTimestamp
	// DeadLetterGroup and DeadLetterAction say who could not handle it. The action is
	// empty where the record was not fit for any.
	DeadLetterGroup  = deadletter.Group
	DeadLetterAction = deadletter.Action
	// DeadLetterError, DeadLetterClass and DeadLetterAttempts say why: the text of
	// the error, at most 2,000 bytes, its kind, and how often it was tried.
	DeadLetterError    = deadletter.Error
	DeadLetterClass    = deadletter.ErrorClass
	DeadLetterAttempts = deadletter.Attempts
	// DeadLetterFailedAt is when it was given up, in RFC 3339, UTC.
	DeadLetterFailedAt = deadletter.FailedAt
	// DeadLetterValueOmitted is there if the dead-letter topic took the record only
	// without its value, which is in the original record still: its size in bytes.
	DeadLetterValueOmitted = deadletter.ValueOmitted
	// DeadLetterKeyOmitted and …HeadersOmitted are there if that was not enough. A key
	// above 1 KiB is omitted then, and of the headers those that do not fit into 8 KiB:
	// the size of the key in bytes, and the number of headers.
	DeadLetterKeyOmitted     = deadletter.KeyOmitted
	DeadLetterHeadersOmitted = deadletter.HeadersOmitted
	// DeadLetterDigest is there beside each of them: the SHA-256 of the original's key,
	// value and headers, by which a replay recognizes it.
	DeadLetterDigest = deadletter.OriginalDigest
)

// The headers of a record that was sent back from a dead-letter topic: only this
// group handles it, and only this action if one is named.
//
// Headers are input: whoever may write to the topic could hide an event with them. So they
// count only in a copy of a dead letter, which ReplayFrom names and which is looked at in
// the dead-letter topic. Other records are handled as if they had no such headers.
const (
	ReplayGroup  = deadletter.ReplayGroup
	ReplayAction = deadletter.ReplayAction
)

// ReplayOf is a header of such a record too: where it was first, as
// topic-partition-offset. It stands for the id of an event that has none, see
// [PlainRecords].
const ReplayOf = deadletter.ReplayOf

// ReplayFrom is a header of such a record too: where its dead letter is, as
// topic-partition-offset.
const ReplayFrom = deadletter.ReplayFrom

// DeadLetterTopic returns the name of the topic for the dead letters of another:
// {topic}.dlq.
func DeadLetterTopic(topic string) string { return deadletter.Topic(topic) }
