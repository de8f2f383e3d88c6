package transaction

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
)

func (s *service) good(ctx context.Context, e outbox.DomainEvent) error {
	return pgx.BeginFunc(ctx, s.db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, sqlInsert, 1); err != nil {
			return err
		}
		var n int
		if err := s.db.QueryRow(ctx, "SELECT count(*) FROM prices").Scan(&n); err != nil { // only reads
			return err
		}
		if _, err := s.db.Exec(ctx, "SET lock_timeout = 1"); err != nil {
			return err
		}
		return s.rec.Record(ctx, tx, e)
	})
}

// A savepoint commits with its transaction.
func (s *service) savepoints(ctx context.Context, tx pgx.Tx, e outbox.DomainEvent) error {
	part, err := tx.Begin(ctx)
	if err != nil {
		return err
	}
	if _, err := part.Exec(ctx, sqlInsert, 1); err != nil {
		return err
	}
	if err := s.rec.Record(ctx, tx, e); err != nil {
		return err
	}
	return pgx.BeginFunc(ctx, tx, func(part pgx.Tx) error {
		if _, err := part.Exec(ctx, sqlInsert, 1); err != nil {
			return err
		}
		return s.rec.Record(ctx, tx, e)
	})
}

// Both may be the same.
func (s *service) parameters(ctx context.Context, one, two pgx.Tx, e outbox.DomainEvent) error {
	if _, err := one.Exec(ctx, sqlInsert, 1); err != nil {
		return err
	}
	return s.rec.Record(ctx, two, e)
}

func (s *service) alias(ctx context.Context, e outbox.DomainEvent) error {
	var last pgx.Tx
	return pgx.BeginFunc(ctx, s.db, func(tx pgx.Tx) error {
		last = tx
		if _, err := last.Exec(ctx, sqlInsert, 1); err != nil {
			return err
		}
		return s.rec.Record(ctx, tx, e)
	})
}

func current(context.Context) pgx.Tx { return nil }

func (s *service) unknown(ctx context.Context, e outbox.DomainEvent) error {
	outer := current(ctx)
	return pgx.BeginFunc(ctx, s.db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, sqlInsert, 1); err != nil {
			return err
		}
		return s.rec.Record(ctx, outer, e) // current may return any transaction
	})
}

// Each of two databases gets its data and its event.
func (s *service) two(ctx context.Context, outer pgx.Tx, e outbox.DomainEvent) error {
	return pgx.BeginFunc(ctx, s.db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, sqlInsert, 1); err != nil {
			return err
		}
		if err := s.rec.Record(ctx, tx, e); err != nil {
			return err
		}
		if err := s.place(ctx, outer); err != nil {
			return err
		}
		return s.rec.Record(ctx, outer, e)
	})
}

// What runs later has nothing to do with the transaction.
func (s *service) later(ctx context.Context, tx pgx.Tx, e outbox.DomainEvent) (func() error, error) {
	return func() error {
		_, err := s.db.Exec(ctx, sqlInsert, 1)
		return err
	}, s.rec.Record(ctx, tx, e)
}
