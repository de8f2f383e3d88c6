package kafka

import (
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/plain"
)

// closing returns the address of a server that closes each connection after it has read some bytes.
func closing(t *testing.T, after int64) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.CopyN(io.Discard, conn, after)
			_ = conn.Close()
		}
	}()
	return l.Addr().String()
}

// The error of a broker that accepts connections and closes them without an answer says so, and what the cause may be.
// A wrong certificate is refused, and a broker that is gone is unreachable.
func TestConnectionsAreClosedAtOnce(t *testing.T) {
	t.Parallel()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.EnableSASL(), kfake.Superuser("SCRAM-SHA-256", "u", "right"))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	secure := httptest.NewTLSServer(http.NotFoundHandler())
	t.Cleanup(secure.Close)
	login, encrypted := kgo.SASL(plain.Auth{User: "u", Pass: "hunter2222"}.AsMechanism()), kgo.DialTLSConfig(&tls.Config{MinVersion: tls.VersionTLS12})
	for _, test := range []struct {
		name, address, class string
		opts                 []kgo.Opt
	}{
		{"a load balancer without brokers", closing(t, 0), "closed", nil},
		{"with a login", closing(t, 0), "closed", []kgo.Opt{login}},
		{"in a request", closing(t, 4), "closed", nil},
		{"behind a request", closing(t, 12), "closed", nil},
		{"in a handshake", closing(t, 4), "closed", []kgo.Opt{encrypted}},
		{"TLS is expected", strings.TrimPrefix(secure.URL, "https://"), "closed", nil},
		{"SASL is expected", cluster.ListenAddrs()[0], "closed", nil},
		{"another mechanism is expected", cluster.ListenAddrs()[0], "closed", []kgo.Opt{login}},
		{"a certificate that is not trusted", strings.TrimPrefix(secure.URL, "https://"), "refused_tls", []kgo.Opt{encrypted}},
		{"nothing listens", "127.0.0.1:1", "unreachable", nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			client, err := NewClient(append(test.opts, kgo.SeedBrokers(test.address)))
			require.NoError(t, err)
			defer client.Close()
			for range 2 {
				err = askContact(t.Context(), client, true)
				require.Equal(t, test.class, ClassOf(err), "%v", err)
				require.ErrorContains(t, err, test.address)
				require.NotContains(t, err.Error(), "hunter2222")
				require.Equal(t, test.class == "closed", strings.Contains(err.Error(), "TLS or SASL that only one side expects"), "%v", err)
				require.Equal(t, test.class == "refused_tls", IsRefused(err))
			}
		})
	}
}

// A broker that is gone has closed its connections, too. That is not told as their being closed at once.
func TestBrokerIsGone(t *testing.T) {
	t.Parallel()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1))
	require.NoError(t, err)
	client, err := NewClient([]kgo.Opt{kgo.SeedBrokers(cluster.ListenAddrs()...)})
	require.NoError(t, err)
	defer client.Close()
	require.NoError(t, askContact(t.Context(), client, true))
	cluster.Close()
	require.Equal(t, "unreachable", ClassOf(askContact(t.Context(), client, true)))
}
