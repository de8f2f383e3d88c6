// Package lone records a type that another package may register. // want package:"registered"
package lone

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
)

type Shipped struct{ ID string }

func (e Shipped) OccurredAt() time.Time { return time.Time{} }

func Ship(ctx context.Context, tx pgx.Tx, rec *outbox.Recorder, id string) error {
	return rec.Record(ctx, tx, Shipped{id})
}
