package watch

import (
	"cmp"
	"errors"
	"math"
	"time"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/tables"
)

// Settings say when to alert. outbox.AlertConfig describes the fields.
type Settings struct {
	Interval       time.Duration
	ReportInterval time.Duration
	DeadThreshold  int
	StaleAfter     time.Duration
	StalePending   int
}

// noReports is a ReportInterval, outbox.Forever.
const noReports time.Duration = math.MaxInt64

const (
	defaultInterval      = time.Minute
	defaultReports       = 10 * time.Minute
	defaultDeadThreshold = 10
	defaultStaleAfter    = 5 * time.Minute
	defaultStalePending  = 100
)

// WithDefaults replaces zero values.
func (s Settings) WithDefaults() Settings {
	s.Interval = cmp.Or(s.Interval, defaultInterval)
	s.ReportInterval = cmp.Or(s.ReportInterval, defaultReports)
	s.DeadThreshold = cmp.Or(s.DeadThreshold, defaultDeadThreshold)
	s.StaleAfter = cmp.Or(s.StaleAfter, defaultStaleAfter)
	s.StalePending = cmp.Or(s.StalePending, defaultStalePending)
	return s
}

// Validate names every bad field of the Alerts of a configuration.
func (s Settings) Validate() error {
	return errors.Join(
		check.NotNegative("Alerts.Interval", s.Interval),
		check.NotNegative("Alerts.ReportInterval", s.ReportInterval),
		check.NotNegative("Alerts.DeadThreshold", s.DeadThreshold),
		check.NotAbove("Alerts.DeadThreshold", s.DeadThreshold, tables.MaxCounted),
		check.NotNegative("Alerts.StaleAfter", s.StaleAfter),
		check.NotNegative("Alerts.StalePending", s.StalePending),
		check.NotAbove("Alerts.StalePending", s.StalePending, tables.MaxPending),
	)
}
