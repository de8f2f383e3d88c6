package outboxops

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/pg"
)

// ErrUnreadable is in the field PayloadErr of [Failure], [RecordedEvent] and [AuditEntry] if PostgreSQL
// cannot print a payload. It is also there if printing takes longer than 5 s, or gives more than the field
// MaxRead of the configuration, by default 100 MiB. A few kilobytes of jsonb may be that much, because
// PostgreSQL prints 1e131000 as 131,001 digits. A dead delivery of more than 64 KiB has its payload in its dead letter
// only.
var ErrUnreadable = errors.New("the payload cannot be read")

const (
	maxRead      = 100 << 20       // bytes of a payload, or of headers, by default
	readPatience = 5 * time.Second // for one of them
)

// reader reads payloads and headers of the rows of a table one by one, because a single value that cannot
// be printed fails the statement.
type reader struct {
	db                       *pgxpool.Pool
	most                     int // bytes of one of them
	payload, headers, stored string
	deadLetter               string // of deliveries: it finds the dead letter that alone has the value
}

// A column is printed once, in a subquery of its own.
const (
	payloadText = `coalesce(payload_bytes, pg_catalog.convert_to(payload::text, 'UTF8'))`
	boundedText = `SELECT CASE WHEN octet_length(c.bytes) <= $2 THEN c.bytes END, octet_length(c.bytes)
  FROM (SELECT {column} AS bytes FROM {schema}.{table} WHERE id = $1 OFFSET 0) AS c`
	storedBytes = `SELECT coalesce(pg_catalog.pg_column_size(payload), pg_catalog.pg_column_size(payload_bytes), 0) FROM {schema}.{table} WHERE id = $1`
)

// sqlDeadLetterOf returns the place of the dead letter that alone has the value of a delivery.
const sqlDeadLetterOf = `SELECT coalesce(d.dead_letter, '') FROM {schema}.event_delivery AS d WHERE d.id = $1`

func newReader(db *pgxpool.Pool, schema, table string, most int) reader {
	in := func(sql, column string) string {
		return pg.InSchema(strings.NewReplacer("{table}", table, "{column}", column).Replace(sql), schema)
	}
	r := reader{db: db, most: most,
		payload: in(boundedText, payloadText), headers: in(boundedText, `pg_catalog.convert_to(headers::text, 'UTF8')`), stored: in(storedBytes, "")}
	if table == "event_delivery" {
		r.deadLetter = in(sqlDeadLetterOf, "")
		r.headers = in(boundedText, `coalesce(record, pg_catalog.convert_to(headers::text, 'UTF8'))`)
	}
	return r
}

// readPayload returns the payload of a row, nil if it has none, or the reason why it cannot
// be read, which is [ErrUnreadable]. err is any other error, [pgx.ErrNoRows] for example.
func (r reader) readPayload(ctx context.Context, id int64) (payload []byte, reason, err error) {
	if r.deadLetter != "" {
		var place string
		if err := r.db.QueryRow(ctx, r.deadLetter, id).Scan(&place); err != nil {
			return nil, nil, err
		}
		if place != "" {
			return nil, fmt.Errorf("%w: only the dead letter %s has it, as long as Kafka keeps that; a retry needs outbox dlq replay %s",
				ErrUnreadable, place, deadletter.TopicOf(place)), nil
		}
	}
	payload, err = r.read(ctx, r.payload, id)
	if !isUnreadable(ctx, err) {
		return payload, nil, err
	}
	var stored int
	if err := r.db.QueryRow(ctx, r.stored, id).Scan(&stored); err != nil {
		return nil, nil, err
	}
	return nil, fmt.Errorf("%w: %d bytes as stored: %w", ErrUnreadable, stored, err), nil
}

// readHeaders returns the headers of a row as JSON. For a delivery that Kafka brought, it returns the
// record. It returns nil if there are none or if they cannot be read.
func (r reader) readHeaders(ctx context.Context, id int64) ([]byte, error) {
	headers, err := r.read(ctx, r.headers, id)
	if isUnreadable(ctx, err) {
		return nil, nil
	}
	return headers, err
}

func (r reader) read(ctx context.Context, sql string, id int64) (text []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, readPatience)
	defer cancel()
	var printed pgtype.Int8
	if err := pg.QueryRow(ctx, r.db, sql, id, r.most).Scan(&text, &printed); err != nil {
		return nil, err
	}
	if printed.Int64 > int64(r.most) {
		return nil, tooLarge{printed.Int64, r.most}
	}
	return text, nil
}

// tooLarge is the error for a payload above the limit. It has the bytes that would be printed, and the
// limit.
type tooLarge struct {
	printed int64
	most    int
}

func (t tooLarge) Error() string {
	return fmt.Sprintf("PostgreSQL would print %d bytes, more than %d", t.printed, t.most)
}

// isUnreadable reports whether err concerns the value that was read, and not the connection to PostgreSQL.
func isUnreadable(ctx context.Context, err error) bool {
	var large tooLarge
	return ctx.Err() == nil && (pg.IsUnreadable(err) || pg.IsCancelled(err) || errors.Is(err, context.DeadlineExceeded) || errors.As(err, &large))
}

// headersOfRecord returns the headers of a record that event_delivery keeps in its column record.
// Of several with a name it is the last.
func headersOfRecord(text []byte) map[string]string {
	var kept struct {
		Headers []struct{ Name, Value []byte }
	}
	if json.Unmarshal(text, &kept) != nil {
		return nil
	}
	headers := make(map[string]string, len(kept.Headers))
	for _, h := range kept.Headers {
		headers[string(h.Name)] = string(h.Value)
	}
	return headers
}

// headersOf decodes headers. A value that is not text, which no recorder writes, is shown
// as JSON.
func headersOf(text []byte) map[string]string {
	var all map[string]json.RawMessage
	if json.Unmarshal(text, &all) != nil || all == nil {
		return nil // none, or no object: the relay rejects the event and says so
	}
	headers := make(map[string]string, len(all))
	for name, value := range all {
		var text string
		if json.Unmarshal(value, &text) != nil {
			text = string(value)
		}
		headers[name] = text
	}
	return headers
}
