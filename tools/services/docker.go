package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/log"

	"github.com/outboxgo/outbox/tools/internal/place"
	"github.com/outboxgo/outbox/tools/internal/progress"
	"github.com/outboxgo/outbox/tools/kafkaserver"
	"github.com/outboxgo/outbox/tools/pgserver"
)

// The images that run unless the environment names others. The images of Kafka have its versions as tags.
const (
	postgresImage = "postgres:18-alpine"
	kafkaImages   = "apache/kafka:"
	kafkaImage    = kafkaImages + kafkaserver.Version
)

const (
	engineTimeout    = 5 * time.Second
	containerTimeout = 90 * time.Second // from the image's arrival to readiness
	createTimeout    = 5 * time.Second  // to finish a creation that is not wanted any more
	removeTimeout    = 30 * time.Second
)

const logTail = 4 << 10 // how much of a container's log an error may hold, in bytes

// docker starts containers. One is shared by all services.
type docker struct {
	once sync.Once
	err  error
}

func newDocker() *docker {
	log.SetDefault(log.NewNoopLogger()) // it tells every step of every container
	disableReaper()
	return &docker{}
}

// disableReaper keeps the library, unless the environment decides, from
// starting a container that removes ours should we crash: it listens on all
// addresses, takes orders from anybody there, and has the engine's socket.
func disableReaper() {
	const name = "TESTCONTAINERS_RYUK_DISABLED"
	if _, ok := os.LookupEnv(name); ok {
		return
	}
	_ = os.Setenv(name, "true") // the name is a valid one
	testcontainers.ReadConfig() // it reads the variable only once
	_ = os.Unsetenv(name)       // the user's command must not inherit it
}

// answers returns nil if a Docker engine on this machine answers. It asks once.
func (d *docker) answers(ctx context.Context) error {
	d.once.Do(func() {
		ctx, cancel := context.WithTimeout(ctx, engineTimeout)
		defer cancel()
		d.err = askEngine(ctx)
	})
	return d.err
}

func askEngine(ctx context.Context) (err error) {
	defer func() {
		// The library panics when it finds no way to an engine.
		if cause := recover(); cause != nil {
			err = fmt.Errorf("find a Docker engine: %v", cause)
		}
	}()
	// Without the name of a network DaemonHost makes one if we are in a container.
	bridge := testcontainers.WithDefaultBridgeNetwork(testcontainers.Bridge)
	provider, err := testcontainers.NewDockerProvider(bridge)
	if err != nil {
		return fmt.Errorf("find a Docker engine: %w", err)
	}
	defer provider.Close()
	host, err := provider.DaemonHost(ctx)
	if err != nil {
		return fmt.Errorf("find a Docker engine: %w", err)
	}
	if ip, err := netip.ParseAddr(host); host != "localhost" && (err != nil || !ip.IsLoopback()) {
		return fmt.Errorf("the Docker engine is on %s: its containers cannot listen on this machine's 127.0.0.1", host)
	}
	if err := provider.Health(ctx); err != nil {
		return fmt.Errorf("ask the Docker engine: %w", err)
	}
	return nil
}

// box is a running container.
type box struct {
	port      int    // on 127.0.0.1
	url       string // what clients need
	container testcontainers.Container
}

// stop kills the container and removes it with its data: there is nothing to
// save. So it is quick, and goes on when ctx ends.
func (b *box) stop(ctx context.Context) error {
	late := fmt.Errorf("no answer within %v", removeTimeout)
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), removeTimeout, late)
	defer cancel()
	if err := b.container.Terminate(ctx, testcontainers.StopTimeout(0)); err != nil {
		return fmt.Errorf("remove container: %w", err)
	}
	return nil
}

// ended returns an error if the container does not run any more.
func (b *box) ended(ctx context.Context) error {
	// If the engine does not tell, the container may well run.
	if state, err := b.container.State(ctx); err == nil && !state.Running {
		return fmt.Errorf("it ended with exit code %d", state.ExitCode)
	}
	return nil
}

// withLog adds the end of the container's log to err.
func (b *box) withLog(ctx context.Context, err error) error {
	ctx, cancel := context.WithTimeout(ctx, engineTimeout)
	defer cancel()
	logs, logErr := b.container.Logs(ctx)
	if logErr != nil {
		return errors.Join(err, fmt.Errorf("read its log: %w", logErr))
	}
	defer func() { _ = logs.Close() }()
	text, logErr := io.ReadAll(logs)
	if logErr != nil {
		return errors.Join(err, fmt.Errorf("read its log: %w", logErr))
	}
	text = text[max(0, len(text)-logTail):]
	return fmt.Errorf("%w\nits log ends with:\n%s", err, bytes.TrimSpace(text))
}

