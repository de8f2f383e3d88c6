package kafka

import (
	"context"
	"crypto/tls"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// An error of kgo is about an option of the host, which it is often said of in other words:
// "idempotency requires acks=all". The error here names what was given.
func TestErrorsNameOptions(t *testing.T) {
	t.Parallel()
	good := []kgo.Opt{kgo.SeedBrokers("b:1"), kgo.ClientID("c"), kgo.MetadataMaxAge(time.Minute)}
	dialer := kgo.Dialer(func(context.Context, string, string) (net.Conn, error) { return nil, net.ErrClosed })
	for _, tt := range []struct {
		name string
		opts []kgo.Opt
		want []string // errors, one a line
	}{
		{"nothing wrong", nil, nil},
		{"one", []kgo.Opt{kgo.RequiredAcks(kgo.LeaderAck())}, []string{"kafka option RequiredAcks: idempotency requires acks=all"}},
		{"a setting with a limit", []kgo.Opt{kgo.MetadataMinAge(time.Millisecond)}, []string{"kafka option MetadataMinAge: metadata min age 1ms is less than allowed 10ms"}},
		{"two that do not go together", []kgo.Opt{dialer, kgo.DialTLSConfig(new(tls.Config))}, []string{"kafka options Dialer and DialTLSConfig: cannot set both Dialer and DialTLSConfig"}},
		{"two that have nothing to do with each other", []kgo.Opt{kgo.RequiredAcks(kgo.NoAck()), kgo.ProduceRequestTimeout(time.Millisecond)},
			[]string{"kafka option RequiredAcks: idempotency", "kafka option ProduceRequestTimeout: produce timeout"}},
		{"one twice", []kgo.Opt{kgo.RequiredAcks(kgo.NoAck()), kgo.RequiredAcks(kgo.LeaderAck())},
			[]string{"kafka option RequiredAcks: idempotency", "kafka option RequiredAcks: idempotency"}},
		{"what belongs to a member of a group", []kgo.Opt{kgo.DisableAutoCommit(), kgo.OnPartitionsLost(nothingLost), kgo.OnPartitionsRevoked(nothingLost)},
			[]string{"kafka option DisableAutoCommit: only a consumer", "kafka option OnPartitionsRevoked: only a consumer", "kafka option OnPartitionsLost: only a consumer"}},
		{"what kgo accepts and a relay does not", []kgo.Opt{kgo.RequiredAcks(kgo.NoAck()), kgo.ConsumeTopics("t")},
			[]string{"kafka option RequiredAcks: idempotency", "kafka option ConsumeTopics: that is for a consumer"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, opts := range [][]kgo.Opt{slices.Concat(good, tt.opts), slices.Concat(tt.opts, good)} {
				err := CheckProducerOpts(opts)
				if tt.want == nil {
					require.NoError(t, err)
					continue
				}
				lines := err.(interface{ Unwrap() []error }).Unwrap() //nolint:errorlint // it is the joined error itself
				all := flatten(lines)
				require.Len(t, all, len(tt.want), "%v", err)
				for i, want := range tt.want {
					require.ErrorContains(t, all[i], want)
				}
			}
		})
	}
}

func nothingLost(context.Context, *kgo.Client, map[string][]int32) {}

// flatten returns errors with those that they have joined.
func flatten(errs []error) (all []error) {
	for _, err := range errs {
		if joined, ok := err.(interface{ Unwrap() []error }); ok { //nolint:errorlint // a joined error, not one that wraps another
			all = append(all, flatten(joined.Unwrap())...)
			continue
		}
		all = append(all, err)
	}
	return all
}

// What is wrong with the options that are added is not blamed on those of the host.
func TestErrorsOfAddedOptions(t *testing.T) {
	t.Parallel()
	add := func(host []kgo.Opt) []kgo.Opt {
		return slices.Concat(host, []kgo.Opt{kgo.RecordDeliveryTimeout(time.Millisecond)})
	}
	require.EqualError(t, ValidateOpts([]kgo.Opt{kgo.ClientID("c")}, add), "kafka options: record timeout 1ms is less than allowed 1s")
	require.ErrorContains(t, ValidateOpts([]kgo.Opt{kgo.ClientID("c"), kgo.TransactionalID("t")}, func(host []kgo.Opt) []kgo.Opt {
		return slices.Concat(host, []kgo.Opt{kgo.AllowIdempotentProduceCancellation()})
	}), "kafka option TransactionalID: ")
}

// An unnamed option that is not one of kgo's does no harm.
func TestOptName(t *testing.T) {
	t.Parallel()
	require.Equal(t, "ClientID", optName(kgo.ClientID("c")))
	require.Empty(t, optName(nil))
}
