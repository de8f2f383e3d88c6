package outboxschema_test

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/sr"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxschema"
)

// fakeRegistry answers requests, and counts them.
type fakeRegistry struct {
	asked  int
	answer func(*http.Request) (*http.Response, error)
}

func (f *fakeRegistry) RoundTrip(r *http.Request) (*http.Response, error) {
	f.asked++
	return f.answer(r)
}

func (f *fakeRegistry) codec(t *testing.T) outbox.Codec {
	t.Helper()
	client, err := sr.NewClient(sr.URLs("http://registry"), sr.HTTPClient(&http.Client{Transport: f}))
	require.NoError(t, err)
	return outboxschema.New(client, nil).Codec("orders", structFormat())
}

// hangs is the answer of a registry that never answers.
func hangs(r *http.Request) (*http.Response, error) {
	<-r.Context().Done()
	return nil, r.Context().Err()
}

// requireAsked requires how long it takes until an event cannot be encoded, and how many requests that makes.
func (f *fakeRegistry) requireAsked(ctx context.Context, t *testing.T, codec outbox.Codec, took time.Duration, requests int) {
	t.Helper()
	before, began := f.asked, time.Now()
	_, err := codec.Encode(ctx, orderOf(1))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Equal(t, took, time.Since(began))
	require.Equal(t, requests, f.asked-before)
}

// A registry that hangs holds up the callers of one request, however early their own deadlines are. A deadline that
// leaves it little time, and a caller that gives up, say nothing about it.
func TestHangingRegistry(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fakeRegistry{answer: hangs}
		codec := f.codec(t)
		within := func(d time.Duration) context.Context {
			ctx, cancel := context.WithTimeout(t.Context(), d)
			t.Cleanup(cancel)
			return ctx
		}
		f.requireAsked(within(5*time.Second), t, codec, 5*time.Second, 1)
		f.requireAsked(within(5*time.Second), t, codec, 0, 0)
		time.Sleep(2 * time.Second)
		f.requireAsked(within(500*time.Millisecond), t, codec, 500*time.Millisecond, 1)
		f.requireAsked(t.Context(), t, codec, 10*time.Second, 1)
		f.requireAsked(t.Context(), t, codec, 0, 0)
	})
}

// What waits for another request has 10 s for both.
func TestWaitForRequest(t *testing.T) {
	t.Parallel()
	for _, wait := range []time.Duration{4 * time.Second, 9500 * time.Millisecond} {
		synctest.Test(t, func(t *testing.T) {
			f := &fakeRegistry{answer: hangs}
			codec := f.codec(t)
			ctx, cancel := context.WithCancel(t.Context())
			go func() { _, _ = codec.Encode(ctx, orderOf(1)) }()
			time.AfterFunc(wait, cancel)
			synctest.Wait()
			f.requireAsked(t.Context(), t, codec, 10*time.Second, 1)
			if 10*time.Second-wait > time.Second {
				f.requireAsked(t.Context(), t, codec, 0, 0)
			} else { // that short a request says nothing about the registry
				f.requireAsked(t.Context(), t, codec, 10*time.Second, 1)
			}
		})
	}
	synctest.Test(t, func(t *testing.T) { // until the end
		f := &fakeRegistry{answer: hangs}
		codec, began := f.codec(t), time.Now()
		done := make(chan struct{})
		go func() { _, _ = codec.Encode(t.Context(), orderOf(1)); close(done) }()
		synctest.Wait()
		_, err := codec.Encode(t.Context(), orderOf(1))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, 10*time.Second, time.Since(began))
		<-done
	})
}

// A schema that is registered while an event is encoded gives it an id and an address, or neither.
func TestSchemaThatComes(t *testing.T) {
	t.Parallel()
	f := &fakeRegistry{}
	f.answer = func(*http.Request) (*http.Response, error) {
		status, body := http.StatusNotFound, `{"error_code": 40403, "message": "Schema not found"}`
		if f.asked > 1 {
			status, body = http.StatusOK, `{"subject": "orders-value", "version": 1, "id": 7, "schema": ""}`
		}
		return &http.Response{StatusCode: status, Body: io.NopCloser(bytes.NewBufferString(body))}, nil
	}
	definition := outbox.Event(orderCreated, "Order", order.AggregateID).Topic("orders").Codec(f.codec(t))
	rec, err := outbox.NewRecorder(registryOf(t, definition), outbox.RecorderConfig{})
	require.NoError(t, err)
	_, err = rec.KafkaRecord(t.Context(), orderOf(1))
	require.ErrorIs(t, err, outbox.ErrEncode)
	require.Equal(t, 1, f.asked)
	record, err := rec.KafkaRecord(t.Context(), orderOf(1))
	require.NoError(t, err)
	require.Equal(t, "http://registry/schemas/ids/7", headerOf(record, "ce_dataschema"))
}
