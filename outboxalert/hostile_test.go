package outboxalert_test

import (
	"encoding/json"
	"errors"
	"io"
	"mime"
	"mime/quotedprintable"
	"net/http"
	"net/http/httptest"
	"net/mail"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxalert"
)

// allClear is a text that forges the end of an alert, with every kind of line break and of markup.
const allClear = "7\r\n:white_check_mark: *relay default: all is well*\u2028✅ _all_ ~is~ `well`\u2029\u0085<https://evil.example|What to do>\v" +
	"https://evil.example [What to do](https://evil.example) <!channel> @channel\u202e\u200b\x1b[2J\x00"

// hostile is an alert in which each text of an event forges an all-clear.
var hostile = outbox.Alert{
	Kind: outbox.AlertDeadDeliveries, Group: allClear, Relay: "", Topic: allClear, Died: 3,
	Counts: []outbox.EventCount{{Group: allClear, Action: allClear, Status: allClear, Type: allClear, Class: allClear, Events: 5}},
	Dead: []outbox.DeadEvent{{Group: allClear, Action: allClear, FailedEvent: outbox.FailedEvent{
		EventID: allClear, Type: allClear, AggregateType: allClear, AggregateID: allClear, Class: allClear, Err: errors.New(allClear),
	}}, {FailedEvent: outbox.FailedEvent{
		EventID: allClear, Type: allClear, AggregateType: allClear, AggregateID: strings.Repeat(allClear, 1000), Class: allClear, Err: errors.New(allClear),
	}}},
}

// hostileAlerts are hostile, and the other kinds of which a sentence repeats texts of events.
func hostileAlerts() (all []outbox.Alert) {
	for _, kind := range []outbox.AlertKind{outbox.AlertDeadDeliveries, outbox.AlertManyDead, outbox.AlertStale, outbox.AlertLost, outbox.AlertReport} {
		a := hostile
		a.Kind = kind
		all = append(all, a)
	}
	leads := outbox.Alert{Kind: outbox.AlertNoLeader, Relay: allClear, Over: true, Status: outbox.RelayStatus{Holder: allClear}}
	return append(all, leads)
}

// requireOneLine requires a text that a reader sees as one line, in the order in which it is written.
func requireOneLine(t *testing.T, text string) {
	t.Helper()
	require.False(t, strings.ContainsAny(text, "\r\n\v\f\x00\x1b\u0085\u2028\u2029\u202e\u200b"), "%q", text)
	require.NotEmpty(t, text)
	require.Less(t, len(text), 3_000, "of Slack")
}

