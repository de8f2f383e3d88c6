// Package outboxadmin is a page for those who operate outbox: the state of relays and consumer
// groups, which events and deliveries have failed and why, what was recorded, and what operators
// did about it. The same is there as JSON under api/, described by api/openapi.json.
//
//   - Nothing is open: [New] demands a [Config.Authorize], which is asked about every
//     request, those for stylesheets included. A [Reader] may look; only an
//     [Operator] may act, and each action needs a reason and is kept.
//   - It works under any prefix, behind [http.StripPrefix] or a proxy, because all its
//     links are relative.
//   - It needs nothing but the database, and works without JavaScript.
package outboxadmin

import (
	"cmp"
	"errors"
	"fmt"
	"html/template"
	"log/slog"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/outboxops"
)

// Config says who may come in, and what is shown. Authorize is required.
type Config struct {
	// Authorize says who sends a request, and what that user may do here. It is called for
	// each request, before anything else. An error, or [None], is answered with 401;
	// the error is logged and not shown. Required.
	Authorize func(*http.Request) (Access, error)
	// Challenge is the header WWW-Authenticate of such an answer, for example
	// `Basic realm="outbox"`, which makes a browser ask for a password. Empty means
	// that there is none.
	Challenge string

	// Schema of the tables. Empty means public.
	Schema string
	// MaxPayload bounds an edited payload in bytes, as RecorderConfig.MaxPayload does for
	// recorded ones: give it the same. A payload above it and above 1 MiB is not shown, but
	// its length is. At most 104,857,600 (100 MiB). Zero means 983,040 (960 KiB).
	MaxPayload int
	// Mask returns what is to be shown of a text that others wrote, on the page and in the
	// API: payloads, headers, keys, errors and statements, as [Text] says. Where it returns
	// something else for a payload, an operator who edits the event does not see what it
	// was; where it does for a key, no link leads to the other events of the key. Filters
	// work on what is stored: who knows a key finds its events. Types, sources, topics and
	// the names of aggregates and headers are not masked, nor what operators wrote. Nil
	// shows all.
	Mask func(Text) []byte
	// AuditReads writes into outbox_audit who reads the payload of which event, on its page
	// or by the API, before it is shown; where that fails, nothing is shown. The entries go
	// as those of actions do, RetentionConfig.AuditedFor. Without it, only actions are
	// audited.
	AuditReads bool
	// TrustedOrigins may send requests that change something, besides the origin under which
	// browsers see this page: scheme, host and port, https://ops.example for example. A proxy that
	// gives requests another Host makes it necessary for browsers that do not send Sec-Fetch-Site.
	// A trusted site acts in the name of the user who is signed in here. Nil means none.
	TrustedOrigins []string
	// MaxConns bounds how many connections of the pool the page uses at a time. One of two
	// or more is left to actions. A request that has waited for a connection for 5 s, or finds
	// 32 views or 16 actions before it, is answered with 503 and Retry-After. Zero means a
	// quarter of the pool's MaxConns, but 1 to 4.
	MaxConns int
	// QueryTimeout bounds what a request asks of the database, and each part of an action on
	// many events. PostgreSQL cancels what takes longer. Zero means 15 s.
	QueryTimeout time.Duration
	// Health returns the health of the relays of this process, [outbox.Relay.Health] of
	// each, for the breaker and the reasons why one is not ready, which the database
	// does not know. It is called for each view of the overview. Nil means that this
	// process has none.
	Health func() []outbox.RelayHealth
	// Consumers returns the health of the consumers of this process, [outbox.Consumer.Health] of
	// each, for blocked partitions and handlers that hang, which the database does not know. It is
	// called for each view of the overview and of consumers. Nil means that this process has none.
	Consumers func() []outbox.ConsumerHealth
	// Workers returns the health of the workers of this process, [outbox.Worker.Health] of each. It
	// is called for each view that shows it. Nil means that this process has none.
	Workers func() []outbox.WorkerHealth
	// Kafka says where the topics of consumer groups are, for their lag: brokers and credentials as
	// for a consumer. Kafka is asked at most every 10 s, and only while a page is viewed. Nil means
	// that the lag is not known.
	Kafka []kgo.Opt
	// StaleAfter is how long an event may wait before the page calls it a problem, like
	// AlertConfig.StaleAfter. Zero means 5 min, as outbox status has it.
	StaleAfter time.Duration
	// Logger gets errors. Nil means slog.Default().
	Logger *slog.Logger
}

// Access is who sends a request, and what that user may do.
type Access struct {
	// Operator is the name. It goes into outbox_audit with each action, at most
	// 100 characters. Required, unless Role is [None].
	Operator string
	// Role is what the user may do.
	Role Role
}

