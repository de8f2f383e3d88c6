package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/exactly"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/wait"
)

// Exactly is what a session and a retrier share when each event is to be sent exactly once. Each transaction has
// events of one of the two, and a cursor record; mu puts them into one order. spec/ExactlyOnce.tla has the actions
// by the names of its methods.
//
// Any doubt about a transaction, a row or the lease makes it unready: nothing is sent until the session has started
// it again. What a retrier has read before is out of date then, hence the generation.
type Exactly struct {
	ExactlyParts
	sender     *exactly.Sender
	producer   *Producer // makes records
	deliverer  *Deliverer
	generation atomic.Int64 // grows when a start has ended

	mu     sync.Mutex // held from the events of a transaction to its commit, and while a row is written
	ready  bool
	ended  bool           // the session has ended, and starts it no more
	starts int            // since Kafka has confirmed a transaction
	newest cursor.InKafka // as Start has read it, until load
	moved  bool           // it was written from another cluster, from which the database was restored

	pos       cursor.Position // of the newest row, but Last is that of the newest record
	token     string          // of that row
	number    int64           // of the newest record
	behind    bool            // the newest row passes events that no record passes yet
	begun     bool            // Kafka has the first record of the mode, and the newest row does not say so
	confirmed cursor.Confirmed
	flights   []exactFlight      // transactions that are not confirmed
	again     []int64            // Record.Again of the next record
	locked    []cursor.FailedRow // of again, which the last Load could not remove

	open     *exactly.Transaction // its events are sent
	recorded bool                 // and its cursor record
	most     int                  // events of the next transaction of the session
	held     bool                 // by the session, from Deliver to Commit; only its goroutine
	endings  int                  // transactions that Kafka has ended since it has confirmed one
	ends     proof                // what ends the newest outage of Kafka
}

// ExactlyParts is what Exactly is made from.
type ExactlyParts struct {
	lease.Leadership
	Rules       Rules
	Config      exactly.Config // Opts
	Cursors     *cursor.Store
	Failed      *cursor.Failed
	Producer    ProducerConfig
	Delivery    DeliveryParts
	Health      relayHealth
	Log         *slog.Logger
	KafkaOutage *outage.Log
}

// exactFlight is a transaction that is being committed.
type exactFlight struct {
	number, row int64
	commit      *exactly.Commit
	sent        func() // called once it is confirmed; nil unless the session has sent its events
}

// NewExactly returns an Exactly that has to be started.
func NewExactly(p ExactlyParts) *Exactly {
	x := &Exactly{ExactlyParts: p, most: p.Rules.BatchSize}
	x.producer = NewProducer(p.Producer, p.Leadership, nil)
	p.Delivery.Sender = x.producer
	p.Delivery.Exclusive = nil // Kafka has ended the transactions of the process that led before
	x.deliverer = &Deliverer{p.Delivery}
	return x
}

// errDoubt is an ErrStale: the session starts again. It says nothing about PostgreSQL.
func errDoubt(err error) error { return fmt.Errorf("%w: %w: %w", cursor.ErrStale, errTransaction, err) }

var errTransaction = errors.New("the outcome of a transaction is not known")

// doubt makes it unready. The caller holds mu.
func (x *Exactly) doubt(err error) error {
	x.ready = false
	return errDoubt(err)
}

// Close closes the clients. No transaction is committed afterwards.
func (x *Exactly) Close() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.close()
}

func (x *Exactly) close() {
	x.ready, x.open, x.producer.client = false, nil, nil
	if x.sender != nil {
		x.sender.Close()
	}
	for _, f := range x.flights { // the end of its client ends it
		<-f.commit.Done()
	}
	x.flights = nil
}

// IsReady reports whether it may be used.
func (x *Exactly) IsReady() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.ready
}

// End is called when the session has ended: it is not started again.
func (x *Exactly) End() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.ended = true
}

// lockReady locks mu when it is ready. It returns false if ctx or the session ends first.
func (x *Exactly) lockReady(ctx context.Context) bool {
	const poll = 20 * time.Millisecond
	for {
		x.mu.Lock()
		if x.ready {
			return true
		}
		ended := x.ended
		x.mu.Unlock()
		if wait.Sleep(ctx, poll); ended || ctx.Err() != nil {
			return false
		}
	}
}

// Start fences both transactional ids and reads the newest record, until Kafka answers or stop ends. [Exactly.Load]
// comes next.
func (x *Exactly) Start(stop context.Context, begun func() (bool, error), identity func() (exactly.Config, error)) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.starts > 0 { // what fails at once is not tried again and again
		wait.Await(stop, x.Held, nil, wait.Exponential(minStartWait, maxStartWait, x.starts-1))
	}
	x.starts++
	for stop.Err() == nil {
		has, err := begun()
		if err != nil {
			return err
		}
		cfg, err := identity()
		if err != nil {
			return err
		}
		if err := x.mayProduce(stop, x.Held); err != nil { // or it would fence its successor
			return err
		}
		err = x.tryStart(cfg, !has)
		if x.Held.Err() != nil {
			return context.Cause(x.Held)
		}
		if has && errors.Is(err, exactly.ErrNoTopic) {
			return fmt.Errorf("%w: %w; it is not created again, because nothing would know what was sent. See the page about exactly once for what to do", cursor.ErrDisagree, err)
		}
		if err == nil {
			x.proved(byStart)
			return nil
		}
		x.hear(err)
		wait.Await(stop, x.Held, nil, x.KafkaOutage.Backoff())
	}
	return nil
}

