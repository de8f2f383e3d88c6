package proxy_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/faults/internal/proxy"
)

// request returns a request as a client sends it.
func request(r kmsg.Request) string {
	return string(kmsg.NewRequestFormatter(kmsg.FormatterClientID("kim")).AppendRequest(nil, r, 1))
}

func cutAtEnds(answered bool) proxy.Fault {
	return proxy.Fault{Requests: &proxy.Requests{Answered: answered, Cut: func(key int16) bool { return key == kmsg.NewPtrEndTxnRequest().Key() }}}
}

// A connection is cut at a request, wherever what came before was divided, and Kafka does not get it.
func TestCutAtRequest(t *testing.T) {
	t.Parallel()
	metadata, end := request(kmsg.NewPtrMetadataRequest()), request(kmsg.NewPtrEndTxnRequest())
	for _, part := range []int{1, 5, 6, 9, len(metadata)} {
		p, accept := listen(t)
		client, server := dial(t, p), accept()
		p.Set(cutAtEnds(false))
		for _, text := range []string{metadata[:part], metadata[part:] + metadata} {
			say(t, client, text)
			requireHears(t, server, text)
		}
		say(t, client, end)
		requireReset(t, client)
		requireReset(t, server)
	}
}

// Kafka gets the request, and the client no answer.
func TestCutInFrontOfAnswerToRequest(t *testing.T) {
	t.Parallel()
	p, accept := listen(t)
	client, server := dial(t, p), accept()
	p.Set(cutAtEnds(true))
	end := request(kmsg.NewPtrEndTxnRequest())
	say(t, client, end)
	requireHears(t, server, end)
	say(t, server, "an answer")
	requireReset(t, client)
	requireReset(t, server)
}

// Bytes of another protocol pass.
func TestOtherProtocolHasNoRequests(t *testing.T) {
	t.Parallel()
	p, accept := listen(t)
	client, server := dial(t, p), accept()
	p.Set(cutAtEnds(false))
	text := "\xff\xff\xff\xff\x00\x1a and more" + request(kmsg.NewPtrEndTxnRequest())
	say(t, client, text)
	requireHears(t, server, text)
	require.NoError(t, client.Close())
}
