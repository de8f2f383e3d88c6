package kafka

import (
	"context"
	"errors"

	"github.com/twmb/franz-go/pkg/kgo"
)

// errNoBroker is the error of a question to a client without brokers.
var errNoBroker = errors.New("the client knows no broker")

// firstAnswer asks all brokers that a client knows at once, so that a silent one delays nothing. It returns the first
// answer without an error, or one of the errors with its answer.
func firstAnswer[T any](
	ctx context.Context, client *kgo.Client, ask func(context.Context, *kgo.Broker) (T, error),
) (answer T, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		answer T
		err    error
	}
	brokers := append(client.DiscoveredBrokers(), client.SeedBrokers()...)
	results := make(chan result, len(brokers))
	for _, b := range brokers {
		go func() {
			answer, err := ask(ctx, b)
			results <- result{answer, err}
		}()
	}
	err = errNoBroker
	for range brokers {
		r := <-results
		if answer, err = r.answer, r.err; err == nil {
			break
		}
	}
	return answer, err
}
