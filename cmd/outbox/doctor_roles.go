package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// part is a part of outbox and the role that plays it, the connected one if empty.
type part struct{ name, role string }

// parseParts reads --as.
func parseParts(text string) (parts []part, err error) {
	for _, one := range strings.Split(text, ",") {
		name, role, _ := strings.Cut(one, "=")
		if err := oneOf("--as", name, slices.Sorted(maps.Keys(partNeeds))); err != nil {
			return nil, err
		}
		parts = append(parts, part{name, role})
	}
	return parts, nil
}

// need is a privilege on a table, on some of its columns, on a sequence, or on a function.
type need struct {
	privilege string
	table     string
	columns   []string
	sequence  string
	function  string // with the types of its parameters
	// partitioned: the function is needed where outbox has partitions only.
	partitioned bool
}

func onTable(table string, privileges ...string) (all []need) {
	for _, p := range privileges {
		all = append(all, need{privilege: p, table: table})
	}
	return all
}

func onSequences(names ...string) (all []need) {
	for _, name := range names {
		all = append(all, need{privilege: "USAGE", sequence: name})
	}
	return all
}

func onFunctions(partitioned bool, signatures ...string) (all []need) {
	for _, f := range signatures {
		all = append(all, need{privilege: "EXECUTE", function: f, partitioned: partitioned})
	}
	return all
}

var readerNeeds = slices.Concat(onTable("outbox", "SELECT"), onTable("outbox_delayed", "SELECT"), onTable("outbox_cursor", "SELECT"), onTable("outbox_lease", "SELECT"), onTable("outbox_archiver", "SELECT"),
	onTable("outbox_failed", "SELECT"), onTable("outbox_audit", "SELECT"), onTable("event_handled", "SELECT"), onTable("consumer_start", "SELECT"),
	onTable("consumer_handler", "SELECT"), onTable("consumer_gap", "SELECT"),
	onTable("consumer_pause", "SELECT"), onTable("consumer_group_role", "SELECT"), onTable("event_delivery", "SELECT"), onTable("event_subscription", "SELECT"), onTable("event_member", "SELECT"),
	onTable("event_success", "SELECT"), onTable("outbox_pending", "SELECT"),
	onFunctions(false, "outbox_pending_events()", "outbox_audit_read(bigint, text, text)", "outbox_audit_read_recorded(bigint, text, text)", "outbox_audit_read_delivery(bigint, text, text)"))

// Functions that remove rows. A role with DELETE on the table might lock it.
const (
	removeHandled    = "outbox_remove_handled(tid[], timestamptz)"
	removeDeliveries = "outbox_remove_deliveries(tid[], timestamptz)"
	removeCursors    = "outbox_remove_cursors(tid[])"
	removeMember     = "outbox_remove_member(text, text)"
	removeTopics     = "outbox_remove_topics(text, text[], uuid[])"
	removeGaps       = "outbox_remove_gaps(text, text[], uuid[], int[], text[], text[], bigint[])"
)

// noteNeeds are the privileges for notes of handled events, and to remove what is handled.
var noteNeeds = slices.Concat(onTable("event_handled", "SELECT"),
	[]need{{privilege: "INSERT", table: "event_handled", columns: []string{"consumer_group", "aggregate_type", "aggregate_id", "action", "event_source", "answer"}},
		{privilege: "UPDATE", table: "event_handled", columns: []string{"handled_at", "answer"}}}, onSequences("event_handled_id_seq"),
	onFunctions(false, removeHandled, removeDeliveries),
	onTable("consumer_pause", "SELECT"), onTable("consumer_group_role", "SELECT"))

// successNeeds are the privileges to save when actions have succeeded.
var successNeeds = append(onTable("event_success", "SELECT", "INSERT"),
	need{privilege: "UPDATE", table: "event_success", columns: []string{"succeeded_at"}})

// deliveryUpdates are the columns of event_delivery that change while a row is handled.
var deliveryUpdates = []string{"status", "held", "put_back", "dead_letter_owed", "attempt_count", "max_attempts", "next_retry_at", "last_attempt_at", "locked_by", "locked_until",
	"updated_at", "processed_at", "failed_at", "witness_after", "last_error_code", "last_error_message"}

// memberNeeds are the privileges for the row of a process.
var memberNeeds = append(slices.Concat(onTable("event_member", "SELECT"), onFunctions(false, removeMember)),
	need{privilege: "INSERT", table: "event_member", columns: []string{"consumer_group", "member", "from_kafka", "renewed_at", "renewed_every", "routes", "works", "reasons", "skipped", "state", "kafka_at"}},
	need{privilege: "UPDATE", table: "event_member", columns: []string{"renewed_at", "works", "reasons", "skipped", "state", "kafka_at"}})

