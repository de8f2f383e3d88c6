package outage

import (
	"log/slog"
	"time"
)

// announcePatience is how long a first try may take before it is logged what it waits for.
const announcePatience = 2 * time.Second

// Announce logs at INFO what a first try waits for, with attrs, unless stop is called soon: until the try has
// failed, which takes at most atMost, nothing else would say why nothing happens.
func Announce(log *slog.Logger, what string, atMost time.Duration, attrs ...any) (stop func() bool) {
	return time.AfterFunc(announcePatience, func() {
		log.Info("outbox: waiting for "+what, append(attrs, "at_most", atMost)...)
	}).Stop
}