func (d *docker) postgres(ctx context.Context, image string, set settings, say teller) (*box, error) {
	port, err := place.Port()
	if err != nil {
		return nil, err
	}
	command := []string{"postgres"}
	for name, value := range merge(settings{"max_connections": "300", "max_prepared_transactions": "64", "wal_level": "replica"}, set) {
		command = append(command, "-c", name+"="+value)
	}
	b := &box{port: port, url: fmt.Sprintf("postgres://%s:%s@%s/postgres?sslmode=disable", pgserver.User, pgserver.Password, place.Address(port))}
	return d.start(ctx, b, say, image, 5432, func(ctx context.Context) error {
		_, err := pgserver.Ping(ctx, b.url)
		return err
	}, testcontainers.WithEnv(map[string]string{"POSTGRES_USER": pgserver.User, "POSTGRES_PASSWORD": pgserver.Password}),
		testcontainers.WithCmd(command...))
}

func (d *docker) kafka(ctx context.Context, image string, set settings, say teller) (*box, error) {
	port, err := place.Port()
	if err != nil {
		return nil, err
	}
	// The broker listens on the same port inside and outside: it also connects
	// to itself by its advertised address.
	broker := strconv.Itoa(port)
	const controller = "14093" // below place.Port's range
	properties := merge(settings{
		"process.roles":                  "broker,controller",
		"node.id":                        "1",
		"controller.quorum.voters":       "1@localhost:" + controller,
		"controller.listener.names":      "CONTROLLER",
		"listeners":                      "PLAINTEXT://:" + broker + ",CONTROLLER://:" + controller,
		"advertised.listeners":           "PLAINTEXT://127.0.0.1:" + broker,
		"listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
		"inter.broker.listener.name":     "PLAINTEXT",
	}, merge(settings(kafkaserver.Defaults()), set))
	b := &box{port: port, url: place.Address(port)}
	return d.start(ctx, b, say, image, port, func(ctx context.Context) error {
		return kafkaserver.Ready(ctx, []string{b.url})
	}, testcontainers.WithEnv(kafkaEnviron(properties)))
}

// kafkaEnviron turns properties into the variables that the image reads:
// KAFKA_ and the name in capitals, with "_" for ".".
func kafkaEnviron(properties settings) map[string]string {
	// In a name "_" stands for ".", so what is no dot needs more of them.
	name := strings.NewReplacer("_", "__", "-", "___", ".", "_")
	env := map[string]string{}
	for key, value := range properties {
		env["KAFKA_"+strings.ToUpper(name.Replace(key))] = value
	}
	return env
}

// start runs a container whose port inner is b.port on 127.0.0.1, and waits
// until ready returns nil.
func (d *docker) start(ctx context.Context, b *box, say teller, image string, inner int,
	ready func(context.Context) error, opts ...testcontainers.ContainerCustomizer) (_ *box, err error) {
	if err := d.answers(ctx); err != nil {
		return nil, err
	}
	defer progress.Heartbeat(say.steps(), func() string { return "still starting (an image may be on its way)" })()
	inside := network.MustParsePort(strconv.Itoa(inner) + "/tcp")
	outside := network.PortBinding{HostIP: netip.MustParseAddr(place.Loopback), HostPort: strconv.Itoa(b.port)}
	opts = append(opts,
		testcontainers.WithExposedPorts(inside.String()),
		testcontainers.WithHostConfigModifier(func(c *container.HostConfig) {
			c.PortBindings = network.PortMap{inside: {outside}}
		}))
	started, err := runImage(ctx, image, opts...)
	if started != nil { // it may be there even if Run failed
		b.container = started
		defer func() {
			if err != nil {
				err = errors.Join(err, b.stop(context.WithoutCancel(ctx)))
			}
		}()
	}
	if err != nil {
		return nil, err
	}
	if err := await(ctx, ready, b.ended); err != nil {
		err = fmt.Errorf("wait until it is ready: %w", err)
		if ctx.Err() == nil {
			err = b.withLog(ctx, err)
		}
		return nil, err
	}
	return b, nil
}

// runImage is testcontainers.Run, but when ctx ends only the arrival of the image is broken off at
// once. The engine may finish the creation of a container after the caller has stopped waiting.
// Then the container would stay, unknown to us.
func runImage(ctx context.Context, image string,
	opts ...testcontainers.ContainerCustomizer) (*testcontainers.DockerContainer, error) {
	late, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	breakOff := func() { cancel(context.Cause(ctx)) }
	stop := context.AfterFunc(ctx, breakOff)
	creating := testcontainers.ContainerLifecycleHooks{
		PreCreates: []testcontainers.ContainerRequestHook{func(context.Context, testcontainers.ContainerRequest) error {
			if !stop() {
				return context.Cause(ctx)
			}
			context.AfterFunc(ctx, func() { time.AfterFunc(createTimeout, breakOff) })
			return nil
		}},
	}
	return testcontainers.Run(late, image, append(opts, testcontainers.WithAdditionalLifecycleHooks(creating))...)
}

// await calls try until it returns nil, or ended an error.
func await(ctx context.Context, try, ended func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, containerTimeout, fmt.Errorf("no answer within %v", containerTimeout))
	defer cancel()
	for {
		err := try(ctx)
		if err == nil {
			return nil
		}
		if err := ended(ctx); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func merge(base, over settings) settings {
	merged := settings{}
	for _, from := range []settings{base, over} {
		for name, value := range from {
			merged[name] = value
		}
	}
	return merged
}
