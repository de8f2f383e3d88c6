// Package testenv gives tests the real PostgreSQL and the real Kafka that tools/services starts. If a
// service is missing, the test fails; under -short it is skipped.
package testenv

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/wait"
)

// Variables that tools/services sets for the command it runs, or writes into
// the file .services.env at the top of the repository.
const (
	PostgresVar  = "OUTBOX_POSTGRES_URL"
	DirectVar    = "OUTBOX_POSTGRES_DIRECT_URL" // past PgBouncer; only set if PgBouncer is used
	BrokersVar   = "OUTBOX_KAFKA_BROKERS"
	KafkaKindVar = "OUTBOX_KAFKA_KIND"
	RegistryVar  = "OUTBOX_SCHEMA_REGISTRY_URL" // only set with -registry
)

// Schema returns a pool and the name of a new, empty schema. The schema belongs to the test, and is dropped
// when the test ends. The schema's name needs quotes, so that a test fails if code forgets them.
func Schema(t testing.TB) (*pgxpool.Pool, string) {
	t.Helper()
	db := Pool(t, nil)
	schema := schemaName()
	_, err := db.Exec(context.Background(), "CREATE SCHEMA "+quoted(schema))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dropSchema(context.Background(), db, schema)) })
	return db, schema
}

// schemaName returns a new name.
func schemaName() string { return fmt.Sprintf("Test %.8s", uuid.NewString()) }

func quoted(schema string) string { return pgx.Identifier{schema}.Sanitize() }

// Pool returns a pool on the test database. configure may change its
// configuration and may be nil.
func Pool(t testing.TB, configure func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(postgresURL(t))
	require.NoError(t, err)
	cfg.MaxConns = 50
	if configure != nil {
		configure(cfg)
	}
	watch(t, cfg)
	db, err := pgxpool.NewWithConfig(context.Background(), cfg)
	require.NoError(t, err)
	t.Cleanup(db.Close)
	return db
}

// PoolIn returns a pool that runs its statements in a mode. For a mode that prepares statements, the pool
// connects past PgBouncer.
func PoolIn(t testing.TB, mode pgx.QueryExecMode) *pgxpool.Pool {
	t.Helper()
	if mode == pgx.QueryExecModeCacheStatement || mode == pgx.QueryExecModeDescribeExec {
		Direct(t)
	}
	return Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.DefaultQueryExecMode = mode })
}

// Direct makes the rest of the test connect past PgBouncer, if there is one. A test that
// depends on settings of its session calls it.
func Direct(t testing.TB) {
	t.Helper()
	if _, seen := direct.LoadOrStore(t.Name(), true); !seen {
		t.Cleanup(func() { direct.Delete(t.Name()) })
	}
}

// direct has the names of the tests that called [Direct].
var direct sync.Map

// postgresURL returns the address of the database. It is PgBouncer's address, unless the test or one of its
// parents has called [Direct].
func postgresURL(t testing.TB) string {
	t.Helper()
	address := need(t, PostgresVar)
	past := lookUp(DirectVar)
	for name := t.Name(); past != "" && name != ""; name = name[:max(0, strings.LastIndex(name, "/"))] {
		if _, ok := direct.Load(name); ok {
			return past
		}
	}
	return address
}

// UpdateEvents runs a statement that changes rows of outbox. Without it, the transaction ids of the rows
// forbid changes.
func UpdateEvents(t testing.TB, db *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(context.Background(), db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(context.Background(), `SET LOCAL outbox.keep_xid = 'on'`); err != nil {
			return err
		}
		_, err := tx.Exec(context.Background(), sql, args...)
		return err
	}))
}

// AllowUnprintable lets rows of outbox have a payload that PostgreSQL cannot print, such as [Unprintable]. No writer
// can record one, because the column size needs the print. A damaged row is like that.
func AllowUnprintable(t testing.TB, db *pgxpool.Pool, schema string) {
	t.Helper()
	table := pgx.Identifier{schema, "outbox"}.Sanitize()
	_, err := db.Exec(context.Background(), `ALTER TABLE `+table+` ALTER COLUMN size DROP EXPRESSION IF EXISTS, DROP CONSTRAINT IF EXISTS outbox_size`)
	require.NoError(t, err)
	_, err = db.Exec(context.Background(), `ALTER TABLE `+table+` ALTER COLUMN size SET DEFAULT 65536`)
	require.NoError(t, err)
}

// Damage removes the values that the rows of a table have in its TOAST table. PostgreSQL can then neither read nor copy
// such a row, as after a loss of pages: the error is XX001. A DELETE would not do, because deleted chunks are still
// read. Values above 8 KB are there, unless they are compressed well.
func Damage(t testing.TB, db interface {
	Begin(ctx context.Context) (pgx.Tx, error)
}, schema, table string,
) {
	t.Helper()
	ctx := context.Background()
	require.NoError(t, pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		var id uint32
		var name string
		err := tx.QueryRow(ctx, `SELECT reltoastrelid, reltoastrelid::regclass::text FROM pg_class WHERE oid = $1::text::regclass`,
			pgx.Identifier{schema, table}.Sanitize()).Scan(&id, &name)
		if err != nil {
			return err
		}
		var there bool
		if err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+name+`)`).Scan(&there); err != nil || !there {
			return errors.Join(err, errors.New("the table has no value there"))
		}
		for _, sql := range []string{
			`SET LOCAL allow_system_table_mods = on`,
			fmt.Sprintf(`UPDATE pg_class SET relkind = 'r' WHERE oid = %d`, id), // no TOAST table may be truncated
			`TRUNCATE ` + name,
			fmt.Sprintf(`UPDATE pg_class SET relkind = 't' WHERE oid = %d`, id),
		} {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return fmt.Errorf("%s: %w", sql, err)
			}
		}
		return nil
	}))
}

