package interop

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/tools/connectserver"
	"github.com/outboxgo/outbox/tools/pgserver"
)

// TestDebezium has Debezium itself read outbox. Its parts take turns, because they share the servers, which take their
// time to start: a PostgreSQL with logical decoding, and a worker of Kafka Connect.
func TestDebezium(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	brokers := testenv.RealBrokers(t)
	connect := make(chan *connectserver.Server, 1)
	go func() {
		defer close(connect)
		server, err := connectserver.Start(ctx, connectserver.Config{Brokers: brokers, Log: os.Stderr, Settings: map[string]string{"offset.flush.interval.ms": "500"}})
		if assert.NoError(t, err) {
			connect <- server
		}
	}()
	bin, err := pgserver.Embedded(ctx, os.Getenv("OUTBOX_POSTGRES_VERSION"), nil)
	require.NoError(t, err)
	postgres, err := pgserver.Start(ctx, pgserver.Config{BinDir: bin, Settings: map[string]string{"wal_level": "logical"}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, postgres.Stop(ctx)) })
	worker := <-connect
	require.NotNil(t, worker)
	t.Cleanup(func() { require.NoError(t, worker.Stop(ctx)) })
	for _, part := range []struct {
		name          string
		partitionRows int64
		test          func(*debezium)
	}{
		{"sends what a relay sends", 100, sendsWhatRelaySends},
		{"expands payloads", 0, expandsPayloads},
		{"refuses cuts", 0, refusesCuts},
		{"refuses cuts over partitions", 100, refusesCuts},
		{"cuts among tables", 0, cutsAmongTables},
		{"cuts among tables over partitions", 100, cutsAmongTables},
		{"cuts at once", 0, cutsAtOnce},
		{"cuts without rights", 0, cutsWithoutRights},
		{"moves both ways", 0, movesBothWays},
		{"carries a saga", 0, carriesSaga},
	} {
		t.Run(part.name, func(t *testing.T) { part.test(newDebezium(t, brokers, postgres.URL(), worker, part.partitionRows)) })
	}
}

// debezium is a connector between a database of its own and Kafka.
type debezium struct {
	*testing.T
	db          *pgxpool.Pool
	brokers     []string
	connect     *connectserver.Server
	schema      string
	publication string
	name        string // of the connector and its slot, and of the database
}

// newDebezium makes the database, in which outbox is published, and no connector.
func newDebezium(t *testing.T, brokers []string, postgres string, connect *connectserver.Server, partitionRows int64) *debezium {
	t.Helper()
	d := &debezium{T: t, brokers: brokers, connect: connect, schema: "Shop", publication: "shop_events", name: "shop_" + uuid.NewString()[:8]}
	ctx := context.Background()
	admin, err := pgx.Connect(ctx, postgres)
	require.NoError(t, err)
	_, err = admin.Exec(ctx, `CREATE DATABASE `+d.name)
	require.NoError(t, errors.Join(err, admin.Close(ctx)))
	cfg, err := pgxpool.ParseConfig(postgres)
	require.NoError(t, err)
	cfg.ConnConfig.Database, cfg.MaxConns = d.name, 60
	d.db, err = pgxpool.NewWithConfig(ctx, cfg)
	require.NoError(t, err)
	t.Cleanup(d.db.Close)
	require.NoError(t, outbox.Migrate(ctx, d.db, outbox.MigrateConfig{Schema: d.schema, PartitionRows: partitionRows, Publication: d.publication}))
	return d
}

// connectorSettings returns those of docs/move.md.
func connectorSettings(t *testing.T) (settings map[string]string) {
	t.Helper()
	doc, err := os.ReadFile("../docs/move.md")
	require.NoError(t, err)
	_, rest, found := strings.Cut(string(doc), "```json\n")
	require.True(t, found)
	text, _, _ := strings.Cut(rest, "```")
	require.NoError(t, json.Unmarshal([]byte(text), &settings))
	return settings
}

// start makes the connector, and waits until its slot is there and in use.
func (d *debezium) start(changes map[string]string) {
	d.Helper()
	d.call(http.MethodPut, "/config", d.config(changes), nil)
	d.Cleanup(func() { d.call(http.MethodDelete, "", nil, nil) })
	d.awaitSlot(true)
}

