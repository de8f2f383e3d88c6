package interop

import (
	"context"
	"encoding/json"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

const eventType = "test.oracle.happened.v1"

// oldOutbox is what a system has before it moves here: tables, a statement that records, and a relay that reads and
// marks.
type oldOutbox struct {
	name   string // of the statements in docs/move.md
	ddl    string
	insert func(ctx context.Context, tx pgx.Tx, topic string, e oracle.Event, value []byte) error
	read   string // id, key, value of what is next
	mark   string // that the row with an id was sent
	// inverts says that the old relay itself does not keep the order of a key: Watermill's is that of transaction
	// ids, which a transaction may take long before it locks the key.
	inverts bool
}

var oldOutboxes = []oldOutbox{{
	name: "own table",
	ddl: `CREATE TABLE old_outbox (id bigserial PRIMARY KEY, event_id uuid NOT NULL, event_type text NOT NULL, aggregate_type text NOT NULL, aggregate_id text NOT NULL,
		topic text NOT NULL, payload jsonb NOT NULL, status text NOT NULL DEFAULT 'PENDING', created_at timestamptz NOT NULL DEFAULT now(), published_at timestamptz)`,
	insert: func(ctx context.Context, tx pgx.Tx, topic string, e oracle.Event, value []byte) error {
		var id int64
		return tx.QueryRow(ctx, `INSERT INTO old_outbox (event_id, event_type, aggregate_type, aggregate_id, topic, payload) VALUES ($1, $2, 'Key', $3, $4, $5) RETURNING id`,
			e.ID, eventType, e.Key, topic, value).Scan(&id)
	},
	read: `SELECT id::text, aggregate_id, convert_to(payload::text, 'UTF8') FROM old_outbox WHERE status = 'PENDING' ORDER BY old_outbox.id LIMIT 100`,
	mark: `UPDATE old_outbox SET status = 'PUBLISHED', published_at = now() WHERE id = $1::text::bigint`,
}, {
	name: "watermill", // tables and statements are those of watermill-sql 4
	ddl: `CREATE TABLE watermill_events ("offset" BIGSERIAL, "uuid" VARCHAR(36) NOT NULL, "created_at" TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP,
			"payload" JSON DEFAULT NULL, "metadata" JSON DEFAULT NULL, "transaction_id" xid8 NOT NULL, PRIMARY KEY ("transaction_id", "offset"));
		CREATE TABLE watermill_offsets_events (consumer_group VARCHAR(255) NOT NULL, offset_acked BIGINT, last_processed_transaction_id xid8 NOT NULL, PRIMARY KEY (consumer_group));
		INSERT INTO watermill_offsets_events VALUES ('', 0, '0')`,
	insert: func(ctx context.Context, tx pgx.Tx, topic string, e oracle.Event, value []byte) error {
		wrapped, err := json.Marshal(map[string]any{"destination_topic": topic, "uuid": e.ID, "payload": value, "metadata": map[string]string{"name": eventType, "key": e.Key}})
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `INSERT INTO watermill_events (uuid, payload, metadata, transaction_id) VALUES ($1, $2, '{}', pg_current_xact_id())`, uuid.NewString(), wrapped)
		return err
	},
	read: `SELECT m.transaction_id || ' ' || m."offset", m.payload->'metadata'->>'key', decode(m.payload->>'payload', 'base64')
		  FROM watermill_events AS m, watermill_offsets_events AS o
		 WHERE (m.transaction_id = o.last_processed_transaction_id AND m."offset" > o.offset_acked OR m.transaction_id > o.last_processed_transaction_id)
		   AND m.transaction_id < pg_snapshot_xmin(pg_current_snapshot())
		 ORDER BY m.transaction_id, m."offset" LIMIT 100`,
	mark:    `UPDATE watermill_offsets_events SET last_processed_transaction_id = split_part($1, ' ', 1)::xid8, offset_acked = split_part($1, ' ', 2)::bigint`,
	inverts: true,
}}

// A system in use moves here by the statements of docs/move.md, with a relay of its own before and ours behind the
// cut. Then its services change to a Recorder one by one. Nothing is lost, repeated or out of the order of its key.
func TestMigrate(t *testing.T) {
	t.Parallel()
	for _, old := range oldOutboxes {
		t.Run(old.name, func(t *testing.T) {
			t.Parallel()
			newMigration(t, old).test()
		})
	}
}

type migration struct {
	*testing.T
	oldOutbox
	db       *pgxpool.Pool
	schema   string
	brokers  []string
	topic    string
	rec      *outbox.Recorder
	arrived  *oracle.Reader
	upgraded atomic.Int32 // of ten transactions, how many are those of services with a Recorder
}

func newMigration(t *testing.T, old oldOutbox) *migration {
	t.Helper()
	testenv.Direct(t) // statements find the tables by a setting of the session
	_, schema := testenv.Schema(t)
	m := &migration{T: t, oldOutbox: old, schema: schema, brokers: testenv.RealBrokers(t), topic: "interop-" + uuid.NewString()}
	m.db = testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.ConnConfig.RuntimeParams["search_path"] = pgx.Identifier{schema}.Sanitize()
	})
	require.NoError(t, outbox.Migrate(context.Background(), m.db, outbox.MigrateConfig{Schema: schema}))
	m.exec(old.ddl)
	testenv.CreateTopic(t, m.brokers, m.topic, 3)
	events, err := outbox.NewRegistry("shop", outbox.Event(eventType, "Key", oracle.Event.Aggregate).Topic(m.topic))
	require.NoError(t, err)
	m.rec, err = outbox.NewRecorder(events, outbox.RecorderConfig{Schema: schema})
	require.NoError(t, err)
	m.arrived, err = oracle.Follow(m.brokers, m.topic, nil)
	require.NoError(t, err)
	t.Cleanup(m.arrived.Close)
	return m
}