// Nothing that others write into events makes a line, bold text, a link or a sign of its own in an alert.
func TestHostileNamesForgeNothing(t *testing.T) {
	t.Parallel()
	t.Run("sentence", func(t *testing.T) {
		t.Parallel()
		for _, a := range hostileAlerts() {
			require.False(t, strings.ContainsAny(a.String(), "\r\n\v\f\x00\x1b\u0085\u2028\u2029\u202e\u200b"), "%q", a.String())
		}
	})
	t.Run("Slack", func(t *testing.T) {
		t.Parallel()
		var message slackMessage
		server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			message = slackMessage{}
			decoder := json.NewDecoder(r.Body)
			decoder.DisallowUnknownFields()
			if err := decoder.Decode(&message); err != nil {
				t.Error(err)
			}
		}))
		defer server.Close()
		slack, err := outboxalert.Slack(server.URL+"/services/T/B/secret", nil)
		require.NoError(t, err)
		for _, a := range hostileAlerts() {
			require.NoError(t, slack.Alert(t.Context(), a))
			message.requireSafe(t, a)
		}
	})
	t.Run("mail", func(t *testing.T) {
		t.Parallel()
		s := (&mailServer{plain: true}).start(t)
		alerter, err := outboxalert.Mail(s.config())
		require.NoError(t, err)
		for _, a := range hostileAlerts() {
			require.NoError(t, alerter.Alert(t.Context(), a))
			mails := s.received()
			message, err := mail.ReadMessage(strings.NewReader(mails[len(mails)-1].text))
			require.NoError(t, err)
			subject, err := new(mime.WordDecoder).DecodeHeader(message.Header.Get("Subject"))
			require.NoError(t, err)
			requireOneLine(t, subject)
			body, err := io.ReadAll(quotedprintable.NewReader(message.Body))
			require.NoError(t, err)
			lines := slices.DeleteFunc(strings.Split(strings.ReplaceAll(string(body), "\r\n", "\n"), "\n"), func(line string) bool { return line == "" })
			want := 1
			if len(a.Dead) > 0 {
				want += 2*len(a.Dead) + 1
			}
			if !a.Over {
				want++
				require.Equal(t, "What to do: "+outboxalert.Runbook(a.Kind), lines[len(lines)-1])
			}
			require.Len(t, lines, want, "%q", body)
			for _, line := range lines[1:] { // the first one lists up to 20 kinds
				requireOneLine(t, line)
			}
		}
	})
	t.Run("PagerDuty", func(t *testing.T) {
		t.Parallel()
		p, alerter := newPagerDuty(t)
		for _, a := range hostileAlerts() {
			require.NoError(t, alerter.Alert(t.Context(), a))
			if payload, triggered := p.last["payload"].(map[string]any); triggered {
				requireOneLines(t, payload)
			}
		}
		require.NotEmpty(t, p.open)
	})
}

// requireOneLines requires that each text in a document of JSON is one line.
func requireOneLines(t *testing.T, value any) {
	t.Helper()
	switch value := value.(type) {
	case map[string]any:
		for _, member := range value {
			requireOneLines(t, member)
		}
	case []any:
		for _, member := range value {
			requireOneLines(t, member)
		}
	case string:
		requireOneLine(t, value)
	}
}

// slackMessage is what a webhook of Slack gets.
type slackMessage struct {
	Text   string `json:"text"`
	Mrkdwn *bool  `json:"mrkdwn"`
	Blocks []struct {
		Type string `json:"type"`
		Text struct {
			Type  string `json:"type"`
			Text  string `json:"text"`
			Emoji *bool  `json:"emoji"`
		} `json:"text"`
	} `json:"blocks"`
}

// requireSafe requires that Slack shows texts of events as they are. Other services show the fallback, perhaps as
// Markdown.
func (m slackMessage) requireSafe(t *testing.T, a outbox.Alert) {
	t.Helper()
	require.NotNil(t, m.Mrkdwn)
	require.False(t, *m.Mrkdwn)
	want := 1
	if len(a.Dead) > 0 {
		want += len(a.Dead) + 1 // "… and 1 more"
	}
	lines := strings.Split(m.Text, "\n")
	require.Len(t, lines, want, "%q", m.Text)
	for _, line := range lines {
		requireOneLine(t, line)
		require.Equal(t, a.Over, strings.HasPrefix(line, "✅"), "%q", line)
		require.NotRegexp(t, "[*~`<>\\[\\]@]|://|:white_check_mark:|(^|\\W)_|_(\\W|$)", line)
	}
	blocks := m.Blocks
	if !a.Over {
		link := blocks[len(blocks)-1].Text
		require.Equal(t, "mrkdwn", link.Type)
		require.Equal(t, "<"+outboxalert.Runbook(a.Kind)+"|What to do>", link.Text)
		blocks = blocks[:len(blocks)-1]
	}
	require.Len(t, blocks, want)
	for _, block := range blocks {
		require.Equal(t, "section", block.Type)
		require.Equal(t, "plain_text", block.Text.Type)
		require.False(t, *block.Text.Emoji)
		requireOneLine(t, block.Text.Text)
		require.Equal(t, a.Over, strings.HasPrefix(block.Text.Text, "✅"))
		require.NotContains(t, block.Text.Text, "<")
	}
}
