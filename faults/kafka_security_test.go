package faults

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/pbkdf2"
	"crypto/rand"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/tools/kafkaserver"
)

// guardedKafka is a real Kafka that accepts no client without a certificate or a password, and no
// request without a right to it. A client of its own listener may do everything.
type guardedKafka struct {
	*kafkaserver.Server
	dir   string // with ca.pem, client.pem and client.key
	admin *kgo.Client
}

// guardedUsers are those with passwords; each is "pass-" and the name.
var guardedUsers = []string{"kim", "relay", "consumer", "operator", "rewinder", "creator", "doctor"}

const (
	certificates = "MTLS"  // lets in who has a certificate
	passwords    = "LOGIN" // lets in by SASL, with TLS
	clearText    = "CLEAR" // lets in by SASL, without TLS
)

func startGuardedKafka(t *testing.T) *guardedKafka {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: needs a real Kafka")
	}
	k := &guardedKafka{dir: t.TempDir()}
	k.writeCertificates(t)
	plain := `org.apache.kafka.common.security.plain.PlainLoginModule required`
	for _, user := range guardedUsers {
		plain += fmt.Sprintf(` user_%s="pass-%[1]s"`, user)
	}
	settings := map[string]string{
		"allow.everyone.if.no.acl.found": "false", "super.users": "User:ANONYMOUS;User:CN=kim;User:kim", "auto.create.topics.enable": "false",
		"sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
	}
	for _, listener := range []string{certificates, passwords} {
		prefix := "listener.name." + strings.ToLower(listener) + ".ssl."
		settings[prefix+"keystore.type"], settings[prefix+"keystore.location"] = "PEM", k.file("broker.pem")
		settings[prefix+"truststore.type"], settings[prefix+"truststore.location"] = "PEM", k.file("ca.pem")
	}
	settings["listener.name.mtls.ssl.client.auth"] = "required"
	for _, listener := range []string{passwords, clearText} {
		prefix := "listener.name." + strings.ToLower(listener) + "."
		settings[prefix+"plain.sasl.jaas.config"] = plain + ";"
		for _, scram := range []string{"scram-sha-256", "scram-sha-512"} {
			settings[prefix+scram+".sasl.jaas.config"] = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
		}
		// Tokens of tests have no signature, and the broker takes them.
		settings[prefix+"oauthbearer.sasl.jaas.config"] = `org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="broker";`
	}
	cfg := brokerConfig(t)
	cfg.Settings = settings
	cfg.Listeners = map[string]string{certificates: "SSL", passwords: "SASL_SSL", clearText: "SASL_PLAINTEXT"}
	var err error
	k.Server, err = kafkaserver.Start(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, k.Stop(context.Background())) })
	k.admin, err = kgo.NewClient(kgo.SeedBrokers(k.Brokers()...))
	require.NoError(t, err)
	t.Cleanup(k.admin.Close)
	k.addScram(t, "kim", "pass-kim")
	return k
}

func (k *guardedKafka) file(name string) string { return filepath.Join(k.dir, name) }

// writeCertificates writes an authority, and a certificate of it for the broker and one for
// a client.
func (k *guardedKafka) writeCertificates(t *testing.T) {
	t.Helper()
	now := time.Now()
	sign := func(name string, ca *x509.Certificate, caKey *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey, []byte, []byte) {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		require.NoError(t, err)
		template := &x509.Certificate{
			SerialNumber: big.NewInt(now.UnixNano()), Subject: pkix.Name{CommonName: name}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour),
			IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: ca == nil, BasicConstraintsValid: true,
			KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		}
		if ca == nil {
			ca, caKey = template, key
		}
		der, err := x509.CreateCertificate(rand.Reader, template, ca, &key.PublicKey, caKey)
		require.NoError(t, err)
		pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
		require.NoError(t, err)
		certificate, err := x509.ParseCertificate(der)
		require.NoError(t, err)
		return certificate, key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8})
	}
	ca, caKey, caPEM, _ := sign("authority", nil, nil)
	_, _, brokerPEM, brokerKey := sign("broker", ca, caKey)
	_, _, clientPEM, clientKey := sign("kim", ca, caKey)
	_, _, otherPEM, otherKey := sign("kim", nil, nil) // by an authority of its own
	for name, text := range map[string][]byte{"ca.pem": caPEM, "broker.pem": append(brokerKey, brokerPEM...), "client.pem": clientPEM, "client.key": clientKey,
		"other.pem": otherPEM, "other.key": otherKey} {
		require.NoError(t, os.WriteFile(k.file(name), text, 0o600))
	}
}

