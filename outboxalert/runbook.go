package outboxalert

import "github.com/outboxgo/outbox"

const runbooks = "https://github.com/outboxgo/outbox/blob/main/docs/runbooks.md#"

// sections of docs/runbooks.md have the names of the rules for Prometheus.
var sections = map[outbox.AlertKind]string{
	outbox.AlertDead:           "outboxdeadevents",
	outbox.AlertDeadDeliveries: "outboxdeaddeliveries",
	outbox.AlertManyDead:       "outboxmanydead",
	outbox.AlertStale:          "outboxstaleevents",
	outbox.AlertNoLeader:       "outboxnoleader",
	outbox.AlertBreaker:        "outboxbreakeropen",
	outbox.AlertLost:           "outboxlostrecords",
	outbox.AlertReport:         "report",
}

// Runbook returns the address of the page that says what to do about a kind of alerts. It is
// empty for a kind that is not known.
func Runbook(kind outbox.AlertKind) string {
	if sections[kind] == "" {
		return ""
	}
	return runbooks + sections[kind]
}
