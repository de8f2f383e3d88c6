package delivery

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/deadletter"
)

// A dead record would be kept twice: in its row, and in its dead letter. A large record is kept in the dead letter
// only: its row is stripped, and names the dead letter. A replay of the dead letter writes the record back.

// maxKept bounds the value and the record, in bytes, that a DEAD row keeps beside its dead letter. See Delivery.Size.
const maxKept = 64 << 10

// sqlStrip replaces the record of a row that becomes DEAD, or whose dead letter was owed and taken until $6.
const sqlStrip = `
UPDATE {schema}.event_delivery AS d SET payload_bytes = '', record = $4::bytea, size = octet_length($4::bytea), dead_letter = $5::text
 WHERE d.id = $1 AND d.consumer_group = $2::text AND coalesce(d.locked_by, '') = $3::text AND (d.status = 'PROCESSING' OR d.dead_letter_owed AND d.next_retry_at = $6::timestamptz)`

// stripped returns the place of a dead letter, or "" if its row keeps the value: the dead letter is incomplete, or
// RetryDeadAfter retries the row.
func (r *Rules) stripped(code, place string) string {
	if _, retried := r.RetryDeadAfter[code]; retried {
		return ""
	}
	return place
}

// queueStrip strips the row of a delivery if it is large and its dead letter has a place. It comes before the statement
// that ends the claim of the row. until is for a dead letter that was owed.
func (s *Store) queueStrip(b *pgx.Batch, d *Delivery, place string, until time.Time) {
	if place != "" && d.ValueIn == "" && d.Size > maxKept {
		b.Queue(s.sqlStrip, d.ID, s.group, d.Holder, strippedRecord(d), place, until)
	}
}

// strippedRecord returns the record of a stripped row: without key and headers if these are large, too.
func strippedRecord(d *Delivery) []byte {
	if len(d.Record) <= maxKept {
		return d.Record
	}
	r, err := RecordOf(d)
	r.Key, r.Headers = nil, nil
	text, textErr := json.Marshal(r)
	if err != nil || textErr != nil { // the dead letter was made of it, so it is well-formed
		return d.Record
	}
	return text
}

// strippedError returns the error of a stripped row that is retried.
func strippedError(place string) error {
	return fmt.Errorf("only the dead letter %s has the value of this event: outbox dlq replay %s brings it back", place, deadletter.TopicOf(place))
}
