package kafka

import (
	"context"
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kgo"
)

// errNoBroker is the error of a question to a client without brokers.
var errNoBroker = errors.New("the client knows no broker")

// errClosed is the error of a broker that closes two connections in a row without an answer.
var errClosed = errors.New("the connection is accepted and closed at once, which may be for " +
	"TLS or SASL that only one side expects, a wrong login, or a load balancer without brokers")

// firstAnswer asks all brokers that a client knows at once, so that a silent one delays nothing. It returns the first
// answer without an error. Otherwise it returns one of the errors with its answer: an answer of Kafka rather than a
// silence. The error names the brokers.
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
			if isHangUp(err) { // the connection may have been an old one
				if answer, err = ask(ctx, b); isHangUp(err) {
					err = fmt.Errorf("%w: %w", errClosed, err)
				}
			}
			results <- result{answer, err}
		}()
	}
	err = errNoBroker
	for range brokers {
		r := <-results
		if r.err == nil {
			return r.answer, nil
		}
		if !IsRefused(err) && (IsRefused(r.err) || !IsAnswer(err)) {
			answer, err = r.answer, r.err
		}
	}
	return answer, withBrokers(client, err)
}
