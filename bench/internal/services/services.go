// Package services connects to PostgreSQL and Kafka, and removes what a run has made there.
package services

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// cleanUpTimeout bounds the removal of what a run has made.
const cleanUpTimeout = time.Minute

// Services are PostgreSQL and Kafka, with what this run has made there.
type Services struct {
	DB    *pgxpool.Pool
	Admin *kadm.Client

	ID      string // of this run, in the names of all that it makes
	Topic   string
	schemas []string
	Topics  []string // made otherwise, to be removed with the run's own
	denied  []string // topics that no client may write to
}

// topicConfig frees the disk of deleted records soon.
var topicConfig = map[string]*string{"segment.bytes": new("67108864"), "file.delete.delay.ms": new("1000")}

// Config says where the services are, and what a run makes there. All fields are required.
type Config struct {
	Addresses
	Conns      int // of the pool
	Partitions int // of the run's topic
}

// Connect makes the run's topic.
func Connect(ctx context.Context, cfg Config) (*Services, error) {
	db, err := NewPool(ctx, cfg.Postgres, cfg.Conns)
	if err != nil {
		return nil, err
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(cfg.Brokers...))
	if err != nil {
		db.Close()
		return nil, fmt.Errorf("make Kafka client: %w", err)
	}
	s := &Services{DB: db, Admin: kadm.NewClient(client), ID: uuid.NewString()[:8]}
	if s.Topic, err = s.NewTopic(ctx, "events", cfg.Partitions); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// NewTopic makes a topic that goes with the run.
func (s *Services) NewTopic(ctx context.Context, name string, partitions int) (topic string, err error) {
	topic = s.TopicName(name)
	if _, err := s.Admin.CreateTopic(ctx, int32(partitions), 1, topicConfig, topic); err != nil {
		return "", fmt.Errorf("create topic: %w", err)
	}
	s.Topics = append(s.Topics, topic)
	return topic, nil
}

// TopicName returns the name of a topic of this run, which need not exist.
func (s *Services) TopicName(name string) string { return "bench-" + s.ID + "-" + name }

// NewPool returns a pool of at most conns connections to a server that answers.
func NewPool(ctx context.Context, url string, conns int) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("PostgreSQL: %w", err)
	}
	cfg.MaxConns = int32(conns)
	db, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("PostgreSQL: %w", err)
	}
	if err := db.Ping(ctx); err != nil {
		db.Close()
		return nil, fmt.Errorf("PostgreSQL: %w", err)
	}
	return db, nil
}

// Close removes what the run has made. It works after Ctrl-C, too.
func (s *Services) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), cleanUpTimeout)
	defer cancel()
	var errs []error
	for _, schema := range s.schemas {
		errs = append(errs, s.DropSchema(ctx, schema))
	}
	s.DB.Close()
	for _, topic := range s.denied {
		errs = append(errs, s.allow(ctx, topic))
	}
	for _, topic := range s.Topics {
		if _, err := s.Admin.DeleteTopic(ctx, topic); err != nil {
			errs = append(errs, fmt.Errorf("delete topic %s: %w", topic, err))
		}
	}
	s.Admin.Close()
	return errors.Join(errs...)
}

// ddlShop is the business of the transactions that record events.
const ddlShop = `
CREATE TABLE {schema}.orders (id bigserial PRIMARY KEY, customer text NOT NULL, placed_at timestamptz NOT NULL DEFAULT now());
CREATE TABLE {schema}.items (id bigserial PRIMARY KEY, customer text NOT NULL, sku text NOT NULL);
CREATE TABLE {schema}.stock (sku int PRIMARY KEY, sold bigint NOT NULL) WITH (fillfactor = 50);
INSERT INTO {schema}.stock SELECT g, 0 FROM generate_series(0, 9999) AS g;`

// NewSchema makes a schema with the tables of outbox and of the shop.
func (s *Services) NewSchema(ctx context.Context, name string) (schema string, err error) {
	schema = s.schemaName(name)
	if err := outbox.Migrate(ctx, s.DB, outbox.MigrateConfig{Schema: schema}); err != nil {
		return "", err
	}
	// Several statements, which only the simple protocol takes.
	if _, err := s.DB.Exec(ctx, InSchema(ddlShop, schema), pgx.QueryExecModeSimpleProtocol); err != nil {
		return "", fmt.Errorf("create shop: %w", err)
	}
	return schema, nil
}

// NewEmptySchema makes a schema without tables.
func (s *Services) NewEmptySchema(ctx context.Context, name string) (schema string, err error) {
	schema = s.schemaName(name)
	if _, err := s.DB.Exec(ctx, InSchema(`CREATE SCHEMA {schema}`, schema)); err != nil {
		return "", fmt.Errorf("create schema: %w", err)
	}
	return schema, nil
}

// schemaName returns the name of a schema that goes with the run.
func (s *Services) schemaName(name string) string {
	schema := "bench_" + s.ID + "_" + name
	s.schemas = append(s.schemas, schema)
	return schema
}

// DropSchema drops one that may be gone already.
func (s *Services) DropSchema(ctx context.Context, schema string) error {
	if _, err := s.DB.Exec(ctx, InSchema(`DROP SCHEMA IF EXISTS {schema} CASCADE`, schema)); err != nil {
		return fmt.Errorf("drop schema %s: %w", schema, err)
	}
	return nil
}

// InSchema puts the name of a schema into a statement, for {schema}.
func InSchema(sql, schema string) string {
	return strings.ReplaceAll(sql, "{schema}", pgx.Identifier{schema}.Sanitize())
}

