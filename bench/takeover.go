package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/laps"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/outboxgo/outbox/bench/internal/stats"
	"github.com/twmb/franz-go/pkg/kgo"
)

const (
	takeoverRate = 100  // transactions per second meanwhile
	takeoverMost = 2500 // ms from a kill to the next arrival
	takeoverPool = 2    // processes that relay
	takeoverTime = 2 * time.Second
)

// takeoverBench has processes that relay, one of which leads, and transactions in this one.
type takeoverBench struct {
	*track
	members map[int]*takeoverMember // by process id
	waker   *outbox.Waker
}

// takeoverMember is a process that relays until its input ends.
type takeoverMember struct {
	cmd   *exec.Cmd
	stdin io.Closer
}

// takeover ends the process that leads, while events are recorded, and measures how long after that the next one
// arrives that was committed since.
func (b *bench) takeover(ctx context.Context) (err error) {
	t, err := b.newTrack(ctx, "takeover")
	if err != nil {
		return err
	}
	defer t.close()
	w := &takeoverBench{track: t, members: map[int]*takeoverMember{}}
	if w.waker, err = outbox.NewWaker(t.DB, outbox.WakerConfig{Schema: t.schema}); err != nil {
		return err
	}
	ctx, stopWaker := runAside(ctx, w.waker.Run)
	defer func() { err = errors.Join(err, stopWaker()) }()
	defer func() {
		for pid := range w.members {
			err = errors.Join(err, w.end(pid, "stop"))
		}
	}()
	for range takeoverPool {
		if err := w.start(ctx); err != nil {
			return err
		}
	}
	const fewer = 5 // clean stops: they take no second of caution
	if err := w.series(ctx, "kill", b.cfg.kills, takeoverMost); err != nil {
		return err
	}
	return w.series(ctx, "stop", max(1, b.cfg.kills/fewer), 0)
}

// series ends leaders in one way. The 99th percentile has a limit, unless that is 0.
func (w *takeoverBench) series(ctx context.Context, how string, times int, limit float64) error {
	var gaps stats.Series
	for n := range times {
		gap, err := w.endLeader(ctx, how)
		if err != nil {
			return fmt.Errorf("takeover after %s %d: %w", how, n+1, err)
		}
		gaps = append(gaps, gap)
		w.say("%d/%d takeover/%s: %.0f ms", n+1, times, how, gap)
	}
	w.report.Note("takeover/%s: %d times, %.0f to %.0f ms; nothing was lost or out of order", how, times, gaps.Percentile(0), gaps.Percentile(100))
	p99 := report.Measured("takeover/"+how+"-p99", "ms", stats.Series{gaps.Percentile(99)})
	if limit > 0 {
		p99 = p99.ValueAtMost(limit)
	}
	w.report.Add(report.Measured("takeover/"+how+"-p50", "ms", stats.Series{gaps.Percentile(50)}), p99)
	return nil
}

// endLeader ends the process that leads and returns after how many milliseconds the next event arrived.
func (w *takeoverBench) endLeader(ctx context.Context, how string) (gap float64, err error) {
	leader, err := w.leader(ctx)
	if err != nil {
		return 0, err
	}
	l := laps.New(w.next, takeoverRate, 0, takeoverTime)
	w.next += l.Total()
	ended := make(chan error, 1)
	var at time.Time
	early := 0.2 + 0.2*rand.Float64() // of the lap
	timer := time.AfterFunc(time.Duration(early*float64(takeoverTime)), func() {
		at = time.Now()
		ended <- w.end(leader, how)
	})
	defer timer.Stop()
	if err := w.run(ctx, l, w.recording(w.DB, orders.New, w.waker.Wake)); err != nil {
		return 0, err
	}
	if err := errors.Join(<-ended, l.InOrder(orders.New), w.start(ctx)); err != nil {
		return 0, err
	}
	return gapAfter(l, at.Sub(l.Start)), nil
}

// gapAfter returns how many milliseconds after a time the first event arrived that was committed since.
func gapAfter(l *laps.Lap, at time.Duration) float64 {
	var first time.Duration
	for n, committed := range l.Committed {
		if arrived := l.Arrived[n]; committed > at && (first == 0 || arrived < first) {
			first = arrived
		}
	}
	return (first - at).Seconds() * 1000
}

// leader waits until a process leads, and another one would find out that it is gone. It returns its id.
func (w *takeoverBench) leader(ctx context.Context) (pid int, err error) {
	ctx, cancel := context.WithTimeout(ctx, laps.Patience)
	defer cancel()
	sql := services.InSchema(`
		SELECT coalesce(max((regexp_match(holder, '/(\d+)/[^/]*$'))[1]::int), 0),
		       count(*) = 1 AND EXISTS (SELECT FROM pg_stat_activity WHERE application_name = $1 AND query LIKE '%pg\_try\_advisory\_lock%')
		  FROM {schema}.outbox_lease WHERE locked_epoch = epoch AND expires_at > clock_timestamp()`, w.schema)
	for ready := false; !ready; {
		if err := w.DB.QueryRow(ctx, sql, w.name()).Scan(&pid, &ready); err != nil {
			return 0, fmt.Errorf("wait for a leader and a standby: %w", err)
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
		}
	}
	return pid, nil
}

// start starts a process.
func (w *takeoverBench) start(ctx context.Context) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	m := &takeoverMember{cmd: exec.CommandContext(ctx, self, childArg)}
	m.cmd.Cancel = func() error { return m.stdin.Close() }
	m.cmd.WaitDelay = childPatience
	m.cmd.Env = append(m.cmd.Environ(), "PGAPPNAME="+w.name())
	m.cmd.Stderr = os.Stderr // several write at the same time
	stdin, err := m.cmd.StdinPipe()
	if err != nil {
		return err
	}
	m.stdin = stdin
	if err := m.cmd.Start(); err != nil {
		return err
	}
	w.members[m.cmd.Process.Pid] = m
	return json.NewEncoder(stdin).Encode(w.connect(job{Work: "stand by", Schema: w.schema}))
}

// name is what the processes call themselves in PostgreSQL.
func (w *takeoverBench) name() string { return "bench of " + w.schema }

// end ends a process: at once, or cleanly.
func (w *takeoverBench) end(pid int, how string) error {
	m := w.members[pid]
	if m == nil {
		return fmt.Errorf("%d leads, and is no process of this scenario", pid)
	}
	delete(w.members, pid)
	if how == "kill" {
		_ = m.cmd.Process.Kill() // Wait says whether it had ended
		if err := m.cmd.Wait(); m.cmd.ProcessState.Exited() {
			return fmt.Errorf("it ended before it was killed: %w", err)
		}
		return nil
	}
	_ = m.stdin.Close() // Wait says whether it had ended
	return m.cmd.Wait()
}

// standBy relays, or waits for that, until its input ends.
func standBy(ctx context.Context, j job) (u used, err error) {
	db, err := services.NewPool(ctx, j.Postgres, 8)
	if ctx.Err() != nil {
		return u, nil
	}
	if err != nil {
		return u, err
	}
	defer db.Close()
	relay, err := outbox.NewRelay(db, []kgo.Opt{kgo.SeedBrokers(j.Brokers...)}, outbox.RelayConfig{Schema: j.Schema, Logger: quiet})
	if err != nil {
		return u, err
	}
	return u, relay.Run(ctx)
}