// addScram has a user log in by SCRAM.
func (k *guardedKafka) addScram(t *testing.T, user, password string) {
	t.Helper()
	const iterations = 4096
	salt := []byte("salt of " + user)
	short, err := pbkdf2.Key(sha256.New, password, salt, iterations, sha256.Size)
	require.NoError(t, err)
	long, err := pbkdf2.Key(sha512.New, password, salt, iterations, sha512.Size)
	require.NoError(t, err)
	for mechanism, salted := range map[int8][]byte{1: short, 2: long} { // a request may name a user once
		request := kmsg.NewPtrAlterUserSCRAMCredentialsRequest()
		request.Upsertions = []kmsg.AlterUserSCRAMCredentialsRequestUpsertion{{Name: user, Mechanism: mechanism, Iterations: iterations, Salt: salt, SaltedPassword: salted}}
		response, err := request.RequestWith(t.Context(), k.admin)
		require.NoError(t, err)
		require.NoError(t, kerr.ErrorForCode(response.Results[0].ErrorCode))
	}
}

// unsigned is a token that says who one is, and has no signature.
func unsigned(subject string, expires time.Time) string {
	part := func(v any) string {
		text, err := json.Marshal(v)
		if err != nil {
			panic(err)
		}
		return base64.RawURLEncoding.EncodeToString(text)
	}
	return part(map[string]string{"alg": "none"}) + "." + part(map[string]any{"sub": subject, "iat": time.Now().Add(-time.Minute).Unix(), "exp": expires.Unix()}) + "."
}

// buildCommandLine builds cmd/outbox.
func buildCommandLine(t *testing.T) (program string) {
	t.Helper()
	program = filepath.Join(t.TempDir(), "outbox")
	out, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, "github.com/outboxgo/outbox/cmd/outbox").CombinedOutput()
	require.NoError(t, err, "%s", out)
	return program
}

