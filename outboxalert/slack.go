package outboxalert

import (
	"context"
	"fmt"
	"net/http"
	"strings"

	"github.com/outboxgo/outbox"
)

// Slack returns an alerter that posts to an incoming webhook of Slack, or of another
// service that takes the same format: a JSON object with the member text. A nil client
// means http.DefaultClient; a request may take 10 s, like any alert.
//
// The URL is a secret, and alerts name what happened to whom. So the URL must be one of
// https, or of http on this machine itself (localhost, 127.0.0.0/8, ::1), where a proxy may
// listen; redirects are not followed, and no error contains the URL.
func Slack(address string, client *http.Client) (outbox.Alerter, error) {
	hook, err := newWebhook(address, client)
	if err != nil {
		return nil, err
	}
	return slack{hook}, nil
}

type slack struct{ *webhook }

// Alert implements [outbox.Alerter].
func (s slack) Alert(ctx context.Context, a outbox.Alert) error {
	return s.post(ctx, map[string]string{"text": slackText(a)})
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
		text += fmt.Sprintf("\n• `%s` %s %s, event `%s`: %s", escape(e.Type), escape(e.AggregateType), escape(e.AggregateID), escape(e.EventID), escape(e.Class))
		if e.Group != "" {
			text += ", for " + escape(e.Action)
		}
	}
	if more := a.Died - len(a.Dead); more > 0 {
		text += fmt.Sprintf("\n… and %d more", more)
	}
	if link := Runbook(a.Kind); link != "" && !a.Over {
		text += "\n<" + link + "|What to do>"
	}
	return text
}

// escape escapes the special characters of Slack's markup, so that no event can mention
// a channel.
func escape(s string) string {
	return strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", "`", "'").Replace(s)
}
