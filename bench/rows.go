package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/twmb/franz-go/pkg/kgo"
)

// sqlRows is what a hand-written loop would read. It loses events when transactions overlap; here
// there are no writers.
const sqlRows = `
SELECT id, occurred_at, event_id::text, event_type, source, aggregate_type, aggregate_id, payload::text, content_type
  FROM {schema}.outbox
 WHERE id > $1
 ORDER BY id
 LIMIT $2`

// row is an event as PostgreSQL sends it.
type row struct {
	id         int64
	occurredAt time.Time

	eventID, eventType, source, aggregateType, aggregateID, payload, contentType []byte
}

// newRow copies a row out of the connection's buffer, all at once.
func newRow(raw [][]byte) row {
	const epoch2000 = 946_684_800_000_000 // microseconds from 1970 to 2000, where PostgreSQL counts from
	all := slices.Concat(raw...)
	next := func(column int) []byte {
		field := all[:len(raw[column]):len(raw[column])]
		all = all[len(field):]
		return field
	}
	return row{
		id:         int64(binary.BigEndian.Uint64(next(0))),
		occurredAt: time.UnixMicro(int64(binary.BigEndian.Uint64(next(1))) + epoch2000),
		eventID:    next(2), eventType: next(3), source: next(4), aggregateType: next(5),
		aggregateID: next(6), payload: next(7), contentType: next(8),
	}
}

const headersPerRecord = 8

// record returns the record that a relay makes of the row. Its headers are
// appended to headers, which many records may share.
func (r row) record(topic string, headers *[]kgo.RecordHeader) kgo.Record {
	first := len(*headers)
	*headers = append(*headers,
		kgo.RecordHeader{Key: "ce_specversion", Value: []byte("1.0")},
		kgo.RecordHeader{Key: "ce_id", Value: r.eventID},
		kgo.RecordHeader{Key: "ce_source", Value: r.source},
		kgo.RecordHeader{Key: "ce_type", Value: r.eventType},
		kgo.RecordHeader{Key: "ce_subject", Value: r.aggregateID},
		kgo.RecordHeader{Key: "ce_time", Value: r.occurredAt.UTC().AppendFormat(nil, "2006-01-02T15:04:05.999999Z07:00")},
		kgo.RecordHeader{Key: "ce_aggregatetype", Value: r.aggregateType},
		kgo.RecordHeader{Key: "content-type", Value: r.contentType},
	)
	return kgo.Record{Topic: topic, Key: r.aggregateID, Value: r.payload, Headers: (*headers)[first:len(*headers):len(*headers)]}
}

// batches reads the events of j in batches, as records, up to the first that is
// empty.
func batches(ctx context.Context, db *pgx.Conn, j job) iter.Seq2[[]kgo.Record, error] {
	sql := services.InSchema(sqlRows, j.Schema)
	return func(yield func([]kgo.Record, error) bool) {
		for last := int64(0); ; {
			records, highest, err := readBatch(ctx, db, sql, last, j)
			if err == nil && len(records) == 0 || !yield(records, err) || err != nil {
				return
			}
			last = highest
		}
	}
}

// readBatch reads the events behind the one with id last.
func readBatch(ctx context.Context, db *pgx.Conn, sql string, last int64, j job) ([]kgo.Record, int64, error) {
	rows, err := db.Query(ctx, sql, last, j.Batch)
	if err != nil {
		return nil, last, fmt.Errorf("read rows: %w", err)
	}
	defer rows.Close()
	records := make([]kgo.Record, 0, j.Batch)
	headers := make([]kgo.RecordHeader, 0, j.Batch*headersPerRecord)
	for rows.Next() {
		r := newRow(rows.RawValues())
		records, last = append(records, r.record(j.Topic, &headers)), r.id
	}
	if err := rows.Err(); err != nil {
		return nil, last, fmt.Errorf("read rows: %w", err)
	}
	return records, last, nil
}

// ahead lets seq work on its next step while the present one is in use.
func ahead[T any](seq iter.Seq2[T, error]) iter.Seq2[T, error] {
	type step struct {
		value T
		err   error
	}
	return func(yield func(T, error) bool) {
		steps, quit := make(chan step), make(chan struct{})
		go func() {
			defer close(steps)
			for value, err := range seq {
				select {
				case steps <- step{value, err}:
				case <-quit:
					return
				}
			}
		}()
		defer func() {
			close(quit)
			for range steps { // until seq has ended
			}
		}()
		for s := range steps {
			if !yield(s.value, s.err) {
				return
			}
		}
	}
}
