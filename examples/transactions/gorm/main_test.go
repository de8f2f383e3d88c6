package main

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/transactions/internal/shop"
	"github.com/outboxgo/outbox/examples/transactions/internal/shoptest"
	"github.com/outboxgo/outbox/internal/testenv"
)

// TestMain fails if a goroutine is left, but for the one that GORM starts for a cache of prepared
// statements and never ends.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("gorm.io/gorm/internal/lru.NewLRU[...].func1"))
}

func TestTransactions(t *testing.T) { shoptest.Test(t, open) }

// With PrepareStmt, the connection of a transaction is a type of GORM's own, which prepares.
func TestPreparedStatements(t *testing.T) {
	testenv.Direct(t)
	shoptest.Test(t, openPrepared)
}

func openPrepared(s *shop.Shop) (shop.Store, error) {
	cfg := &gorm.Config{PrepareStmt: true, Logger: logger.Discard}
	db, err := gorm.Open(postgres.New(postgres.Config{Conn: stdlib.OpenDBFromPool(s.Pool)}), cfg)
	return &store{db: db, recorder: s.Recorder, waker: s.Relay.Waker()}, err
}

// In a handler, a nested transaction is a savepoint, Commit fails, and others that use the same
// *gorm.DB are not in the transaction of the handler.
func TestHandler(t *testing.T) {
	testenv.Direct(t)
	h, opened := shoptest.NewHandler(t, openPrepared)
	s := opened.(*store)
	require.NoError(t, h.Handle(func(ctx context.Context, tx *sql.Tx) error {
		db := s.db.WithContext(ctx)
		db.Statement.ConnPool = tx
		err := db.Transaction(func(nested *gorm.DB) error {
			return errors.Join(nested.Create(&Order{ID: "a"}).Error, nested.Create(&Order{ID: "a"}).Error)
		})
		require.ErrorContains(t, err, "duplicate key")
		require.NoError(t, db.Create([]Order{{ID: "b"}, {ID: "c", Product: "tea"}}).Error)
		var teas []Order
		require.NoError(t, db.Where("product = ?", "tea").Find(&teas).Error)
		require.Equal(t, []Order{{ID: "c", Product: "tea"}}, teas)
		row := map[string]any{}
		require.NoError(t, db.Model(&Order{}).Where("id = ?", "c").Take(&row).Error)
		require.EqualValues(t, "tea", row["product"])
		var outside int64
		require.NoError(t, s.db.WithContext(ctx).Model(&Order{}).Count(&outside).Error)
		require.Zero(t, outside, "another session is not in this transaction")
		return nil
	}))
	h.RequireOrders("b", "c")
	for _, end := range []func(db *gorm.DB) *gorm.DB{(*gorm.DB).Commit, (*gorm.DB).Rollback} {
		require.ErrorIs(t, h.Handle(func(ctx context.Context, tx *sql.Tx) error {
			db := s.db.WithContext(ctx)
			db.Statement.ConnPool = tx
			require.NoError(t, db.Create(&Order{ID: "d"}).Error)
			_ = end(db).Error
			return nil
		}), outbox.ErrHandlerTx)
	}
	require.NoError(t, h.Handle(func(ctx context.Context, tx *sql.Tx) error {
		db := s.db.WithContext(ctx)
		db.Statement.ConnPool = tx
		require.ErrorIs(t, db.Begin().Error, gorm.ErrInvalidTransaction, "there is one already")
		return nil
	}))
	h.RequireOrders("b", "c")
}
