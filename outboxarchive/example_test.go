package outboxarchive_test

import (
	"context"
	"fmt"
	"log"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxarchive"
)

// A relay archives what it removes, in the transaction that removes it.
func ExampleTable() {
	db, err := pgxpool.New(context.Background(), "postgres:///shop")
	if err != nil {
		log.Fatal(err)
	}

	table, err := outboxarchive.NewTable(db, outboxarchive.TableConfig{})
	if err != nil {
		log.Fatal(err)
	}
	relay, err := outbox.NewRelay(db, nil, outbox.RelayConfig{
		Retention: outbox.RetentionConfig{PublishedFor: 7 * 24 * time.Hour, Archive: table.Archive},
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(relay != nil)
	db.Close()
	// Output: true
}

// bucket is an object store.
type bucket fstest.MapFS

// Put implements outboxarchive.Store.
func (b bucket) Put(_ context.Context, name string, content []byte) error {
	b[name] = &fstest.MapFile{Data: content}
	return nil
}

// A Store writes the files to any place, and an fs.FS reads them.
func ExampleFiles() {
	store := bucket{}
	files, err := outboxarchive.NewFiles(store, outboxarchive.FilesConfig{})
	if err != nil {
		log.Fatal(err)
	}
	err = files.Archive(context.Background(), nil, []outbox.ArchivedEvent{{
		OutboxID: 1, EventID: "0190a0b0-0000-7000-8000-000000000001", Type: "shop.orders.placed.v1", AggregateID: "o-1", ContentType: "application/json",
		JSON: true, Payload: []byte(`{"total": 7}`), CreatedAt: time.Date(2026, 11, 3, 10, 11, 12, 0, time.UTC),
	}})
	if err != nil {
		log.Fatal(err)
	}
	for e, err := range outboxarchive.FromFS(fstest.MapFS(store)).Events(context.Background(), outboxarchive.Filter{}) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(e.OutboxID, e.Type, string(e.Payload))
	}
	// Output: 1 shop.orders.placed.v1 {"total": 7}
}
