package main

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxhttp"
)

const tables = `
CREATE TABLE IF NOT EXISTS orders (id text PRIMARY KEY, product text NOT NULL, cents bigint NOT NULL);
CREATE TABLE IF NOT EXISTS sales (product text PRIMARY KEY, cents bigint NOT NULL);
INSERT INTO sales VALUES ('tea', 0) ON CONFLICT DO NOTHING;`

// shop serves HTTP.
type shop struct {
	db       *pgxpool.Pool
	recorder *outbox.Recorder
	relay    *outbox.Relay
	sales    *outbox.Consumer
}

func (s *shop) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /orders", s.postOrder)
	mux.HandleFunc("GET /sales/{product}", s.getSales)
	mux.HandleFunc("PUT /products/{product}", s.putProduct)
	mux.Handle("GET /live", outboxhttp.Live(outboxhttp.Relay(s.relay), outboxhttp.Consumer(s.sales)))
	mux.Handle("GET /ready", outboxhttp.Ready(outboxhttp.Relay(s.relay), outboxhttp.Consumer(s.sales)))
	return mux
}

func (s *shop) postOrder(w http.ResponseWriter, r *http.Request) {
	var order OrderPlaced
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<20)).Decode(&order); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	order.At = time.Now()
	if err := s.place(r.Context(), order); err != nil {
		fail(w, r, err)
		return
	}
	w.WriteHeader(http.StatusCreated)
}

// place stores an order and its event: both, or neither.
func (s *shop) place(ctx context.Context, order OrderPlaced) error {
	return s.relay.Waker().InTx(ctx, func(tx pgx.Tx) error { // begins, commits, and has the relay look now
		_, err := tx.Exec(ctx, `INSERT INTO orders VALUES ($1, $2, $3)`, order.OrderID, order.Product, order.Cents)
		if err != nil {
			return err
		}
		return s.recorder.Record(ctx, tx, order)
	})
}

func (s *shop) getSales(w http.ResponseWriter, r *http.Request) {
	var cents int64
	err := s.db.QueryRow(r.Context(), `SELECT cents FROM sales WHERE product = $1`, r.PathValue("product")).Scan(&cents)
	if err != nil {
		fail(w, r, err)
		return
	}
	_ = json.NewEncoder(w).Encode(cents) // an error means that the client has gone
}

func (s *shop) putProduct(w http.ResponseWriter, r *http.Request) {
	_, err := s.db.Exec(r.Context(), `INSERT INTO sales VALUES ($1, 0) ON CONFLICT DO NOTHING`, r.PathValue("product"))
	if err != nil {
		fail(w, r, err)
	}
}

// fail answers a request. Record checks events before it sends anything to
// PostgreSQL: a FieldError names what the caller has to correct.
func fail(w http.ResponseWriter, r *http.Request, err error) {
	var field *outbox.FieldError
	switch {
	case errors.As(err, &field):
		http.Error(w, err.Error(), http.StatusBadRequest)
	case errors.Is(err, pgx.ErrNoRows):
		http.NotFound(w, r)
	default:
		slog.ErrorContext(r.Context(), "request failed", "path", r.URL.Path, "error", err)
		http.Error(w, "internal error", http.StatusInternalServerError)
	}
}
