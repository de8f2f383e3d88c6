package recorderror

import (
	"context"
	"database/sql"
	"log"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxsql"
)

var rec *outbox.Recorder

func bad(ctx context.Context, tx pgx.Tx, sqlTx *sql.Tx, batch *pgx.Batch, e outbox.DomainEvent) {
	rec.Record(ctx, tx, e)                    // want `the error of Record is ignored`
	_ = rec.Record(ctx, tx, e)                // want `the error of Record is ignored`
	_ = (rec.Record(ctx, tx, e))              // want `the error of Record is ignored`
	var _ = rec.Record(ctx, tx, e)            // want `the error of Record is ignored`
	go rec.Record(ctx, tx, e)                 // want `the error of Record is ignored`
	defer rec.Record(ctx, tx, e)              // want `the error of Record is ignored`
	rec.Queue(ctx, batch, e)                  // want `the error of Queue is ignored`
	outboxsql.Record(ctx, sqlTx, rec, e)      // want `the error of Record is ignored`
	text, args, _ := rec.Statement(ctx, e)    // want `the error of Statement is ignored`
	n, _ := len(args), rec.Record(ctx, tx, e) // want `the error of Record is ignored`
	log.Print(text, n)
}

type recorder struct{ *outbox.Recorder }

func embedded(ctx context.Context, tx pgx.Tx, r recorder, e outbox.DomainEvent) {
	r.Record(ctx, tx, e) // want `the error of Record is ignored`
}

type history struct{}

func (history) Record(context.Context, pgx.Tx, ...outbox.DomainEvent) error { return nil }

func good(ctx context.Context, tx pgx.Tx, e outbox.DomainEvent) error {
	if err := rec.Record(ctx, tx, e); err != nil {
		return err
	}
	_, args, err := rec.Statement(ctx, e)
	log.Print(args, err)
	_, _ = len(args), rec // no call
	err, _ = rec.Record(ctx, tx, e), len(args)
	log.Print(err, rec.Record(ctx, tx, e))
	history{}.Record(ctx, tx, e) // another Record
	return rec.Record(ctx, tx, e)
}
