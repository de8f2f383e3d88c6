package exactly

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
)

// Config says where a [Sender] sends.
type Config struct {
	Opts  []kgo.Opt // of a producer with transactions, which is flushed by hand; the ids are added
	Topic string    // of the cursor
	Key   string    // of the cursor records
	ID    string    // both transactional ids begin with it
	Go    func(func())

	System int64 // Record.System
}

// IDs returns the two transactional ids.
func (c Config) IDs() [2]string { return [2]string{c.ID + ".1", c.ID + ".2"} }

// For returns the configuration with the names of a relay. A database that was restored into another cluster has the
// same cursor records, but other transactional ids, so that its relay does not fence that of the original.
func (c Config) For(systemID int64, database, schema, relay string) Config {
	c.Key = database + "." + schema + "." + relay
	c.ID = fmt.Sprintf("outbox.%d.%s", systemID, c.Key)
	c.System = systemID
	return c
}

// Sender sends transactions. It belongs to one goroutine at a time.
type Sender struct {
	cfg     Config
	clients [2]*kgo.Client
	commits [2]*Commit // the newest of each id; nil if it has none
	next    int        // id of the next transaction
	last    *Commit    // the newest
}

// NewSender returns a sender. It does no I/O. Start comes first.
func NewSender(cfg Config) *Sender { return &Sender{cfg: cfg} }

// Client returns a client for questions to Kafka, or nil before Start and after Close.
func (s *Sender) Client() *kgo.Client { return s.clients[0] }

// Close closes both clients. What is open stays open until its time is over, or until the next start.
func (s *Sender) Close() {
	for i, client := range s.clients {
		if client != nil {
			client.Close()
		}
		s.clients[i], s.commits[i] = nil, nil
	}
	s.next, s.last = 0, nil
}

// Start makes new clients, ends all transactions of both ids and returns the newest record, if there is one. Create
// lets it create the topic.
func (s *Sender) Start(ctx context.Context, create bool) (newest Record, found bool, err error) {
	s.Close()
	for i, id := range s.cfg.IDs() {
		s.clients[i], err = kafka.NewClient(append(slices.Clone(s.cfg.Opts), kgo.TransactionalID(id)))
		if err != nil {
			return Record{}, false, fmt.Errorf("make Kafka client: %w", err)
		}
	}
	if err := CheckVersion(ctx, s.clients[0]); err != nil {
		return Record{}, false, err
	}
	if err := s.ensureTopic(ctx, create); err != nil {
		return Record{}, false, err
	}
	if err := s.fence(ctx); err != nil {
		return Record{}, false, err
	}
	return s.read(ctx)
}

var errNoProducerID = errors.New("the brokers give out no producer id")

// fence initializes both ids. Kafka answers once what was open is aborted, and what was prepared is committed.
func (s *Sender) fence(ctx context.Context) error {
	var errs [2]error
	var wg sync.WaitGroup
	for i, client := range s.clients {
		wg.Go(func() {
			id, _, err := client.ProducerID(ctx)
			if err == nil && id < 0 { // the client goes on without one if a broker seems to be too old
				err = errNoProducerID
			}
			errs[i] = err
		})
	}
	wg.Wait()
	for i, err := range errs {
		if errors.Is(err, kerr.TransactionalIDAuthorizationFailed) {
			err = fmt.Errorf("the client needs the rights Write and Describe on the transactional ids that begin with %s: %w", s.cfg.ID, err)
		}
		if err != nil {
			return fmt.Errorf("initialize transactional id %s: %w", s.cfg.IDs()[i], err)
		}
	}
	return nil
}

// Transaction is one that has not ended.
type Transaction struct {
	sender *Sender
	id     int
	client *kgo.Client
	epoch  int16
}