func (d *debezium) config(changes map[string]string) map[string]string {
	db := d.db.Config().ConnConfig
	config := connectorSettings(d.T)
	maps.Copy(config, map[string]string{
		"database.hostname": db.Host, "database.port": strconv.Itoa(int(db.Port)), "database.user": db.User, "database.password": db.Password, "database.dbname": db.Database,
		"topic.prefix": d.name, "slot.name": d.name, "publication.name": d.publication, "table.include.list": d.schema + ".outbox",
		"poll.interval.ms": "10", "slot.max.retries": "50", "slot.retry.delay.ms": "200",
	})
	maps.Copy(config, changes)
	return config
}

// stop stops the connector as an operator does, and waits until its slot is free.
func (d *debezium) stop() {
	d.Helper()
	d.call(http.MethodPut, "/stop", nil, nil)
	d.awaitSlot(false)
}

func (d *debezium) resume() {
	d.Helper()
	d.call(http.MethodPut, "/resume", nil, nil)
	d.awaitSlot(true)
}

func (d *debezium) awaitSlot(active bool) {
	d.Helper()
	require.Eventually(d, func() bool {
		var is bool
		require.NoError(d, d.db.QueryRow(context.Background(), `SELECT coalesce(bool_or(active), false) FROM pg_replication_slots WHERE slot_name = $1`, d.name).Scan(&is))
		if is != active {
			d.requireHealthy()
		}
		return is == active
	}, testenv.Patience, 20*time.Millisecond, "slot active: %v", active)
}

type connectorState struct{ State, Trace string }

// requireHealthy fails the test if the connector or its task has failed.
func (d *debezium) requireHealthy() {
	d.Helper()
	var status struct {
		Connector connectorState
		Tasks     []connectorState
	}
	d.call(http.MethodGet, "/status", nil, &status)
	for _, s := range append(status.Tasks, status.Connector) {
		require.NotEqual(d, "FAILED", s.State, s.Trace)
	}
}

// call asks the worker about the connector. One that has just been made may not be there yet.
func (d *debezium) call(method, path string, body, result any) {
	d.Helper()
	encoded, err := json.Marshal(body)
	require.NoError(d, err)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	var answer []byte
	var code int
	require.Eventually(d, func() bool {
		var input io.Reader = http.NoBody
		if body != nil {
			input = bytes.NewReader(encoded)
		}
		request, err := http.NewRequest(method, d.connect.URL()+"/connectors/"+d.name+path, input)
		require.NoError(d, err)
		request.Header.Set("Content-Type", "application/json")
		response, err := client.Do(request)
		require.NoError(d, err)
		answer, err = io.ReadAll(response.Body)
		require.NoError(d, err)
		require.NoError(d, response.Body.Close())
		code = response.StatusCode
		return code != http.StatusConflict && (code != http.StatusNotFound || method == http.MethodDelete)
	}, testenv.Patience, 50*time.Millisecond)
	require.True(d, code < http.StatusBadRequest || code == http.StatusNotFound, "%s %s: %s", method, path, answer)
	if result != nil {
		require.NoError(d, json.Unmarshal(answer, result))
	}
}

// orderPaid is an event with everything that a row can say.
type orderPaid struct {
	Order string `json:"order"`
	Total json.RawMessage
}

func (orderPaid) OccurredAt() time.Time { return time.Date(2026, 2, 3, 4, 5, 6, 789_012_000, time.UTC) }
func (o orderPaid) id() string          { return o.Order }