func (m *migration) exec(sql string) {
	m.Helper()
	_, err := m.db.Exec(context.Background(), sql, pgx.QueryExecModeSimpleProtocol)
	require.NoError(m, err)
}

// statement returns one of docs/move.md.
func (m *migration) statement(what string) string {
	m.Helper()
	doc, err := os.ReadFile("../docs/move.md")
	require.NoError(m, err)
	_, rest, found := strings.Cut(string(doc), "```sql\n-- "+m.name+": "+what+"\n")
	require.True(m, found, what)
	sql, _, _ := strings.Cut(rest, "```")
	return sql
}

// record is an oracle.Record: that of a service which is upgraded, or of one which is not.
func (m *migration) record(ctx context.Context, tx pgx.Tx, events ...oracle.Event) error {
	if rand.Int32N(10) < m.upgraded.Load() {
		all := make([]outbox.DomainEvent, len(events))
		for i, e := range events {
			all[i] = e
		}
		return m.rec.Record(ctx, tx, all...)
	}
	for _, e := range events {
		value, err := json.Marshal(e)
		if err != nil {
			return err
		}
		if err := m.insert(ctx, tx, m.topic, e, value); err != nil {
			return err
		}
	}
	return nil
}

// oldRelay sends one event after the other, and marks each.
func (m *migration) oldRelay(ctx context.Context) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(m.brokers...), kgo.DefaultProduceTopic(m.topic))
	if err != nil {
		return err
	}
	defer client.Close()
	background := context.Background() // it is stopped between two events
	for ctx.Err() == nil {
		rows, err := m.db.Query(background, m.read)
		if err != nil {
			return err
		}
		type row struct {
			ID, Key string
			Value   []byte
		}
		all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
		if err != nil {
			return err
		}
		for _, r := range all {
			if err := client.ProduceSync(background, &kgo.Record{Key: []byte(r.Key), Value: r.Value}).FirstErr(); err != nil {
				return err
			}
			if _, err := m.db.Exec(background, m.mark, r.ID); err != nil {
				return err
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
	return nil
}

func (m *migration) pass(n int) {
	m.Helper()
	before := len(m.events())
	require.Eventually(m, func() bool { return len(m.events()) >= before+n }, testenv.Patience, 20*time.Millisecond)
}

func (m *migration) events() []oracle.Event {
	m.Helper()
	all, err := m.arrived.Arrived()
	require.NoError(m, err)
	return all
}

func (m *migration) test() {
	ctx := context.Background()
	v := oracle.Result{Seed: rand.Uint64()}
	m.Logf("seed %d", v.Seed)
	stop := make(chan struct{})
	stopWriters := testenv.Run(m, func(context.Context) error {
		return oracle.Write(ctx, oracle.Writers{DB: m.db, Schema: m.schema, Record: m.record, Seed: v.Seed, Events: 1 << 30, Writers: 4, Keys: 20, Pause: 20 * time.Millisecond, Stop: stop})
	})
	m.Cleanup(func() { stopWriters() })
	stopOld := testenv.Run(m, m.oldRelay)
	m.pass(100)

	tries := 0
	require.Eventually(m, func() bool {
		tries++
		conn, err := m.db.Acquire(ctx)
		require.NoError(m, err)
		defer conn.Release() // closes a connection that is in a failed transaction
		_, err = conn.Conn().PgConn().Exec(ctx, m.statement("the cut")).ReadAll()
		if err != nil {
			require.True(m, pg.IsLocked(err), err)
		}
		return err == nil
	}, testenv.Patience, 50*time.Millisecond)
	m.Logf("cut at try %d", tries)
	require.Eventually(m, func() bool {
		var left int
		require.NoError(m, m.db.QueryRow(ctx, m.statement("what is left")).Scan(&left))
		return left == 0
	}, testenv.Patience, 20*time.Millisecond)
	stopOld()
	relay, err := outbox.NewRelay(m.db, testenv.KafkaOpts(m.brokers), outbox.RelayConfig{Schema: m.schema, PollInterval: 20 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(m, err)
	testenv.Run(m, relay.Run)
	m.pass(100)
	m.upgraded.Store(5)
	m.pass(100)
	m.upgraded.Store(10)
	m.pass(100)
	close(stop)
	stopWriters()

	committed, err := oracle.Committed(ctx, m.db, m.schema)
	require.NoError(m, err)
	require.Eventually(m, func() bool { return m.arrived.Missing(committed) == 0 }, testenv.Patience, 20*time.Millisecond)
	v.Compare(committed, m.events())
	m.Log(v)
	if m.inverts {
		v.Inversions = m.inversionsBehindCut()
	}
	require.NoError(m, v.Err())
}

// inversionsBehindCut returns how many events of our relay arrived behind a later version of their
// key, whether the relay or Debezium sent that version.
func (m *migration) inversionsBehindCut() (n int) {
	m.Helper()
	rows, err := m.db.Query(context.Background(), `SELECT event_id::text FROM outbox`)
	require.NoError(m, err)
	ours, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(m, err)
	require.NotEmpty(m, ours)
	newest := map[string]int64{}
	for _, e := range m.events() {
		if e.Version < newest[e.Key] && slices.Contains(ours, e.ID) {
			n++
		}
		newest[e.Key] = max(newest[e.Key], e.Version)
	}
	return n
}
