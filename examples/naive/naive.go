// Package naive is an outbox in less than 100 lines that loses, repeats and reorders events. Do not use it:
// docs/outbox-in-100-lines.md says why. Its tests show each defect.
package naive

import (
	"context"
	"log"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Tables creates the tables.
const Tables = `
CREATE TABLE naive_outbox (id bigserial PRIMARY KEY, key text NOT NULL, value text NOT NULL);
CREATE TABLE naive_position (id bigint NOT NULL);
CREATE TABLE naive_failed (id bigint PRIMARY KEY);
INSERT INTO naive_position VALUES (0);`

// Record stores an event in your transaction.
func Record(ctx context.Context, tx pgx.Tx, key, value string) error {
	_, err := tx.Exec(ctx, `INSERT INTO naive_outbox (key, value) VALUES ($1, $2)`, key, value)
	return err
}

// Relay sends recorded events to a topic.
type Relay struct {
	DB    *pgxpool.Pool
	Kafka *kgo.Client
	Topic string
}

// Run sends events until ctx is cancelled. Each process of the service calls it.
func (r *Relay) Run(ctx context.Context) {
	for ctx.Err() == nil {
		if err := r.Poll(ctx); err != nil {
			log.Print(err)
		}
		if err := r.Retry(ctx); err != nil {
			log.Print(err)
		}
		time.Sleep(500 * time.Millisecond)
	}
}

// Poll sends the events behind the position, and moves the position.
func (r *Relay) Poll(ctx context.Context) error {
	rows, _ := r.DB.Query(ctx, `SELECT o.id, key, value FROM naive_outbox AS o, naive_position AS p
		WHERE o.id > p.id ORDER BY o.id LIMIT 100`)
	last, err := r.send(ctx, rows)
	if err != nil || last == 0 {
		return err
	}
	_, err = r.DB.Exec(ctx, `UPDATE naive_position SET id = $1`, last)
	return err
}

// Retry sends the failed events again.
func (r *Relay) Retry(ctx context.Context) error {
	rows, _ := r.DB.Query(ctx, `WITH f AS (DELETE FROM naive_failed RETURNING id)
		SELECT o.id, key, value FROM naive_outbox AS o JOIN f USING (id) ORDER BY o.id`)
	_, err := r.send(ctx, rows)
	return err
}

// send passes events to the Kafka client, and returns the id of the last one.
func (r *Relay) send(ctx context.Context, rows pgx.Rows) (last int64, err error) {
	var id int64
	var key, value string
	_, err = pgx.ForEachRow(rows, []any{&id, &key, &value}, func() error {
		failed := id
		record := &kgo.Record{Topic: r.Topic, Key: []byte(key), Value: []byte(value)}
		r.Kafka.Produce(ctx, record, func(_ *kgo.Record, err error) {
			if err != nil {
				_, err = r.DB.Exec(context.WithoutCancel(ctx), `INSERT INTO naive_failed VALUES ($1)`, failed)
			}
			if err != nil {
				log.Print(err)
			}
		})
		last = id
		return nil
	})
	return last, err
}
