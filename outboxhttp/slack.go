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
	"net/url"
	"strings"

	"github.com/outboxgo/outbox"
)

// Slack returns an alerter that posts to an incoming webhook of Slack, or of another
// service that takes the same format: a JSON object with the member text. A nil client
// means http.DefaultClient; a request may take 10 s, like any alert. The URL is a
// secret, so errors do not contain it.
func Slack(webhook string, client *http.Client) (outbox.Alerter, error) {
	u, err := url.Parse(webhook)
	if err != nil || u.Host == "" || u.Scheme != "https" && u.Scheme != "http" {
		return nil, errors.New("outboxhttp: webhook is no http or https URL")
	}
	return &slack{url: webhook, client: cmp.Or(client, http.DefaultClient)}, nil
}

type slack struct {
	url    string
	client *http.Client
}

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
	var failed *url.Error
	if errors.As(err, &failed) {
		err = failed.Err // without the URL
	}
	if err != nil {
		return fmt.Errorf("outboxhttp: post alert: %w", err)
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode/100 != 2 {
		answer, _ := io.ReadAll(io.LimitReader(response.Body, 200)) // as far as it goes
		return fmt.Errorf("outboxhttp: post alert: %s: %s", response.Status, bytes.TrimSpace(answer))
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
