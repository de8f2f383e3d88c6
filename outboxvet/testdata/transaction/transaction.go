package transaction

import (
	"context"
	"database/sql"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxsql"
)

const sqlInsert = `
-- an order
INSERT INTO orders VALUES ($1)`

type service struct {
	db    *pgxpool.Pool
	sql   *sql.DB
	rec   *outbox.Recorder
	waker *outbox.Waker
}

// The literal writes in its transaction, and records in that of the caller.
func (s *service) outerTx(ctx context.Context, outer pgx.Tx, e outbox.DomainEvent) error {
	return pgx.BeginFunc(ctx, s.db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, sqlInsert, 1); err != nil {
			return err
		}
		return s.rec.Record(ctx, outer, e) // want `recorded in outer, but the data is written in tx`
	})
}

func (s *service) nested(ctx context.Context, e outbox.DomainEvent) error {
	return s.waker.InTx(ctx, func(one pgx.Tx) error {
		return pgx.BeginFunc(ctx, s.db, func(two pgx.Tx) error {
			_, err := two.CopyFrom(ctx, pgx.Identifier{"orders"}, nil, nil)
			if err != nil {
				return err
			}
			return s.retry(func() error {
				return s.rec.Record(ctx, one, e) // want `recorded in one, but the data is written in two`
			})
		})
	})
}

func (s *service) begins(ctx context.Context, tx pgx.Tx, e outbox.DomainEvent) error {
	own, err := s.db.Begin(ctx)
	if err != nil {
		return err
	}
	defer own.Rollback(ctx)
	if _, err := tx.Exec(ctx, "UPDATE orders SET n = 1"); err != nil {
		return err
	}
	if err := s.rec.Record(ctx, own, e); err != nil { // want `recorded in own, but the data is written in tx`
		return err
	}
	return own.Commit(ctx)
}

func (s *service) database(ctx context.Context, e outbox.DomainEvent) error {
	one, err := s.sql.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	two, err := s.sql.Begin()
	if err != nil {
		return err
	}
	if _, err := one.Exec("DELETE FROM orders"); err != nil {
		return err
	}
	if err := outboxsql.Record(ctx, two, s.rec, e); err != nil { // want `recorded in two, but the data is written in one`
		return err
	}
	return two.Commit()
}

// The pool writes while the transaction records.
func (s *service) pool(ctx context.Context, e outbox.DomainEvent) error {
	return pgx.BeginFunc(ctx, s.db, func(tx pgx.Tx) error {
		if _, err := s.db.Exec(ctx, sqlInsert, 1); err != nil { // want `not written in the transaction tx, in which line 87 records the event`
			return err
		}
		return s.rec.Record(ctx, tx, e)
	})
}

func (s *service) poolOfFunction(ctx context.Context, tx pgx.Tx, e outbox.DomainEvent) error {
	var id int
	err := s.db.QueryRow(ctx, "insert into orders values (1) returning id").Scan(&id) // want `not written in the transaction tx`
	if err != nil {
		return err
	}
	return s.rec.Record(ctx, tx, e)
}

func (s *service) poolBetween(ctx context.Context, e outbox.DomainEvent) error {
	if _, err := s.db.Exec(ctx, sqlInsert, 1); err != nil { // before the transaction begins
		return err
	}
	tx, err := s.db.BeginTx(ctx, pgx.TxOptions{})
	if err != nil {
		return err
	}
	if _, err := s.sql.ExecContext(ctx, sqlInsert, 2); err != nil { // want `not written in the transaction tx`
		return err
	}
	if err := s.rec.Record(ctx, tx, e); err != nil {
		return err
	}
	if err := tx.Commit(ctx); err != nil {
		return err
	}
	_, err = s.db.Exec(ctx, sqlInsert, 3) // after it has committed
	return err
}

func (s *service) handler() outbox.Handler {
	return outbox.Handle("A", func(ctx context.Context, tx pgx.Tx, e outbox.DomainEvent, _ outbox.Metadata) error {
		if _, err := s.db.Exec(ctx, sqlInsert, 1); err != nil { // want `not written in the transaction tx`
			return err
		}
		return s.rec.Record(ctx, tx, e)
	})
}

func (s *service) retry(f func() error) error { return f() }

func (s *service) place(ctx context.Context, tx pgx.Tx) error { return nil }