// What Debezium sends, a consumer takes for the event that a relay sends: every attribute is the same.
func sendsWhatRelaySends(d *debezium) {
	t, topic := d.T, newTopic(d.T, d.brokers)
	d.start(nil)
	events, err := outbox.NewRegistry("shop", outbox.Event("acme.order.paid.v1", "Order", orderPaid.id).Topic(topic))
	require.NoError(t, err)
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{Schema: d.schema, Headers: func(_ context.Context, e outbox.DomainEvent) map[string]string {
		if e.(orderPaid).Order == "plain" {
			return nil
		}
		return map[string]string{"tenant": awkward}
	}})
	require.NoError(t, err)
	ctx := outbox.WithTraceParent(outbox.WithCorrelationID(context.Background(), awkward), trace)
	total := json.RawMessage(`[12345678901234567890, -1.50, "é 주문 😀 \u0001"]`)
	require.NoError(t, pgx.BeginFunc(ctx, d.db, func(tx pgx.Tx) error {
		expires := outbox.EventOptions{Expires: time.Date(2126, 2, 3, 4, 5, 6, 120_000_000, time.UTC)}
		return rec.Record(ctx, tx, orderPaid{"o-1", total}, outbox.With(orderPaid{awkward, total}, expires))
	}))
	require.NoError(t, pgx.BeginFunc(ctx, d.db, func(tx pgx.Tx) error { return rec.Record(context.Background(), tx, orderPaid{"plain", total}) }))
	_, err = d.db.Exec(ctx, `DELETE FROM "Shop".outbox WHERE aggregate_id = 'plain'`)
	require.NoError(t, err, "what retention removes is no event")
	const foreign = `INSERT INTO "Shop".outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
		VALUES ($1, $2, 'elsewhere', 'Order', 'o-2', '{"by": "SQL"}', 'application/json', '2026-02-03T04:05:06Z')`
	derived := "interop" + uuid.NewString()[:8]
	_, err = d.db.Exec(ctx, foreign, uuid.NewString(), "acme."+derived+".happened.v1")
	require.NoError(t, err)

	byDebezium := decodeAll(t, d.brokers, topic, 3)
	require.Equal(t, "o-2", decodeAll(t, d.brokers, derived+"-events", 1)[0].Subject, "the trigger has derived the topic")
	d.stop()

	relay, err := outbox.NewRelay(d.db, testenv.KafkaOpts(d.brokers), outbox.RelayConfig{Schema: d.schema, PollInterval: 10 * time.Millisecond})
	require.NoError(t, err)
	stop := testenv.Run(t, relay.Run)
	both := decodeAll(t, d.brokers, topic, 5)
	stop()
	require.Equal(t, "plain", byDebezium[2].Subject)
	require.Equal(t, byDebezium[:2], both[3:])
	require.Equal(t, awkward, both[4].Extensions["correlationid"])
	require.Equal(t, trace, both[4].Extensions["traceparent"])
	require.Equal(t, "2126-02-03T04:05:06.12Z", both[4].Extensions["expirytime"])
}

// decodeAll returns the first n events of a topic.
func decodeAll(t *testing.T, brokers []string, topic string, n int) (all []*outbox.Message) {
	t.Helper()
	for _, r := range fetch(t, brokers, topic, n) {
		m, err := outbox.DecodeDebezium(r)
		require.NoError(t, err, "%v", r.Headers)
		m.Time = m.Time.UTC()
		m.Extensions["key"] = string(r.Key)
		all = append(all, m)
	}
	return all
}

// The connector of an older guide works with our names of columns: the payload is expanded, and the type is in a
// header. What the router cannot expand it sends as a text, and numbers it rewrites.
func expandsPayloads(d *debezium) {
	t, topic := d.T, newTopic(d.T, d.brokers)
	guide := map[string]string{
		"value.converter": "org.apache.kafka.connect.json.JsonConverter", "value.converter.schemas.enable": "false", "transforms": "outbox",
		"transforms.outbox.table.expand.json.payload":         "true",
		"transforms.outbox.table.fields.additional.placement": "event_type:header:eventType",
	}
	d.start(guide)
	id := uuid.NewString()
	insert := func(payload string) {
		_, err := d.db.Exec(context.Background(), `INSERT INTO "Shop".outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, occurred_at)
			VALUES ($1, 'acme.order.paid.v1', 'elsewhere', 'Order', 'o-1', $3, 'application/json', $2, now())`, id, topic, payload)
		require.NoError(t, err)
	}
	insert(`{"a": {"b": [1, 2]}, "n": 0.10}`)
	insert(`{"a": [1, "x"]}`)
	got := decodeAll(t, d.brokers, topic, 2)
	require.Equal(t, []string{id, "acme.order.paid.v1", "o-1", topic}, []string{got[0].ID, got[0].Type, got[0].Subject, got[0].Source})
	require.Equal(t, `{"a":{"b":[1,2]},"n":0.1}`, string(got[0].Data))
	require.Equal(t, `{"a": [1, "x"]}`, string(got[1].Data))

	guide["transforms.outbox.table.field.event.timestamp"] = "occurred_at" // a text, where the router wants a number
	d.call(http.MethodPut, "/config", d.config(guide), nil)
	insert(`{}`)
	require.Eventually(t, func() bool {
		var status struct{ Tasks []connectorState }
		d.call(http.MethodGet, "/status", nil, &status)
		return len(status.Tasks) == 1 && status.Tasks[0].State == "FAILED"
	}, testenv.Patience, 50*time.Millisecond, "the timestamp works; say so in docs/move.md")
}
