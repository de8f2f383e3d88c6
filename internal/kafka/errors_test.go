package kafka

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Errors are classified however they are wrapped. What is on no list is an outage.
func TestErrorsAreUnwrapped(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		err              error
		rejected         string
		isTopic, isFinal bool
	}{
		{kerr.MessageTooLarge, "message_too_large", false, false},
		{kerr.RecordListTooLarge, "message_too_large", false, false},
		{kerr.InvalidRecord, "invalid_record", false, false},
		{kerr.PolicyViolation, "policy_violation", false, false},
		{kerr.UnknownTopicOrPartition, "", true, false},
		{kerr.TopicAuthorizationFailed, "", true, false},
		{kerr.InvalidTopicException, "", true, false},
		{kerr.UnknownTopicID, "", true, true},
		{kerr.NotLeaderForPartition, "", false, false},
		{kerr.RequestTimedOut, "", false, false},
		{kerr.SaslAuthenticationFailed, "", false, true},
		{kerr.InvalidTimestamp, "", false, true},
		{context.DeadlineExceeded, "", false, false},
		{io.EOF, "", false, false},
		{errors.New("nobody has foreseen this"), "", false, false},
	} {
		for _, err := range []error{tt.err, fmt.Errorf("send: %w", fmt.Errorf("attempt 3: %w", tt.err)), errors.Join(io.ErrUnexpectedEOF, tt.err)} {
			require.Equal(t, tt.rejected, RejectionClass(err), "%v", err)
			require.Equal(t, tt.isTopic, IsTopicOutage(err), "%v", err)
			require.Equal(t, tt.isFinal, IsFinal(err), "%v", err)
			require.Equal(t, tt.rejected == "" && !tt.isTopic, IsOutage(err), "%v", err)
		}
	}
	require.False(t, IsOutage(nil))
}

// Each error has one class of a closed list. Only an answer of Kafka, or of what speaks TLS in its place, refuses.
func TestClassOf(t *testing.T) {
	t.Parallel()
	dial := &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
	for _, tt := range []struct {
		err     error
		class   string
		rejects bool
	}{
		{kerr.SaslAuthenticationFailed, "refused_login", true},
		{kerr.UnsupportedSaslMechanism, "refused_login", true},
		{kerr.IllegalSaslState, "refused_login", true},
		{tls.RecordHeaderError{Msg: "first record does not look like a TLS handshake"}, "refused_tls", true},
		{tls.AlertError(42), "refused_tls", true},
		{&tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}, "refused_tls", true},
		{x509.HostnameError{Certificate: &x509.Certificate{}, Host: "kafka"}, "refused_tls", true},
		{kerr.ClusterAuthorizationFailed, "refused_rights", true},
		{kerr.GroupAuthorizationFailed, "refused_rights", true},
		{kerr.TransactionalIDAuthorizationFailed, "refused_rights", true},
		{kerr.TopicAuthorizationFailed, "refused_rights", false},
		{ErrNoLeader, "no_leader", false},
		{kerr.LeaderNotAvailable, "no_leader", false},
		{kerr.UnknownTopicOrPartition, "unknown_topic", false},
		{kerr.UnknownTopicID, "unknown_topic", false},
		{kerr.NotEnoughReplicas, "unavailable", false},
		{dial, "unreachable", false},
		{fmt.Errorf("%w: %w", dial, context.DeadlineExceeded), "unreachable", false},
		{io.EOF, "unreachable", false},
		{errors.New("unable to join group session: the broker connection has died and the request will be retried on a new connection"), "unreachable", false},
		{errNoBroker, "unreachable", false},
		{fmt.Errorf("%w: %w", errClosed, io.EOF), "closed", false},
		{context.DeadlineExceeded, "no_answer", false},
		{&net.OpError{Op: "dial", Net: "tcp", Err: os.ErrDeadlineExceeded}, "no_answer", false},
		{kgo.ErrRecordTimeout, "no_answer", false},
		{errors.New("a text"), "unavailable", false},
	} {
		for _, err := range []error{tt.err, fmt.Errorf("send: %w", tt.err)} {
			require.Equal(t, tt.class, ClassOf(err), "%v", err)
			require.Equal(t, tt.rejects, IsRefused(err), "%v", err)
		}
	}
}
