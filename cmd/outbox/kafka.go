package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/outboxgo/outbox/internal/short"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl"
	"github.com/twmb/franz-go/pkg/sasl/aws"
	"github.com/twmb/franz-go/pkg/sasl/oauth"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

func (e *env) brokers() string { return cmp.Or(e.kafka, e.getenv("KAFKA_BROKERS")) }

// kafkaPatience is how long a request to Kafka is repeated, and kafkaSilence how long a
// broker may say nothing: closing a client waits for that too.
const (
	kafkaPatience = 10 * time.Second
	kafkaSilence  = 5 * time.Second
)

// kafkaOpts returns the options of the flags for a client of a short command.
func (e *env) kafkaOpts() ([]kgo.Opt, error) {
	opts, err := e.kafkaAccess()
	if err != nil {
		return nil, err
	}
	silence := kafkaSilence
	if e.timeout > 0 {
		silence = min(silence, max(e.timeout, time.Second))
	}
	return append(opts, kgo.ClientID("outbox-cli"), kgo.RetryTimeout(kafkaPatience), kgo.DialTimeout(silence), kgo.RequestTimeoutOverhead(silence)), nil
}

// kafkaAccess returns where the brokers are, and how one logs in.
func (e *env) kafkaAccess() ([]kgo.Opt, error) {
	if e.brokers() == "" {
		return nil, usagef("which Kafka? --kafka HOST:PORT, or $KAFKA_BROKERS")
	}
	opts := []kgo.Opt{kgo.SeedBrokers(strings.Split(e.brokers(), ",")...)}
	secure, err := e.kafkaTLSConfig()
	if err != nil {
		return nil, err
	}
	if secure != nil {
		opts = append(opts, kgo.DialTLSConfig(secure))
	}
	login, err := e.kafkaLogin()
	if err != nil || login == nil {
		return opts, err
	}
	if secure == nil {
		e.warnOfClearText(login.Name())
	}
	return append(opts, kgo.SASL(login)), nil
}

// kafkaTLSConfig returns nil if TLS is not to be spoken.
func (e *env) kafkaTLSConfig() (*tls.Config, error) {
	ca, givenCA := e.setting(e.kafkaCA, "--kafka-ca", "KAFKA_CA")
	cert, givenCert := e.setting(e.kafkaCert, "--kafka-cert", "KAFKA_CERT")
	key, givenKey := e.setting(e.kafkaKey, "--kafka-key", "KAFKA_KEY")
	if ca == "" && cert == "" && key == "" && !e.kafkaTLS {
		return nil, nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if ca != "" {
		pem, err := os.ReadFile(ca)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", givenCA, err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s: %s holds no certificate in PEM", givenCA, ca)
		}
	}
	switch {
	case cert == "" && key == "":
		return config, nil
	case cert == "" || key == "":
		return nil, usagef("--kafka-cert and --kafka-key go together: a certificate, and the key that it is of")
	}
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("%s, %s: %w", givenCert, givenKey, err)
	}
	config.Certificates = []tls.Certificate{pair}
	return config, nil
}

var mechanisms = []string{"plain", "scram-sha-256", "scram-sha-512", "oauthbearer", "aws-msk-iam"}

// kafkaLogin returns nil if no mechanism, user or token is named: then there is no login.
func (e *env) kafkaLogin() (sasl.Mechanism, error) {
	mechanism, given := e.setting(e.kafkaMechanism, "--kafka-mechanism", "KAFKA_MECHANISM")
	if mechanism != "" {
		if err := oneOf(given, mechanism, mechanisms); err != nil {
			return nil, err
		}
	}
	switch mechanism {
	case "oauthbearer":
		return e.oauthLogin()
	case "aws-msk-iam":
		return e.awsLogin()
	}
	name, password := cmp.Or(e.kafkaUser, e.getenv("KAFKA_USER")), e.getenv("KAFKA_PASSWORD")
	if name == "" && mechanism == "" {
		return nil, nil
	}
	if name == "" || password == "" {
		return nil, usagef("the login with Kafka wants a user and a password: --kafka-user or $KAFKA_USER, and $KAFKA_PASSWORD")
	}
	e.secret(password, name)
	switch mechanism {
	case "plain":
		return plain.Auth{User: name, Pass: password}.AsMechanism(), nil
	case "scram-sha-512":
		return scram.Auth{User: name, Pass: password}.AsSha512Mechanism(), nil
	}
	return scram.Auth{User: name, Pass: password}.AsSha256Mechanism(), nil
}

