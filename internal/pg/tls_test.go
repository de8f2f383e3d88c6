package pg_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
)

// A server whose certificate this process does not trust refuses TLS: another CA in the configuration mends it, and
// waiting does not. A server without TLS is unreachable with it.
func TestClassOfTLS(t *testing.T) {
	t.Parallel()
	certified := httptest.NewTLSServer(http.NotFoundHandler())
	t.Cleanup(certified.Close)
	for _, test := range []struct {
		name, mode, ca, class string
		answer                byte
	}{
		{"a CA that has not signed it", "verify-ca", "other", "refused_tls", 'S'},
		{"the CA of the system", "verify-full", "", "refused_tls", 'S'},
		{"another host", "verify-full", "own", "refused_tls", 'S'},
		{"no TLS", "require", "", "unreachable", 'N'},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			defer l.Close()
			go func() {
				for {
					conn, err := l.Accept()
					if err != nil {
						return
					}
					_, _ = io.CopyN(io.Discard, conn, 8) // SSLRequest
					_, _ = conn.Write([]byte{test.answer})
					if test.answer == 'S' {
						_ = tls.Server(conn, certified.TLS).HandshakeContext(t.Context())
					}
					_ = conn.Close()
				}
			}()
			url := "postgres://u:hunter2222@" + l.Addr().String() + "/d?sslmode=" + test.mode
			switch test.ca {
			case "own":
				url = "postgres://u:hunter2222@localhost:" + l.Addr().String()[len("127.0.0.1:"):] + "/d?sslmode=" + test.mode + "&sslrootcert=" + rootFile(t, certified.Certificate().Raw)
			case "other":
				url += "&sslrootcert=" + rootFile(t, someCA(t))
			}
			_, err = pgx.Connect(t.Context(), url)
			require.Equal(t, test.class, pg.ClassOf(err), "%v", err)
			require.NotContains(t, err.Error(), "hunter2222")
		})
	}
}

// rootFile returns the name of a file with a certificate.
func rootFile(t *testing.T, der []byte) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "ca.pem")
	require.NoError(t, os.WriteFile(name, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	return name
}

// someCA returns the certificate of a CA that has signed nothing.
func someCA(t *testing.T) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), IsCA: true, BasicConstraintsValid: true, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	return der
}
