package kafka

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
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
