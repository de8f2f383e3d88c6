package main

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
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// cleanUpTimeout bounds the removal of what a run has made.
const cleanUpTimeout = time.Minute

// services are PostgreSQL and Kafka, with what this run has made there.
type services struct {
	db    *pgxpool.Pool
	admin *kadm.Client

	id      string // of this run, in the names of all that it makes
	topic   string
	schemas []string
	topics  []string
	denied  []string // topics that nobody may write
}

// topicConfig frees the disk of deleted records soon.
var topicConfig = map[string]*string{"segment.bytes": new("67108864"), "file.delete.delay.ms": new("1000")}

// connect makes the run's topic.
func connect(ctx context.Context, cfg config) (*services, error) {
	db, err := newPool(ctx, cfg.postgres, cfg.workers+8)
	if err != nil {
		return nil, err
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(cfg.brokers...))
	if err != nil {
		db.Close()
		return nil, fmt.Errorf("make Kafka client: %w", err)
	}
	s := &services{db: db, admin: kadm.NewClient(client), id: uuid.NewString()[:8]}
	if s.topic, err = s.newTopic(ctx, "events", cfg.partitions); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// newTopic makes a topic that goes with the run.
func (s *services) newTopic(ctx context.Context, name string, partitions int) (topic string, err error) {
	topic = s.topicName(name)
	if _, err := s.admin.CreateTopic(ctx, int32(partitions), 1, topicConfig, topic); err != nil {
		return "", fmt.Errorf("create topic: %w", err)
	}
	s.topics = append(s.topics, topic)
	return topic, nil
}

// topicName returns the name of a topic of this run, which need not exist.
func (s *services) topicName(name string) string { return "bench-" + s.id + "-" + name }

func newPool(ctx context.Context, url string, conns int) (*pgxpool.Pool, error) {
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

// close removes what the run has made. It works after Ctrl-C, too.
func (s *services) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), cleanUpTimeout)
	defer cancel()
	var errs []error
	for _, schema := range s.schemas {
		errs = append(errs, s.dropSchema(ctx, schema))
	}
	s.db.Close()
	for _, topic := range s.denied {
		errs = append(errs, s.allow(ctx, topic))
	}
	for _, topic := range s.topics {
		if _, err := s.admin.DeleteTopic(ctx, topic); err != nil {
			errs = append(errs, fmt.Errorf("delete topic %s: %w", topic, err))
		}
	}
	s.admin.Close()
	return errors.Join(errs...)
}

// ddlShop is the business of the transactions that record events.
const ddlShop = `
CREATE TABLE {schema}.orders (id bigserial PRIMARY KEY, customer text NOT NULL, placed_at timestamptz NOT NULL DEFAULT now());
CREATE TABLE {schema}.items (id bigserial PRIMARY KEY, customer text NOT NULL, sku text NOT NULL);
CREATE TABLE {schema}.stock (sku int PRIMARY KEY, sold bigint NOT NULL) WITH (fillfactor = 50);
INSERT INTO {schema}.stock SELECT g, 0 FROM generate_series(0, 9999) AS g;`

// newSchema makes a schema with the tables of outbox and of the shop.
func (s *services) newSchema(ctx context.Context, name string) (schema string, err error) {
	schema = "bench_" + s.id + "_" + name
	s.schemas = append(s.schemas, schema)
	if err := outbox.Migrate(ctx, s.db, outbox.MigrateConfig{Schema: schema}); err != nil {
		return "", err
	}
	// Several statements, which only the simple protocol takes.
	if _, err := s.db.Exec(ctx, inSchema(ddlShop, schema), pgx.QueryExecModeSimpleProtocol); err != nil {
		return "", fmt.Errorf("create shop: %w", err)
	}
	return schema, nil
}

// dropSchema drops one that may be gone already.
func (s *services) dropSchema(ctx context.Context, schema string) error {
	if _, err := s.db.Exec(ctx, inSchema(`DROP SCHEMA IF EXISTS {schema} CASCADE`, schema)); err != nil {
		return fmt.Errorf("drop schema %s: %w", schema, err)
	}
	return nil
}

func inSchema(sql, schema string) string {
	return strings.ReplaceAll(sql, "{schema}", pgx.Identifier{schema}.Sanitize())
}

// sqlUnresolved counts the events that did not get through.
const sqlUnresolved = `SELECT count(*) FROM {schema}.outbox_failed WHERE status <> 'resolved'`

// nothingFailed returns an error if events have not got through.
func (s *services) nothingFailed(ctx context.Context, schema string) error {
	var n int
	if err := s.db.QueryRow(ctx, inSchema(sqlUnresolved, schema)).Scan(&n); err != nil {
		return fmt.Errorf("look for failed events: %w", err)
	}
	if n > 0 {
		return fmt.Errorf("%d events are left in outbox_failed", n)
	}
	return nil
}

// ends returns the offset behind the last record of each partition.
func (s *services) ends(ctx context.Context) (kadm.ListedOffsets, error) {
	ends, err := s.admin.ListEndOffsets(ctx, s.topic)
	if err == nil {
		err = ends.Error()
	}
	if err != nil {
		return nil, fmt.Errorf("list end offsets: %w", err)
	}
	return ends, nil
}

// produced returns how many records the topic has ever received.
func (s *services) produced(ctx context.Context) (n int64, err error) {
	ends, err := s.ends(ctx)
	ends.Each(func(o kadm.ListedOffset) { n += o.Offset })
	return n, err
}

// emptyTopic deletes all records.
func (s *services) emptyTopic(ctx context.Context) error {
	ends, err := s.ends(ctx)
	if err != nil {
		return err
	}
	deleted, err := s.admin.DeleteRecords(ctx, ends.Offsets())
	if err == nil {
		err = deleted.Error()
	}
	if err != nil {
		return fmt.Errorf("delete records: %w", err)
	}
	return nil
}

// sqlSettings are those that the figures depend on.
const sqlSettings = `
SELECT name, current_setting(name) FROM pg_settings
 WHERE name IN ('server_version', 'fsync', 'synchronous_commit', 'full_page_writes', 'wal_level', 'shared_buffers')
 ORDER BY name`

// lookAround notes where the run takes place. It refuses a server that does not
// wait for its disk.
func (b *bench) lookAround(ctx context.Context) error {
	b.report.note("machine: %d cores, GOMAXPROCS %d, %s, %s/%s", runtime.NumCPU(), runtime.GOMAXPROCS(0), runtime.Version(), runtime.GOOS, runtime.GOARCH)
	rows, err := b.db.Query(ctx, sqlSettings)
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
	b.report.note("PostgreSQL: %s", strings.Join(settings, ", "))
	versions, err := b.admin.ApiVersions(ctx)
	if err != nil {
		return fmt.Errorf("read Kafka's version: %w", err)
	}
	for _, v := range versions.Sorted() {
		b.report.note("Kafka: broker %d, %s, topic with %d partitions", v.NodeID, v.VersionGuess(), b.cfg.partitions)
	}
	return nil
}