// identity returns the configuration of a sender, with the names of the relay.
func (x *Exactly) identity(ctx context.Context) (exactly.Config, error) {
	system, database, err := x.Cursors.Identity(ctx)
	return x.Config.For(system, database, x.Rules.Schema, x.Rules.Name), err
}

func (x *Exactly) tryStart(cfg exactly.Config, create bool) error {
	x.Health.Progressed()
	x.close()
	cfg.Topic, cfg.Go = x.Rules.ExactlyOnce, x.NewGroup().Go
	x.sender = exactly.NewSender(cfg)
	ctx, cancel := context.WithTimeout(x.Held, x.Rules.startTimeout())
	defer cancel()
	r, _, err := x.sender.Start(ctx, create)
	if err != nil {
		return err
	}
	x.newest = cursor.InKafka{Number: r.Number, System: r.System, Row: r.Row, Token: r.Token, Last: r.Last, Again: r.Again}
	x.moved = r.System != 0 && r.System != cfg.System
	x.producer.use(x.sender.Client())
	return nil
}

const (
	minStartWait = 50 * time.Millisecond
	maxStartWait = 5 * time.Second
)

// minStart is how long a start may take at least. A transaction that is prepared ends only when all of its partitions
// have their markers.
const minStart = 10 * time.Second

func (r Rules) startTimeout() time.Duration { return max(r.SendTimeout, minStart) }

// Load continues from the newest record. It is the step Renew.
func (x *Exactly) Load(ctx context.Context, l *lease.Lease) (cursor.Position, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	now, err := x.Cursors.Continue(ctx, l, x.newest)
	p := now.Position
	if err != nil {
		return p, err
	}
	x.pos, x.token, x.number, x.behind, x.again = p, x.Cursors.Token(), x.newest.Number, false, nil
	x.locked = now.Locked
	for _, row := range now.Locked {
		x.again = append(x.again, row.Row)
	}
	x.confirmed = cursor.Confirmed{Batch: x.number, Row: p.CursorID}
	if now.Begins || x.moved {
		if err := x.begin(ctx); err != nil {
			return p, errDoubt(err)
		}
	}
	x.begun = now.Begins
	return p, nil
}

// Ready lets it be used. Rows of outbox_failed that were read before are out of date: Load has removed some of them.
func (x *Exactly) Ready() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.generation.Add(1)
	x.ready = true
}

// keepLocked leaves the rows that Load could not remove to a retrier, which does not send their events again. Nothing
// says where these were sent.
func (x *Exactly) keepLocked(parked *Parking) {
	x.mu.Lock()
	locked := x.locked
	x.mu.Unlock()
	parked.mu.Lock()
	defer parked.mu.Unlock()
	for i := range locked {
		parked.keep(cursor.RetryResult{Event: &locked[i], Row: locked[i].Row, Status: statusResolved, Partition: kafka.Unassigned, SentAt: time.Now()})
	}
}

// begin sends a record alone: the first one after the mode was turned on; one in another cluster, because retention
// removes the rows that say from which one the database was restored; or one to find out whether Kafka confirms it.
// Until Kafka has confirmed the first one, the row counts; from then on the topic does.
func (x *Exactly) begin(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, x.Rules.SendTimeout)
	defer cancel()
	if x.open, err = x.sender.Begin(ctx); err != nil {
		return x.outage(err, byCommit)
	}
	if err := x.sendRecord(ctx); err != nil {
		return x.outage(err, byRecord)
	}
	commit := x.endOpen(nil)
	if err := commit.Wait(ctx); err != nil {
		return x.outage(err, byCommit)
	}
	return x.reap()
}

// record returns the next cursor record, for a position in the window of the newest row.
func (x *Exactly) record(last int64, again []int64) exactly.Record {
	return exactly.Record{Number: x.number + 1, Row: x.pos.CursorID, Token: x.token, Last: last, Again: again}
}

// sendRecord sends the cursor record of the open transaction alone.
func (x *Exactly) sendRecord(ctx context.Context) error {
	r, err := x.sender.CursorRecord(x.record(x.pos.Last, x.again))
	if err != nil {
		return err
	}
	errs, err := x.open.Send(ctx, recordsOf(r))
	if err == nil {
		err = errs[0]
	}
	x.recorded = err == nil
	if x.recorded {
		x.proved(byRecord)
	}
	return err
}