// Begin begins a transaction of the next id, after the one before of this id has ended.
func (s *Sender) Begin(ctx context.Context) (*Transaction, error) {
	i := s.next
	if s.last != nil && s.last.failed() {
		return nil, s.last.err
	}
	if before := s.commits[i]; before != nil {
		if err := before.Wait(ctx); err != nil {
			return nil, err
		}
	}
	if err := s.clients[i].BeginTransaction(); err != nil {
		return nil, fmt.Errorf("begin transaction: %w", err)
	}
	_, epoch, err := s.clients[i].ProducerID(ctx)
	if err != nil {
		return nil, fmt.Errorf("begin transaction: %w", err)
	}
	return &Transaction{s, i, s.clients[i], epoch}, nil
}

// IsEnded reports whether Kafka has ended a transaction that the client wanted to continue: another process has
// initialized its id, its time was over, or Kafka has forgotten the id.
func IsEnded(err error) bool {
	return errors.Is(err, kerr.ProducerFenced) || errors.Is(err, kerr.InvalidProducerEpoch) ||
		errors.Is(err, kerr.InvalidProducerIDMapping) || errors.Is(err, kerr.InvalidTxnState) || errors.Is(err, kerr.TransactionAbortable)
}

// Send sends records and returns the error of each. Its own error means that not all outcomes are known: the
// transaction must not be committed, and the sender has to start again.
func (t *Transaction) Send(ctx context.Context, records []kgo.Record) ([]error, error) {
	var mu sync.Mutex
	errs := make([]error, len(records))
	for i := range records {
		t.client.Produce(context.Background(), &records[i], func(_ *kgo.Record, err error) { //nolint:contextcheck // a record in flight cannot be cancelled
			if err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs[i] = err
			}
		})
	}
	if err := t.client.Flush(ctx); err != nil {
		return nil, fmt.Errorf("no answer to records of a transaction: %w", context.Cause(ctx))
	}
	mu.Lock()
	defer mu.Unlock()
	return errs, nil
}

// CursorRecord returns the cursor record to send.
func (s *Sender) CursorRecord(r Record) (kgo.Record, error) {
	r.System = s.cfg.System
	value, err := json.Marshal(r)
	return kgo.Record{Topic: s.cfg.Topic, Partition: 0, Key: []byte(s.cfg.Key), Value: value}, err
}

// Abort ends the transaction. After an error the sender has to start again. The next transaction has the same id.
func (t *Transaction) Abort(ctx context.Context) error {
	if err := t.client.EndTransaction(ctx, kgo.TryAbort); err != nil {
		return fmt.Errorf("abort transaction: %w", err)
	}
	return nil
}

// Commit is the end of a transaction that is being committed.
type Commit struct {
	done chan struct{}
	err  error // once done is closed
}

// Commit commits the transaction once the one before is confirmed. All of its records must have been accepted, one of
// them at least. It does not wait.
func (t *Transaction) Commit(ctx context.Context) *Commit {
	s, before := t.sender, t.sender.last
	c := &Commit{done: make(chan struct{}), err: errors.New("the commit has panicked")}
	s.last, s.commits[t.id], s.next = c, c, 1-t.id
	s.cfg.Go(func() {
		defer close(c.done)
		if before != nil {
			if c.err = before.Wait(ctx); c.err != nil {
				return
			}
		}
		if c.err = t.commit(ctx); c.err != nil {
			c.err = fmt.Errorf("commit transaction: %w", c.err)
		}
	})
	return c
}

// errInTwo means that the client has initialized its id in the middle of the transaction, which it does by itself
// after some errors: what it had sent before is aborted.
var errInTwo = errors.New("the client has begun another transaction in its middle")

func (t *Transaction) commit(ctx context.Context) error {
	if _, epoch, err := t.client.ProducerID(ctx); err != nil {
		return err
	} else if epoch != t.epoch {
		return errInTwo
	}
	return t.client.EndTransaction(ctx, kgo.TryCommit)
}

// Wait waits until Kafka has confirmed the commit. An error means that it is not known whether the transaction is
// committed, and that the sender has to start again.
func (c *Commit) Wait(ctx context.Context) error {
	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Done returns a channel that is closed when the outcome of the commit is known.
func (c *Commit) Done() <-chan struct{} { return c.done }

func (c *Commit) failed() bool {
	select {
	case <-c.done:
		return c.err != nil
	default:
		return false
	}
}
