// Package kafkaserver runs a real Apache Kafka broker for development and
// tests: one node that is broker and controller (KRaft). [StartCluster] runs three
// such nodes as one cluster.
//
//   - It listens on 127.0.0.1 only, on free ports, and topics, consumer groups and
//     transactions can be used when [Start] returns.
//   - It can crash ([Server.Kill]), stop ([Server.ShutDown]) and come back
//     ([Server.Restart]) at the same address with the same data.
//   - It can hang without a word ([Server.Freeze]) and go on ([Server.Thaw]).
//   - Nothing of it remains after [Server.Stop]. On Linux the broker also ends
//     when the program that started it dies.
//
// It needs Java 17. [Libraries] downloads the rest.
package kafkaserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/outboxgo/outbox/tools/internal/java"
	"github.com/outboxgo/outbox/tools/internal/place"
	"github.com/outboxgo/outbox/tools/internal/proc"
)

const (
	startTimeout = 90 * time.Second
	stopTimeout  = 30 * time.Second
	portTries    = 3
)

// Config says what to run. The zero value is fine.
type Config struct {
	// Version is one of the [Versions]. Empty means [Version].
	Version string

	// Settings are lines of server.properties. They override the defaults: those of
	// [Defaults], or those of [StartCluster]. The node's identity, listeners and
	// log.dirs cannot be set.
	Settings map[string]string

	// Listeners are extra listeners, by name and security protocol, such as "MTLS": "SSL". Settings
	// say the rest, for example listener.name.mtls.ssl.keystore.location. The broker's own listener
	// is PLAINTEXT and has no logins.
	Listeners map[string]string

	// Advertised are the addresses that extra listeners advertise instead of their own, by name. Clients then reach
	// the broker through a proxy at this address.
	Advertised map[string]string

	// Brief is for a broker that lives for minutes: Java leaves out the compiler that makes it fast later, and a start
	// takes half of the processor time. Brokers of [StartCluster] are always brief.
	Brief bool

	// Log receives what the broker prints, warnings and errors. Nil discards it.
	Log io.Writer

	// Progress receives lines about a download. Nil discards them.
	Progress io.Writer
}

// Server is a running broker. Its methods may be called from several
// goroutines.
type Server struct {
	cfg       Config
	java      string            // the command
	libraries string            // the directory of Kafka's Java archives
	options   []string          // of Java
	limit     time.Duration     // for a start
	defaults  map[string]string // of cfg.Settings
	node      int32             // the node's id
	quorum    []*Server         // all nodes of the cluster, this one too

	// Chosen when the cluster starts.
	port, controllerPort int
	ports                map[string]int // of extra listeners
	cluster              string

	mu   sync.Mutex
	run  *place.Run // nil once stopped
	proc *proc.Process
}

// briefly is an option of Java, see [Config.Brief].
const briefly = "-XX:TieredStopAtLevel=1"

// Start starts a broker and waits until it can be used, as [Ready] says, at most 90 s.
// If that fails, the error holds the last lines of its log, and nothing remains
// running.
func Start(ctx context.Context, cfg Config) (*Server, error) {
	java, libraries, err := cfg.programs(ctx)
	if err != nil {
		return nil, err
	}
	run, err := place.NewRun("kafka")
	if err != nil {
		return nil, fmt.Errorf("kafka: %w", err)
	}
	options := []string{"-Xmx512m"}
	if cfg.Brief {
		options = append(options, briefly)
	}
	s := &Server{
		cfg: cfg, java: java, libraries: libraries, options: options, limit: startTimeout,
		defaults: Defaults(), node: 1, run: run,
	}
	s.quorum = []*Server{s}
	if err := start(ctx, s.quorum, s.launch); err != nil {
		return nil, errors.Join(fmt.Errorf("kafka: %w", err), run.Remove())
	}
	return s, nil
}

// programs checks a configuration, and finds Java and Kafka.
func (c Config) programs(ctx context.Context) (command, libraries string, err error) {
	if err := c.validate(); err != nil {
		return "", "", fmt.Errorf("kafka: %w", err)
	}
	if command, err = java.Path(); err != nil {
		return "", "", fmt.Errorf("kafka: %w", err)
	}
	libraries, err = Libraries(ctx, c.Version, c.Progress)
	return command, libraries, err
}

// fixed are the settings that make the server ours to find and to stop.
var fixed = []string{
	"process.roles", "node.id", "controller.quorum.voters", "controller.listener.names",
	"listeners", "advertised.listeners", "listener.security.protocol.map", "inter.broker.listener.name", "log.dirs",
}

func (c Config) validate() error {
	errs := []error{java.CheckSettings(c.Settings, fixed)}
	for name := range c.Listeners {
		if !listenerName.MatchString(name) || name == "PLAINTEXT" || name == "CONTROLLER" {
			errs = append(errs, fmt.Errorf("listener %q: want a name of its own, of capital letters", name))
		}
	}
	return errors.Join(errs...)
}

