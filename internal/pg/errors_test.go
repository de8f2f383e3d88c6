package pg_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
)

// A row is unreadable if PostgreSQL cannot print it, not if a connection has ended.
func TestIsUnreadable(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		err  error
		want bool
	}{
		{nil, false},
		{errors.New("54000"), false},
		{&pgconn.PgError{Code: "54000", Severity: "ERROR"}, true},
		{&pgconn.PgError{Code: "XX000"}, true},
		{&pgconn.PgError{Code: "22P05"}, true},
		{&pgconn.PgError{Code: "57014", Severity: "ERROR"}, false},
		{&pgconn.PgError{Code: "XX000", Severity: "FATAL"}, false},
		{&pgconn.PgError{Code: "XX000", Severity: "FATALE", SeverityUnlocalized: "FATAL"}, false},
	} {
		require.Equal(t, test.want, pg.IsUnreadable(fmt.Errorf("fetch events: %w", test.err)), "%+v", test.err)
	}
}

// Each error has one class of a closed list.
func TestClassOf(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		err  error
		want string
	}{
		{&pgconn.PgError{Code: "28P01"}, "refused_login"},
		{&pgconn.PgError{Code: "28000"}, "refused_login"},
		{&pgconn.PgError{Code: "3D000"}, "no_database"},
		{&pgconn.PgError{Code: "53300"}, "no_connections"},
		{&pgconn.PgError{Code: "53100"}, "disk_full"},
		{&pgconn.PgError{Code: "53200"}, "failing"},
		{&pgconn.PgError{Code: "25006"}, "read_only"},
		{&pgconn.PgError{Code: "55P03"}, "locked"},
		{&pgconn.PgError{Code: "57P03"}, "unreachable"},
		{&pgconn.PgError{Code: "57P01"}, "unreachable"},
		{&pgconn.PgError{Code: "08006"}, "unreachable"},
		{&pgconn.PgError{Code: "42501"}, "failing"},
		{&net.OpError{Op: "read", Err: syscall.ECONNRESET}, "unreachable"},
		{context.DeadlineExceeded, "no_answer"},
		{&net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded}, "no_answer"},
		{errors.New("a text"), "failing"},
	} {
		require.Equal(t, test.want, pg.ClassOf(fmt.Errorf("take lease: %w", test.err)), "%v", test.err)
	}
}
