package outboxalert_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxalert"
)

// Slack's incoming webhook gets one message for each alert.
func ExampleSlack() {
	slack := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		var message struct{ Text string }
		if err := json.NewDecoder(r.Body).Decode(&message); err != nil {
			panic(err)
		}
		fmt.Println(message.Text != "")
	}))
	defer slack.Close()
	alerter, err := outboxalert.Slack(slack.URL, slack.Client())
	if err != nil {
		panic(err)
	}
	_ = outbox.RelayConfig{Alerts: outbox.AlertConfig{Alerter: alerter}}
	if err := alerter.Alert(context.Background(), outbox.Alert{Kind: outbox.AlertBreaker, Relay: "default"}); err != nil {
		panic(err)
	}
	// Output: true
}
