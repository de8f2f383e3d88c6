package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox/bench/internal/laps"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/schedule"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

// riverJob is the event of the other scenarios as River's jobs carry it.
type riverJob orders.Placed

// Kind implements [river.JobArgs].
func (riverJob) Kind() string { return "order_placed" }

// riverTunings are those that are tried. More jobs than connections wait for one, but
// save fetches; a short pause between fetches fills them.
var riverTunings = []riverTuning{
	{Clients: busWorkers, MaxWorkers: 25, Cooldown: time.Millisecond, Conns: 36},
	{Clients: busWorkers, MaxWorkers: 100, Cooldown: time.Millisecond, Conns: 68},
	{Clients: busWorkers, MaxWorkers: 500, Cooldown: 20 * time.Millisecond, Conns: 68},
	{Clients: busWorkers, MaxWorkers: 2000, Cooldown: 20 * time.Millisecond, Conns: 68},
}

// riverTuning is what makes River quick.
type riverTuning struct {
	Clients    int
	MaxWorkers int           // jobs that a client works on at the same time
	Cooldown   time.Duration // between two fetches of a client
	Conns      int           // of all clients together
	InTx       bool          // completes each job in the transaction of its effect
}

func (t riverTuning) String() string {
	how := "completed in batches"
	if t.InTx {
		how = "completed with the effect"
	}
	return fmt.Sprintf("%s, %d clients of %d jobs, %d connections", how, t.Clients, t.MaxWorkers, t.Conns)
}

// riverLog keeps quiet about anything but errors, which would explain a figure.
func riverLog() *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
}

// newRiverSchema makes a schema with River's tables.
func (b *bench) newRiverSchema(ctx context.Context, name string) (schema string, err error) {
	if schema, err = b.NewEmptySchema(ctx, name); err != nil {
		return "", err
	}
	m, err := rivermigrate.New(riverpgxv5.New(b.DB), &rivermigrate.Config{Schema: schema, Logger: riverLog()})
	if err != nil {
		return "", fmt.Errorf("migrate River: %w", err)
	}
	if _, err := m.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
		return "", fmt.Errorf("migrate River: %w", err)
	}
	return schema, nil
}

// riverWorker handles jobs.
type riverWorker struct {
	river.WorkerDefaults[riverJob]

	db      *pgxpool.Pool
	inTx    bool
	effect  string // SQL
	begin   func() // called with each job
	handled func(n int)
}

// Work implements [river.Worker].
func (w *riverWorker) Work(ctx context.Context, job *river.Job[riverJob]) error {
	w.begin()
	if err := w.work(ctx, job); err != nil {
		return err
	}
	w.handled(job.Args.N)
	return nil
}

// work commits the effect of a job, alone or together with the job's completion.
func (w *riverWorker) work(ctx context.Context, job *river.Job[riverJob]) error {
	if !w.inTx {
		_, err := w.db.Exec(ctx, w.effect, job.Args.Order, job.Args.N)
		return err
	}
	return pgx.BeginFunc(ctx, w.db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, w.effect, job.Args.Order, job.Args.N); err != nil {
			return err
		}
		_, err := river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job)
		return err
	})
}

// riverClients are clients that work off the same queue.
type riverClients struct {
	db  *pgxpool.Pool
	all []*river.Client[pgx.Tx]
}

// startRiver starts clients that call w.
func startRiver(ctx context.Context, schema string, t riverTuning, w *riverWorker) (*riverClients, error) {
	r := &riverClients{db: w.db}
	for range t.Clients {
		workers := river.NewWorkers()
		river.AddWorker(workers, w)
		client, err := river.NewClient(riverpgxv5.New(w.db), &river.Config{
			Schema: schema, Workers: workers, Logger: riverLog(), FetchCooldown: t.Cooldown,
			Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: t.MaxWorkers}},
		})
		if err == nil {
			err = client.Start(ctx)
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("start River: %w", err), r.stop(ctx))
		}
		r.all = append(r.all, client)
	}
	return r, nil
}

func (r *riverClients) stop(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), laps.Patience)
	defer cancel()
	var errs []error
	for _, client := range r.all {
		errs = append(errs, client.Stop(ctx))
	}
	return errors.Join(errs...)
}

// workRiver works off the jobs that wait, to the last completion.
func workRiver(ctx context.Context, j job) (u used, err error) {
	db, err := services.NewPool(ctx, j.Postgres, j.River.Conns)
	if err != nil {
		return u, err
	}
	defer db.Close()
	late, done := newLateMeter(j), newCountdown(j.Events)
	clients, err := startRiver(ctx, j.Schema, j.River, &riverWorker{
		db: db, inTx: j.River.InTx, effect: services.InSchema(sqlEffect, j.Schema), begin: late.called, handled: func(int) { late.handled(); done.done(1) },
	})
	if err != nil {
		return u, err
	}
	select {
	case <-done.all:
		if err = completedAll(ctx, db, j.Schema); err == nil {
			u, err = late.finish()
		}
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	return u, errors.Join(err, clients.stop(ctx))
}

// sqlUncompleted looks for a job that is not completed. It has an index for each state.
const sqlUncompleted = `SELECT EXISTS (SELECT FROM {schema}.river_job WHERE state IN ('available', 'running', 'retryable'))`

// completedAll waits until the last batch of completions is in the table.
func completedAll(ctx context.Context, db *pgxpool.Pool, schema string) error {
	for {
		var more bool
		if err := db.QueryRow(ctx, services.InSchema(sqlUncompleted, schema)).Scan(&more); err != nil {
			return fmt.Errorf("look for uncompleted jobs: %w", err)
		}
		if !more {
			return nil
		}
		if err := schedule.Sleep(ctx, completedLook); err != nil {
			return err
		}
	}
}

// completedLook is short against the 50 ms after which River completes jobs.
const completedLook = 10 * time.Millisecond
