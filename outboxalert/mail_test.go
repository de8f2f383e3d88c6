package outboxalert_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/quotedprintable"
	"net"
	"net/http/httptest"
	"net/mail"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxalert"
)

// mailServer is a mail server for one test, with what SMTP needs.
type mailServer struct {
	address  string
	cert     tls.Certificate
	roots    *x509.CertPool
	password string // that it wants; empty: none
	plain    bool   // it has no STARTTLS
	implicit bool   // TLS from the beginning
	silentAt string // the command that it does not answer
	refuses  string // the command that it refuses

	mu    sync.Mutex
	mails []receivedMail
	seen  []string // commands
}

type receivedMail struct {
	from      string
	to        []string
	encrypted bool
	text      string
}

// start serves until the test ends.
func (s *mailServer) start(t *testing.T) *mailServer {
	t.Helper()
	certs := httptest.NewTLSServer(nil)
	defer certs.Close()
	s.cert, s.roots = certs.TLS.Certificates[0], x509.NewCertPool()
	s.roots.AddCert(certs.Certificate())
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s.address = listener.Addr().String()
	var sessions sync.WaitGroup
	ended := make(chan struct{})
	sessions.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			stop := context.AfterFunc(contextOf(ended), func() { _ = conn.Close() })
			sessions.Go(func() {
				defer stop()
				defer conn.Close()
				s.serve(conn)
			})
		}
	})
	t.Cleanup(func() {
		close(ended)
		_ = listener.Close()
		sessions.Wait()
	})
	return s
}

// contextOf returns a context that ends with a channel.
func contextOf(ended chan struct{}) context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		<-ended
		cancel()
	}()
	return ctx
}

// serve talks to one client.
func (s *mailServer) serve(conn net.Conn) {
	encrypted := s.implicit
	if s.implicit {
		conn = tls.Server(conn, &tls.Config{Certificates: []tls.Certificate{s.cert}})
	}
	lines := bufio.NewReader(conn)
	answer := func(text string) { fmt.Fprintf(conn, "%s\r\n", text) }
	answer("220 mail.example.com ESMTP")
	var m receivedMail
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			return
		}
		line = strings.TrimRight(line, "\r\n")
		command, rest, _ := strings.Cut(line, " ")
		s.mu.Lock()
		s.seen = append(s.seen, command)
		s.mu.Unlock()
		switch command = strings.ToUpper(command); {
		case command == s.silentAt:
			_, _ = io.Copy(io.Discard, conn)
			return
		case command == s.refuses:
			answer("550 no, and neither " + line)
		case command == "EHLO" && !encrypted && !s.plain:
			answer("250-mail.example.com\r\n250 STARTTLS")
		case command == "EHLO":
			answer("250-mail.example.com\r\n250 AUTH PLAIN")
		case command == "STARTTLS":
			answer("220 go ahead")
			conn, encrypted = tls.Server(conn, &tls.Config{Certificates: []tls.Certificate{s.cert}}), true
			lines = bufio.NewReader(conn)
		case command == "AUTH":
			given, _ := base64.StdEncoding.DecodeString(strings.TrimPrefix(rest, "PLAIN "))
			if s.password == "" || string(given) != "\x00kim\x00"+s.password {
				answer("535 not you, " + line)
				continue
			}
			s.password = ""
			answer("235 welcome")
		case s.password != "" && command != "QUIT":
			answer("530 who are you?")
		case command == "MAIL":
			m = receivedMail{from: rest, encrypted: encrypted}
			answer("250 ok")
		case command == "RCPT":
			m.to = append(m.to, rest)
			answer("250 ok")
		case command == "DATA":
			answer("354 go on")
			text, err := readData(lines)
			if err != nil {
				return
			}
			m.text = text
			s.mu.Lock()
			s.mails = append(s.mails, m)
			s.mu.Unlock()
			answer("250 taken")
		case command == "QUIT":
			answer("221 bye")
			return
		default:
			answer("500 what?")
		}
	}
}

func readData(lines *bufio.Reader) (string, error) {
	var text bytes.Buffer
	for {
		line, err := lines.ReadString('\n')
		if err != nil || line == ".\r\n" {
			return text.String(), err
		}
		text.WriteString(strings.TrimPrefix(line, "."))
	}
}

func (s *mailServer) received() []receivedMail {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mails
}

func (s *mailServer) config() outboxalert.MailConfig {
	return outboxalert.MailConfig{
		Server: s.address, From: "Outbox <outbox@example.com>", To: []string{"ops@example.com", "Kim <kim@example.com>"},
		ImplicitTLS: s.implicit, TLS: &tls.Config{RootCAs: s.roots},
	}
}

var poisonous = outbox.Alert{
	Kind: outbox.AlertDeadDeliveries, Group: "stäts\r\nBcc: all@example.com", Died: 3, Counts: []outbox.EventCount{{Events: 5}},
	Dead: []outbox.DeadEvent{{Group: "stats", Action: "COUNTED", FailedEvent: outbox.FailedEvent{
		EventID: "e-1", Type: "shop.order.created.v1", AggregateType: "Order", AggregateID: "42\r\n.\r\nMAIL FROM:<x>", Class: "timeout", Err: errors.New("it took too long"),
	}}},
}

