package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/schedule"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/outboxgo/outbox/tools/connectserver"
)

const debeziumSettings = "Kafka Connect standalone, heap 1 GB, `PostgresConnector` with pgoutput and the `EventRouter`. Tuned: `poll.interval.ms` 1 (default 500), " +
	"`max.batch.size` 8192, `max.queue.size` 32768, `producer.linger.ms` 0, `producer.enable.idempotence` with 5 requests in flight, " +
	"`producer.batch.size` 256 KiB, `offset.flush.interval.ms` 5000; strings instead of JSON converters; no snapshot; no heartbeats; " +
	"a publication of the outbox table alone. Rows stay in the table."

// connectSettings are those of the worker.
var connectSettings = map[string]string{
	"producer.linger.ms":                             "0",
	"producer.batch.size":                            "262144",
	"producer.acks":                                  "all",
	"producer.enable.idempotence":                    "true",
	"producer.max.in.flight.requests.per.connection": "5",
	"offset.flush.interval.ms":                       "5000",
}

// connectorSettings are those of each connector that do not depend on where things are.
var connectorSettings = map[string]string{
	"connector.class":             "io.debezium.connector.postgresql.PostgresConnector",
	"tasks.max":                   "1",
	"plugin.name":                 "pgoutput",
	"publication.autocreate.mode": "disabled",
	"snapshot.mode":               "no_data",
	"tombstones.on.delete":        "false",
	"poll.interval.ms":            "1",
	"max.batch.size":              "8192",
	"max.queue.size":              "32768",
	"heartbeat.interval.ms":       "0",
	"slot.retry.delay.ms":         "200", // the server may hold the slot of a connection that has just ended
	"slot.max.retries":            "50",
	"transforms":                  "outbox",
	"transforms.outbox.type":      "io.debezium.transforms.outbox.EventRouter",
}

const (
	debeziumHeap    = "1g"
	debeziumLook    = 50 * time.Millisecond
	debeziumTimeout = 60 * time.Second // until a connector has started, or stopped
)

const (
	ddlDebezium = `
CREATE TABLE {schema}.outboxevent (
	id            uuid PRIMARY KEY,
	aggregatetype varchar(255) NOT NULL,
	aggregateid   varchar(255) NOT NULL,
	type          varchar(255) NOT NULL,
	payload       jsonb NOT NULL
)`
	sqlDebezium     = `INSERT INTO {schema}.outboxevent (id, aggregatetype, aggregateid, type, payload) VALUES ($1, $2, $3, $4, $5)`
	sqlDebeziumMany = `
INSERT INTO {schema}.outboxevent (id, aggregatetype, aggregateid, type, payload)
SELECT e.id, $1, e.key, $2, e.payload
  FROM unnest($3::uuid[], $4::text[], $5::jsonb[]) AS e (id, key, payload)`
)

// debeziumInstance is a connector with a table, a publication and a slot of its own.
type debeziumInstance struct {
	b             *bench
	name          string // of the connector and what belongs to it
	schema        string
	order, insert string // SQL
	insertMany    string
}

func openDebezium(ctx context.Context, b *bench) (instance, error) {
	var level string
	if err := b.DB.QueryRow(ctx, `SHOW wal_level`).Scan(&level); err != nil {
		return nil, err
	}
	if level != "logical" {
		return nil, fmt.Errorf("wal_level is %s, and Debezium needs logical: run it with `make bench-peers`", level)
	}
	name := b.newName("debezium")
	schema, err := b.newSchemaWithOrders(ctx, name)
	if err != nil {
		return nil, err
	}
	d := &debeziumInstance{
		b: b, name: "bench_" + b.ID + "_" + name, schema: schema, order: services.InSchema(sqlOrder, schema),
		insert: services.InSchema(sqlDebezium, schema), insertMany: services.InSchema(sqlDebeziumMany, schema),
	}
	publication := fmt.Sprintf(`CREATE PUBLICATION %s FOR TABLE {schema}.outboxevent`, pgx.Identifier{d.name}.Sanitize())
	for _, sql := range []string{ddlDebezium, publication} {
		if _, err := b.DB.Exec(ctx, services.InSchema(sql, schema)); err != nil {
			return nil, fmt.Errorf("create table: %w", err)
		}
	}
	if b.connect == nil {
		b.say("starting Kafka Connect")
		b.connect, err = connectserver.Start(ctx, connectserver.Config{
			Brokers: b.cfg.Brokers, Settings: connectSettings, Heap: debeziumHeap, Log: os.Stderr, Progress: b.stderr,
		})
		if err != nil {
			return nil, err
		}
	}
	return d, d.create(ctx)
}

// create makes the connector, which stays stopped.
func (d *debeziumInstance) create(ctx context.Context) error {
	db, err := pgx.ParseConfig(d.b.cfg.Postgres)
	if err != nil {
		return fmt.Errorf("PostgreSQL: %w", err)
	}
	config := maps.Clone(connectorSettings)
	maps.Copy(config, map[string]string{
		"database.hostname":  db.Host,
		"database.port":      strconv.Itoa(int(db.Port)),
		"database.user":      db.User,
		"database.password":  db.Password,
		"database.dbname":    db.Database,
		"topic.prefix":       d.name,
		"slot.name":          d.name,
		"publication.name":   d.name,
		"table.include.list": d.schema + ".outboxevent",
		"transforms.outbox.route.topic.replacement": d.b.Topic,
	})
	return d.call(ctx, http.MethodPost, "", map[string]any{"name": d.name, "config": config, "initial_state": "STOPPED"}, nil)
}