// leaseNeeds are the privileges to lead. A role with UPDATE of the whole table might lock it.
var leaseNeeds = append(onTable("outbox_lease", "SELECT", "INSERT"),
	need{privilege: "UPDATE", table: "outbox_lease", columns: []string{"holder", "epoch", "expires_at", "lasts", "locked_epoch", "exclusive_at",
		"state", "state_at", "kafka_at", "elsewhere_at"}})

// recordedColumns are the columns of an event that its writer sets.
var recordedColumns = []string{"event_id", "event_type", "source", "aggregate_type", "aggregate_id", "payload", "payload_bytes", "content_type", "topic",
	"partition_key", "headers", "occurred_at", "expires_at"}

// moveDue is the function of movers.
const moveDue = "outbox_move_due(timestamptz, text[])"

// partNeeds has the rights that docs/roles.md grants, except USAGE of the schema.
var partNeeds = map[string][]need{
	"writer": slices.Concat(onSequences("outbox_id_seq", "outbox_delayed_id_seq"), []need{
		{privilege: "INSERT", table: "outbox", columns: recordedColumns},
		{privilege: "INSERT", table: "outbox_delayed", columns: append(slices.Clone(recordedColumns), "due_at")}}, onFunctions(false, "outbox_cancel(uuid)")),
	"relay": slices.Concat(onTable("outbox", "SELECT", "DELETE"), []need{{privilege: "UPDATE", table: "outbox", columns: []string{"xid"}},
		{privilege: "SELECT", sequence: "outbox_id_seq"}, {privilege: "SELECT", table: "outbox_delayed", columns: []string{"id", "due_at", "rejected_at"}}},
		onTable("outbox_cursor", "SELECT", "INSERT"), onFunctions(false, moveDue), leaseNeeds, onTable("outbox_failed", "SELECT", "INSERT", "UPDATE", "DELETE"),
		onTable("outbox_archiver", "SELECT"), []need{{privilege: "INSERT", table: "outbox_archiver", columns: []string{"name", "epoch"}},
			{privilege: "UPDATE", table: "outbox_archiver", columns: []string{"epoch"}}},
		onTable("outbox_audit", "SELECT", "DELETE"), []need{{privilege: "INSERT", table: "outbox_audit", columns: []string{"operator", "action", "reason",
			"relay", "parking_key", "failed_id", "outbox_id", "event_id"}}},
		onTable("event_handled", "SELECT"), onTable("event_delivery", "SELECT"), onTable("event_subscription", "SELECT"),
		onTable("consumer_start", "SELECT"), onTable("consumer_group_role", "SELECT"), onFunctions(false, removeHandled, removeDeliveries, removeCursors),
		onSequences("outbox_cursor_id_seq", "outbox_failed_id_seq", "outbox_audit_id_seq"),
		onFunctions(true, "outbox_partitions()", "outbox_relays()", "outbox_make_partitions()",
			"outbox_drop_partition(name, boolean, pg_snapshot, timestamptz, text[], text, text, bigint)")),
	"consumer": slices.Concat(noteNeeds, memberNeeds, successNeeds, onTable("consumer_start", "SELECT", "INSERT"),
		onTable("consumer_gap", "SELECT", "INSERT"), onTable("consumer_handler", "SELECT", "INSERT"), onTable("event_delivery", "SELECT"),
		leaseNeeds, onTable("outbox_cursor", "SELECT"), onTable("event_subscription", "SELECT"),
		[]need{{privilege: "SELECT", table: "outbox", columns: []string{"id", "xid", "event_type", "created_at"}},
			{privilege: "UPDATE", table: "consumer_start", columns: []string{"position", "saved_at", "lost", "lost_at", "handlers",
				"assigned_to", "assigned_at", "read_from", "unclean_ends", "suspect_offset", "suspect_ends"}},
			{privilege: "UPDATE", table: "consumer_gap", columns: []string{"from_offset", "version"}},
			{privilege: "INSERT", table: "event_delivery", columns: []string{"consumer_group", "action", "stream", "position", "order_key", "status",
				"attempt_count", "max_attempts", "size", "next_retry_at", "last_attempt_at", "created_at", "updated_at", "last_error_code", "last_error_message",
				"event_id", "event_type", "source", "aggregate_type", "aggregate_id", "payload_bytes", "content_type", "partition_key", "occurred_at", "recorded_at",
				"record_partition", "record_id", "record_digest", "record", "failed_at"}},
			{privilege: "UPDATE", table: "event_delivery", columns: slices.Concat(deliveryUpdates, []string{"position", "size", "payload_bytes",
				"record_partition", "record", "dead_letter"})}},
		onSequences("event_delivery_id_seq"),
		onFunctions(false, "outbox_lock_keys(text, bigint[])", "outbox_lock_keys_shared(text, bigint[])",
			"outbox_blocked(text, text[], bigint[], bytea[], timestamptz)", "outbox_promote(text, bigint[], bigint[])",
			"outbox_finish_deliveries(text, text, bigint[], bigint[], bigint[])", removeTopics, removeGaps)),
	"worker": slices.Concat(noteNeeds, memberNeeds, successNeeds, onTable("outbox", "SELECT"), onTable("event_delivery", "SELECT"),
		[]need{{privilege: "INSERT", table: "event_delivery", columns: []string{"consumer_group", "action", "stream", "position", "order_key", "status",
			"attempt_count", "max_attempts", "size", "next_retry_at", "last_attempt_at", "locked_by", "locked_until", "created_at", "updated_at", "processed_at",
			"last_error_code", "last_error_message", "event_id", "event_type", "source", "aggregate_type", "aggregate_id", "payload", "payload_bytes",
			"content_type", "partition_key", "headers", "occurred_at", "recorded_at"}},
			{privilege: "UPDATE", table: "event_delivery", columns: deliveryUpdates},
			{privilege: "INSERT", table: "event_subscription", columns: []string{"consumer_group", "routes", "routes_version", "unordered"}},
			{privilege: "UPDATE", table: "event_subscription", columns: []string{"state", "changed_at", "routes", "routes_version", "unordered"}},
			{privilege: "INSERT", table: "outbox_cursor", columns: []string{"relay", "last_processed_id", "snapshot", "window_snapshot", "highest_id",
				"system_identifier", "epoch"}},
			{privilege: "SELECT", sequence: "outbox_id_seq"}, {privilege: "SELECT", table: "outbox_failed", columns: []string{"relay", "outbox_id"}}},
		onTable("event_subscription", "SELECT"), onTable("outbox_cursor", "SELECT"), leaseNeeds,
		onSequences("event_delivery_id_seq", "outbox_cursor_id_seq"),
		onFunctions(false, "outbox_lock_keys(text, bigint[])", "outbox_promote(text, bigint[], bigint[])", "outbox_finish_deliveries(text, text, bigint[], bigint[], bigint[])", removeCursors, moveDue)),
	"inbox": append(slices.Concat(onTable("event_handled", "SELECT"), onTable("consumer_group_role", "SELECT"), onSequences("event_handled_id_seq")),
		need{privilege: "INSERT", table: "event_handled", columns: []string{"consumer_group", "aggregate_type", "aggregate_id", "action", "answer"}},
		need{privilege: "UPDATE", table: "event_handled", columns: []string{"answer"}}),
	"reader": readerNeeds,
	"operator": slices.Concat(readerNeeds, onFunctions(false, "outbox_retry_failed(bigint[], text, text)", "outbox_resolve_failed(bigint[], text, text)",
		"outbox_edit_failed(bigint, bytea, text, text)", "outbox_hold_key(text, text, text, text)", "outbox_release_key(text, text, text, text)",
		"outbox_pause_consumer(text, text, text, text)", "outbox_resume_consumer(text, text, text, text)",
		"outbox_rewind_consumer(text, text[], uuid[], int[], bigint[], text, text)",
		"outbox_forget_action(text, text, text, text)",
		"outbox_audit_replay(text, text, text, text)", "outbox_audit_edit(text, text, text, text, bytea, text, text)", "outbox_cancel_delayed(uuid[], text, text)", "outbox_forget_handled(text, text[], text[], text[], text[], timestamptz, text, text)",
		"outbox_requeue_deliveries(bigint[], text, text)", "outbox_edit_delivery(bigint, bytea, text, text)", "outbox_resolve_deliveries(bigint[], text, text)",
		"outbox_hold_deliveries(bigint[], text, text)", "outbox_release_deliveries(bigint[], text, text)",
		"outbox_cut_to_kafka(text[], text, text, text)", "outbox_cut_to_postgres(text[], text, text[], text, text)",
		"outbox_finish_cut(text, boolean, text, text)", "outbox_cancel_cut(text, text, text)", "outbox_cut_from_debezium(text, text, text, text)", "outbox_stop_archive(text, text)",
		"outbox_begin_relay(text, text, text, text)", "outbox_cut_to_debezium(text, text, text, text, text)")),
}