// OtherDatabase returns a pool on another database of the same cluster. The database is dropped when the
// test ends.
func OtherDatabase(t testing.TB) *pgxpool.Pool {
	t.Helper()
	admin := Pool(t, nil)
	name := "elsewhere_" + strings.ReplaceAll(uuid.NewString(), "-", "")
	_, err := admin.Exec(context.Background(), "CREATE DATABASE "+name)
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := admin.Exec(context.Background(), "DROP DATABASE "+name+" WITH (FORCE)")
		require.NoError(t, err)
	})
	return Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.Database = name })
}

// Brokers returns the seed brokers of Kafka. The broker may be a fake. A test that depends on the behaviour
// of a real broker calls RealBrokers.
func Brokers(t testing.TB) []string {
	t.Helper()
	return strings.Split(need(t, BrokersVar), ",")
}

// RealBrokers is Brokers, but fails the test if the broker is a fake. Under -short it skips the test.
func RealBrokers(t testing.TB) []string {
	t.Helper()
	brokers := Brokers(t)
	if kind := need(t, KafkaKindVar); kind != "kafka" {
		if testing.Short() {
			t.Skip("-short: needs a real Kafka")
		}
		t.Fatalf("this test needs a real Kafka, and %s is %q", KafkaKindVar, kind)
	}
	return brokers
}

// SchemaRegistry returns the address of a schema registry, for clients of Confluent's. All tests share it: subjects
// have names of the test's own.
func SchemaRegistry(t testing.TB) string {
	t.Helper()
	return need(t, RegistryVar)
}

// KafkaOpts returns a relay's options for a test's broker: missing topics are created, and new topics are
// found quickly.
func KafkaOpts(brokers []string) []kgo.Opt {
	return []kgo.Opt{kgo.SeedBrokers(brokers...), kgo.AllowAutoTopicCreation(), kgo.MetadataMinAge(100 * time.Millisecond)}
}

// CreateTopic creates a topic without replicas, and waits until it can be used. Settings
// come in pairs of name and value.
func CreateTopic(t testing.TB, brokers []string, topic string, partitions int32, settings ...string) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...))
	require.NoError(t, err)
	defer client.Close()
	one := kmsg.NewCreateTopicsRequestTopic()
	one.Topic, one.NumPartitions, one.ReplicationFactor = topic, partitions, 1
	for pair := range slices.Chunk(settings, 2) {
		one.Configs = append(one.Configs, kmsg.CreateTopicsRequestTopicConfig{Name: pair[0], Value: &pair[1]})
	}
	request := kmsg.NewPtrCreateTopicsRequest()
	request.Topics = append(request.Topics, one)
	response, err := request.RequestWith(context.Background(), client)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.Topics[0].ErrorCode))
	for start := time.Now(); ; wait.Sleep(context.Background(), 10*time.Millisecond) {
		err := tryTopic(client, topic, partitions)
		if err == nil {
			return
		}
		require.Less(t, time.Since(start), Patience, err)
	}
}

// tryTopic returns an error while a partition of a topic is not usable. A broker learns of a new topic
// after the controller has confirmed the topic.
func tryTopic(client *kgo.Client, topic string, partitions int32) error {
	found, err := kafka.Metadata(context.Background(), client, topic)
	if err != nil {
		return err
	}
	if err := kerr.ErrorForCode(found.Topics[0].ErrorCode); err != nil {
		return err
	}
	list := kmsg.NewListOffsetsRequestTopic()
	list.Topic = topic
	for number := range partitions {
		one := kmsg.NewListOffsetsRequestTopicPartition()
		one.Partition, one.Timestamp = number, -1 // the end of the partition
		list.Partitions = append(list.Partitions, one)
	}
	request := kmsg.NewPtrListOffsetsRequest()
	request.ReplicaID, request.Topics = -1, append(request.Topics, list)
	offsets, err := request.RequestWith(context.Background(), client)
	if err != nil {
		return err
	}
	for _, p := range offsets.Topics[0].Partitions {
		if err := kerr.ErrorForCode(p.ErrorCode); err != nil {
			return fmt.Errorf("partition %d: %w", p.Partition, err)
		}
	}
	return nil
}

// need returns the value of a variable. If the variable is not set, need skips the test under -short, and
// fails it otherwise.
func need(t testing.TB, name string) string {
	t.Helper()
	value := lookUp(name)
	if value == "" {
		if testing.Short() {
			t.Skip("-short: " + name + " is not set")
		}
		t.Fatalf("%s is not set: run the tests with `make test`, or start the services with `make services` first", name)
	}
	return value
}

func lookUp(name string) string {
	if value := os.Getenv(name); value != "" {
		return value
	}
	return file()[name]
}

// file reads .services.env from the closest folder above that has one.
var file = sync.OnceValue(func() map[string]string {
	values := map[string]string{}
	dir, err := os.Getwd()
	if err != nil {
		return values
	}
	for parent := filepath.Dir(dir); ; dir, parent = parent, filepath.Dir(parent) {
		f, err := os.Open(filepath.Join(dir, ".services.env"))
		if err == nil {
			defer f.Close()
			for lines := bufio.NewScanner(f); lines.Scan(); {
				if name, value, ok := strings.Cut(lines.Text(), "="); ok {
					values[name] = value
				}
			}
			return values
		}
		if dir == parent {
			return values
		}
	}
})

// ThroughPgBouncer reports whether pools of tests that do not call [Direct] connect to PgBouncer.
func ThroughPgBouncer() bool { return lookUp(DirectVar) != "" }
