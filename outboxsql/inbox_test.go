package outboxsql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxsql"
)

func (s *shop) inbox(t *testing.T) *outbox.Inbox {
	t.Helper()
	inbox, err := outbox.NewInbox(s.schema, "shop")
	require.NoError(t, err)
	return inbox
}

func request(id string) outbox.InboxMessage {
	return outbox.InboxMessage{Source: "client", ID: id, Action: "ORDER_PLACED"}
}

// placing places an order and answers with its id.
func (s *shop) placing(ctx context.Context, tx *sql.Tx, id string) func() ([]byte, error) {
	return func() ([]byte, error) { return []byte("placed " + id), s.insert(ctx, tx, id) }
}

// Repeats at the same time place an order once, at every level; sessions of some are killed while they do.
func TestOnce(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	inbox := s.inbox(t)
	const orders, clients = 5, 6
	place := func(order string, level sql.IsolationLevel, kill bool) (string, error) {
		tx, err := s.db.BeginTx(background, &sql.TxOptions{Isolation: level})
		if err != nil {
			return "", err
		}
		defer tx.Rollback()
		answer, err := outboxsql.Once(background, tx, inbox, request(order), func() ([]byte, error) {
			answer, err := s.placing(background, tx, order)()
			if kill {
				_, _ = tx.Exec(`SELECT pg_terminate_backend(pg_backend_pid())`)
			}
			return answer, err
		})
		if err != nil {
			return "", err
		}
		return string(answer), tx.Commit()
	}
	var all sync.WaitGroup
	for n := range orders * clients {
		all.Go(func() {
			order := fmt.Sprint(n % orders)
			level := []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable}[n%3]
			answer, err := place(order, level, n%2 == 0)
			for err != nil {
				answer, err = place(order, level, false)
			}
			if answer != "placed "+order {
				t.Errorf("%q for %s", answer, order)
			}
		})
	}
	all.Wait()
	require.Equal(t, []string{"0", "1", "2", "3", "4"}, s.orders(t))
}

// What fails is taken back. If that is impossible, the transaction is rolled back, so that the caller commits nothing.
func TestOnceTakesBack(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	inbox := s.inbox(t)
	tx := s.begin(t)
	for range 2 {
		_, err := outboxsql.Once(background, tx, inbox, request("1"), func() ([]byte, error) {
			_, err := s.placing(background, tx, "refused")()
			return nil, errors.Join(err, errOwn)
		})
		require.ErrorIs(t, err, errOwn)
	}
	_, err := outboxsql.Once(background, tx, inbox, request("1"), s.placing(background, tx, "1"))
	require.NoError(t, err)
	require.NoError(t, tx.Commit())
	require.Equal(t, []string{"1"}, s.orders(t))

	tx = s.begin(t)
	ctx, cancel := context.WithCancel(background)
	_, err = outboxsql.Once(ctx, tx, inbox, request("2"), func() ([]byte, error) {
		_, err := s.placing(background, tx, "canceled")()
		cancel()
		return []byte("answer"), err
	})
	require.ErrorIs(t, err, context.Canceled)
	_ = tx.Commit()
	tx = s.begin(t)
	_, err = outboxsql.Once(background, tx, inbox, request("3"), func() ([]byte, error) {
		_, err := s.placing(background, tx, "gone back")()
		require.NoError(t, err)
		_, err = tx.Exec(`RELEASE SAVEPOINT outbox_inbox`)
		return nil, errors.Join(err, errOwn)
	})
	require.ErrorIs(t, err, errOwn)
	require.ErrorIs(t, tx.Commit(), sql.ErrTxDone)
	require.Equal(t, []string{"1"}, s.orders(t))
}

func TestOnceArguments(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	inbox, tx := s.inbox(t), s.begin(t)
	done := func() ([]byte, error) { return nil, nil }
	handle := func(tx outboxsql.Tx, inbox *outbox.Inbox, m outbox.InboxMessage, f func() ([]byte, error)) error {
		_, err := outboxsql.Once(background, tx, inbox, m, f)
		return err
	}
	for field, err := range map[string]error{
		"tx": handle(nil, inbox, request("1"), done), "inbox": handle(tx, nil, request("1"), done),
		"function": handle(tx, inbox, request("1"), nil), "id": handle(tx, inbox, request(""), done),
	} {
		bad, is := errors.AsType[*outbox.FieldError](err)
		require.True(t, is, "%s: %v", field, err)
		require.Equal(t, field, bad.Field)
	}
	require.Equal(t, "tx", func() string {
		bad, _ := errors.AsType[*outbox.FieldError](handle((*sql.Tx)(nil), inbox, request("1"), done))
		return bad.Field
	}())
}

// The errors of lib/pq are understood as those of pgx.
func TestOnceByOtherDrivers(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	inbox := s.inbox(t)
	for _, tt := range []struct {
		err  error
		want []error
	}{
		{&pqError{code: "55P03", where: "while inserting"}, []error{outbox.ErrInProgress}},
		{&pqError{code: "55P03"}, nil},
		{&pqError{code: "40001", where: "while inserting"}, nil},
		{&pqError{code: "42P01"}, []error{outbox.ErrNotMigrated}},
		{&pgconn.PgError{Code: "55P03", Where: "while inserting"}, []error{outbox.ErrInProgress}},
	} {
		_, err := outboxsql.Once(background, failingTx{err: tt.err}, inbox, request("1"), func() ([]byte, error) { return nil, nil })
		require.ErrorIs(t, err, tt.err)
		var kinds []error
		for _, kind := range []error{outbox.ErrInProgress, outbox.ErrNotMigrated} {
			if errors.Is(err, kind) {
				kinds = append(kinds, kind)
			}
		}
		require.Equal(t, tt.want, kinds, "%v: %v", tt.err, err)
	}
}