// on returns the object of the privilege, and grant the statement that gives it.
func (n need) on() string {
	switch {
	case n.sequence != "":
		return "sequence " + n.sequence
	case n.function != "":
		return "function " + n.function
	case len(n.columns) > 0:
		return fmt.Sprintf("%s (%s)", n.table, strings.Join(n.columns, ", "))
	}
	return n.table
}

func (n need) grant(schema, role string) string {
	role = pgx.Identifier{role}.Sanitize()
	switch {
	case n.sequence != "":
		return fmt.Sprintf("GRANT %s ON SEQUENCE %s TO %s", n.privilege, pgx.Identifier{schema, n.sequence}.Sanitize(), role)
	case n.function != "":
		return fmt.Sprintf("GRANT %s ON FUNCTION %s.%s TO %s", n.privilege, pgx.Identifier{schema}.Sanitize(), n.function, role)
	case len(n.columns) > 0:
		return fmt.Sprintf("GRANT %s (%s) ON %s TO %s", n.privilege, strings.Join(n.columns, ", "), pgx.Identifier{schema, n.table}.Sanitize(), role)
	}
	return fmt.Sprintf("GRANT %s ON %s TO %s", n.privilege, pgx.Identifier{schema, n.table}.Sanitize(), role)
}

// If an object does not exist, the answer is NULL, and no privilege is missing. A role that may UPDATE a
// sequence may also draw from it.
const (
	sqlTableNeed    = `SELECT coalesce(pg_catalog.has_table_privilege($1, to_regclass($2)::oid, $3), true)`
	sqlColumnNeed   = `SELECT coalesce(pg_catalog.has_column_privilege($1, to_regclass($2)::oid, $3, $4), true)`
	sqlSequenceNeed = `SELECT coalesce(pg_catalog.has_sequence_privilege($1, to_regclass($2)::oid, CASE $3 WHEN 'USAGE' THEN 'USAGE, UPDATE' ELSE $3 END), true)`
	sqlFunctionNeed = `SELECT coalesce(pg_catalog.has_function_privilege($1, to_regprocedure($2)::oid, $3), true)
                           OR $5 AND NOT EXISTS (SELECT FROM pg_class WHERE oid = to_regclass($4)::oid AND relkind = 'p')`
	sqlSchemaNeed = `SELECT pg_catalog.has_schema_privilege($1, $2, 'USAGE')`
)