// Role is what a user may do.
type Role int

// The roles. Each may do what the ones before it may.
const (
	None     Role = iota // nothing
	Reader               // look at everything, as [Config.Mask] leaves it
	Operator             // retry, resolve and edit events, hold and release keys, pause and resume consumer groups
)

// String returns none, reader or operator.
func (r Role) String() string {
	switch r {
	case Reader:
		return "reader"
	case Operator:
		return "operator"
	default:
		return "none"
	}
}

// admin is the handler.
type admin struct {
	cfg        Config
	failed     *outboxops.Failures
	inspect    *outboxops.Inspector
	consumers  *outboxops.Consumers
	deliveries *outboxops.Deliveries
	kafka      *kafkaReader
	samples    samples
	slots      *slots
	origin     *http.CrossOriginProtection
	mux        *http.ServeMux
	pages      map[string]*template.Template
}

// New returns a handler of all pages, of the API and of what they need. Mount it with
// a slash at the end:
//
//	mux.Handle("/admin/outbox/", http.StripPrefix("/admin/outbox", handler))
//
// It does no I/O; closing db, for which the privileges of an operator are enough, stays
// with the caller. Requests that change something are refused where a browser says that
// they come from another site. To retry or resolve many events takes a second for each
// 5,000, for which the server's WriteTimeout should leave time: docs/operations.md has
// timeouts for a server.
func New(db *pgxpool.Pool, cfg Config) (http.Handler, error) {
	var errs []error
	if cfg.Authorize == nil {
		errs = append(errs, fmt.Errorf("field Authorize %w: it says who may come in", outbox.ErrNilArgument))
	}
	cfg = cfg.withDefaults(db)
	errs = append(errs, cfg.validate(db))
	origin := http.NewCrossOriginProtection()
	for _, trusted := range cfg.TrustedOrigins {
		if err := origin.AddTrustedOrigin(trusted); err != nil {
			errs = append(errs, fmt.Errorf("field TrustedOrigins: %w", err))
		}
	}
	failed, err := outboxops.NewFailures(db, outboxops.FailuresConfig{Schema: cfg.Schema, MaxPayload: cfg.MaxPayload, MaxRead: max(maxShown, cfg.MaxPayload)})
	errs = append(errs, err)
	inspect, err := outboxops.NewInspector(db, outboxops.InspectorConfig{Schema: cfg.Schema, MaxRead: max(maxShown, cfg.MaxPayload)})
	errs = append(errs, err)
	consumers, err := outboxops.NewConsumers(db, outboxops.ConsumersConfig{Schema: cfg.Schema})
	errs = append(errs, err)
	deliveries, err := outboxops.NewDeliveries(db, outboxops.DeliveriesConfig{Schema: cfg.Schema})
	errs = append(errs, err)
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("outboxadmin: config: %w", err)
	}
	a := &admin{cfg: cfg, failed: failed, inspect: inspect, consumers: consumers, deliveries: deliveries, kafka: newKafkaReader(consumers, cfg.Kafka),
		slots: newSlots(cfg.MaxConns), origin: origin, mux: http.NewServeMux(), pages: parsePages()}
	for _, rt := range routes {
		a.mux.Handle(rt.method+" "+rt.path, a.handler(rt))
	}
	a.mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { send(w, r, a.failure(r, errNowhere)) })
	return a, nil
}

const (
	// mostConns bounds the default of Config.MaxConns.
	mostConns           = 4
	defaultQueryTimeout = 15 * time.Second
	defaultStaleAfter   = 5 * time.Minute
	// maxShown bounds the payload of an event that is shown, unless MaxPayload is larger.
	maxShown = 1 << 20
)

func (c Config) withDefaults(db *pgxpool.Pool) Config {
	if c.MaxConns == 0 && db != nil {
		c.MaxConns = min(max(1, int(db.Config().MaxConns)/4), mostConns)
	}
	c.QueryTimeout = cmp.Or(c.QueryTimeout, defaultQueryTimeout)
	c.StaleAfter = cmp.Or(c.StaleAfter, defaultStaleAfter)
	c.Logger = cmp.Or(c.Logger, slog.Default())
	return c
}

func (c Config) validate(db *pgxpool.Pool) error {
	errs := []error{check.NotNegative("MaxConns", c.MaxConns), check.NotNegative("QueryTimeout", c.QueryTimeout), check.NotNegative("StaleAfter", c.StaleAfter)}
	if db != nil {
		errs = append(errs, check.NotAbove("MaxConns", c.MaxConns, int(db.Config().MaxConns)))
	}
	return errors.Join(errs...)
}
