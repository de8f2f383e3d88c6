package delivery

import (
	"crypto/sha256"
	"encoding/binary"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox/internal/pg"
)

// Status of a row of event_delivery.
type Status string

const (
	// Pending is the status of a row that can be claimed once it is due. No other row of its key can be.
	Pending Status = "PENDING"
	// Parked is the status of a row that waits behind another row of its key.
	Parked Status = "PARKED"
	// Processing is the status of a row that a process has claimed.
	Processing Status = "PROCESSING"
	// Done is the status of a row that was handled.
	Done Status = "DONE"
	// Dead is the status of a row that is not retried, unless an operator or RetryDeadAfter requeues it.
	Dead Status = "DEAD"
)

// Ref identifies a claimed row by its id and the holder of the claim, which is locked_by in the row.
type Ref struct {
	ID     int64
	Holder string
}

// Delivery is a row that this process has claimed.
type Delivery struct {
	Ref
	Position int64 // outbox.id, or the offset of the record that brought the event
	Key      Key
	Action   string
	Stream   string

	Attempt, MaxAttempts int
	// Suspect is set if the row was taken over: the event may have ended its last process.
	Suspect bool

	EventID, Type, Source, AggregateType, AggregateID string
	Payload                                           []byte
	ContentType                                       string
	PartitionKey                                      string // "" for AggregateID
	Headers                                           []byte // a JSON object of strings, or nil
	Size                                              int    // of Payload and Headers in bytes, as the row says
	Bare                                              bool   // Payload and Headers were not read, see Store.readPayload
	OccurredAt, RecordedAt                            time.Time

	// FromKafka is set if a record brought the event. Then Payload is the value of the record and Partition
	// its partition. Record has the other parts of the record, as they were parked.
	FromKafka bool
	Partition int32
	Record    []byte
	// ValueIn is the place of the dead letter that alone has the value of the record, "" if the row has it.
	ValueIn string
	// LastCode and LastMessage are the error of the last failed attempt.
	LastCode, LastMessage string
	// FirstFailed is when the first attempt has failed, by the clock of this process. It is zero if none has.
	FirstFailed time.Time
	// WitnessAfter is that of [handling.Task], by the clock of this process.
	WitnessAfter time.Time

	// floor is an id below which no row of the key is open, unless the row was put back.
	floor int64
}

// recordKey returns the key of the event's record in Kafka.
func (d *Delivery) recordKey() string {
	if d.PartitionKey != "" {
		return d.PartitionKey
	}
	return d.AggregateID
}

// Key identifies rows that are handled in order, one after the other. The zero Key is for rows without an
// order.
type Key struct {
	Digest  int64
	Ordered bool
}

// KeyOf returns the key for an action of a group and the events of a stream that share a record key.
func KeyOf(group, action, stream, recordKey string) Key {
	b := make([]byte, 0, 128)
	for _, part := range []string{group, action, stream} { // none of them holds a NUL
		b = append(append(b, part...), 0)
	}
	sum := sha256.Sum256(append(b, recordKey...))
	return Key{Digest: int64(binary.BigEndian.Uint64(sum[:8])), Ordered: true}
}

func (k Key) value() pgtype.Int8 { return pgtype.Int8{Int64: k.Digest, Valid: k.Ordered} }

// columnsWithin returns the columns that readRows reads. The query has a column until, the sum of the sizes
// up to each row. Payload, headers and record are NULL where until is above the budget, a parameter.
func columnsWithin(budget string) string {
	fits := func(column string) string {
		return `CASE WHEN d.until <= ` + budget + `::bigint THEN ` + column + ` END`
	}
	return columns + `, d.until > ` + budget + `::bigint, ` + fits(payload) + `, ` + fits(headers) + `, ` + fits(record)
}

const (
	columns = `d.id, coalesce(d.locked_by, ''), d.position, d.order_key, d.action, d.stream, d.attempt_count, d.max_attempts, coalesce(d.last_error_code = '` + codeStale + `', false),
       coalesce(d.record_id, d.event_id::text), d.event_type, d.source, d.aggregate_type, d.aggregate_id,
       d.content_type, coalesce(d.partition_key, ''), d.occurred_at, d.recorded_at, d.size,
       d.record_partition, coalesce(d.last_error_code, ''), coalesce(d.last_error_message, ''), clock_timestamp() - d.failed_at, clock_timestamp() - d.witness_after, coalesce(d.dead_letter, '')`
	payload = `coalesce(pg_catalog.convert_to(d.payload::text, 'UTF8'), d.payload_bytes)`
	headers = `pg_catalog.convert_to(d.headers::text, 'UTF8')`
	record  = `d.record`
)

// readRows reads all rows of a query for columnsWithin, and further columns of the last one.
func readRows(rows pgx.Rows, further ...any) (all []Delivery, err error) {
	var d Delivery
	var key pgtype.Int8
	var bare pgtype.Bool
	var partition pgtype.Int4
	var failing, witness *time.Duration
	same := func(text *string) any { return (*pg.Repeated)(text) }
	into := append([]any{&d.ID, same(&d.Holder), &d.Position, &key, same(&d.Action), same(&d.Stream), &d.Attempt, &d.MaxAttempts, &d.Suspect,
		&d.EventID, same(&d.Type), same(&d.Source), same(&d.AggregateType), &d.AggregateID,
		same(&d.ContentType), &d.PartitionKey, pg.Instant{At: &d.OccurredAt}, pg.Instant{At: &d.RecordedAt}, &d.Size,
		&partition, &d.LastCode, &d.LastMessage, &failing, &witness, &d.ValueIn, &bare, &d.Payload, &d.Headers, &d.Record}, further...)
	_, err = pgx.ForEachRow(rows, into, func() error {
		d.Key, d.Bare = Key{key.Int64, key.Valid}, bare.Bool
		d.FromKafka, d.Partition = partition.Valid, partition.Int32
		d.FirstFailed, d.WitnessAfter = ago(failing), ago(witness)
		all = append(all, d)
		return nil
	})
	return all, err
}

// ago returns the time, by the clock of this process, since which a duration has passed. It is zero without one.
func ago(d *time.Duration) time.Time {
	if d == nil {
		return time.Time{}
	}
	return time.Now().Add(-max(0, *d))
}

// withFloors sets the floors of rows whose keys were free, given in the order of their ids. The floor of a
// key is its first row here. It holds for good, because later rows have higher ids.
func withFloors(rows []Delivery) []Delivery {
	first := map[Key]int64{}
	for i := range rows {
		d := &rows[i]
		if _, ok := first[d.Key]; !ok && d.Key.Ordered {
			first[d.Key] = d.ID
		}
		d.floor = first[d.Key]
	}
	return rows
}
