package main

import (
	"errors"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/outboxgo/outbox"
	"github.com/twmb/franz-go/pkg/kgo"
)

// groups returns the consumers. With adds what observes them to their configuration.
func (a *app) groups(with func(group string, cfg outbox.ConsumerConfig) outbox.ConsumerConfig) ([]*outbox.Consumer, error) {
	counting, err := outbox.NewConsumer(a.db, a.members(), a.events, a.group(statisticsGroup), with(a.group(statisticsGroup), a.config()), statistics{a.db, a.log}.handlers()...)
	if err != nil {
		return nil, err
	}
	deleting, err := outbox.NewConsumer(nil, a.members(), a.events, a.group(cacheGroup), with(a.group(cacheGroup), a.config()), a.pages.handlers()...)
	return []*outbox.Consumer{counting, deleting}, err
}

const (
	statisticsGroup = "product-statistics"
	cacheGroup      = "cache-invalidation"
)

// group returns the name of a group of this run. In a service a group keeps its name.
func (a *app) group(name string) string { return name + "." + a.id }

// members are the Kafka options of a group. Kafka gives the partitions of a killed process to others after the
// session timeout, 6 s here so that a run is short.
func (a *app) members() []kgo.Opt { return append(a.kafka, kgo.SessionTimeout(6*time.Second)) }

// config configures a group of this run. A service needs no more than RetriesFor.
func (a *app) config() outbox.ConsumerConfig {
	return outbox.ConsumerConfig{
		HandlerConfig: outbox.HandlerConfig{
			Schema: a.id,
			Retry:  outbox.RetryPolicy{RetriesFor: retries},
			Hooks:  a.hooks,
			Logger: a.log,
			From:   outbox.FromStart, // customers do not wait until the groups are ready
		},
		Decode: onlyFrom(a.source),
	}
}

// retries says how often a handler that fails is tried again before its event becomes a dead
// letter. A consumer waits for an unavailable PostgreSQL, but it cannot know which services
// handlers without a transaction call. So an event is dead-lettered only if it may be to blame: for
// data that PostgreSQL refuses, and for a panic.
func retries(err error) int {
	var pg *pgconn.PgError
	var panicked *outbox.PanicError
	rejected := errors.As(err, &pg) && (strings.HasPrefix(pg.Code, "22") || strings.HasPrefix(pg.Code, "23"))
	if rejected || errors.As(err, &panicked) {
		return 3
	}
	return math.MaxInt
}

// onlyFrom passes over what others send to the same topics, such as other runs of
// this program.
func onlyFrom(source string) func(*kgo.Record) (*outbox.Message, error) {
	return func(r *kgo.Record) (*outbox.Message, error) {
		m, err := outbox.DecodeCloudEvent(r)
		if err == nil && m.Source != source {
			return nil, nil // of another program
		}
		return m, err
	}
}
