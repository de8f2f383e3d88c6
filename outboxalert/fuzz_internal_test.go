package outboxalert

import (
	"encoding/json"
	"errors"
	"io"
	"mime"
	"mime/quotedprintable"
	"net/http"
	"net/mail"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
)

// roundTrip answers requests in place of a network.
type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

var fuzzedKinds = []outbox.AlertKind{outbox.AlertDead, outbox.AlertDeadDeliveries, outbox.AlertManyDead, outbox.AlertStale, outbox.AlertNoLeader,
	outbox.AlertBreaker, outbox.AlertLost, outbox.AlertReport}

// Whatever the names of an event are, each event has one line in Slack, in a mail and in PagerDuty, without a character
// that moves others, and nothing in it is bold text, a link, a mention or a sign.
func FuzzAlert(f *testing.F) {
	f.Add("shop.order.created.v1", "Order", "1", "orders", "MAIL", "timeout: context deadline exceeded", uint8(0), false)
	f.Add("7\r\n:white_check_mark: *all is well*", "\u2028✅ _all_", "<https://evil.example|What to do>", "[a](https://evil.example)", "<!channel> @here", "\u202e\x1b[2J\x00", uint8(1), false)
	f.Add("1:2:3", "a_b_c", "__", "::", "\xff\xf0", "&lt;&amp;", uint8(3), true)
	f.Add(strings.Repeat("&", 400), strings.Repeat("\u200b", 400), strings.Repeat("é", 200), "\u0085", "\v\f", "=\r\n.\r\n", uint8(6), true)
	var body []byte
	client := &http.Client{Transport: roundTrip(func(r *http.Request) (*http.Response, error) {
		var err error
		body, err = io.ReadAll(r.Body)
		return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody}, err
	})}
	slackAlerter, err := Slack("https://hooks.example/x", client)
	require.NoError(f, err)
	pagerDutyAlerter, err := PagerDuty("key", "shop", PagerDutyConfig{Client: client})
	require.NoError(f, err)
	mailAlerter, err := Mail(MailConfig{Server: "mail.example:587", From: "outbox@shop.example", To: []string{"ops@shop.example"}})
	require.NoError(f, err)
	f.Fuzz(func(t *testing.T, eventType, aggregateType, aggregateID, group, action, text string, kind uint8, over bool) {
		event := outbox.FailedEvent{EventID: text, Type: eventType, AggregateType: aggregateType, AggregateID: aggregateID, Class: action, Err: errors.New(text)}
		a := outbox.Alert{Kind: fuzzedKinds[int(kind)%len(fuzzedKinds)], Group: group, Topic: text, Over: over, At: time.Unix(1e9, 0), Status: outbox.RelayStatus{Holder: text},
			Counts: []outbox.EventCount{{Group: group, Action: action, Status: text, Type: eventType, Class: action, Events: 5}}}
		if kind%2 == 0 {
			a.Relay, a.Group = group, ""
		}
		if !over && (a.Kind == outbox.AlertDead || a.Kind == outbox.AlertDeadDeliveries) {
			a.Died, a.Dead = 3, []outbox.DeadEvent{{Group: group, Action: action, FailedEvent: event}, {FailedEvent: event}}
		}
		requireLine(t, a.String())
		require.NoError(t, slackAlerter.Alert(t.Context(), a))
		requireSafeSlack(t, a, body)
		body = []byte("{}")
		require.NoError(t, pagerDutyAlerter.Alert(t.Context(), a))
		requireSafePagerDuty(t, body)
		requireSafeMail(t, a, mailAlerter.(*mailer))
	})
}

// requireLine requires a text that a reader sees as one line, in the order in which it is written.
func requireLine(t *testing.T, text string) {
	t.Helper()
	require.True(t, utf8.ValidString(text), "%q", text)
	require.False(t, strings.ContainsFunc(text, func(r rune) bool { return unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp) }), "%q", text)
}

