package outboxalert

import (
	"fmt"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/short"
)

// maxText is how much of a text of an event is repeated, in bytes.
const maxText = 300

// field returns a text of an event, or of a table, as an alert has it: writers choose it, so it must not become a line
// of its own.
func field(text string) string { return short.Line(text, maxText) }

// deadLines returns a line for each event of an alert, and one for the number of others.
func deadLines(a outbox.Alert) (lines []string) {
	for _, e := range a.Dead {
		line := fmt.Sprintf("%s %s %s, event %s: %s", field(e.Type), field(e.AggregateType), field(e.AggregateID), field(e.EventID), field(e.Class))
		if e.Group != "" {
			line += ", for " + field(e.Action)
		}
		lines = append(lines, line)
	}
	if more := a.Died - len(a.Dead); more > 0 {
		lines = append(lines, fmt.Sprintf("… and %d more", more))
	}
	return lines
}
