package main

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"sync"
	"time"
)

const idempotencyKey = "Idempotency-Key"

type mail struct {
	To   string `json:"to"`
	Text string `json:"text"`
}

// mailProvider is outside: no transaction of the shop reaches it. It sends a mail once for each key, and now and then
// it has sent one and its answer gets lost.
type mailProvider struct {
	mu       sync.Mutex
	sent     map[string]mail // by key
	requests int
}

// everyLost is how many mails are sent for each one whose answer is lost.
const everyLost = 25

// ServeHTTP takes a mail.
func (p *mailProvider) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var m mail
	key := r.Header.Get(idempotencyKey)
	if json.NewDecoder(r.Body).Decode(&m) != nil || key == "" || m.To == "" {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.requests++
	if _, repeated := p.sent[key]; !repeated {
		p.sent[key] = m
		if len(p.sent)%everyLost == 0 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
	}
	w.WriteHeader(http.StatusAccepted)
}

// counts returns how many mails were sent, and how many requests were repeats of others.
func (p *mailProvider) counts() (sent, repeats int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.sent), p.requests - len(p.sent)
}

// openMailProvider starts one in this process, which is not killed.
func openMailProvider(ctx context.Context) (p *mailProvider, url string, closeIt func(), err error) {
	p = &mailProvider{sent: map[string]mail{}}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, "", nil, err
	}
	server := &http.Server{Handler: p, ReadHeaderTimeout: 10 * time.Second}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = server.Serve(listener) // until it is closed
	}()
	return p, "http://" + listener.Addr().String(), func() { _ = server.Close(); <-ended }, nil
}
