package outboxalert

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"mime"
	"mime/quotedprintable"
	"net"
	"net/mail"
	"net/smtp"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/short"
)

// MailConfig says how [Mail] sends mails.
type MailConfig struct {
	// Server is host and port of the mail server: mail.example.com:587. Required.
	Server string
	// From is the address of the sender. Required.
	From string
	// To are the addresses of the receivers. Required.
	To []string
	// Username is for the login to the server. Empty means none.
	Username string
	// Password is for the login to the server. Empty means none.
	Password string
	// ImplicitTLS begins a connection with TLS, as is usual at port 465. False means STARTTLS, which the server must
	// offer unless it is this machine.
	ImplicitTLS bool
	// TLS has, for example, the roots of your own authority. Nil means the system's roots.
	TLS *tls.Config
	// Timeout bounds a mail; an alert has 10 s in any case. Zero means 10 s.
	Timeout time.Duration
}

const mailTimeout = 10 * time.Second

// Mail returns an alerter that sends each alert as a mail, by SMTP with STARTTLS or TLS. The error
// names every bad field.
func Mail(cfg MailConfig) (outbox.Alerter, error) {
	cfg.Timeout = cmp.Or(cfg.Timeout, mailTimeout)
	m := &mailer{cfg: cfg, secrets: newSecrets(cfg.Password, base64.StdEncoding.EncodeToString([]byte("\x00"+cfg.Username+"\x00"+cfg.Password)))}
	var errs []error
	var err error
	if m.host, _, err = net.SplitHostPort(cfg.Server); err != nil || m.host == "" {
		errs = append(errs, errors.New("field Server is no host:port"))
	}
	if m.from, err = mail.ParseAddress(cfg.From); err != nil {
		errs = append(errs, fmt.Errorf("field From: %w", err))
	}
	if len(cfg.To) == 0 {
		errs = append(errs, errors.New("field To is empty"))
	}
	for _, address := range cfg.To {
		to, err := mail.ParseAddress(address)
		if err != nil {
			errs = append(errs, fmt.Errorf("field To: %w", err))
			continue
		}
		m.to = append(m.to, to)
	}
	if cfg.Timeout < 0 {
		errs = append(errs, fmt.Errorf("field Timeout is %v: must not be negative", cfg.Timeout))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("outboxalert: mail config: %w", err)
	}
	return m, nil
}

type mailer struct {
	cfg  MailConfig
	host string
	from *mail.Address
	to   []*mail.Address
	secrets
}

// Alert implements [outbox.Alerter].
func (m *mailer) Alert(ctx context.Context, a outbox.Alert) error {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.Timeout)
	defer cancel()
	text, err := m.message(a, time.Now())
	if err == nil {
		err = m.send(ctx, text)
	}
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	return fmt.Errorf("outboxalert: send mail: %w", m.maskErr(err))
}

// send passes a message to the server. When ctx ends, all its waits end.
func (m *mailer) send(ctx context.Context, message []byte) error {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", m.cfg.Server)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	client, err := m.greet(ctx, conn)
	if err != nil {
		return err
	}
	if m.cfg.Username != "" {
		if err := client.Auth(smtp.PlainAuth("", m.cfg.Username, m.cfg.Password, m.host)); err != nil {
			return err
		}
	}
	if err := client.Mail(m.from.Address); err != nil {
		return err
	}
	for _, to := range m.to {
		if err := client.Rcpt(to.Address); err != nil {
			return err
		}
	}
	data, err := client.Data()
	if err != nil {
		return err
	}
	if _, err := data.Write(message); err != nil {
		return err
	}
	if err := data.Close(); err != nil {
		return err
	}
	_ = client.Quit() // the server has taken the mail
	return nil
}

// greet begins a session over TLS. Without TLS it does so on this machine only, because alerts name
// what happened to whom.
func (m *mailer) greet(ctx context.Context, conn net.Conn) (*smtp.Client, error) {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if m.cfg.TLS != nil {
		cfg = m.cfg.TLS.Clone()
	}
	cfg.ServerName = cmp.Or(cfg.ServerName, m.host)
	if m.cfg.ImplicitTLS {
		secured := tls.Client(conn, cfg)
		if err := secured.HandshakeContext(ctx); err != nil {
			return nil, err
		}
		return smtp.NewClient(secured, m.host)
	}
	client, err := smtp.NewClient(conn, m.host)
	if err != nil {
		return nil, err
	}
	if ok, _ := client.Extension("STARTTLS"); ok {
		return client, client.StartTLS(cfg)
	}
	if !isLoopback(m.host) {
		return nil, errors.New("the server offers no STARTTLS")
	}
	return client, nil
}

// maxSubject is in bytes.
const maxSubject = 200

// message returns an alert as a mail.
func (m *mailer) message(a outbox.Alert, now time.Time) ([]byte, error) {
	var to []string
	for _, address := range m.to {
		to = append(to, address.String())
	}
	_, domain, _ := strings.Cut(m.from.Address, "@")
	var b bytes.Buffer
	for _, header := range [][2]string{
		{"From", m.from.String()},
		{"To", strings.Join(to, ", ")},
		{"Subject", mime.QEncoding.Encode("utf-8", short.Line("outbox: "+a.String(), maxSubject))},
		{"Date", now.Format(time.RFC1123Z)},
		{"Message-ID", "<" + uuid.NewString() + "@" + domain + ">"},
		{"Auto-Submitted", "auto-generated"},
		{"MIME-Version", "1.0"},
		{"Content-Type", "text/plain; charset=utf-8"},
		{"Content-Transfer-Encoding", "quoted-printable"},
	} {
		fmt.Fprintf(&b, "%s: %s\r\n", header[0], header[1])
	}
	b.WriteString("\r\n")
	body := quotedprintable.NewWriter(&b)
	_, err := body.Write([]byte(mailText(a)))
	return b.Bytes(), errors.Join(err, body.Close())
}

// mailText returns an alert as the text of a mail.
func mailText(a outbox.Alert) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\r\n", a)
	for i, line := range deadLines(a) {
		fmt.Fprintf(&b, "\r\n%s", line)
		if i < len(a.Dead) && a.Dead[i].Err != nil {
			fmt.Fprintf(&b, "\r\n  %s", short.Line(a.Dead[i].Err.Error(), maxText))
		}
	}
	if link := Runbook(a.Kind); link != "" && !a.Over {
		fmt.Fprintf(&b, "\r\n\r\nWhat to do: %s\r\n", link)
	}
	return b.String()
}
