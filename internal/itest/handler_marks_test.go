package itest

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
)

// RetryAfter without an error is none.
func TestRetryAfterNoError(t *testing.T) {
	t.Parallel()
	require.NoError(t, outbox.RetryAfter(nil, time.Second))
}

// A recorder refuses headers of dead letters and replays. See also the test of the same name in internal/consumer.
func TestReplayHeadersAreNotRecorded(t *testing.T) {
	t.Parallel()
	events, err := outbox.NewRegistry("post-office", outbox.Event(parcelSent, "Parcel", parcel.Number))
	require.NoError(t, err)
	for _, name := range []string{outbox.ReplayGroup, "Replay_Of", outbox.ReplayFrom, outbox.DeadLetterGroup, "DLQ_anything"} {
		rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{
			Headers: func(context.Context, outbox.DomainEvent) map[string]string { return map[string]string{name: "x"} },
		})
		require.NoError(t, err)
		_, err = rec.KafkaRecord(t.Context(), parcel{ID: "1", Sent: noon})
		require.ErrorContains(t, err, "the name is reserved")
	}
}