// A mail is sent over TLS, however it begins, and nothing of an event becomes a header or a command.
func TestMail(t *testing.T) {
	t.Parallel()
	for name, server := range map[string]*mailServer{
		"STARTTLS": {}, "TLS": {implicit: true}, "with a password": {password: "s3cret-word"}, "this machine": {plain: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := server.start(t)
			cfg := s.config()
			if s.password != "" {
				cfg.Username, cfg.Password = "kim", s.password
			}
			alerter, err := outboxalert.Mail(cfg)
			require.NoError(t, err)
			require.NoError(t, alerter.Alert(t.Context(), poisonous))
			require.Len(t, s.received(), 1)
			m := s.received()[0]
			require.Equal(t, !s.plain, m.encrypted)
			require.Equal(t, "FROM:<outbox@example.com>", strings.TrimSuffix(m.from, " BODY=8BITMIME"))
			require.Equal(t, []string{"TO:<ops@example.com>", "TO:<kim@example.com>"}, m.to)
			requireMail(t, m.text)
		})
	}
}

func requireMail(t *testing.T, text string) {
	t.Helper()
	message, err := mail.ReadMessage(strings.NewReader(text))
	require.NoError(t, err)
	require.Equal(t, `"Outbox" <outbox@example.com>`, message.Header.Get("From"))
	require.Equal(t, `<ops@example.com>, "Kim" <kim@example.com>`, message.Header.Get("To"))
	require.Empty(t, message.Header.Get("Bcc"))
	require.Equal(t, "auto-generated", message.Header.Get("Auto-Submitted"))
	require.Regexp(t, `^<.+@example.com>$`, message.Header.Get("Message-ID"))
	subject, err := new(mime.WordDecoder).DecodeHeader(message.Header.Get("Subject"))
	require.NoError(t, err)
	require.Equal(t, "outbox: consumer group stäts··Bcc: all@example.com: 3 deliveries given up; 5 are dead", subject)
	date, err := message.Header.Date()
	require.NoError(t, err)
	require.WithinDuration(t, time.Now(), date, time.Minute)
	body, err := io.ReadAll(quotedprintable.NewReader(message.Body))
	require.NoError(t, err)
	require.Contains(t, string(body), "shop.order.created.v1 Order 42··.··MAIL FROM:<x>, event e-1: timeout, for COUNTED\r\n  it took too long\r\n… and 2 more")
	require.Contains(t, string(body), "What to do: https://github.com/outboxgo/outbox/blob/main/docs/runbooks.md#outboxdeaddeliveries")
}

// What the server refuses, or does not answer, is an error without the password. Nothing waits for
// longer than the time that there is.
func TestMailFails(t *testing.T) {
	t.Parallel()
	const password = "s3cret-word"
	for _, command := range []string{"EHLO", "STARTTLS", "AUTH", "MAIL", "RCPT", "DATA"} {
		for _, silent := range []bool{false, true} {
			s := (&mailServer{password: password}).start(t)
			want := "no, and neither"
			if silent {
				s.silentAt, want = command, context.DeadlineExceeded.Error()
			} else {
				s.refuses = command
			}
			cfg := s.config()
			cfg.Username, cfg.Password, cfg.Timeout = "kim", password, 300*time.Millisecond
			alerter, err := outboxalert.Mail(cfg)
			require.NoError(t, err)
			began := time.Now()
			err = alerter.Alert(t.Context(), poisonous)
			require.Error(t, err, command)
			if command != "EHLO" || silent { // another greeting is tried
				require.ErrorContains(t, err, want, command)
			}
			require.Less(t, time.Since(began), 5*time.Second)
			require.NotContains(t, err.Error(), password)
			require.NotContains(t, err.Error(), base64.StdEncoding.EncodeToString([]byte("\x00kim\x00"+password)))
			require.Empty(t, s.received())
		}
	}
}

// Alerts and passwords are not sent to a server that cannot prove who it is, nor to one without TLS.
func TestMailIsNotSentInTheOpen(t *testing.T) {
	t.Parallel()
	s := new(mailServer).start(t)
	cfg := s.config()
	cfg.TLS = nil // its authority is not known
	alerter, err := outboxalert.Mail(cfg)
	require.NoError(t, err)
	require.ErrorContains(t, alerter.Alert(t.Context(), poisonous), "certificate")

	open := (&mailServer{plain: true}).start(t)
	cfg = open.config()
	_, port, err := net.SplitHostPort(open.address)
	require.NoError(t, err)
	cfg.Server = "localhost.localdomain:" + port
	alerter, err = outboxalert.Mail(cfg)
	require.NoError(t, err)
	require.Error(t, alerter.Alert(t.Context(), poisonous))
	require.Empty(t, open.received())
	open.mu.Lock()
	defer open.mu.Unlock()
	require.NotContains(t, open.seen, "MAIL")
}

func TestMailConfig(t *testing.T) {
	t.Parallel()
	_, err := outboxalert.Mail(outboxalert.MailConfig{Server: "mail", From: "x", To: []string{"y\r\nBcc: z@example.com"}, Timeout: -1})
	for _, field := range []string{"Server", "From", "To", "Timeout"} {
		require.ErrorContains(t, err, "field "+field)
	}
	_, err = outboxalert.Mail(outboxalert.MailConfig{Server: "mail:25", From: "x@example.com"})
	require.ErrorContains(t, err, "field To is empty")
}
