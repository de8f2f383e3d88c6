// Package outboxadmin is a page for operators of outbox. It shows the state of relays and consumer groups,
// failed events and deliveries with their errors, recorded events, and the actions of operators. The same
// data is available as JSON under api/, described by api/openapi.json.
//
//   - Nothing is public: [New] requires a [Config.Authorize], which is called for every request, including
//     stylesheets. A [Reader] may look. Only an [Operator] may act; each action needs a reason and is
//     audited.
//   - It works under any prefix, behind [http.StripPrefix] or a proxy, because all its links are relative.
//   - It needs only the database, and works without JavaScript.
package outboxadmin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"html/template"
	"log/slog"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/outboxops"
)

// Config says who has access, and what the page shows.
type Config struct {
	// Authorize returns the user of a request and the user's role, before anything else. An error, which is logged at
	// WARN, or [None] is answered with 401. Required.
	Authorize func(*http.Request) (Access, error)
	// Challenge is the header WWW-Authenticate of an answer with 401, such as `Basic realm="outbox"`. Empty means none.
	Challenge string

	// Schema holds the tables of outbox. Empty means public.
	Schema string
	// Name tells the pages of several schemas or databases apart: it is in the header and in the titles. Empty means
	// none.
	Name string
	// Names lists the pages that the header links to. The page of a name is served at ../NAME/, relative to this page.
	// Nil means none.
	Names []string
	// MaxPayload is the largest edited payload, in bytes, at most 104,857,600 (100 MiB). Use the value of
	// RecorderConfig. Zero means 983,040 (960 KiB).
	MaxPayload int
	// Mask returns what is shown of a payload, header, key, error or statement: see [Text]. Types, sources, topics,
	// names and reasons are not masked. Filters are not masked either: a user who knows a key can find its events. Nil
	// shows all.
	Mask func(Text) []byte
	// AuditReads writes into outbox_audit who reads the payload of which event. If that fails, the payload is not
	// shown.
	AuditReads bool
	// TrustedOrigins are other origins (https://ops.example) that may send requests that change something. They are
	// needed only behind a proxy that changes Host, for browsers that do not send Sec-Fetch-Site. Danger: a trusted
	// site acts in the name of its signed-in visitor. Nil means none.
	TrustedOrigins []string
	// MaxConns is how many connections of the pool the page uses at a time; of two or more, one is reserved for
	// actions. A request gets 503 after a wait of 5 s, or at once if 32 views or 16 actions are in progress. Zero means
	// a quarter of the pool's MaxConns, at least 1 and at most 4.
	MaxConns int
	// QueryTimeout bounds each request's use of the database, and each part of a long action. Zero means 15 s.
	QueryTimeout time.Duration
	// Health returns [outbox.Relay.Health] of each relay of this process, to show standbys, too. Nil means none.
	Health func() []outbox.RelayHealth
	// Consumers returns [outbox.Consumer.Health] of each consumer of this process, to show those without a database,
	// too. Nil means none.
	Consumers func() []outbox.ConsumerHealth
	// Workers returns [outbox.Worker.Health] of each worker of this process. Nil means none.
	Workers func() []outbox.WorkerHealth
	// Kafka has brokers and credentials, to read the lag of consumer groups, at most every 10 s. Nil means that the lag
	// is not known.
	Kafka []kgo.Opt
	// StaleAfter is how long an event may wait before the page calls it a problem. Zero means 5 min.
	StaleAfter time.Duration
	// Logger gets errors. Nil means slog.Default().
	Logger *slog.Logger
}

// Access is the user who sends a request, and the role of that user.
type Access struct {
	// Operator is the name. It goes into outbox_audit with each action: at most 100 characters that can be
	// printed, with a letter or a digit. Required, unless Role is [None].
	Operator string
	// Role is the role of the user.
	Role Role
}

// Role decides what a user may do.
type Role int

// The roles. Each role includes the roles before it.
const (
	None     Role = iota // nothing
	Reader               // look at everything, as [Config.Mask] leaves it
	Operator             // retry, resolve and edit failures, cancel delayed events, hold and release keys, pause and resume consumer groups
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
	db         *pgxpool.Pool
	clock      atomic.Pointer[pg.Clock] // of db, as the last request has read it; nil before
	failed     *outboxops.Failures
	inspect    *outboxops.Inspector
	consumers  *outboxops.Consumers
	deliveries *outboxops.Deliveries
	delayed    *outboxops.Delayed
	groups     tables.GroupReader
	kafka      *kafkaReader
	samples    samples // of relays
	// groupSamples are those of consumer groups.
	groupSamples samples
	slots        *slots
	logins       *logins
	origin       *http.CrossOriginProtection
	mux          *http.ServeMux
	pages        map[string]*template.Template
}

// New returns a handler of all pages, of the API and of their assets. Mount it with a slash at the end:
//
//	mux.Handle("/admin/outbox/", http.StripPrefix("/admin/outbox", handler))
//
// It does no I/O. The caller closes db; the privileges of an operator are sufficient for it. Requests that
// change something are refused if the browser says that they come from another site. An action on many
// events takes a second for each 5,000 events, and the server's WriteTimeout must leave time for it:
// the second example has timeouts for a server.
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
	delayed, err := outboxops.NewDelayed(db, outboxops.DelayedConfig{Schema: cfg.Schema})
	errs = append(errs, err)
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("outboxadmin: config: %w", err)
	}
	a := &admin{cfg: cfg, db: db, failed: failed, inspect: inspect, consumers: consumers, deliveries: deliveries, delayed: delayed,
		groups: tables.NewGroupReader(db, cfg.Schema), kafka: newKafkaReader(consumers, cfg.Kafka),
		slots: newSlots(cfg.MaxConns), logins: newLogins(cfg.Logger), origin: origin, mux: http.NewServeMux(), pages: parsePages()}
	for _, rt := range routes {
		a.mux.Handle(rt.method+" "+rt.path, a.handler(rt))
	}
	a.mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { send(w, r, a.failure(r, errNowhere)) })
	return a, nil
}

// readClock reads the clock of the database, by which pages tell ages.
func (a *admin) readClock(ctx context.Context) error {
	clock, err := pg.ReadClock(ctx, a.db)
	if err == nil {
		a.clock.Store(&clock)
	}
	return err
}

// now returns the time of the database. It does no I/O.
func (a *admin) now() time.Time { return a.at(time.Now()) }

// at returns the time of the database at a time of this process.
func (a *admin) at(own time.Time) time.Time {
	if clock := a.clock.Load(); clock != nil {
		return clock.At(own)
	}
	return own
}

// outagesAt returns outages that this process has reported, with times of the database.
func (a *admin) outagesAt(own []outbox.Outage) []outbox.Outage {
	all := slices.Clone(own)
	for i := range all {
		all[i].Since = a.at(all[i].Since)
	}
	return all
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
	c.Schema = cmp.Or(c.Schema, pg.DefaultSchema)
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
