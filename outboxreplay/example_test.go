package outboxreplay_test

import (
	"context"
	"fmt"
	"log"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/outboxarchive"
	"github.com/outboxgo/outbox/outboxops"
	"github.com/outboxgo/outbox/outboxreplay"
)

// A new view begins with the events of five years. Its workers start after that, and get them first.
func ExampleStartGroup() {
	start := func(ctx context.Context, db *pgxpool.Pool) error {
		archive, err := outboxarchive.NewTable(db, outboxarchive.TableConfig{})
		if err != nil {
			return err
		}
		_, err = outboxreplay.StartGroup(ctx, db, nil, outboxreplay.StartConfig{
			Group: "sales-view", Archive: archive, Audit: outboxops.AuditInfo{Operator: "kim", Reason: "a new view"},
			Progress: func(r outboxreplay.StartReport) {
				log.Printf("up to outbox id %d of %d %s", r.Through, r.Last, r.Waiting)
			},
		})
		return err // another call goes on, after a restart of the process for example
	}
	fmt.Println(start != nil)
	// Output: true
}