// call runs the command line with some variables and returns what it writes.
func call(t *testing.T, program string, variables []string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Env = append([]string{"HOME=" + t.TempDir(), "PATH=" + os.Getenv("PATH")}, variables...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		require.ErrorAs(t, err, new(*exec.ExitError))
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// The command line logs in to a real Kafka in each way that it offers, and says what is
// wrong without repeating a secret.
func TestCommandLineLogsIn(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	k, program := startGuardedKafka(t), buildCommandLine(t)
	k.createTopic(t, "t")
	ca := "KAFKA_CA=" + k.file("ca.pem")
	password := []string{ca, "KAFKA_USER=kim", "KAFKA_PASSWORD=pass-kim"}
	wrong := []string{ca, "KAFKA_USER=kim", "KAFKA_PASSWORD=wrong-secret"}
	good, expired := unsigned("kim", time.Now().Add(time.Hour)), unsigned("kim", time.Now().Add(-time.Minute))
	require.NoError(t, os.WriteFile(k.file("token"), []byte(good+"\n"), 0o600))
	for _, test := range []struct {
		name, listener string
		variables      []string
		flags          string
		fails          string // "" if it works
		warns          string
	}{
		{"certificate", certificates, []string{ca}, "--kafka-cert " + k.file("client.pem") + " --kafka-key " + k.file("client.key"), "", ""},
		{"certificate by variables", certificates, []string{ca, "KAFKA_CERT=" + k.file("client.pem"), "KAFKA_KEY=" + k.file("client.key")}, "", "", ""},
		{"no certificate", certificates, []string{ca}, "", "tls: ", ""},
		{"certificate of another authority", certificates, []string{ca}, "--kafka-cert " + k.file("other.pem") + " --kafka-key " + k.file("other.key"), "tls: ", ""},
		{"certificate with another key", certificates, []string{ca}, "--kafka-cert " + k.file("client.pem") + " --kafka-key " + k.file("other.key"), "does not match", ""},
		{"authority not trusted", passwords, password[1:], "--kafka-tls", "unknown authority", ""},
		{"plain", passwords, password, "--kafka-mechanism plain", "", ""},
		{"plain in clear text", clearText, password[1:], "--kafka-mechanism plain", "", "the password goes to Kafka in clear text"},
		{"plain, wrong password", passwords, wrong, "--kafka-mechanism plain", "SASL_AUTHENTICATION_FAILED", ""},
		{"scram, by default", passwords, password, "", "", ""},
		{"scram 512", passwords, password, "--kafka-mechanism scram-sha-512", "", ""},
		{"scram, wrong password", passwords, wrong, "", "SASL_AUTHENTICATION_FAILED", ""},
		{"token", passwords, []string{ca, "KAFKA_TOKEN=" + good}, "--kafka-mechanism oauthbearer", "", ""},
		{"token of a file", passwords, []string{ca}, "--kafka-mechanism oauthbearer --kafka-token " + k.file("token"), "", ""},
		{"token in clear text", clearText, []string{"KAFKA_TOKEN=" + good, "KAFKA_MECHANISM=oauthbearer"}, "", "", "the token goes to Kafka in clear text"},
		{"token that has expired", passwords, []string{ca, "KAFKA_TOKEN=" + expired}, "--kafka-mechanism oauthbearer", `Kafka rejects the token: {"status":"invalid_token"`, ""},
		{"nobody", passwords, []string{ca}, "", "", ""},
	} {
		args := append([]string{"topics", "t", "--timeout", "20s", "--kafka", k.Address(test.listener)}, strings.Fields(test.flags)...)
		if test.name == "nobody" {
			test.fails = "Kafka" // it closes the connection
			args[3] = "5s"
		}
		out, errs, code := call(t, program, test.variables, args...)
		for _, secret := range []string{"wrong-secret", "pass-kim", good, expired, "PRIVATE"} {
			require.NotContains(t, out+errs, secret, test.name)
		}
		switch {
		case test.name == "nobody":
			require.NotEqual(t, 0, code, test.name)
			require.NotEmpty(t, errs)
		case test.fails != "":
			require.NotEqual(t, 0, code, test.name)
			require.Contains(t, errs, test.fails, test.name)
		default:
			require.Equal(t, 0, code, "%s: %s%s", test.name, out, errs)
			require.Contains(t, out, "there", test.name)
		}
		require.Equal(t, test.warns != "", strings.Contains(errs, "warning: "), "%s: %s", test.name, errs)
		require.Contains(t, errs, test.warns, test.name)
	}
}

// AWS verifies a signature of what is sent. A real MSK cannot be had here: a fake broker
// verifies the same signature in its place.
func TestCommandLineSignsForAWS(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	kafka, program := fakeKafka(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "t")), buildCommandLine(t)
	var mu sync.Mutex
	var sent map[string]string
	kafka.ControlKey(int16(kmsg.SASLHandshake), func(request kmsg.Request) (kmsg.Response, error, bool) {
		kafka.KeepControl()
		response := request.ResponseKind().(*kmsg.SASLHandshakeResponse)
		response.SupportedMechanisms = []string{"AWS_MSK_IAM"}
		if request.(*kmsg.SASLHandshakeRequest).Mechanism != "AWS_MSK_IAM" {
			response.ErrorCode = kerr.UnsupportedSaslMechanism.Code
		}
		return response, nil, true
	})
	kafka.ControlKey(int16(kmsg.SASLAuthenticate), func(request kmsg.Request) (kmsg.Response, error, bool) {
		kafka.KeepControl()
		response := request.ResponseKind().(*kmsg.SASLAuthenticateResponse)
		response.SASLAuthBytes = []byte(`{"version": "2020_10_22", "request-id": "1"}`)
		mu.Lock()
		defer mu.Unlock()
		sent = map[string]string{}
		if json.Unmarshal(request.(*kmsg.SASLAuthenticateRequest).SASLAuthBytes, &sent) != nil || sent["x-amz-signature"] != awsSignature(sent, "secret-of-aws") {
			message := "Access denied"
			response.ErrorCode, response.ErrorMessage = kerr.SaslAuthenticationFailed.Code, &message
		}
		return response, nil, true
	})
	variables := []string{"KAFKA_BROKERS=" + kafka.ListenAddrs()[0], "KAFKA_MECHANISM=aws-msk-iam", "AWS_REGION=eu-central-1", "AWS_ACCESS_KEY_ID=AKIA", "AWS_SESSION_TOKEN=session-of-aws"}
	out, errs, code := call(t, program, append(variables, "AWS_SECRET_ACCESS_KEY=secret-of-aws"), "dlq", "list", "t")
	require.Equal(t, 0, code, errs)
	require.Contains(t, out, "No dead letters")
	require.Contains(t, errs, "the signature goes to Kafka in clear text")
	mu.Lock()
	require.Equal(t, "kafka-cluster:Connect", sent["action"])
	require.Equal(t, "session-of-aws", sent["x-amz-security-token"])
	require.Contains(t, sent["x-amz-credential"], "/eu-central-1/kafka-cluster/aws4_request")
	mu.Unlock()
	out, errs, code = call(t, program, append(variables, "AWS_SECRET_ACCESS_KEY=other-of-aws"), "dlq", "list", "t", "--timeout", "5s")
	require.NotEqual(t, 0, code)
	require.Contains(t, errs, "SASL_AUTHENTICATION_FAILED")
	require.NotContains(t, out+errs, "-of-aws")
}

// awsSignature is version 4 of AWS's signatures for a GET of / with what was sent as its
// query, by the documentation of AWS.
func awsSignature(sent map[string]string, secret string) string {
	query := url.Values{}
	for _, name := range []string{"Action", "X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Date", "X-Amz-Expires", "X-Amz-Security-Token", "X-Amz-SignedHeaders"} {
		query.Set(name, sent[strings.ToLower(name)])
	}
	_, scope, _ := strings.Cut(sent["x-amz-credential"], "/")
	empty := sha256.Sum256(nil)
	canonical := sha256.Sum256([]byte("GET\n/\n" + strings.ReplaceAll(query.Encode(), "+", "%20") + "\nhost:" + sent["host"] + "\n\nhost\n" + hex.EncodeToString(empty[:])))
	key := []byte("AWS4" + secret)
	for _, part := range append(strings.Split(scope, "/"), "AWS4-HMAC-SHA256\n"+sent["x-amz-date"]+"\n"+scope+"\n"+hex.EncodeToString(canonical[:])) {
		mac := hmac.New(sha256.New, key)
		mac.Write([]byte(part))
		key = mac.Sum(nil)
	}
	return hex.EncodeToString(key)
}

func (k *guardedKafka) createTopic(t *testing.T, name string, settings ...string) {
	t.Helper()
	topic := kmsg.NewCreateTopicsRequestTopic()
	topic.Topic, topic.NumPartitions, topic.ReplicationFactor = name, 1, 1
	for i := 0; i < len(settings); i += 2 {
		topic.Configs = append(topic.Configs, kmsg.CreateTopicsRequestTopicConfig{Name: settings[i], Value: &settings[i+1]})
	}
	request := kmsg.NewPtrCreateTopicsRequest()
	request.Topics = append(request.Topics, topic)
	response, err := request.RequestWith(t.Context(), k.admin)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.Topics[0].ErrorCode))
}
