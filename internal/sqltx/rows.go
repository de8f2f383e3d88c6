package sqltx

import (
	"database/sql/driver"
	"fmt"
	"io"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// What rows return is what those of pgx/stdlib return, in the same formats, so that code which was written for
// it goes on as it was.

// formats are the types that arrive in their binary form. The others are texts.
var formats = pgx.QueryResultFormatsByOID{
	pgtype.BoolOID: pgx.BinaryFormatCode, pgtype.ByteaOID: pgx.BinaryFormatCode, pgtype.CIDOID: pgx.BinaryFormatCode,
	pgtype.DateOID: pgx.BinaryFormatCode, pgtype.Float4OID: pgx.BinaryFormatCode, pgtype.Float8OID: pgx.BinaryFormatCode,
	pgtype.Int2OID: pgx.BinaryFormatCode, pgtype.Int4OID: pgx.BinaryFormatCode, pgtype.Int8OID: pgx.BinaryFormatCode,
	pgtype.OIDOID: pgx.BinaryFormatCode, pgtype.TimestampOID: pgx.BinaryFormatCode, pgtype.TimestamptzOID: pgx.BinaryFormatCode,
	pgtype.XIDOID: pgx.BinaryFormatCode,
}

// rows are the rows of a statement.
type rows struct {
	conn    *conn
	from    pgx.Rows
	fields  []pgconn.FieldDescription // a copy: the connection uses its own again
	names   []string
	convert []conversion // made with the first row
	fetched bool         // the next row has been fetched
	more    bool         // it is there
}

func newRows(c *conn, from pgx.Rows, more bool) *rows {
	r := &rows{conn: c, from: from, fields: slices.Clone(from.FieldDescriptions()), fetched: true, more: more}
	r.names = make([]string, len(r.fields))
	for i, f := range r.fields {
		r.names[i] = f.Name
	}
	return r
}

// Columns implements [driver.Rows].
func (r *rows) Columns() []string { return r.names }

// Close implements [driver.Rows]. Rows that the end of the transaction has closed are closed.
func (r *rows) Close() error {
	r.conn.mu.Lock()
	defer r.conn.mu.Unlock()
	if r.conn.open != r {
		return nil
	}
	r.conn.open = nil
	r.from.Close()
	return final(r.from.Err())
}

// Next implements [driver.Rows].
func (r *rows) Next(values []driver.Value) error {
	return r.conn.use(func() error {
		if r.fetched {
			r.fetched = false
		} else {
			r.more = r.from.Next()
		}
		if !r.more {
			if err := r.from.Err(); err != nil {
				return err
			}
			return io.EOF
		}
		return r.read(values)
	})
}

// read converts the current row.
func (r *rows) read(values []driver.Value) (err error) {
	if r.convert == nil {
		types := r.from.Conn().TypeMap()
		r.convert = make([]conversion, len(r.fields))
		for i, f := range r.fields {
			r.convert[i] = conversionOf(types, f)
		}
	}
	for i, raw := range r.from.RawValues() {
		values[i] = nil
		if raw == nil {
			continue
		}
		if values[i], err = r.convert[i](raw); err != nil {
			return fmt.Errorf("column %s: %w", r.names[i], err)
		}
	}
	return nil
}

// conversion makes a value of what PostgreSQL has sent.
type conversion func(raw []byte) (driver.Value, error)

func conversionOf(types *pgtype.Map, f pgconn.FieldDescription) conversion {
	switch f.DataTypeOID {
	case pgtype.BoolOID:
		return scanAs(types, f, func(v *bool) (driver.Value, error) { return *v, nil })
	case pgtype.ByteaOID, pgtype.JSONOID, pgtype.JSONBOID, pgtype.XMLOID:
		return scanAs(types, f, func(v *[]byte) (driver.Value, error) { return *v, nil })
	case pgtype.Int2OID, pgtype.Int4OID, pgtype.Int8OID:
		return scanAs(types, f, func(v *int64) (driver.Value, error) { return *v, nil })
	case pgtype.Float4OID:
		return scanAs(types, f, func(v *float32) (driver.Value, error) { return float64(*v), nil })
	case pgtype.Float8OID:
		return scanAs(types, f, func(v *float64) (driver.Value, error) { return *v, nil })
	case pgtype.OIDOID, pgtype.XIDOID, pgtype.CIDOID:
		return scanAs(types, f, func(v *pgtype.Uint32) (driver.Value, error) { return v.Value() })
	case pgtype.DateOID:
		return scanAs(types, f, func(v *pgtype.Date) (driver.Value, error) { return v.Value() })
	case pgtype.TimestampOID:
		return scanAs(types, f, func(v *pgtype.Timestamp) (driver.Value, error) { return v.Value() })
	case pgtype.TimestamptzOID:
		return scanAs(types, f, func(v *pgtype.Timestamptz) (driver.Value, error) { return v.Value() })
	}
	return scanAs(types, f, func(v *string) (driver.Value, error) { return *v, nil })
}

// scanAs scans into a T, and makes a value of that.
func scanAs[T any](types *pgtype.Map, f pgconn.FieldDescription, value func(*T) (driver.Value, error)) conversion {
	var v T
	plan := types.PlanScan(f.DataTypeOID, f.Format, &v)
	return func(raw []byte) (driver.Value, error) {
		if err := plan.Scan(raw, &v); err != nil {
			return nil, err
		}
		return value(&v)
	}
}

// ColumnTypeDatabaseTypeName implements [driver.RowsColumnTypeDatabaseTypeName]. It is the type's
// number if its name is not known, or the transaction has ended.
func (r *rows) ColumnTypeDatabaseTypeName(index int) (name string) {
	oid := r.fields[index].DataTypeOID
	name = strconv.FormatUint(uint64(oid), 10)
	_ = r.conn.use(func() error {
		if t, ok := r.conn.tx.Conn().TypeMap().TypeForOID(oid); ok {
			name = strings.ToUpper(t.Name)
		}
		return nil
	})
	return name
}

const modifierOffset = 4 // of the modifiers of types, VARHDRSZ in PostgreSQL

// ColumnTypeLength implements [driver.RowsColumnTypeLength].
func (r *rows) ColumnTypeLength(index int) (length int64, ok bool) {
	f := r.fields[index]
	switch f.DataTypeOID {
	case pgtype.TextOID, pgtype.ByteaOID:
		return math.MaxInt64, true
	case pgtype.VarcharOID, pgtype.BPCharOID:
		return int64(f.TypeModifier - modifierOffset), true
	case pgtype.VarbitOID:
		return int64(f.TypeModifier), true
	}
	return 0, false
}

// ColumnTypePrecisionScale implements [driver.RowsColumnTypePrecisionScale].
func (r *rows) ColumnTypePrecisionScale(index int) (precision, scale int64, ok bool) {
	f := r.fields[index]
	if f.DataTypeOID != pgtype.NumericOID {
		return 0, 0, false
	}
	modifier := f.TypeModifier - modifierOffset
	return int64(modifier >> 16 & 0xFFFF), int64(modifier & 0xFFFF), true
}

// ColumnTypeScanType implements [driver.RowsColumnTypeScanType].
func (r *rows) ColumnTypeScanType(index int) reflect.Type {
	switch r.fields[index].DataTypeOID {
	case pgtype.Float8OID, pgtype.NumericOID:
		return reflect.TypeFor[float64]()
	case pgtype.Float4OID:
		return reflect.TypeFor[float32]()
	case pgtype.Int8OID:
		return reflect.TypeFor[int64]()
	case pgtype.Int4OID:
		return reflect.TypeFor[int32]()
	case pgtype.Int2OID:
		return reflect.TypeFor[int16]()
	case pgtype.BoolOID:
		return reflect.TypeFor[bool]()
	case pgtype.DateOID, pgtype.TimestampOID, pgtype.TimestamptzOID:
		return reflect.TypeFor[time.Time]()
	case pgtype.ByteaOID:
		return reflect.TypeFor[[]byte]()
	}
	return reflect.TypeFor[string]()
}
