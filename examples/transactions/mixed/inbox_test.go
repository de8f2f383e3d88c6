package mixed_test

import (
	"bytes"
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxsql"
	"github.com/outboxgo/outbox/outboxtest"
)

var errRefused = errors.New("refused")

// An inbox handles messages once in the transactions of each library.
func TestInboxOfEachLibrary(t *testing.T) {
	t.Parallel()
	pool, schema, _, _ := newCups(t)
	inbox, err := outbox.NewInbox(schema, "cups")
	require.NoError(t, err)
	elsewhere, err := outbox.NewInbox("not migrated", "cups")
	require.NoError(t, err)
	message := func(id, request string) outbox.InboxMessage {
		return outbox.InboxMessage{Source: "client", ID: id, Action: "SOLD", Request: []byte(request)}
	}
	largest := bytes.Repeat([]byte("\x00\xff'\\?$1"), outbox.MaxAnswer/7)
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := inbox.Once(t.Context(), tx, message("committed", "a"), func() ([]byte, error) { return largest, nil })
		return err
	}))
	held, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer held.Rollback(t.Context())
	_, err = inbox.Once(t.Context(), held, message("held", "a"), func() ([]byte, error) { return nil, nil })
	require.NoError(t, err)

	_, libraries := allLibraries(t, pool)
	for name, library := range libraries {
		t.Run(name, func(t *testing.T) {
			require.ErrorIs(t, library.inTx(t.Context(), func(tx outboxsql.Tx, _ outboxtest.SQLDB) error {
				calls := 0
				handle := func(m outbox.InboxMessage, answer []byte, err error) ([]byte, error) {
					return outboxsql.Once(t.Context(), tx, inbox, m, func() ([]byte, error) {
						calls++
						return answer, err
					})
				}
				for id, answer := range map[string][]byte{"without an answer": nil, "short": []byte("done"), "long": largest} {
					calls = 0
					for range 2 {
						got, err := handle(message(id, "a"), answer, nil)
						require.NoError(t, err)
						require.Equal(t, answer, got)
					}
					require.Equal(t, 1, calls)
				}
				got, err := handle(message("committed", "a"), nil, nil)
				require.NoError(t, err)
				require.Equal(t, largest, got)
				_, err = handle(message("committed", "b"), nil, nil)
				require.ErrorIs(t, err, outbox.ErrOtherRequest)
				_, err = handle(message("refused", "a"), nil, errRefused)
				require.Equal(t, errRefused, err)
				got, err = handle(message("refused", "a"), []byte("not any more"), nil)
				require.NoError(t, err)
				require.Equal(t, "not any more", string(got))

				calls = 0
				requireExec(t, tx, `SET LOCAL lock_timeout = '20ms'`)
				_, err = handle(message("held", "a"), nil, nil)
				require.ErrorIs(t, err, outbox.ErrInProgress)
				requireExec(t, tx, `SELECT 1`)
				require.Zero(t, calls)

				_, err = outboxsql.Once(t.Context(), tx, elsewhere, message("nowhere", "a"), func() ([]byte, error) { return nil, nil })
				require.ErrorIs(t, err, outbox.ErrNotMigrated)
				return errUndo
			}), errUndo)
		})
	}
}

func requireExec(t *testing.T, tx outboxsql.Tx, query string) {
	t.Helper()
	_, err := tx.ExecContext(context.WithoutCancel(t.Context()), query)
	require.NoError(t, err)
}