// sqlUnresolved counts the events that did not get through.
const sqlUnresolved = `SELECT count(*) FROM {schema}.outbox_failed WHERE status <> 'resolved'`

// NothingFailed returns an error if events have not got through.
func (s *Services) NothingFailed(ctx context.Context, schema string) error {
	var n int
	if err := s.DB.QueryRow(ctx, InSchema(sqlUnresolved, schema)).Scan(&n); err != nil {
		return fmt.Errorf("look for failed events: %w", err)
	}
	if n > 0 {
		return fmt.Errorf("%d events are left in outbox_failed", n)
	}
	return nil
}

// Ends returns the offset behind the last record of each partition.
func (s *Services) Ends(ctx context.Context) (kadm.ListedOffsets, error) {
	ends, err := s.Admin.ListEndOffsets(ctx, s.Topic)
	if err == nil {
		err = ends.Error()
	}
	if err != nil {
		return nil, fmt.Errorf("list end offsets: %w", err)
	}
	return ends, nil
}

// Produced returns how many records the topic has ever received.
func (s *Services) Produced(ctx context.Context) (n int64, err error) {
	ends, err := s.Ends(ctx)
	ends.Each(func(o kadm.ListedOffset) { n += o.Offset })
	return n, err
}

// EmptyTopic deletes all records.
func (s *Services) EmptyTopic(ctx context.Context) error {
	ends, err := s.Ends(ctx)
	if err != nil {
		return err
	}
	deleted, err := s.Admin.DeleteRecords(ctx, ends.Offsets())
	if err == nil {
		err = deleted.Error()
	}
	if err != nil {
		return fmt.Errorf("delete records: %w", err)
	}
	return nil
}

// Deny forbids everybody to write a topic. All else has to be allowed then: who
// has rules for a topic no longer gets what is allowed where there are none.
func (s *Services) Deny(ctx context.Context, topic string) error {
	s.denied = append(s.denied, topic)
	for _, rule := range []*kadm.ACLBuilder{
		kadm.NewACLs().Topics(topic).Allow("User:*").AllowHosts("*").Operations(kadm.OpAll),
		kadm.NewACLs().Topics(topic).Deny("User:*").DenyHosts("*").Operations(kadm.OpWrite),
	} {
		results, err := s.Admin.CreateACLs(ctx, rule)
		for _, r := range results {
			err = errors.Join(err, r.Err)
		}
		if err != nil {
			return fmt.Errorf("deny topic: %w", err)
		}
	}
	return nil
}

// allow removes the rules of a topic.
func (s *Services) allow(ctx context.Context, topic string) error {
	all := kadm.NewACLs().Topics(topic).ResourcePatternType(kadm.ACLPatternAny).
		Allow().AllowHosts().Deny().DenyHosts().Operations(kadm.OpAny)
	results, err := s.Admin.DeleteACLs(ctx, all)
	for _, r := range results {
		if r.Err != nil && !errors.Is(r.Err, kerr.SecurityDisabled) {
			err = errors.Join(err, r.Err)
		}
	}
	if err != nil {
		return fmt.Errorf("allow topic %s: %w", topic, err)
	}
	return nil
}

// sqlSettings are those that the figures depend on.
const sqlSettings = `
SELECT name, current_setting(name) FROM pg_settings
 WHERE name IN ('server_version', 'fsync', 'synchronous_commit', 'full_page_writes', 'wal_level', 'shared_buffers')
 ORDER BY name`

// LookAround notes in a report where the run takes place. It refuses a server that does not
// wait for its disk.
func (s *Services) LookAround(ctx context.Context, to *report.Report, partitions int) error {
	to.Note("machine: %d cores, GOMAXPROCS %d, %s, %s/%s", runtime.NumCPU(), runtime.GOMAXPROCS(0), runtime.Version(), runtime.GOOS, runtime.GOARCH)
	rows, err := s.DB.Query(ctx, sqlSettings)
	if err != nil {
		return fmt.Errorf("read settings: %w", err)
	}
	var settings []string
	var name, value string
	_, err = pgx.ForEachRow(rows, []any{&name, &value}, func() error {
		settings = append(settings, name+" "+value)
		if (name == "fsync" || name == "synchronous_commit") && value != "on" {
			return fmt.Errorf("%s is %s: commits that do not wait for the disk say nothing", name, value)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("read settings: %w", err)
	}
	to.Note("PostgreSQL: %s", strings.Join(settings, ", "))
	versions, err := s.Admin.ApiVersions(ctx)
	if err != nil {
		return fmt.Errorf("read Kafka's version: %w", err)
	}
	for _, v := range versions.Sorted() {
		to.Note("Kafka: broker %d, %s, topic with %d partitions", v.NodeID, v.VersionGuess(), partitions)
	}
	return nil
}

// EventType goes by convention to the run's topic.
func (s *Services) EventType() string { return "acme.bench-" + s.ID + ".placed.v1" }

// Recorder returns one that records into schema, as JSON.
func (s *Services) Recorder(schema string) (*outbox.Recorder, error) {
	return s.RecorderOf(schema, outbox.JSON())
}

// RecorderOf returns one that records into schema what a codec makes of events.
func (s *Services) RecorderOf(schema string, codec outbox.Codec) (*outbox.Recorder, error) {
	events, err := outbox.NewRegistry(orders.Source, outbox.Event(s.EventType(), orders.Aggregate, orders.Placed.Key).Codec(codec))
	if err != nil {
		return nil, err
	}
	return outbox.NewRecorder(events, outbox.RecorderConfig{Schema: schema})
}
