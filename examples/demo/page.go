package main

import (
	"context"
	"errors"
	"net"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox/outboxadmin"
)

// openPage serves the operators' page until stop is called, and returns its address.
func openPage(ctx context.Context, db *pgxpool.Pool, schema string) (address string, stop func(), err error) {
	page, err := outboxadmin.New(db, outboxadmin.Config{Schema: schema, Authorize: local})
	if err != nil {
		return "", nil, err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	server := &http.Server{
		Handler: page, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second, WriteTimeout: 5 * time.Minute,
		IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
	}
	go func() { _ = server.Serve(listener) }() // ends with stop
	return "http://" + listener.Addr().String() + "/", func() { _ = server.Close() }, nil
}

// local lets in a user of this machine who asks for it by its address: a name could be that of a
// site that has made it mean this machine. A service asks for more.
func local(r *http.Request) (outboxadmin.Access, error) {
	for _, address := range []string{r.RemoteAddr, r.Host} {
		host, _, err := net.SplitHostPort(address)
		if ip := net.ParseIP(host); err != nil || ip == nil || !ip.IsLoopback() {
			return outboxadmin.Access{}, errors.New("not from this machine")
		}
	}
	return outboxadmin.Access{Operator: "demo", Role: outboxadmin.Operator}, nil
}
