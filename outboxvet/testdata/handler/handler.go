package handler // want package:"registered"

import (
	"bytes"
	"context"
	"database/sql"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxsql"
	"github.com/twmb/franz-go/pkg/kgo"
)

type Placed struct{ ID string }

func (e Placed) OccurredAt() time.Time { return time.Time{} }

type service struct {
	kafka *kgo.Client
	http  *http.Client
}

func (s *service) handlers() []outbox.Handler {
	return []outbox.Handler{
		outbox.Handle("LITERAL", func(ctx context.Context, tx pgx.Tx, e Placed, _ outbox.Metadata) error {
			if err := s.kafka.ProduceSync(ctx, &kgo.Record{}).FirstErr(); err != nil { // want `ProduceSync of Kafka in a handler with a transaction`
				return err
			}
			go func() { s.kafka.Produce(ctx, nil, nil) }()     // want `Produce of Kafka in a handler`
			if _, err := http.Get("http://mail"); err != nil { // want `HTTP in a handler`
				return err
			}
			return s.mail(ctx, e)
		}),
		outbox.Handle("METHOD", s.placed),
		outbox.Handle[Placed]("FUNCTION", placed),
		outbox.HandleBatch("BATCH", func(ctx context.Context, _ pgx.Tx, all []outbox.Received[Placed]) error {
			_, err := s.http.Post("http://mail", "", nil) // want `HTTP in a handler`
			return err
		}),
		outboxsql.Handle("SQL", func(ctx context.Context, _ *sql.Tx, e Placed, _ outbox.Metadata) error {
			return generic(ctx, e)
		}),
	}
}

func (s *service) mail(ctx context.Context, e Placed) error {
	r, err := http.NewRequestWithContext(ctx, "POST", "http://mail", bytes.NewReader(nil))
	if err != nil {
		return err
	}
	_, err = s.http.Do(r) // want `HTTP in a handler`
	return err
}

func (s *service) placed(ctx context.Context, tx pgx.Tx, e Placed, _ outbox.Metadata) error {
	s.kafka.TryProduce(ctx, nil, nil) // want `TryProduce of Kafka in a handler`
	return nil
}

func placed(ctx context.Context, tx pgx.Tx, e Placed, _ outbox.Metadata) error {
	_, err := http.PostForm("http://mail", nil) // want `HTTP in a handler`
	return err
}

func generic[E any](ctx context.Context, e E) error {
	_, err := http.Head("http://mail") // want `HTTP in a handler`
	return err
}

func (s *service) good() []outbox.Handler {
	return []outbox.Handler{
		outbox.HandleNoTx("MAIL", func(ctx context.Context, e Placed, _ outbox.Metadata) error {
			if _, err := http.Get("http://mail"); err != nil {
				return err
			}
			return s.kafka.ProduceSync(ctx, &kgo.Record{}).FirstErr()
		}),
		outbox.Handle("COUNT", func(ctx context.Context, tx pgx.Tx, e Placed, m outbox.Metadata) error {
			if _, err := http.NewRequestWithContext(ctx, "GET", "http://mail", nil); err != nil { // sends nothing
				return err
			}
			s.kafka.PauseFetchTopics("a")
			_, err := tx.Exec(ctx, "INSERT INTO counts VALUES ($1)", e.ID)
			return err
		}),
	}
}

// Elsewhere is no handler.
func (s *service) Elsewhere() error {
	_, err := s.http.Get("http://mail")
	return err
}
