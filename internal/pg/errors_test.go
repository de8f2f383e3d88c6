package pg_test

import (
	"errors"
	"fmt"
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
