package kafka

import (
	"errors"

	"github.com/twmb/franz-go/pkg/kerr"
)

// RejectionClass returns the class of an error with which Kafka rejects the record
// itself, so that a retry returns the same error. For every other error it returns "",
// and the error counts as an outage. The list is closed on purpose: with an open one, an
// hour of expired credentials would reject the whole backlog, and a host whose clock is
// an hour ahead would have all its records rejected (Kafka calls that an invalid
// timestamp).
func RejectionClass(err error) string {
	switch {
	case errors.Is(err, kerr.MessageTooLarge), errors.Is(err, kerr.RecordListTooLarge):
		return "message_too_large"
	case errors.Is(err, kerr.InvalidRecord):
		return "invalid_record"
	case errors.Is(err, kerr.PolicyViolation):
		return "policy_violation"
	}
	return ""
}

// IsTopicOutage reports whether the failure is that of one topic and not of Kafka:
// the topic is missing, or we may not write to it. Other topics do not wait for it.
func IsTopicOutage(err error) bool {
	return errors.Is(err, kerr.UnknownTopicOrPartition) || errors.Is(err, kerr.TopicAuthorizationFailed) ||
		errors.Is(err, kerr.InvalidTopicException) || IsReplaced(err)
}

// IsOutage reports whether a record failed for a reason that lies neither in the record
// nor, as far as the error says, in its topic: in its partition, or in Kafka as a whole.
func IsOutage(err error) bool { return err != nil && RejectionClass(err) == "" && !IsTopicOutage(err) }

// IsReplaced reports whether the topic that a client has sent to was deleted, and
// perhaps created again under the same name. The client keeps sending to the deleted
// one; only a new client sees the new topic.
func IsReplaced(err error) bool { return errors.Is(err, kerr.UnknownTopicID) }

// IsFinal reports whether the client will return this error for ever, so that the next
// send needs a new client. The client does so after an error about its producer id that
// it does not retry, and for a topic that was deleted.
func IsFinal(err error) bool {
	answer, ok := errors.AsType[*kerr.Error](err) // without the allocation of errors.As: this is called for every event
	if !ok || RejectionClass(err) != "" {
		return false
	}
	return IsReplaced(err) || !answer.Retriable && !IsTopicOutage(err)
}

// UnavailableClass returns the class of an outage for which an event waits.
func UnavailableClass(err error) string {
	switch {
	case errors.Is(err, kerr.UnknownTopicOrPartition), IsReplaced(err):
		return "unknown_topic"
	case errors.Is(err, kerr.TopicAuthorizationFailed):
		return "not_authorized"
	case errors.Is(err, kerr.InvalidTopicException):
		return "invalid_topic"
	case errors.Is(err, ErrNoLeader):
		return "no_leader"
	}
	return "unavailable"
}
