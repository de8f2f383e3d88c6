package outboxadmin

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/outboxops"
)

const (
	// kafkaFresh is the age up to which an answer of Kafka is shown without another request.
	kafkaFresh = 10 * time.Second
	// kafkaTimeout bounds the requests to Kafka.
	kafkaTimeout = 10 * time.Second
	// kafkaPatience bounds how long a view waits for Kafka. After it, the view shows the older answer.
	kafkaPatience = 2 * time.Second
)

// kafkaView has the unread records of groups, the dead letters, and the time of Kafka's answer. It is zero
// if Kafka has not answered.
type kafkaView struct {
	At     time.Time // of all facts
	Err    string    // why it is not known, not newer, or not complete
	InPart bool      // the answer lacks what Err is about
	Asked  bool      // there is a Kafka to ask
	kafkaFacts
}

// kafkaFacts are Kafka's answers about consumer groups.
type kafkaFacts struct {
	Lag         map[string]map[string]int64 // by group and topic
	DeadLetters []outboxops.DeadLetterTopic
}

// of returns the lag of a group in a topic.
func (v kafkaView) of(group, topic string) *int64 {
	n, ok := v.Lag[group][topic]
	if !ok {
		return nil
	}
	return &n
}

// kafkaReader asks Kafka about consumer groups, for all views together.
type kafkaReader struct {
	ask func(context.Context, []outboxops.ConsumerGroup) (kafkaFacts, error)

	mu     sync.Mutex
	known  kafkaView
	tried  time.Time
	asking chan struct{} // closed when Kafka has answered; nil if no question is in flight
}

func newKafkaReader(consumers *outboxops.Consumers, opts []kgo.Opt) *kafkaReader {
	if opts == nil {
		return &kafkaReader{}
	}
	return &kafkaReader{known: kafkaView{Asked: true}, ask: func(ctx context.Context, groups []outboxops.ConsumerGroup) (facts kafkaFacts, err error) {
		if facts.Lag, err = consumers.Lag(ctx, opts, groups); ctx.Err() != nil {
			return facts, err
		}
		var derr error
		facts.DeadLetters, derr = consumers.DeadLetters(ctx, opts, groups)
		return facts, errors.Join(err, derr)
	}}
}

// look returns Kafka's answers about groups. They are not older than kafkaFresh if Kafka answers in time.
func (l *kafkaReader) look(ctx context.Context, groups []outboxops.ConsumerGroup) kafkaView {
	if l.ask == nil || len(groups) == 0 {
		return l.last()
	}
	l.mu.Lock()
	if l.asking == nil && time.Since(l.tried) > kafkaFresh {
		l.tried, l.asking = time.Now(), make(chan struct{})
		go l.renew(groups, l.asking)
	}
	asking := l.asking
	l.mu.Unlock()
	if asking != nil {
		timer := time.NewTimer(kafkaPatience)
		defer timer.Stop()
		select {
		case <-asking:
		case <-timer.C:
		case <-ctx.Done():
		}
	}
	return l.last()
}

func (l *kafkaReader) last() kafkaView {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.known
}

// renew asks Kafka. It outlives the view that began it, because other views wait for the answer too.
func (l *kafkaReader) renew(groups []outboxops.ConsumerGroup, asking chan struct{}) {
	defer close(asking)
	ctx, cancel := context.WithTimeout(context.Background(), kafkaTimeout)
	defer cancel()
	facts, err := l.ask(ctx, groups)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asking = nil
	if err == nil {
		l.known = kafkaView{At: time.Now(), Asked: true, kafkaFacts: facts}
		return
	}
	if facts.isEmpty() { // the older answer stays, with its time
		l.known.Err, l.known.InPart = errorText(err), false
		return
	}
	// What the answer lacks is not known: older facts would be shown with the time of this answer.
	l.known = kafkaView{At: time.Now(), Asked: true, InPart: true, Err: errorText(err), kafkaFacts: facts}
}

// isEmpty reports whether Kafka has answered nothing.
func (f kafkaFacts) isEmpty() bool {
	for _, topics := range f.Lag {
		if len(topics) > 0 {
			return false
		}
	}
	return len(f.DeadLetters) == 0
}
