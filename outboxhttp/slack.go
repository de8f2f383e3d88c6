package outboxhttp

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/short"
)

// Slack returns an alerter that posts to an incoming webhook of Slack, or of another
// service that takes the same format: a JSON object with the member text. A nil client
// means http.DefaultClient; a request may take 10 s, like any alert.
//
// The URL is a secret, and alerts name what happened to whom. So the URL must be one of
// https, or of http on this machine itself (localhost, 127.0.0.0/8, ::1), where a proxy may
// listen; redirects are not followed, and no error contains the URL.
func Slack(webhook string, client *http.Client) (outbox.Alerter, error) {
	u, err := url.Parse(webhook)
	switch {
	case err != nil || u.Hostname() == "" || u.Scheme != "https" && u.Scheme != "http":
		return nil, errors.New("outboxhttp: webhook is no https URL")
	case u.Scheme == "http" && !isLoopback(u.Hostname()):
		return nil, errors.New("outboxhttp: webhook is an http URL, which shows itself and the alerts to the network; want https")
	}
	own := *cmp.Or(client, http.DefaultClient)
	own.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return &slack{url: webhook, client: &own, secrets: secretsOf(webhook, u)}, nil
}

func isLoopback(host string) bool {
	address, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && address.Unmap().IsLoopback()
}

// secretsOf returns the texts that errors must not repeat, the longest first. A path or a
// query of a few characters is no secret, and might be a part of any text.
func secretsOf(webhook string, u *url.URL) (secrets []string) {
	password, _ := u.User.Password()
	for _, text := range []string{webhook, u.String(), u.Redacted(), u.RequestURI(), u.EscapedPath(), u.Path, u.RawQuery, password} {
		if len(text) > 3 {
			secrets = append(secrets, text, fmt.Sprintf("%q", text))
		}
	}
	slices.SortFunc(secrets, func(a, b string) int { return len(b) - len(a) })
	return secrets
}

type slack struct {
	url     string
	client  *http.Client
	secrets []string
}

// mask leaves the webhook's address out of a text.
func (s *slack) mask(text string) string {
	for _, secret := range s.secrets {
		text = strings.ReplaceAll(text, secret, "xxxxx")
	}
	return short.Text(text, maxAnswer)
}

// maskedError has the text of an error without the webhook's address, whatever the client
// put into it.
type maskedError struct {
	text string
	error
}

func (e *maskedError) Error() string { return e.text }

// Is reports what the error is, without handing it out: its text has the address.
func (e *maskedError) Is(target error) bool { return errors.Is(e.error, target) }

// maxAnswer is how much of an answer or an error is repeated, in bytes.
const maxAnswer = 300

// Alert implements [outbox.Alerter].
func (s *slack) Alert(ctx context.Context, a outbox.Alert) error {
	body, err := json.Marshal(map[string]string{"text": slackText(a)})
	if err != nil {
		return fmt.Errorf("outboxhttp: encode alert: %w", err)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url, bytes.NewReader(body))
	if err != nil {
		return errors.New("outboxhttp: webhook is no URL")
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := s.client.Do(request)
	if err != nil {
		var failed *url.Error
		if errors.As(err, &failed) {
			err = failed.Err // without the URL
		}
		return fmt.Errorf("outboxhttp: post alert: %w", &maskedError{s.mask(err.Error()), err})
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode/100 != 2 {
		answer, _ := io.ReadAll(io.LimitReader(response.Body, 4<<10)) // as far as it goes
		return fmt.Errorf("outboxhttp: post alert: %s", s.mask(response.Status+": "+string(bytes.TrimSpace(answer))))
	}
	_, err = io.Copy(io.Discard, io.LimitReader(response.Body, 1<<20)) // so that the connection is used again
	return err
}

// slackText returns an alert in Slack's markup.
func slackText(a outbox.Alert) string {
	sign := ":rotating_light:"
	switch {
	case a.Over:
		sign = ":white_check_mark:"
	case a.Kind == outbox.AlertReport:
		sign = ":clipboard:"
	}
	text := sign + " " + escape(a.String())
	for _, e := range a.Dead {
		text += fmt.Sprintf("\n• `%s` %s %s, event `%s`: %s", escape(e.Type), escape(e.AggregateType), escape(e.AggregateID), e.EventID, escape(e.Class))
	}
	if more := a.Died - len(a.Dead); more > 0 {
		text += fmt.Sprintf("\n… and %d more", more)
	}
	return text
}

// escape escapes the special characters of Slack's markup, so that no event can mention
// a channel.
func escape(s string) string {
	return strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", "`", "'").Replace(s)
}
