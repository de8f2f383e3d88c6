package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/orders/orderspb"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/outboxschema"
	"github.com/twmb/franz-go/pkg/sr"
)

// codecEvents is how many events a transaction of recordCodecs records.
const codecEvents = 100

const placedSchema = `{"type": "object", "required": ["n", "order", "customer", "total", "note"], "properties": {
	"n": {"type": "integer"}, "order": {"type": "string"}, "customer": {"type": "string"}, "total": {"type": "integer"}, "note": {"type": "string"}}}`

// formats are those of outboxschema, by their names in the report.
var formats = []struct {
	name   string
	format outboxschema.Format
}{
	{"protobuf", orderspb.Format()},
	{"avro", outboxschema.Avro[orders.Placed]()},
	{"json-schema", outboxschema.JSON[orders.Placed](placedSchema)},
}

// recordCodecs compares transactions that record events in other formats, without a registry and with one, with those
// that record JSON.
func (b *bench) recordCodecs(ctx context.Context) error {
	registry := httptest.NewServer(http.HandlerFunc(answerOne))
	defer registry.Close()
	client, err := sr.NewClient(sr.URLs(registry.URL))
	if err != nil {
		return err
	}
	schemas := outboxschema.New(client, nil)
	names, codecs := []string{"record-codecs/json"}, []outbox.Codec{outbox.JSON()}
	for _, f := range formats {
		names = append(names, "record-codecs/"+f.name, "record-codecs/"+f.name+"-registry")
		codecs = append(codecs, f.format.Codec(), schemas.Codec("bench", f.format))
	}
	if err := schemas.Lookup(ctx); err != nil {
		return err
	}
	all := make([]transaction, len(codecs))
	for i, codec := range codecs {
		if all[i], err = b.recordWith(ctx, fmt.Sprint("codec", i), codec); err != nil {
			return err
		}
	}
	medians, err := b.interleaved(ctx, b.cfg.records/5, all...)
	if err != nil {
		return err
	}
	b.report.Add(report.Measured(names[0], "µs/tx", medians[0]))
	for i := 1; i < len(names); i++ {
		b.report.Add(report.Compared(names[i], "µs/tx", medians[i], names[0], medians[0]))
	}
	return nil
}

// recordWith returns a transaction that records events with a codec, into a schema of a name.
func (b *bench) recordWith(ctx context.Context, name string, codec outbox.Codec) (transaction, error) {
	schema, err := b.NewSchema(ctx, name)
	if err != nil {
		return nil, err
	}
	rec, err := b.RecorderOf(schema, codec)
	events := orders.NewMany(0, codecEvents)
	return func(ctx context.Context) error {
		return pgx.BeginFunc(ctx, b.DB, func(tx pgx.Tx) error { return rec.Record(ctx, tx, events...) })
	}, err
}

// answerOne is a schema registry that has each schema, as number 1. It is asked before anything is measured.
func answerOne(w http.ResponseWriter, _ *http.Request) {
	_ = json.NewEncoder(w).Encode(sr.SubjectSchema{Subject: "bench", ID: 1, Version: 1}) // who asks notices an error
}