// endOpen commits the open transaction, whose cursor record is sent. It does not wait.
func (x *Exactly) endOpen(sent func()) *exactly.Commit {
	x.number++
	commit := x.open.Commit(x.Held)
	x.flights = append(x.flights, exactFlight{x.number, x.pos.CursorID, commit, sent})
	x.open, x.recorded, x.behind = nil, false, false
	return commit
}

// reap takes the confirmations that have come, in their order. The caller holds mu. It is the step Confirm.
func (x *Exactly) reap() error {
	for len(x.flights) > 0 {
		f := x.flights[0]
		select {
		case <-f.commit.Done():
		default:
			return nil
		}
		if err := f.commit.Wait(x.Held); err != nil {
			return err
		}
		x.flights, x.starts, x.endings = x.flights[1:], 0, 0
		x.confirmed = cursor.Confirmed{Batch: f.number, Row: max(x.confirmed.Row, f.row)}
		x.proved(byCommit)
		if f.sent != nil {
			x.Health.CursorMoved()
			f.sent()
		}
	}
	return nil
}

// AwaitConfirmed waits until Kafka has confirmed everything. It reports whether the newest row says so already. If only
// a confirmation ends the outage of Kafka, and nothing is left to confirm, it sends a cursor record alone.
func (x *Exactly) AwaitConfirmed(ctx context.Context) (bool, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, f := range x.flights {
		if err := f.commit.Wait(ctx); err != nil {
			return false, x.doubt(x.outage(err, byCommit))
		}
	}
	if err := x.reap(); err != nil {
		return false, x.doubt(x.outage(err, byCommit))
	}
	if !x.mayEnd(byRecord) {
		if err := x.begin(ctx); err != nil {
			return false, x.doubt(err)
		}
	}
	return !x.begun && x.confirmed.Row == x.pos.CursorID, nil
}

// write calls f, which may write a row, with what the row says of confirmations. It returns the position with the row
// that is the newest now. The caller holds mu.
func (x *Exactly) write(p cursor.Position, parks bool, f func(p cursor.Position) (cursor.Position, error)) (cursor.Position, error) {
	if !x.ready {
		return p, errDoubt(errUnready)
	}
	if err := x.reap(); err != nil {
		return p, x.doubt(x.outage(err, byCommit))
	}
	p.CursorID, p.Epoch = x.pos.CursorID, x.pos.Epoch // a retrier may have written rows
	says := x.confirmed
	confirmed := len(x.flights) == 0 && x.open == nil && !x.behind && !parks
	if confirmed {
		says.Row = 0
	}
	x.Cursors.Confirm(says, x.number+1)
	next, err := f(p)
	if err != nil {
		x.ready = !isDoubt(err) && x.ready
		return next, err
	}
	if next.CursorID != x.pos.CursorID {
		x.token, x.behind, x.begun = x.Cursors.Token(), x.behind || parks, false
		if confirmed {
			x.confirmed.Row = next.CursorID
		}
	}
	x.pos = next
	return next, nil
}

var errUnready = errors.New("a transaction has failed")

// exactlyCursors are the cursors of a session that sends exactly once.
type exactlyCursors struct {
	*cursor.Store
	x *Exactly
}

// lock locks mu, unless the session holds it.
func (x *Exactly) lock() func() {
	if x.held {
		return func() {}
	}
	x.mu.Lock()
	return x.mu.Unlock
}

// Load implements cursorStore.
func (c exactlyCursors) Load(ctx context.Context, l *lease.Lease) (cursor.Position, error) {
	return c.x.Load(ctx, l)
}

// Open implements cursorStore. It is the step OpenWindow.
func (c exactlyCursors) Open(ctx context.Context, l *lease.Lease, p cursor.Position, limit int) (next cursor.Position, events []envelope.Event, large bool, err error) {
	defer c.x.lock()()
	next, err = c.x.write(p, false, func(p cursor.Position) (cursor.Position, error) {
		next, events, large, err = c.Store.Open(ctx, l, p, limit)
		return next, err
	})
	return next, events, large, err
}

// Move implements cursorStore. With failures it is the step Park.
func (c exactlyCursors) Move(ctx context.Context, l *lease.Lease, p cursor.Position, failures []cursor.Failure) (int64, error) {
	defer c.x.lock()()
	next, err := c.x.write(p, len(failures) > 0, func(p cursor.Position) (cursor.Position, error) {
		id, err := c.Store.Move(ctx, l, p, failures)
		p.CursorID, p.Epoch = id, l.Epoch
		return p, err
	})
	return next.CursorID, err
}

// Save saves the results of retries. It is the step Remove. The caller holds mu.
func (x *Exactly) save(ctx context.Context, results []cursor.RetryResult) (saved cursor.Saved, err error) {
	_, err = x.write(x.pos, false, func(p cursor.Position) (cursor.Position, error) {
		var id int64
		saved, id, err = x.Cursors.SaveExactly(ctx, x.Failed, x.Lease, p, results, x.Rules.KeepSent)
		p.CursorID, p.Epoch = id, x.Lease.Epoch
		return p, err
	})
	if err == nil {
		x.forget(results, saved.Locked)
	}
	return saved, err
}
