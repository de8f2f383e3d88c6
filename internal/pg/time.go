package pg

import (
	"math"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// Time scans a timestamptz into a time. One that RFC 3339 cannot write, infinity for
// example, becomes the first or the last one that it can; NULL becomes zero.
type Time struct{ At *time.Time }

var (
	firstTime = time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC)
	lastTime  = time.Date(9999, 12, 31, 23, 59, 59, 999_999_000, time.UTC)
)

// Instant scans a timestamptz into a time, also one that RFC 3339 cannot write. Infinity becomes
// a time in a year far from those, NULL becomes zero.
type Instant struct{ At *time.Time }

// ScanTimestamptz implements [pgtype.TimestamptzScanner].
func (i Instant) ScanTimestamptz(v pgtype.Timestamptz) error {
	switch v.InfinityModifier {
	case pgtype.Infinity:
		*i.At = time.UnixMicro(math.MaxInt64)
	case pgtype.NegativeInfinity:
		*i.At = time.UnixMicro(math.MinInt64)
	default:
		*i.At = v.Time
	}
	return nil
}

// ScanTimestamptz implements [pgtype.TimestamptzScanner].
func (t Time) ScanTimestamptz(v pgtype.Timestamptz) error {
	*t.At = v.Time
	switch year := v.Time.UTC().Year(); {
	case !v.Valid:
		*t.At = time.Time{}
	case v.InfinityModifier == pgtype.Infinity, v.InfinityModifier == pgtype.Finite && year > lastTime.Year():
		*t.At = lastTime
	case v.InfinityModifier == pgtype.NegativeInfinity, year < firstTime.Year():
		*t.At = firstTime
	}
	return nil
}