func requireSafeSlack(t *testing.T, a outbox.Alert, body []byte) {
	t.Helper()
	var m slackMessage
	require.NoError(t, json.Unmarshal(body, &m))
	require.False(t, m.Mrkdwn)
	want := 1
	if len(a.Dead) > 0 {
		want += len(a.Dead) + 1
	}
	lines := strings.Split(m.Text, "\n")
	require.Len(t, lines, want, "%q", m.Text)
	for _, line := range lines {
		requireLine(t, line)
		require.LessOrEqual(t, len(line), maxBlock)
		require.Equal(t, a.Over, strings.HasPrefix(line, "✅"))
		require.NotRegexp(t, "[*~`<>\\[\\]@]|://|:[\\pL_+-]|(^|[^\\pL\\pN])_|_([^\\pL\\pN]|$)", line)
	}
	if !a.Over {
		last := m.Blocks[len(m.Blocks)-1].Text
		require.Equal(t, slackText{Type: "mrkdwn", Text: "<" + Runbook(a.Kind) + "|What to do>"}, last)
		m.Blocks = m.Blocks[:len(m.Blocks)-1]
	}
	require.Len(t, m.Blocks, want)
	for _, block := range m.Blocks {
		require.Equal(t, "plain_text", block.Text.Type)
		require.False(t, *block.Text.Emoji)
		requireLine(t, block.Text.Text)
		require.LessOrEqual(t, len(block.Text.Text), maxBlock)
		require.False(t, strings.ContainsAny(block.Text.Text, "<>"))
	}
}

func requireSafePagerDuty(t *testing.T, body []byte) {
	t.Helper()
	require.Less(t, len(body), 512<<10)
	var event pagerDutyEvent
	require.NoError(t, json.Unmarshal(body, &event))
	require.LessOrEqual(t, len(event.DedupKey), 6*maxDedupKey) // a byte that is no text may be three
	if event.Payload == nil {
		return
	}
	require.LessOrEqual(t, utf8.RuneCountInString(event.Payload.Summary), maxSummary)
	for _, text := range []string{event.Payload.Summary, event.Payload.Component} {
		requireLine(t, text)
	}
	for _, e := range event.Payload.Details.Dead {
		for _, text := range []string{e.EventID, e.Type, e.AggregateType, e.AggregateID, e.Action, e.Class, e.Error} {
			requireLine(t, text)
			require.LessOrEqual(t, len(text), maxText)
		}
	}
	for _, c := range event.Payload.Details.Counts {
		for _, text := range []string{c.Relay, c.Group, c.Action, c.Status, c.Type, c.Class} {
			requireLine(t, text)
		}
	}
}

func requireSafeMail(t *testing.T, a outbox.Alert, m *mailer) {
	t.Helper()
	text, err := m.message(a, time.Unix(1e9, 0))
	require.NoError(t, err)
	message, err := mail.ReadMessage(strings.NewReader(string(text)))
	require.NoError(t, err)
	require.Len(t, message.Header, 9)
	subject, err := new(mime.WordDecoder).DecodeHeader(message.Header.Get("Subject"))
	require.NoError(t, err)
	requireLine(t, subject)
	require.LessOrEqual(t, len(subject), maxSubject)
	body, err := io.ReadAll(quotedprintable.NewReader(message.Body))
	require.NoError(t, err)
	lines := strings.Split(string(body), "\r\n")
	want := 2 // with what is behind the last line break
	if len(a.Dead) > 0 {
		want += 2*len(a.Dead) + 1
	}
	if !a.Over {
		want += 3
		if len(a.Dead) == 0 {
			want--
		}
		require.Equal(t, "What to do: "+Runbook(a.Kind), lines[len(lines)-2])
	}
	require.LessOrEqual(t, len(lines), want+1, "%q", body)
	for _, line := range lines {
		requireLine(t, line)
	}
}
