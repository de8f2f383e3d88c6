package main

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/schedule"
	"github.com/outboxgo/outbox/bench/internal/stats"
)

const (
	minLargeSize  = 1000
	maxLargeSize  = 960_000          // a recorder takes 960 KiB
	largeBatch    = 32 << 20         // bytes that the bare pipe reads at a time, as many as a relay
	largePatience = 10 * time.Minute // for a relay that does not get ahead

	firstLimit  = 3   // s from Run to the first arrival
	memoryLimit = 256 // MiB of a relay's heap
)

// large compares the relay with the bare pipe over events that are nearly as
// large as Kafka takes them, in bytes per second.
func (b *bench) large(ctx context.Context) error {
	s, err := b.newStock(ctx, "large")
	if err != nil {
		return err
	}
	if err := b.fill(ctx, s, b.cfg.large, kind{event: b.largeEvent, perTx: 20, writers: 4}); err != nil {
		return err
	}
	var pipes, relays []used
	var firsts, temporary stats.Series
	for n := range b.cfg.longRuns {
		now := round{n, b.cfg.longRuns}
		p, err := b.compete(ctx, now, contestant{"large/pipe", s, job{Work: "pipe", Batch: max(1, largeBatch/b.cfg.largeSize)}})
		if err != nil {
			return err
		}
		r, err := b.largeRelay(ctx, now, s)
		if errors.Is(err, errLate) {
			return b.DropSchema(ctx, s.schema)
		}
		if err != nil {
			return err
		}
		pipes, relays = append(pipes, p), append(relays, r.used)
		firsts, temporary = append(firsts, r.first.Seconds()), append(temporary, float64(r.temporary))
	}
	throughput := func(u used) float64 { return u.rate() * float64(b.cfg.largeSize) / 1e6 }
	b.report.Add(
		report.Measured("large/pipe", "MB/s", each(pipes, throughput)),
		report.Compared("large/relay", "MB/s", each(relays, throughput), "large/pipe", each(pipes, throughput)).RatioAtLeast(0.5),
		report.Measured("large/relay-first-arrival", "s", firsts).ValueAtMost(firstLimit),
		report.Measured("large/pipe-heap", "MiB", each(pipes, used.peak)),
		report.Measured("large/relay-heap", "MiB", each(relays, used.peak)).ValueAtMost(memoryLimit),
		report.Measured("large/relay-temporary-files", "files", temporary).ValueAtMost(0))
	return b.DropSchema(ctx, s.schema)
}

// largeEvent returns event n with a payload of as many bytes as were asked for. It
// is random text, of which neither PostgreSQL nor Kafka's clients make much less.
func (b *bench) largeEvent(n int) outbox.DomainEvent {
	e := orders.New(n)
	e.Note = randomText(b.cfg.largeSize-len(e.Note)-minLargeSize/4, uint64(n))
	return e
}

// randomText returns about n bytes of it, the same ones for the same seed.
func randomText(n int, seed uint64) string {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	random := make([]byte, base64.StdEncoding.DecodedLen(n))
	_, _ = rand.NewChaCha8(key).Read(random) // it never fails
	return base64.StdEncoding.EncodeToString(random)
}

// largeRun is a drain of large events by a relay.
type largeRun struct {
	used
	first     time.Duration // from Run to the arrival of the first event at a consumer
	temporary int64         // files that PostgreSQL has written because memory was not enough
}

func (b *bench) largeRelay(ctx context.Context, now round, s *stock) (r largeRun, err error) {
	before, err := b.temporaryFiles(ctx)
	if err != nil {
		return r, err
	}
	reader, err := b.newReader(ctx)
	if err != nil {
		return r, err
	}
	defer reader.Client.Close()
	arrived := make(chan time.Time, 1)
	go func() {
		reader.Client.PollRecords(ctx, 1)
		arrived <- time.Now()
		reader.Client.Close() // the others are not for us
	}()
	if r.used, err = b.competeWithin(ctx, largePatience, now, contestant{"large/relay", s, job{Work: "relay"}}); err != nil {
		return r, err
	}
	r.first = (<-arrived).Sub(r.Start)
	after, err := b.temporaryFiles(ctx)
	r.temporary = after - before
	b.say("%s large/relay: the first event after %.2f s, %d temporary files", now, r.first.Seconds(), r.temporary)
	return r, err
}

// sqlChildren counts the connections of children, which report what they did when
// they end.
const (
	sqlChildren  = `SELECT count(*) FROM pg_stat_activity WHERE application_name = $1`
	sqlTemporary = `SELECT temp_files FROM pg_stat_database WHERE datname = current_database()`
	childLook    = 10 * time.Millisecond
)

// temporaryFiles returns how many PostgreSQL has ever written for this database.
func (b *bench) temporaryFiles(ctx context.Context) (files int64, err error) {
	for children := 1; children > 0; {
		if err := b.DB.QueryRow(ctx, sqlChildren, childName()).Scan(&children); err != nil {
			return 0, fmt.Errorf("look for connections: %w", err)
		}
		if err := schedule.Sleep(ctx, childLook); err != nil {
			return 0, err
		}
	}
	if err := b.DB.QueryRow(ctx, sqlTemporary).Scan(&files); err != nil {
		return 0, fmt.Errorf("count temporary files: %w", err)
	}
	return files, nil
}