// oauthLogin sends a token. One of a file is read at each login, because it expires and
// something else writes a new one there.
func (e *env) oauthLogin() (sasl.Mechanism, error) {
	read := func() (string, error) {
		token := e.getenv("KAFKA_TOKEN")
		if e.kafkaToken != "" {
			text, err := os.ReadFile(e.kafkaToken)
			if err != nil {
				return "", fmt.Errorf("--kafka-token: %w", err)
			}
			token = string(text)
		}
		token = strings.TrimSpace(token)
		if token == "" {
			return "", usagef("--kafka-mechanism oauthbearer wants a token: --kafka-token FILE, or $KAFKA_TOKEN")
		}
		// It becomes part of a line of a protocol.
		if strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return "", usagef("--kafka-mechanism oauthbearer: the token holds other characters than a token may")
		}
		e.secret(token)
		return token, nil
	}
	if _, err := read(); err != nil {
		return nil, err
	}
	return tokenLogin{oauth.Oauth(func(context.Context) (oauth.Auth, error) {
		token, err := read()
		return oauth.Auth{Token: token}, err
	})}, nil
}

// tokenLogin is a login by OAUTHBEARER that says why a broker rejects a token.
type tokenLogin struct{ sasl.Mechanism }

// Authenticate implements [sasl.Mechanism].
func (l tokenLogin) Authenticate(ctx context.Context, host string) (sasl.Session, []byte, error) {
	session, first, err := l.Mechanism.Authenticate(ctx, host)
	return tokenSession{session}, first, err
}

type tokenSession struct{ sasl.Session }

// Challenge implements [sasl.Session]. A broker answers something only to a token that it
// rejects: an object with the reason.
func (s tokenSession) Challenge(answer []byte) (bool, []byte, error) {
	if len(answer) > 0 {
		return false, nil, fmt.Errorf("Kafka rejects the token: %s", short.Text(visible(string(answer)), 300)) //nolint:staticcheck // a name
	}
	return s.Session.Challenge(answer)
}

// awsLogin signs with the credentials of AWS's usual variables. Its signature is the part
// of AWS's library that is needed, so that library is not.
func (e *env) awsLogin() (sasl.Mechanism, error) {
	login := aws.Auth{AccessKey: e.getenv("AWS_ACCESS_KEY_ID"), SecretKey: e.getenv("AWS_SECRET_ACCESS_KEY"), SessionToken: e.getenv("AWS_SESSION_TOKEN"),
		UserAgent: "outbox-cli"}
	if login.AccessKey == "" || login.SecretKey == "" {
		return nil, usagef("--kafka-mechanism aws-msk-iam wants $AWS_ACCESS_KEY_ID and $AWS_SECRET_ACCESS_KEY: eval $(aws configure export-credentials --format env)")
	}
	e.secret(login.SecretKey)
	e.secret(login.SessionToken)
	return login.AsManagedStreamingIAMMechanism(), nil
}

// warnOfClearText warns once of a login that anyone who reads the network traffic can repeat. SCRAM
// sends no password.
func (e *env) warnOfClearText(mechanism string) {
	what := map[string]string{"PLAIN": "the password", "OAUTHBEARER": "the token", "AWS_MSK_IAM": "the signature"}[mechanism]
	if what == "" || e.warned {
		return
	}
	e.warned = true
	e.printError("warning: " + what + " goes to Kafka in clear text: --kafka-tls, or --kafka-ca FILE, encrypts it")
}
