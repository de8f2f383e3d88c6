// Package deliveries keeps the table event_delivery: what is owed to the handlers of
// workers, and what those of consumers could not handle. One goroutine or process after the other handles the rows of a key, in their
// order; rows of different keys go side by side.
//
// Of the open rows of a key, those before others in its order are PROCESSING or one is
// PENDING, and all others are PARKED. So a claim looks at one row of each key, however many
// wait behind it. What inserts, ends or requeues rows locks their keys first, and decides in
// a later statement: a statement that waits for a lock goes on reading what was committed
// before it began to wait.
//
// A floor of a key is an id below which none of its rows is open, unless it was put back. It holds
// for good, so nobody need look below it.
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
	// Pending rows are due at some time: the only row of their key that may be claimed.
	Pending Status = "PENDING"
	// Parked rows wait behind another row of their key.
	Parked Status = "PARKED"
	// Processing rows are with a worker.
	Processing Status = "PROCESSING"
	// Done rows are handled.
	Done Status = "DONE"
	// Dead rows are given up until an operator acts.
	Dead Status = "DEAD"
)

// Ref is a row that this worker has claimed, and locked_by of this claim.
type Ref struct {
	ID     int64
	Holder string
}

// Delivery is a row that this worker has claimed.
type Delivery struct {
	Ref
	Position int64 // outbox.id, or the offset of the record that brought it
	Key      Key
	Action   string
	Stream   string

	Attempt, MaxAttempts int
	// Suspect is set if the worker that had it before is gone: the event may have ended its
	// process.
	Suspect bool

	EventID, Type, Source, AggregateType, AggregateID string
	Payload                                           []byte
	ContentType                                       string
	PartitionKey                                      string // "" for AggregateID
	Headers                                           []byte // a JSON object of strings, or nil
	Size                                              int    // of Payload and Headers in bytes, by what its row says
	Bare                                              bool   // Payload and Headers were not read, see Store.Print
	OccurredAt, RecordedAt                            time.Time

	// FromKafka is set if a record brought the event: then Payload is its value, Partition its partition, and Record is
	// the rest of it, as it was parked.
	FromKafka bool
	Partition int32
	Record    []byte
	// LastCode and LastMessage are of the attempt that has failed last.
	LastCode, LastMessage string

	// floor is an id below which no row of the key is open, unless it was put back.
	floor int64
}

// RecordKey returns the key that the event's record has in Kafka.
func (d *Delivery) RecordKey() string {
	if d.PartitionKey != "" {
		return d.PartitionKey
	}
	return d.AggregateID
}

// Key identifies the rows that are handled in order. The zero Key is that of rows whose
// order does not matter.
type Key struct {
	Digest  int64
	Ordered bool
}

// KeyOf returns the key of the events of a record key in a stream, for an action of a group.
func KeyOf(group, action, stream, recordKey string) Key {
	b := make([]byte, 0, 128)
	for _, part := range []string{group, action, stream} { // none of them holds a NUL
		b = append(append(b, part...), 0)
	}
	sum := sha256.Sum256(append(b, recordKey...))
	return Key{Digest: int64(binary.BigEndian.Uint64(sum[:8])), Ordered: true}
}

func (k Key) value() pgtype.Int8 { return pgtype.Int8{Int64: k.Digest, Valid: k.Ordered} }

// columnsWithin are those that scan reads. The last three are NULL in rows that have a column until, the sum of the
// sizes up to theirs, which is above a parameter.
func columnsWithin(budget string) string {
	fits := func(column string) string {
		return `CASE WHEN d.until <= ` + budget + `::bigint THEN ` + column + ` END`
	}
	return columns + `, d.until > ` + budget + `::bigint, ` + fits(payload) + `, ` + fits(headers) + `, ` + fits(record)
}

const (
	columns = `d.id, coalesce(d.locked_by, ''), d.position, d.order_key, d.action, d.stream, d.attempt_count, d.max_attempts, coalesce(d.last_error_code = '` + CodeStale + `', false),
       coalesce(d.record_id, d.event_id::text), d.event_type, d.source, d.aggregate_type, d.aggregate_id,
       d.content_type, coalesce(d.partition_key, ''), d.occurred_at, d.recorded_at, d.size,
       d.record_partition, coalesce(d.last_error_code, ''), coalesce(d.last_error_message, '')`
	payload = `coalesce(convert_to(d.payload::text, 'UTF8'), d.payload_bytes)`
	headers = `convert_to(d.headers::text, 'UTF8')`
	record  = `d.record`
)

// scan reads all rows.
func scan(rows pgx.Rows) ([]Delivery, error) {
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (d Delivery, err error) {
		var key pgtype.Int8
		var bare pgtype.Bool
		var partition pgtype.Int4
		err = row.Scan(&d.ID, &d.Holder, &d.Position, &key, &d.Action, &d.Stream, &d.Attempt, &d.MaxAttempts, &d.Suspect,
			&d.EventID, &d.Type, &d.Source, &d.AggregateType, &d.AggregateID,
			&d.ContentType, &d.PartitionKey, pg.Instant{At: &d.OccurredAt}, pg.Instant{At: &d.RecordedAt}, &d.Size,
			&partition, &d.LastCode, &d.LastMessage, &bare, &d.Payload, &d.Headers, &d.Record)
		d.Key, d.Bare = Key{key.Int64, key.Valid}, bare.Bool
		d.FromKafka, d.Partition = partition.Valid, partition.Int32
		return d, err
	})
}

// onFloors notes for rows that were found free, in the order of their ids, that none of their keys
// is open before the first of them. It stays so: what is inserted later has higher ids.
func onFloors(rows []Delivery) []Delivery {
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