var listenerName = regexp.MustCompile(`^[A-Z]+$`)

// start chooses the ports of the nodes of a cluster, prepares the nodes and launches them.
func start(ctx context.Context, nodes []*Server, launch func(context.Context) error) error {
	ctx, cancel := nodes[0].withLimit(ctx)
	defer cancel()
	for try := 1; ; try++ {
		ports, err := prepareAll(ctx, nodes)
		if err != nil {
			return err
		}
		err = launch(ctx)
		// Another process can take a port before our server does. That is seen
		// by looking, not by reading the log.
		if err == nil || try == portTries || ctx.Err() != nil || !slices.ContainsFunc(ports, isTaken) {
			return err
		}
	}
}

func (s *Server) withLimit(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, s.limit, fmt.Errorf("no answer within %v", s.limit))
}

func isTaken(port int) bool { return !place.Free(port) }

// prepareAll chooses the ports of all nodes and prepares each of them. The configuration of a
// node has the ports of all controllers.
func prepareAll(ctx context.Context, nodes []*Server) (ports []int, err error) {
	choose := func() (port int) {
		for err == nil && (port == 0 || slices.Contains(ports, port)) {
			port, err = place.Port()
		}
		ports = append(ports, port)
		return port
	}
	cluster := newClusterID()
	for _, s := range nodes {
		s.cluster, s.port, s.controllerPort, s.ports = cluster, choose(), choose(), map[string]int{}
		for name := range s.cfg.Listeners {
			s.ports[name] = choose()
		}
	}
	for _, s := range nodes {
		if err == nil {
			err = s.prepare(ctx)
		}
	}
	return ports, err
}

// prepare writes the configuration and formats the storage.
func (s *Server) prepare(ctx context.Context) error {
	if err := os.RemoveAll(s.path("data")); err != nil { // of the try before
		return fmt.Errorf("remove data: %w", err)
	}
	for name, content := range map[string][]byte{
		"server.properties": s.properties(),
		"log4j2.xml":        log4jConfig,
	} {
		if err := os.WriteFile(s.path(name), content, 0o600); err != nil {
			return fmt.Errorf("write configuration: %w", err)
		}
	}
	err := proc.Run(ctx, s.command("kafka.tools.StorageTool",
		"format", "--cluster-id", s.cluster, "--config", s.path("server.properties")))
	if err != nil {
		return fmt.Errorf("format storage: %w", err)
	}
	return nil
}

func (s *Server) properties() []byte {
	broker, controller := place.Address(s.port), place.Address(s.controllerPort)
	settings := map[string]string{
		"process.roles":                  "broker,controller",
		"node.id":                        strconv.Itoa(int(s.node)),
		"controller.quorum.voters":       s.voters(),
		"controller.listener.names":      "CONTROLLER",
		"listeners":                      "PLAINTEXT://" + broker + ",CONTROLLER://" + controller,
		"advertised.listeners":           "PLAINTEXT://" + broker,
		"listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
		"inter.broker.listener.name":     "PLAINTEXT",
		"log.dirs":                       s.path("data"),
	}
	for name, port := range s.ports {
		address := place.Address(port)
		settings["listeners"] += "," + name + "://" + address
		settings["advertised.listeners"] += "," + name + "://" + cmp.Or(s.cfg.Advertised[name], address)
		settings["listener.security.protocol.map"] += "," + name + ":" + s.cfg.Listeners[name]
	}
	maps.Copy(settings, s.defaults)
	maps.Copy(settings, s.cfg.Settings)
	return java.Properties(settings)
}

// voters returns the ids and addresses of all controllers.
func (s *Server) voters() string {
	var voters []string
	for _, other := range s.quorum {
		voters = append(voters, fmt.Sprintf("%d@%s", other.node, place.Address(other.controllerPort)))
	}
	return strings.Join(voters, ",")
}

// Defaults returns the settings for a single broker that serves tests.
func Defaults() map[string]string {
	return map[string]string{
		"num.partitions":                   "3",
		"auto.create.topics.enable":        "true",
		"group.initial.rebalance.delay.ms": "0",

		"offsets.topic.replication.factor":                 "1",
		"transaction.state.log.replication.factor":         "1",
		"transaction.state.log.min.isr":                    "1",
		"share.coordinator.state.topic.replication.factor": "1",
		"share.coordinator.state.topic.min.isr":            "1",

		// Topics can be denied to everybody. Without a rule everything is allowed.
		"authorizer.class.name":          "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
		"allow.everyone.if.no.acl.found": "true",

		// The footprint of one that serves tests: a few partitions inside, and
		// no 128 MB of buffers to compact logs that never grow.
		"offsets.topic.num.partitions":                 "5",
		"transaction.state.log.num.partitions":         "5",
		"share.coordinator.state.topic.num.partitions": "1",
		"log.cleaner.dedupe.buffer.size":               "8388608",

		// A controller keeps a dead broker's place for this long. The one
		// broker must not wait 9 s for itself after a crash.
		"broker.session.timeout.ms":    "3000",
		"broker.heartbeat.interval.ms": "500",
	}
}