// call asks the worker's REST interface. A path begins with a slash behind the connector's
// name; an empty one is that of all connectors.
func (d *debeziumInstance) call(ctx context.Context, method, path string, body, result any) error {
	address := d.b.connect.URL() + "/connectors"
	if path != "" {
		address += "/" + d.name + path
	}
	var input io.Reader = http.NoBody
	if body != nil {
		encoded, err := json.Marshal(body)
		if err != nil {
			return err
		}
		input = bytes.NewReader(encoded)
	}
	request, err := http.NewRequestWithContext(ctx, method, address, input)
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(request)
	if err != nil {
		return fmt.Errorf("call Kafka Connect: %w", err)
	}
	answer, err := io.ReadAll(response.Body)
	if err := errors.Join(err, response.Body.Close()); err != nil {
		return fmt.Errorf("call Kafka Connect: %w", err)
	}
	if response.StatusCode >= http.StatusBadRequest {
		return fmt.Errorf("call Kafka Connect: %s %s: %s: %s", method, path, response.Status, answer)
	}
	if result == nil {
		return nil
	}
	return json.Unmarshal(answer, result)
}

func (d *debeziumInstance) write(ctx context.Context, e orders.Placed, committed func()) error {
	id, err := uuid.NewV7()
	if err != nil {
		return err
	}
	payload, err := payloadOf(e)
	if err != nil {
		return err
	}
	var batch pgx.Batch
	batch.Queue(d.order, e.Customer)
	batch.Queue(d.insert, id.String(), orders.Aggregate, e.Order, d.b.EventType(), payload)
	if err := d.b.transact(ctx, &batch); err != nil {
		return err
	}
	committed()
	return nil
}

func (d *debeziumInstance) fill(ctx context.Context, events []orders.Placed) error {
	ids, keys, payloads := make([]string, len(events)), make([]string, len(events)), make([]string, len(events))
	for i, e := range events {
		id, err := uuid.NewV7()
		if err != nil {
			return err
		}
		payload, err := payloadOf(e)
		if err != nil {
			return err
		}
		ids[i], keys[i], payloads[i] = id.String(), e.Order, string(payload)
	}
	_, err := d.b.DB.Exec(ctx, d.insertMany, orders.Aggregate, d.b.EventType(), ids, keys, payloads)
	return err
}

func (d *debeziumInstance) relay(ctx context.Context) (stop func() error, err error) {
	if err := d.call(ctx, http.MethodPut, "/resume", nil, nil); err != nil {
		return nil, err
	}
	stop = func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), debeziumTimeout)
		defer cancel()
		return errors.Join(d.failed(ctx), d.call(ctx, http.MethodPut, "/stop", nil, nil), d.awaitStopped(ctx), d.awaitSlot(ctx, false))
	}
	if err := d.awaitSlot(ctx, true); err != nil {
		return nil, errors.Join(err, stop())
	}
	return stop, nil
}

// connectorStatus is what Kafka Connect says about a connector.
type connectorStatus struct {
	Connector connectorState
	Tasks     []connectorState
}

// connectorState is that of a connector or of a task. A failure has a trace.
type connectorState struct{ State, Trace string }

// failed returns why the connector or its task has failed, or nil.
func (d *debeziumInstance) failed(ctx context.Context) error {
	var status connectorStatus
	if err := d.call(ctx, http.MethodGet, "/status", nil, &status); err != nil {
		return err
	}
	for _, s := range append(status.Tasks, status.Connector) {
		if s.State == "FAILED" {
			return fmt.Errorf("connector: %s", s.Trace)
		}
	}
	return nil
}

// awaitStopped waits until the connector is stopped and its task gone.
func (d *debeziumInstance) awaitStopped(ctx context.Context) error {
	for {
		var status connectorStatus
		if err := d.call(ctx, http.MethodGet, "/status", nil, &status); err != nil {
			return err
		}
		if status.Connector.State == "STOPPED" && len(status.Tasks) == 0 {
			return nil
		}
		if err := schedule.Sleep(ctx, debeziumLook); err != nil {
			return fmt.Errorf("wait until the connector is stopped: %w", err)
		}
	}
}

// awaitSlot waits until the slot is in use, or is not.
func (d *debeziumInstance) awaitSlot(ctx context.Context, active bool) error {
	ctx, cancel := context.WithTimeoutCause(ctx, debeziumTimeout, fmt.Errorf("the slot's activity is not %v within %v", active, debeziumTimeout))
	defer cancel()
	for {
		var is bool
		err := d.b.DB.QueryRow(ctx, `SELECT coalesce(bool_or(active), false) FROM pg_replication_slots WHERE slot_name = $1`, d.name).Scan(&is)
		if err != nil {
			return fmt.Errorf("look for the slot: %w", err)
		}
		if is == active {
			return nil
		}
		if err := d.failed(ctx); err != nil {
			return err
		}
		if err := schedule.Sleep(ctx, debeziumLook); err != nil {
			return err
		}
	}
}

// close removes the connector, its slot and its publication.
func (d *debeziumInstance) close(ctx context.Context) error {
	err := d.call(ctx, http.MethodDelete, "/", nil, nil)
	_, slot := d.b.DB.Exec(ctx, `SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = $1`, d.name)
	_, publication := d.b.DB.Exec(ctx, `DROP PUBLICATION IF EXISTS `+pgx.Identifier{d.name}.Sanitize())
	return errors.Join(err, slot, publication, d.b.DropSchema(ctx, d.schema))
}
