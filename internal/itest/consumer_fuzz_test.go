package itest

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
)

// Whatever a record holds, it is an event or an error that says what is wrong with
// it, and no panic gets through.
func FuzzDeliver(f *testing.F) {
	events, err := outbox.NewRegistry("shop", outbox.Event(saleType, "Product", sale.productID))
	require.NoError(f, err)
	var got *sale
	c, err := outbox.NewConsumer(nil, nil, events, "fuzz", outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Unknown: outbox.DeadLetterUnknown, From: outbox.FromStart}},
		outbox.HandleNoTx("SEEN", func(_ context.Context, e sale, m outbox.Metadata) error { got = &e; return nil }))
	require.NoError(f, err)
	f.Add([]byte(`{"product":"p","amount":1}`), saleType, "application/json", "1.0", "1", "s", "2026-01-02T03:04:05Z")
	f.Add([]byte(`{"specversion":"1.0","id":"1","source":"s","type":"test.sale.made.v1","data":{"product":"p"}}`), "", "application/cloudevents+json", "", "", "", "")
	f.Add([]byte(`{"specversion":"1.0","id":"1","source":"s","type":"test.sale.made.v1","data_base64":"e30="}`), "", "application/cloudevents+json", "", "", "", "")
	f.Add([]byte(`{"amount":"one"}`), saleType, "", "1.0", "\x00", "s", "yesterday")
	f.Add([]byte{0xff}, saleType, "application/octet-stream", "0.3", "1", "", "")
	f.Add([]byte(`{"specversion":"1.0","id":"1","source":"s","type":"test.sale.made.v1","":{}}`), "", "application/cloudevents+json", "", "", "", "")
	f.Fuzz(func(t *testing.T, value []byte, eventType, contentType, version, id, source, at string) {
		r := &kgo.Record{Topic: "t", Value: value}
		for _, h := range [][2]string{{"ce_type", eventType}, {"content-type", contentType}, {"ce_specversion", version}, {"ce_id", id}, {"ce_source", source}, {"ce_time", at}} {
			if h[1] != "" {
				r.Headers = append(r.Headers, kgo.RecordHeader{Key: h[0], Value: []byte(h[1])})
			}
		}
		got = nil
		err := c.Deliver(background, r)
		require.Equal(t, err == nil, got != nil, "%v", err)
		if err != nil {
			var field *outbox.FieldError
			require.ErrorAs(t, err, &field)
			require.NotEmpty(t, field.Field)
		}
	})
}
