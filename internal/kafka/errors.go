package kafka

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/outage"
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

// IsAnswer reports whether an error has an answer of Kafka in it. Otherwise Kafka has not answered.
func IsAnswer(err error) bool {
	_, ok := errors.AsType[*kerr.Error](err)
	return ok
}

// IsOutage reports whether a record failed for a reason that lies neither in the record
// nor, as far as the error says, in its topic: in its partition, or in Kafka as a whole.
func IsOutage(err error) bool { return err != nil && RejectionClass(err) == "" && !IsTopicOutage(err) }

// IsReplaced reports whether the topic that a client has sent to was deleted, and
// perhaps created again under the same name. The client keeps sending to the deleted
// one, until it forgets the topic (kgo.PurgeTopicsFromProducing) or a new client replaces it.
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

// Classes of errors of Kafka, see [ClassOf].
const (
	classLogin       = "refused_login"
	classTLS         = "refused_tls"
	classRights      = "refused_rights"
	classUnreachable = "unreachable"
	classClosed      = "closed"
	classNoAnswer    = "no_answer"
	classNoLeader    = "no_leader"
	classNoTopic     = "unknown_topic"
	classUnavailable = "unavailable"
)

// ClassOf returns the class of an error of Kafka, for views of outages. The list of classes is closed.
func ClassOf(err error) string {
	switch {
	case isAny(err, kerr.SaslAuthenticationFailed, kerr.UnsupportedSaslMechanism, kerr.IllegalSaslState):
		return classLogin
	case outage.IsTLS(err):
		return classTLS
	case IsRefused(err), errors.Is(err, kerr.TopicAuthorizationFailed):
		return classRights
	case isAny(err, ErrNoLeader, kerr.LeaderNotAvailable):
		return classNoLeader
	case isAny(err, kerr.UnknownTopicOrPartition, kerr.UnknownTopicID):
		return classNoTopic
	case IsAnswer(err):
		return classUnavailable
	case errors.Is(err, errClosed):
		return classClosed
	case isUnreachable(err):
		return classUnreachable
	case isTimeout(err):
		return classNoAnswer
	}
	return classUnavailable
}

// IsRefused reports whether Kafka has answered that it does not serve this client: its login, its certificate or its
// rights are wrong. A broker that closes a connection without an answer may only be behind a proxy.
func IsRefused(err error) bool {
	return outage.IsTLS(err) || isAny(err, kerr.SaslAuthenticationFailed, kerr.UnsupportedSaslMechanism, kerr.IllegalSaslState,
		kerr.ClusterAuthorizationFailed, kerr.GroupAuthorizationFailed, kerr.TransactionalIDAuthorizationFailed)
}

// isHangUp reports whether the other side has closed a connection.
func isHangUp(err error) bool {
	return isAny(err, io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET, syscall.EPIPE)
}

func isUnreachable(err error) bool {
	failed, ok := errors.AsType[*net.OpError](err)
	return ok && !failed.Timeout() || strings.Contains(err.Error(), connectionDied) || isAny(err, errNoBroker, io.EOF, io.ErrUnexpectedEOF, net.ErrClosed)
}

// connectionDied is in an error that franz-go does not export: a request was on a connection that has ended, and there
// is no other one yet.
const connectionDied = "broker connection has died"

func isTimeout(err error) bool {
	failed, ok := errors.AsType[net.Error](err)
	return ok && failed.Timeout() || isAny(err, context.DeadlineExceeded, os.ErrDeadlineExceeded, kgo.ErrRecordTimeout)
}

func isAny(err error, of ...error) bool {
	return slices.ContainsFunc(of, func(one error) bool { return errors.Is(err, one) })
}
