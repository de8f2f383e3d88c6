package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"runtime/pprof"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

type small struct{ N int }

func (small) OccurredAt() time.Time { return time.Time{} }

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func main() {
	parts := flag.Int("p", 100, "")
	n := flag.Int("n", 1000000, "")
	mode := flag.String("mode", "notx", "notx, batch, raw, nodb")
	prof := flag.String("prof", "", "")
	flag.Parse()
	ctx, stop := context.WithCancel(context.Background())
	brokers := strings.Split(os.Getenv("OUTBOX_KAFKA_BROKERS"), ",")
	topic := fmt.Sprintf("hundred-%d-%d", *parts, *n)
	cl := must(kgo.NewClient(kgo.SeedBrokers(brokers...), kgo.MaxBufferedRecords(50000), kgo.RecordPartitioner(kgo.RoundRobinPartitioner())))
	adm := kadm.NewClient(cl)
	_, err := adm.CreateTopic(ctx, int32(*parts), 1, nil, topic)
	if err == nil {
		began := time.Now()
		for i := range *n {
			r := &kgo.Record{Topic: topic, Key: fmt.Appendf(nil, "k%d", i%10000), Value: fmt.Appendf(nil, `{"N":%d,"pad":"%0100d"}`, i, i), Headers: []kgo.RecordHeader{
				{Key: "ce_specversion", Value: []byte("1.0")}, {Key: "ce_id", Value: []byte(uuid.Must(uuid.NewV7()).String())}, {Key: "ce_type", Value: []byte("bench.small.v1")},
				{Key: "ce_source", Value: []byte("bench")}, {Key: "ce_subject", Value: fmt.Appendf(nil, "k%d", i%10000)}, {Key: "content-type", Value: []byte("application/json")}}}
			cl.Produce(ctx, r, nil)
		}
		cl.Flush(ctx)
		fmt.Printf("produced %d in %v\n", *n, time.Since(began))
	}
	db := must(pgxpool.New(ctx, os.Getenv("OUTBOX_POSTGRES_URL")+"&pool_max_conns=20"))
	if err := outbox.Migrate(ctx, db, outbox.MigrateConfig{}); err != nil {
		panic(err)
	}
	var seen atomic.Int64
	var first atomic.Int64
	count := func(k int) {
		first.CompareAndSwap(0, time.Now().UnixNano())
		if seen.Add(int64(k)) >= int64(*n) {
			stop()
		}
	}
	if *prof != "" {
		f := must(os.Create(*prof))
		_ = pprof.StartCPUProfile(f)
		defer pprof.StopCPUProfile()
	}
	var peak uint64
	go func() {
		for {
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			peak = max(peak, m.HeapInuse)
			time.Sleep(200 * time.Millisecond)
		}
	}()
	if *mode == "raw" {
		c := must(kgo.NewClient(kgo.SeedBrokers(brokers...), kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart())))
		for ctx.Err() == nil {
			count(c.PollFetches(ctx).NumRecords())
		}
	} else {
		reg := must(outbox.NewRegistry("bench", outbox.Event("bench.small.v1", "Small", func(e small) string { return fmt.Sprint(e.N) }).Topic(topic)))
		h := outbox.HandleNoTx("COUNT", func(context.Context, small, outbox.Metadata) error { count(1); return nil })
		if *mode == "batch" {
			h = outbox.HandleBatch("COUNT", func(_ context.Context, _ pgx.Tx, all []outbox.Received[small]) error { count(len(all)); return nil })
		}
		use := db
		if *mode == "nodb" {
			use = nil
		}
		c := must(outbox.NewConsumer(use, []kgo.Opt{kgo.SeedBrokers(brokers...)}, reg, fmt.Sprintf("g-%s-%d", *mode, time.Now().UnixNano()), outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Logger: slog.New(slog.DiscardHandler)}}, h))
		if err := c.Run(ctx); err != nil {
			fmt.Println(err)
		}
	}
	took := time.Since(time.Unix(0, first.Load()))
	fmt.Printf("heap in use, largest: %d MiB\n", peak>>20)
	fmt.Printf("%s: %d in %v: %.0f/s\n", *mode, seen.Load(), took, float64(seen.Load())/took.Seconds())
}
