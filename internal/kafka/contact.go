package kafka

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/wait"
)

// Contact knows whether Kafka answers this process. It asks all brokers when it begins to run, then until the first
// answer, and after that if this process has had no other answer for contactInterval, or when it is told to. It is safe
// for concurrent use.
type Contact struct {
	opts     []kgo.Opt
	produces bool                                               // asks for a producer id, which producing needs
	report   func(began time.Time, err error, attrs ...any)     // of each question
	ask      func(context.Context, *kgo.Client, bool) error     // replaced by tests
	connect  func(opts []kgo.Opt) (client *kgo.Client, _ error) // replaced by tests
	askNow   chan struct{}                                      // holds at most one wake request

	mu       sync.Mutex
	answered time.Time // when Kafka answered last
	known    bool      // Kafka has answered since Run began
	rejected error     // with which Kafka has answered that it does not serve this client; nil after any other answer
	sending  time.Time // when a send failed last, and none has had an answer since
	again    bool      // AskAgain was called, and Kafka has not answered since
}

const (
	contactInterval = 10 * time.Second
	mostContactWait = 5 * time.Second // between two questions without an answer
	// sendsWait is how long only a send ends the outage that a send has begun. A leader tries again sooner.
	sendsWait = 2 * time.Minute
	// ElsewhereFor is how long it counts that Kafka has answered another process.
	ElsewhereFor = 30 * time.Second
)

// NewContact returns a contact that asks with a client of its own, made from opts. It reports each question: the time
// at which it began, its error, and attributes for the log.
func NewContact(opts []kgo.Opt, produces bool, report func(began time.Time, err error, attrs ...any)) *Contact {
	return &Contact{opts: opts, produces: produces, report: report, ask: askContact, connect: NewClient, askNow: make(chan struct{}, 1)}
}

// Run asks until ctx ends. It may run once at a time.
func (c *Contact) Run(ctx context.Context) {
	c.begin()
	client, err := c.connect(c.opts)
	if err != nil { // the options were validated
		c.tried(time.Now(), err, nil)
		return
	}
	defer client.Close()
	seeds, _ := client.OptValue(kgo.SeedBrokers).([]string)
	for pause := time.Second; ctx.Err() == nil; {
		if left := c.untilDue(); left > 0 {
			wait.Await(ctx, ctx, c.askNow, left)
			continue
		}
		began := time.Now()
		err := c.ask(ctx, client, c.produces && !c.Answered())
		if ctx.Err() != nil {
			return
		}
		c.tried(began, err, seeds)
		if err == nil {
			client.ForceMetadataRefresh() // so that it knows brokers beside the seeds
			pause = time.Second
			wait.Await(ctx, ctx, c.askNow, max(c.untilDue(), mostContactWait))
			continue
		}
		wait.Sleep(ctx, pause)
		pause = min(2*pause, mostContactWait)
	}
}

func (c *Contact) begin() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.known, c.rejected, c.answered, c.sending = false, nil, time.Time{}, time.Time{}
}

// untilDue returns how long it is until the next question.
func (c *Contact) untilDue() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.known || c.again || c.rejected != nil || !c.sending.IsZero() {
		return 0
	}
	return contactInterval - time.Since(c.answered)
}

// tried takes the result of a question. An error is out of date if something else has had an answer meanwhile.
func (c *Contact) tried(began time.Time, err error, seeds []string) {
	c.mu.Lock()
	late := err != nil && c.answered.After(began)
	sends := time.Since(c.sending) < sendsWait
	if err == nil {
		c.answered, c.known, c.rejected, c.again = time.Now(), true, nil, false
	} else if IsRefused(err) && !late {
		c.rejected = err
	}
	c.mu.Unlock()
	if late || err == nil && sends {
		return
	}
	c.report(began, err, "brokers", strings.Join(seeds, ","))
}

// Heard takes the result of a send or a fetch: nil if Kafka has answered.
func (c *Contact) Heard(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		c.sending = time.Now()
		return
	}
	c.answered, c.known, c.rejected, c.sending, c.again = time.Now(), true, nil, time.Time{}, false
}

// StopSending is called when this process sends no more, or when a send has failed for its partitions alone: from now
// on an answer ends any outage.
func (c *Contact) StopSending() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sending = time.Time{}
}

// AskAgain makes Run ask at once, unless something else has an answer before.
func (c *Contact) AskAgain() {
	c.mu.Lock()
	c.again = true
	c.mu.Unlock()
	wait.Signal(c.askNow)
}

// Answered reports whether Kafka has answered since Run began.
func (c *Contact) Answered() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.known
}

// LastAnswer returns when Kafka answered last, or zero.
func (c *Contact) LastAnswer() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.answered
}

// Rejected returns the error with which Kafka has answered that it does not serve this client, or nil.
func (c *Contact) Rejected() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rejected
}

// askContact asks all brokers for their metadata and, for a producer, for a producer id.
func askContact(ctx context.Context, client *kgo.Client, produces bool) error {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	_, err := firstAnswer(ctx, client, func(ctx context.Context, b *kgo.Broker) (struct{}, error) {
		request := metadataRequest()
		request.Topics = []kmsg.MetadataRequestTopic{} // nil would ask for all topics
		if _, err := b.Request(ctx, request); err != nil {
			return struct{}{}, err
		}
		if !produces {
			return struct{}{}, nil
		}
		return struct{}{}, askProducerID(ctx, b)
	})
	return err
}

// askProducerID asks a broker for a producer id, which producing needs.
func askProducerID(ctx context.Context, b *kgo.Broker) error {
	id, err := b.Request(ctx, kmsg.NewPtrInitProducerIDRequest())
	if err != nil {
		return err
	}
	if err := kerr.ErrorForCode(id.(*kmsg.InitProducerIDResponse).ErrorCode); err != nil {
		return fmt.Errorf("ask for a producer id, which needs WRITE on a topic: %w", err)
	}
	return nil
}

// mostNamed is how many brokers an error names.
const mostNamed = 5

// withBrokers adds to an error which brokers were asked.
func withBrokers(client *kgo.Client, err error) error {
	seeds, _ := client.OptValue(kgo.SeedBrokers).([]string)
	names := slices.Clone(seeds[:min(len(seeds), mostNamed)])
	if len(seeds) > mostNamed {
		names = append(names, "…")
	}
	if IsAnswer(err) || IsRefused(err) {
		return fmt.Errorf("answer of Kafka at %s: %w", strings.Join(names, ", "), err)
	}
	return fmt.Errorf("no answer of Kafka at %s: %w", strings.Join(names, ", "), err)
}
