package record

import (
	"encoding/base64"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/jsonb"
)

// maxStatement bounds the values of a statement, in bytes. PostgreSQL takes 1 GiB, but keeps several
// copies of it, and pgx closes the connection above that; a single event of the largest payload always fits.
const maxStatement = 256 << 20

// document returns all rows as a JSON array of objects, whose members are rowColumns, and due_at of a delayed one.
func (r *Rows) document() (string, error) {
	b := append(make([]byte, 0, min(r.documentSize(), maxStatement)), '[')
	for i := range r.Len() {
		if i > 0 {
			b = append(b, ',')
		}
		b = r.appendObject(b, i)
		if len(b) > maxStatement {
			return "", tooLarge()
		}
	}
	return string(append(b, ']')), nil
}

// documentSize estimates how long the document becomes.
func (r *Rows) documentSize() (n int) {
	const others = 500 // names of members, and short values
	for i := range r.Len() {
		n += others + len(r.payload[i].String)*9/8 + len(r.headers[i].String)*9/8 + base64.StdEncoding.EncodedLen(len(r.payloadBytes[i]))
	}
	return n
}

func (r *Rows) appendObject(b []byte, i int) []byte {
	values, _ := r.row(i) // its error is always nil
	for k, value := range values {
		separator := byte(',')
		if k == 0 {
			separator = '{'
		}
		b = append(append(append(b, separator, '"'), rowColumns[k]...), '"', ':')
		b = appendValue(b, value)
	}
	if r.dueAt[i].Valid {
		b = appendValue(append(b, `,"due_at":`...), r.dueAt[i].Time)
	}
	return append(b, '}')
}

// appendValue appends a value of a row in the form that the input function of its column reads.
func appendValue(b []byte, value any) []byte {
	switch v := value.(type) {
	case string:
		return jsonb.AppendString(b, v)
	case pgtype.Text:
		if v.Valid {
			return jsonb.AppendString(b, v.String)
		}
	case pgtype.UUID:
		return append(append(append(b, '"'), uuid.UUID(v.Bytes).String()...), '"')
	case time.Time:
		return append(envelope.AppendTime(append(b, '"'), v), '"')
	case pgtype.Timestamptz:
		if v.Valid {
			return append(envelope.AppendTime(append(b, '"'), v.Time), '"')
		}
	case int32:
		return strconv.AppendInt(b, int64(v), 10)
	case []byte:
		if v != nil {
			return append(base64.StdEncoding.AppendEncode(append(b, '"'), v), '"')
		}
	}
	return append(b, "null"...)
}
