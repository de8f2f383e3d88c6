package outboxalert

import (
	"context"
	"net/http"
	"strings"
	"unicode"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/short"
)

// Slack returns an alerter that posts to an incoming webhook of Slack, or of another
// service that takes the same format: a JSON object with blocks, or with the member text for services that show no
// blocks. No text of an event is markup there: it makes neither a line, nor bold text, nor a link. A nil client
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

// slackMessage is the body of a request. Text is for notifications, and for services without blocks.
type slackMessage struct {
	Text   string       `json:"text"`
	Mrkdwn bool         `json:"mrkdwn"` // Slack's default is true
	Blocks []slackBlock `json:"blocks"`
}

type slackBlock struct {
	Type string    `json:"type"`
	Text slackText `json:"text"`
}

type slackText struct {
	Type  string `json:"type"`
	Text  string `json:"text"`
	Emoji *bool  `json:"emoji,omitempty"` // of plain text: whether :names: become signs
}

// maxBlock is how much of a block is sent, in bytes. Slack takes 3,000 characters.
const maxBlock = 2_900

// Alert implements [outbox.Alerter].
func (s slack) Alert(ctx context.Context, a outbox.Alert) error {
	sign := "\U0001f6a8 " // a rotating light
	switch {
	case a.Over:
		sign = "\u2705 " // a check mark
	case a.Kind == outbox.AlertReport:
		sign = "\U0001f4cb " // a clipboard
	}
	lines := append([]string{sign + a.String()}, deadLines(a)...)
	var m slackMessage
	for i := range lines {
		if i > 0 && i <= len(a.Dead) {
			lines[i] = "• " + lines[i]
		}
		m.Blocks = append(m.Blocks, plainBlock(lines[i]))
		lines[i] = short.Text(withoutMarkup(lines[i]), maxBlock)
	}
	m.Text = strings.Join(lines, "\n")
	if link := Runbook(a.Kind); link != "" && !a.Over {
		m.Blocks = append(m.Blocks, slackBlock{"section", slackText{Type: "mrkdwn", Text: "<" + link + "|What to do>"}})
	}
	return s.post(ctx, m)
}

// plainBlock returns a block that Slack shows as it is, but for the three characters that it wants escaped in any text.
func plainBlock(text string) slackBlock {
	return slackBlock{"section", slackText{Type: "plain_text", Text: short.Text(slackEscapes.Replace(text), maxBlock), Emoji: new(bool)}}
}

var slackEscapes = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;")

// withoutMarkup returns a text that neither Slack nor a service with Markdown takes for markup: no bold text, link,
// mention or :name: of a sign.
func withoutMarkup(text string) string {
	runes := []rune(" " + text + " ")
	isWord := func(r rune) bool { return unicode.IsLetter(r) || unicode.IsDigit(r) }
	for i := 1; i < len(runes)-1; i++ {
		before, after := runes[i-1], runes[i+1]
		inWord, inNumber := isWord(before) && isWord(after), unicode.IsDigit(before) && unicode.IsDigit(after)
		switch r := runes[i]; {
		case strings.ContainsRune("*~`[]@", r), r == '_' && !inWord, r == ':' && after != ' ' && !inNumber:
			runes[i] = '·'
		}
	}
	return slackEscapes.Replace(string(runes[1 : len(runes)-1]))
}
