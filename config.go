package outbox

import (
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// What the configurations have in common.

const defaultSchema = "public"

// inSchema completes a statement. It is called once for each, in constructors.
func inSchema(sql, schema string) string {
	return strings.ReplaceAll(sql, "{schema}", pgx.Identifier{schema}.Sanitize())
}

// checkSchema refuses a name that PostgreSQL would cut off or not take.
func checkSchema(schema string) error {
	if err := checkText(schema, 63); err != nil {
		return fmt.Errorf("field Schema %w", err)
	}
	if schema == "$user" { // in a search_path that means the role, however quoted
		return fmt.Errorf("field Schema %w: %q is no name", ErrMalformed, schema)
	}
	if len(schema) > 63 {
		return fmt.Errorf("field Schema %w: %d bytes, at most 63", ErrTooLong, len(schema))
	}
	return nil
}

func notNegative[N int | int64 | time.Duration](field string, n N) error {
	if n < 0 {
		return fmt.Errorf("field %s is %v: must not be negative", field, n)
	}
	return nil
}

// orNull is a parameter: a zero time is NULL.
func orNull(t time.Time) pgtype.Timestamptz { return pgtype.Timestamptz{Time: t, Valid: !t.IsZero()} }

func notAbove(field string, n, limit int) error {
	if n > limit {
		return fmt.Errorf("field %s is %d: at most %d", field, n, limit)
	}
	return nil
}
