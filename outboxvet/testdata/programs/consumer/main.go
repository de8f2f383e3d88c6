package main // want package:"registered"

import (
	"context"

	"example.com/vet/lone"
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
)

func main() {
	outbox.Handle("A", func(context.Context, pgx.Tx, lone.Shipped, outbox.Metadata) error { return nil })
}
