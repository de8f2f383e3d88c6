package pg

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outboxgo/outbox/internal/outage"
)

// IsUndefined reports whether PostgreSQL did not find an object that a statement names: a table,
// its schema, a column or a function. A database that is behind this release causes such errors. It
// returns false for objects that a trigger of the host does not find: such an error says where it
// is from.
func IsUndefined(err error) bool {
	failed, ok := errors.AsType[*pgconn.PgError](err)
	return ok && failed.Where == "" && IsUndefinedCode(failed.Code)
}

const undefinedTable, invalidSchemaName, undefinedColumn, undefinedFunction = "42P01", "3F000", "42703", "42883"

// IsUndefinedCode reports whether a SQLSTATE says that something was not found.
func IsUndefinedCode(code string) bool {
	return slices.Contains([]string{undefinedTable, invalidSchemaName, undefinedColumn, undefinedFunction}, code)
}

// IsUndefinedTable reports whether PostgreSQL did not find a table or its schema.
func IsUndefinedTable(err error) bool { return hasCode(err, undefinedTable, invalidSchemaName) }

// LockNotAvailable is the SQLSTATE of a lock that PostgreSQL did not get in time.
const LockNotAvailable = "55P03"

// IsLocked reports whether PostgreSQL did not get a lock in time.
func IsLocked(err error) bool { return hasCode(err, LockNotAvailable) }

// IsUnreadable reports whether PostgreSQL could not print a row, which is the same however
// often it is asked: the text is longer than 1 GB, the data are damaged, or a value has no
// text. A jsonb of a few kilobytes can be that long, because numbers are printed in full.
// An error that ends the connection says nothing about a row: some poolers tell with the
// code of an internal error that they have no connection left.
func IsUnreadable(err error) bool {
	if failed, ok := errors.AsType[*pgconn.PgError](err); !ok || failed.SeverityUnlocalized == "FATAL" || failed.Severity == "FATAL" {
		return false
	}
	const programLimitExceeded, dataCorrupted, indexCorrupted, internalError, dataException = "54000", "XX001", "XX002", "XX000", "22"
	return hasCode(err, programLimitExceeded, dataCorrupted, indexCorrupted, internalError) || strings.HasPrefix(Code(err), dataException)
}

// IsRejectedRow reports whether PostgreSQL rejects a row for its content: a value that its encoding
// does not have, a constraint, or a key that is too long for an index.
func IsRejectedRow(err error) bool {
	return slices.ContainsFunc([]string{"22", "23", "54"}, func(class string) bool { return strings.HasPrefix(Code(err), class) })
}

// IsDuplicate reports whether there is a row already that a unique index does not want twice.
func IsDuplicate(err error) bool {
	const uniqueViolation = "23505"
	return hasCode(err, uniqueViolation)
}

// IsTransient reports whether PostgreSQL asks for the transaction to be repeated.
func IsTransient(err error) bool {
	const serializationFailure, deadlockDetected = "40001", "40P01"
	return hasCode(err, serializationFailure, deadlockDetected)
}

// IsCancelled reports whether PostgreSQL has cancelled a statement that took too long, or
// that an operator cancelled. It may succeed if it asks for less. transaction_timeout also
// ends the session.
func IsCancelled(err error) bool {
	const queryCanceled, transactionTimeout = "57014", "25P04"
	return hasCode(err, queryCanceled, transactionTimeout)
}

// IsOutage reports whether PostgreSQL itself is unavailable: no connection could be
// made, the server lacks resources, shuts down, or has become read-only.
func IsOutage(err error) bool {
	const connection, resources, operatorIntervention, readOnlyTransaction = "08", "53", "57P", "25006"
	var unreachable *pgconn.ConnectError
	if errors.As(err, &unreachable) {
		return true
	}
	code := Code(err)
	return code != "" && slices.ContainsFunc([]string{connection, resources, operatorIntervention, readOnlyTransaction},
		func(class string) bool { return strings.HasPrefix(code, class) })
}

// IsOwn reports whether an error is certainly one of PostgreSQL, or of a connection to it.
func IsOwn(err error) bool {
	_, unreachable := errors.AsType[*pgconn.ConnectError](err)
	return unreachable || Code(err) != ""
}

// ClassOf returns the class of an error of PostgreSQL, for views of outages. The list of classes is closed.
func ClassOf(err error) string {
	const tooManyConnections, diskFull, readOnly, noDatabase, invalidLogin, noLogin = "53300", "53100", "25006", "3D000", "28P01", "28000"
	const byPooler = "08P01" // of PgBouncer, whatever its reason is
	code := Code(err)
	failed, network := errors.AsType[net.Error](err)
	_, connecting := errors.AsType[*pgconn.ConnectError](err)
	switch {
	case hasCode(err, invalidLogin, noLogin):
		return "refused_login"
	case code == "" && outage.IsTLS(err):
		return "refused_tls"
	case code == noDatabase:
		return "no_database"
	case connecting && code == byPooler:
		return "refused"
	case code == tooManyConnections:
		return "no_connections"
	case code == diskFull:
		return "disk_full"
	case code == readOnly:
		return "read_only"
	case IsLocked(err):
		return "locked"
	case code == "" && (errors.Is(err, context.DeadlineExceeded) || network && failed.Timeout()):
		return ClassNoAnswer
	case network, IsOutage(err) && !strings.HasPrefix(code, "53"):
		return "unreachable"
	}
	return "failing"
}

// ClassNoAnswer is the class of an error without an answer in time.
const ClassNoAnswer = "no_answer"

// FailsForAll reports whether an error is one that each statement that writes meets, whatever its table is.
func FailsForAll(err error) bool {
	switch ClassOf(err) {
	case "locked", "failing", ClassNoAnswer:
		return false
	}
	return true
}

// WithDetail adds to an error PostgreSQL's detail, which has the values of a key for example.
func WithDetail(err error) error {
	if pgErr, is := errors.AsType[*pgconn.PgError](err); is && pgErr.Detail != "" {
		return fmt.Errorf("%w: %s", err, pgErr.Detail)
	}
	return err
}

// IsDuplicateIn reports whether a unique index of this name has refused a row.
func IsDuplicateIn(err error, index string) bool {
	pgErr, is := errors.AsType[*pgconn.PgError](err)
	return is && IsDuplicate(err) && pgErr.ConstraintName == index
}

// IsRejectedBy reports whether a CHECK constraint of this name has rejected a row.
func IsRejectedBy(err error, constraint string) bool {
	const checkViolation = "23514"
	pgErr, is := errors.AsType[*pgconn.PgError](err)
	return is && pgErr.Code == checkViolation && pgErr.ConstraintName == constraint
}

// Code returns the SQLSTATE of an error of PostgreSQL, or "" for any other error.
func Code(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

func hasCode(err error, codes ...string) bool { return slices.Contains(codes, Code(err)) }

// ErrEncoding is described in the package outbox.
var ErrEncoding = errors.New("needs a database and sessions with the encoding UTF8")

// ErrNotMigrated is described in the package outbox.
var ErrNotMigrated = errors.New("the tables are missing or of an earlier release; call outbox.Migrate, or run outbox migrate up, or name another schema")

// NotMigrated adds to an error of PostgreSQL in which schema something is missing.
func NotMigrated(schema string, err error) error {
	return fmt.Errorf("%w than %s: %w", ErrNotMigrated, schema, err)
}