// privileges checks that roles can do their work.
func (d *doctor) privileges(ctx context.Context) error {
	var named []part
	for _, p := range d.parts {
		connected := p.role == ""
		if connected {
			if err := d.e.db.QueryRow(ctx, `SELECT current_user`).Scan(&p.role); err != nil {
				return err
			}
		}
		var there bool
		if err := d.e.db.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1)`, p.role).Scan(&there); err != nil {
			return err
		}
		if !there {
			d.add("privileges.role", severityError, fmt.Sprintf("there is no role %q", p.role), "Nobody can work as it.", "CREATE ROLE, or another name in --as.")
			continue
		}
		if err := errors.Join(d.privilegesOf(ctx, p), d.groupsOf(ctx, p)); err != nil {
			return err
		}
		if !connected {
			named = append(named, p)
		}
	}
	return errors.Join(d.excess(ctx, named), d.groups(ctx))
}

func (d *doctor) privilegesOf(ctx context.Context, p part) error {
	schema := d.e.schemaName()
	ok, err := d.has(ctx, sqlSchemaNeed, p.role, schema)
	if err != nil {
		return err
	}
	if !ok {
		d.lacks(p, "USAGE of schema "+schema, fmt.Sprintf("GRANT USAGE ON SCHEMA %s TO %s", pgx.Identifier{schema}.Sanitize(), pgx.Identifier{p.role}.Sanitize()))
	}
	for _, n := range partNeeds[p.name] {
		ok, err := d.hasNeed(ctx, p.role, n)
		if err != nil {
			return err
		}
		if !ok {
			d.lacks(p, n.privilege+" on "+n.on(), n.grant(schema, p.role))
		}
	}
	return nil
}

func (d *doctor) lacks(p part, what, grant string) {
	d.add("privileges."+p.name, severityError, fmt.Sprintf("role %s lacks %s", p.role, what),
		"It cannot work as "+p.name+": statements are refused.", grant)
}

func (d *doctor) hasNeed(ctx context.Context, role string, n need) (bool, error) {
	schema := d.e.schemaName()
	if n.sequence != "" {
		return d.has(ctx, sqlSequenceNeed, role, pgx.Identifier{schema, n.sequence}.Sanitize(), n.privilege)
	}
	if n.function != "" {
		return d.has(ctx, sqlFunctionNeed, role, d.inSchema(n.function), n.privilege, d.inSchema("outbox"), n.partitioned)
	}
	table := pgx.Identifier{schema, n.table}.Sanitize()
	if len(n.columns) == 0 {
		return d.has(ctx, sqlTableNeed, role, table, n.privilege)
	}
	for _, column := range n.columns {
		ok, err := d.has(ctx, sqlColumnNeed, role, table, column, n.privilege)
		if err != nil || !ok {
			return false, err
		}
	}
	return true, nil
}

func (d *doctor) has(ctx context.Context, sql string, args ...any) (ok bool, err error) {
	err = d.e.db.QueryRow(ctx, sql, args...).Scan(&ok)
	return ok, err
}
