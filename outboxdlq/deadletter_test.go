package outboxdlq_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxdlq"
)

func TestDecodeDeadLetter(t *testing.T) {
	t.Parallel()
	f := &fixture{topic: "orders", dlq: "orders.dlq"}
	r := f.deadLetter("a", "v", outbox.DeadLetterValueOmitted, "1234", outbox.DeadLetterError, "bang", outbox.ReplayOf, "first-0-1")
	got, err := outboxdlq.Decode(r)
	require.NoError(t, err)
	require.Equal(t, outboxdlq.DeadLetter{
		OriginalTopic: "orders", OriginalOffset: 17, OriginalTimestamp: failedAt, ReplayOf: "first-0-1", Group: "statistics", Action: "COUNT",
		Error: "bang", Class: "handler", Attempts: 4, FailedAt: failedAt, ValueOmitted: 1234, Record: r,
	}, got, "of two headers the last")
	r.Headers = slices.DeleteFunc(r.Headers, func(h kgo.RecordHeader) bool {
		return !slices.Contains([]string{outbox.DeadLetterOriginalTopic, outbox.DeadLetterOriginalPartition, outbox.DeadLetterOriginalOffset, outbox.DeadLetterGroup}, h.Key)
	})
	got, err = outboxdlq.Decode(r)
	require.NoError(t, err)
	require.Equal(t, outboxdlq.DeadLetter{OriginalTopic: "orders", OriginalOffset: 17, Group: "statistics", Record: r}, got)
}

var badDeadLetters = []struct {
	header, value string
	want          error
}{
	{outbox.DeadLetterOriginalTopic, "", outbox.ErrEmpty},
	{outbox.DeadLetterOriginalTopic, "a b", outbox.ErrMalformed},
	{outbox.DeadLetterOriginalPartition, "", outbox.ErrEmpty},
	{outbox.DeadLetterOriginalPartition, "-1", outbox.ErrMalformed},
	{outbox.DeadLetterOriginalPartition, "2147483648", outbox.ErrMalformed},
	{outbox.DeadLetterOriginalOffset, "", outbox.ErrEmpty},
	{outbox.DeadLetterOriginalOffset, "x", outbox.ErrMalformed},
	{outbox.DeadLetterOriginalOffset, "9223372036854775808", outbox.ErrMalformed},
	{outbox.DeadLetterGroup, "", outbox.ErrEmpty},
	{outbox.DeadLetterOriginalTimestamp, "today", outbox.ErrTime},
	{outbox.DeadLetterFailedAt, "", outbox.ErrTime},
	{outbox.DeadLetterFailedAt, "9999-12-31T23:59:59-23:59", outbox.ErrTime},
	{outbox.DeadLetterAttempts, "many", outbox.ErrMalformed},
	{outbox.DeadLetterValueOmitted, "-5", outbox.ErrMalformed},
}

func TestBadDeadLetter(t *testing.T) {
	t.Parallel()
	f := &fixture{topic: "orders", dlq: "orders.dlq"}
	for _, tt := range badDeadLetters {
		t.Run(tt.header+"="+tt.value, func(t *testing.T) {
			r := f.deadLetter("a", "v", tt.header, tt.value)
			got, err := outboxdlq.Decode(r)
			requireFieldError(t, err, tt.want, tt.header)
			require.Equal(t, outboxdlq.DeadLetter{Record: r}, got)
		})
	}
	_, err := outboxdlq.Decode(&kgo.Record{})
	requireFieldError(t, err, outbox.ErrEmpty, outbox.DeadLetterOriginalTopic)
}
