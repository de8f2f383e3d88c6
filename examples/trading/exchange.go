package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"
)

// exchange is the client of the exchange. It returns answers and no errors: an unknown outcome of
// an order is an answer, too.
type exchange struct {
	url  string
	http *http.Client
}

const (
	exchangeTimeout = 300 * time.Millisecond // after which the exchange is asked whether it has an order
	pushTimeout     = 5 * time.Second
)

// newHTTP returns a client that waits for so long for an answer.
func newHTTP(timeout time.Duration) *http.Client {
	return &http.Client{Timeout: timeout, Transport: &http.Transport{MaxIdleConnsPerHost: 64}}
}

// place orders once, and never again by itself.
func (x exchange) place(ctx context.Context, i OrderIntent, a Attempt) Answer {
	status, body, err := call(ctx, x.http, http.MethodPost, x.url+"/orders", map[string]any{
		"identifier": a.Identifier, "market": i.Market, "side": i.Side, "quantity": i.Quantity, "validUntil": a.ValidUntil,
	})
	switch {
	case err != nil:
		return Answer{State: Unknown, Reason: err.Error()}
	case status == http.StatusCreated && body.OrderID != "":
		return Answer{State: Acked, OrderID: body.OrderID}
	case status == http.StatusTooManyRequests:
		return Answer{State: Throttled, Wait: time.Duration(body.RetryAfterMs) * time.Millisecond, Reason: body.Error}
	case status >= 400 && status < 500 && status != http.StatusConflict && status != http.StatusRequestTimeout:
		return Answer{State: Rejected, Reason: body.Error}
	default: // a conflict means that it has this identifier; a time-out says no more than one of this client
		return Answer{State: Unknown, Reason: fmt.Sprintf("status %d: %s", status, body.Error)}
	}
}

// find asks for an order by its identifier.
func (x exchange) find(ctx context.Context, a Attempt) Answer {
	status, body, err := call(ctx, x.http, http.MethodGet, x.url+"/orders/"+url.PathEscape(a.Identifier), nil)
	switch {
	case err != nil:
		return Answer{State: Unknown, Reason: err.Error()}
	case status == http.StatusOK && body.OrderID != "":
		return Answer{State: Acked, OrderID: body.OrderID}
	case status == http.StatusNotFound:
		return Answer{State: NotPlaced, Reason: body.Error}
	default:
		return Answer{State: Unknown, Reason: fmt.Sprintf("status %d: %s", status, body.Error)}
	}
}

// reply is what the services answer, if they do.
type reply struct {
	OrderID      string `json:"orderId"`
	Error        string `json:"error"`
	RetryAfterMs int64  `json:"retryAfterMs"`
}

// call sends JSON and reads JSON. Its error means that the outcome of the call is unknown.
func call(ctx context.Context, client *http.Client, method, address string, send any) (status int, got reply, err error) {
	body, err := json.Marshal(send)
	if err != nil {
		return 0, got, err
	}
	req, err := http.NewRequestWithContext(ctx, method, address, bytes.NewReader(body))
	if err != nil {
		return 0, got, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, got, err
	}
	defer func() { _ = resp.Body.Close() }() // it was only read
	text, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return 0, got, err
	}
	if len(text) > 0 {
		err = json.Unmarshal(text, &got)
	}
	return resp.StatusCode, got, err
}