// launch starts the server and waits until it answers.
func (s *Server) launch(ctx context.Context) error {
	p, err := proc.Start(s.command("kafka.Kafka", s.path("server.properties")))
	if err != nil {
		return err
	}
	if err := p.Await(ctx, "the broker", retryEvery, s.ready); err != nil {
		return errors.Join(err, p.Kill())
	}
	s.proc = p
	return nil
}

func (s *Server) command(class string, args ...string) proc.Command {
	return proc.Command{
		Path: s.java,
		Args: slices.Concat(s.options, []string{
			"-XX:+UseSerialGC",
			"-Djava.io.tmpdir=" + s.run.Path, "-XX:-UsePerfData", // leave nothing elsewhere
			"-Dlog4j2.configurationFile=" + s.path("log4j2.xml"),
			"-cp", filepath.Join(s.libraries, "*"), class,
		}, args),
		Dir: s.run.Path,
		Log: s.cfg.Log,
	}
}

func (s *Server) path(name string) string { return filepath.Join(s.run.Path, name) }

// Brokers returns the one broker's address, 127.0.0.1 and a port. It never
// changes.
func (s *Server) Brokers() []string { return []string{place.Address(s.port)} }

// Address returns the address of one of [Config.Listeners].
func (s *Server) Address(listener string) string { return place.Address(s.ports[listener]) }

// Port returns the broker's port.
func (s *Server) Port() int { return s.port }

// PID returns the id of the broker's process.
func (s *Server) PID() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc.PID()
}

// Done is closed when the broker that runs now has ended, for whatever reason.
func (s *Server) Done() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc.Done()
}

// Tail returns the last lines of the broker's log.
func (s *Server) Tail() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc.Tail()
}

// ErrStopped is returned for a server that [Server.Stop] has ended.
var ErrStopped = errors.New("kafka: server is stopped")

// Stop shuts the broker down and removes its directory. It takes at most 30 s;
// then, or when ctx ends, the broker is killed and Stop says so. A second Stop
// does nothing.
func (s *Server) Stop(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.run == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	err := errors.Join(end(ctx, s.proc), s.run.Remove())
	s.run = nil
	if err != nil {
		return fmt.Errorf("kafka: %w", err)
	}
	return nil
}

// Kill ends the broker with SIGKILL, as a crash does, and returns when it is
// gone. [Server.Restart] brings it back.
func (s *Server) Kill() error { return s.control((*proc.Process).Kill) }

// ShutDown ends the broker cleanly and returns when it is gone, after at most 30 s.
// Then, or when ctx ends, the broker is killed and ShutDown says so. The data stay:
// [Server.Restart] brings the broker back.
func (s *Server) ShutDown(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	return s.control(func(p *proc.Process) error { return end(ctx, p) })
}

// Freeze stops the broker with SIGSTOP: its connections stay open, and it answers
// nothing until [Server.Thaw].
func (s *Server) Freeze() error {
	return s.control(func(p *proc.Process) error { return p.Signal(syscall.SIGSTOP) })
}

// Thaw lets a frozen broker go on.
func (s *Server) Thaw() error { return s.control(thaw) }

func thaw(p *proc.Process) error { return p.Signal(syscall.SIGCONT) }

// end ends a process cleanly. A frozen process would not end.
func end(ctx context.Context, p *proc.Process) error {
	if err := thaw(p); err != nil {
		return err
	}
	return p.Stop(ctx, syscall.SIGTERM)
}

// control does something to the broker's process.
func (s *Server) control(do func(*proc.Process) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.run == nil {
		return ErrStopped
	}
	if err := do(s.proc); err != nil {
		return fmt.Errorf("kafka: %w", err)
	}
	return nil
}

// Restart starts the broker again with the same data and address, and waits
// until it can be used; a node of a [Cluster] then is one of its brokers again. A
// broker that still runs is shut down first.
func (s *Server) Restart(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.run == nil {
		return ErrStopped
	}
	ctx, cancel := s.withLimit(ctx)
	defer cancel()
	if err := end(ctx, s.proc); err != nil {
		return fmt.Errorf("kafka: restart: %w", err)
	}
	if err := s.launch(ctx); err != nil {
		return fmt.Errorf("kafka: restart: %w", err)
	}
	return nil
}
