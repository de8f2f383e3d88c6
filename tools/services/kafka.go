package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/outboxgo/outbox/tools/internal/progress"
	"github.com/outboxgo/outbox/tools/kafkaserver"
)

const (
	brokersEnv = "OUTBOX_KAFKA_BROKERS"
	commonEnv  = "KAFKA_BROKERS" // that of the command outbox; only written, like databaseEnv
	kindEnv    = "OUTBOX_KAFKA_KIND"
)

// Values of OUTBOX_KAFKA_KIND.
const (
	kindReal = "kafka"
	kindFake = "kfake"
)

// startKafka returns nil if none is wanted.
func startKafka(ctx context.Context, o *options, docker *docker, say teller) (*service, error) {
	k := &kafkaStarter{
		version: kafkaserver.Version,
		image:   cmp.Or(os.Getenv("OUTBOX_KAFKA_IMAGE"), kafkaImage),
		set:     o.kafkaSet,
		docker:  docker,
		say:     say,
	}
	switch o.kafka {
	case "none":
		return nil, nil
	case "auto":
		return k.auto(ctx)
	case "real":
		return k.real(ctx)
	case "docker":
		return k.container(ctx)
	case "local":
		return k.local(ctx)
	case "fake":
		return k.fake()
	default:
		k.version, k.image = o.kafka, kafkaImages+o.kafka
		return k.own(ctx)
	}
}

type kafkaStarter struct {
	version string // of a local process
	image   string // of a container
	set     settings
	docker  *docker
	say     teller
}

// auto is real, or else fake.
func (k *kafkaStarter) auto(ctx context.Context) (*service, error) {
	if brokers := os.Getenv(brokersEnv); brokers != "" {
		return k.given(ctx, brokers)
	}
	s, err := k.real(ctx)
	if err == nil || ctx.Err() != nil {
		return s, err
	}
	k.say.warn("no real broker, an imitation (kfake) instead; tests that need a real one will fail: %v", err)
	return k.fake()
}

// real returns the broker of the environment, or one of our own.
func (k *kafkaStarter) real(ctx context.Context) (*service, error) {
	if brokers := os.Getenv(brokersEnv); brokers != "" {
		if os.Getenv(kindEnv) == kindFake {
			return nil, fmt.Errorf("kafka: a real one is wanted, and %s says that the one in %s is an imitation", kindEnv, brokersEnv)
		}
		return k.given(ctx, brokers)
	}
	return k.own(ctx)
}

// own returns a container, or a local process.
func (k *kafkaStarter) own(ctx context.Context) (*service, error) {
	if k.docker.answers(ctx) == nil {
		s, err := k.container(ctx)
		if err == nil || ctx.Err() != nil {
			return s, err
		}
		k.say.step("no container, a local broker instead: %s", oneLine(err))
	}
	return k.local(ctx)
}

// given uses brokers that run already.
func (k *kafkaStarter) given(ctx context.Context, brokers string) (*service, error) {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, givenTimeout)
	defer cancel()
	var seeds []string
	for seed := range strings.SplitSeq(brokers, ",") {
		seeds = append(seeds, strings.TrimSpace(seed))
	}
	if err := kafkaserver.Ping(ctx, seeds); err != nil {
		return nil, fmt.Errorf("kafka: use the address in %s: %w", brokersEnv, err)
	}
	kind := cmp.Or(os.Getenv(kindEnv), kindReal)
	k.ready(kind, "the environment", seeds, began)
	return &service{name: "kafka", env: kafkaVariables(seeds, kind)}, nil
}

// local runs Apache Kafka with Java.
func (k *kafkaStarter) local(ctx context.Context) (*service, error) {
	if err := kafkaserver.Available(); err != nil {
		return nil, fmt.Errorf("kafka: %w", err)
	}
	if _, err := kafkaserver.Libraries(ctx, k.version, k.say.steps()); err != nil { // before the clock starts
		return nil, err
	}
	began := time.Now()
	stop := progress.Heartbeat(k.say.steps(), func() string { return "still starting" })
	server, err := kafkaserver.Start(ctx, kafkaserver.Config{Version: k.version, Settings: k.set, Log: k.say.log()})
	stop()
	if err != nil {
		return nil, err
	}
	k.ready(k.version, "Java archives", server.Brokers(), began)
	return &service{
		name:   "kafka",
		env:    kafkaVariables(server.Brokers(), kindReal),
		stop:   server.Stop,
		server: server,
	}, nil
}

func (k *kafkaStarter) container(ctx context.Context) (*service, error) {
	k.say.step("starting a container of %s", k.image)
	began := time.Now()
	container, err := k.docker.kafka(ctx, k.image, k.set, k.say)
	if err != nil {
		return nil, fmt.Errorf("kafka: container of %s: %w", k.image, err)
	}
	k.ready(kindReal, "image "+k.image, []string{container.url}, began)
	return &service{name: "kafka", env: kafkaVariables([]string{container.url}, kindReal), stop: container.stop}, nil
}

// fake runs franz-go's imitation of a broker in this process.
func (k *kafkaStarter) fake() (*service, error) {
	began := time.Now()
	cluster, err := kfake.NewCluster(
		kfake.NumBrokers(1),
		kfake.DefaultNumPartitions(3),
		kfake.AllowAutoTopicCreation(),
		kfake.BrokerConfigs(k.set),
	)
	if err != nil {
		return nil, fmt.Errorf("kafka: start imitation: %w", err)
	}
	k.ready(kindFake, "this process", cluster.ListenAddrs(), began)
	return &service{
		name: "kafka",
		env:  kafkaVariables(cluster.ListenAddrs(), kindFake),
		stop: func(context.Context) error { cluster.Close(); return nil },
	}, nil
}

func (k *kafkaStarter) ready(what, origin string, brokers []string, began time.Time) {
	k.say.step("%s from %s, %s, ready in %.1f s", what, origin, strings.Join(brokers, ","), time.Since(began).Seconds())
}

func kafkaVariables(brokers []string, kind string) []string {
	list := strings.Join(brokers, ",")
	return []string{brokersEnv + "=" + list, commonEnv + "=" + list, kindEnv + "=" + kind}
}

// oneLine returns the first line of err's text.
func oneLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}
