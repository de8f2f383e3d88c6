package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
)

// databaseChecks need no tables of outbox.
var databaseChecks = []check{
	{"server.settings", []string{"server.fsync", "server.full_page_writes", "server.synchronous_commit", "server.autovacuum",
		"server.idle_in_transaction", "server.version", "server.standby"}, (*doctor).settings},
	{"encoding", []string{"server.encoding"}, (*doctor).encoding},
	{"server.connections", []string{"server.connections"}, (*doctor).connections},
	{"server.slots", []string{"server.slot"}, (*doctor).slots},
	{"clock", []string{"clock"}, (*doctor).clock},
}

// settingRule is a setting of the server, and the effect of a bad value.
type settingRule struct {
	setting, value string
	finding        finding
}

var settingRules = []settingRule{
	{"fsync", "off", finding{"server.fsync", severityError, "fsync is off",
		"A crash of the machine can destroy the whole database, events included.", "ALTER SYSTEM SET fsync = on; SELECT pg_reload_conf();"}},
	{"full_page_writes", "off", finding{"server.full_page_writes", severityWarning, "full_page_writes is off",
		"A crash of the machine can leave pages that are half old and half new, unless the storage rules it out.", "ALTER SYSTEM SET full_page_writes = on; SELECT pg_reload_conf();"}},
	{"synchronous_commit", "off", finding{"server.synchronous_commit", severityWarning, "synchronous_commit is off",
		"A crash of PostgreSQL forgets the latest commits. Those that recorded events are kept, unless outbox.allow_async_commit is on.",
		"Turn it on for the role or the database: ALTER DATABASE … SET synchronous_commit = on. The relay turns it off by itself where it does no harm."}},
	{"autovacuum", "off", finding{"server.autovacuum", severityError, "autovacuum is off",
		"Rows that retention removes leave their space behind: outbox grows, and polls become slower.", "ALTER SYSTEM SET autovacuum = on; SELECT pg_reload_conf();"}},
	{"track_counts", "off", finding{"server.autovacuum", severityError, "track_counts is off, and so autovacuum does nothing",
		"Rows that retention removes leave their space behind: outbox grows, and polls become slower.", "ALTER SYSTEM SET track_counts = on; SELECT pg_reload_conf();"}},
	{"idle_in_transaction_session_timeout", "0", finding{"server.idle_in_transaction", severityNote, "idle_in_transaction_session_timeout is 0",
		"A transaction that its client forgot stays open until the connection breaks, with its events and what it keeps from being cleaned up.",
		"Bound it for the roles of your services: ALTER ROLE … SET idle_in_transaction_session_timeout = '5min'."}},
}

// oldestServer is the first major version that outbox is tested with.
const oldestServer = 14

// settings checks the settings of the server, as this session has them.
func (d *doctor) settings(ctx context.Context) error {
	rows, err := d.e.db.Query(ctx, `SELECT name, setting FROM pg_settings`)
	if err != nil {
		return err
	}
	defer rows.Close()
	have := map[string]string{}
	for rows.Next() {
		var name, value string
		if err := rows.Scan(&name, &value); err != nil {
			return err
		}
		have[name] = value
	}
	d.findings = append(d.findings, settingFindings(have)...)
	return rows.Err()
}

func settingFindings(have map[string]string) (all []finding) {
	for _, v := range settingRules {
		if have[v.setting] == v.value {
			all = append(all, v.finding)
		}
	}
	if n, err := strconv.Atoi(have["server_version_num"]); err == nil && n/10_000 < oldestServer {
		all = append(all, finding{"server.version", severityError, "PostgreSQL " + have["server_version"] + " is older than " + strconv.Itoa(oldestServer),
			"outbox is not tested with it, and statements may be refused.", "Upgrade PostgreSQL."})
	}
	if have["in_hot_standby"] == "on" {
		all = append(all, finding{"server.standby", severityError, "this server is a standby",
			"Nothing can be recorded here, and no relay can work.", "Name the primary in --database and in the URLs of your services."})
	}
	return all
}

// encoding checks that PostgreSQL stores and sends texts as they are.
func (d *doctor) encoding(ctx context.Context) error {
	err := pg.CheckSessions(ctx, d.e.db)
	if !errors.Is(err, outbox.ErrEncoding) {
		return err
	}
	what, do, _ := strings.Cut(strings.TrimPrefix(err.Error(), outbox.ErrEncoding.Error()+": "), "; ")
	do = strings.ToUpper(do[:1]) + do[1:]
	d.add("server.encoding", severityError, what,
		"PostgreSQL converts what events contain, or refuses what the other encoding does not have. Migrate, relays, workers and consumers refuse to run.",
		do+".")
	return nil
}

// fullAt is the share of connections in use that is worth a warning.
const fullAt = 0.9

func (d *doctor) connections(ctx context.Context) error {
	var used, most, reserved int
	err := d.e.db.QueryRow(ctx, `
SELECT (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'), current_setting('max_connections')::int,
       current_setting('superuser_reserved_connections')::int + coalesce(current_setting('reserved_connections', true)::int, 0)`).Scan(&used, &most, &reserved)
	if err == nil {
		d.findings = append(d.findings, connectionFindings(used, most-reserved)...)
	}
	return err
}

func connectionFindings(used, most int) []finding {
	if float64(used) < fullAt*float64(most) {
		return nil
	}
	return []finding{{"server.connections", severityWarning, fmt.Sprintf("%d of %d connections are in use", used, most),
		"When none is left, services and relays cannot connect. A relay takes up to five, a standby two.",
		"Make pools smaller, put PgBouncer in front, or raise max_connections."}}
}

// slotLimit is how much WAL a slot may hold back.
const slotLimit = 1 << 30

func (d *doctor) slots(ctx context.Context) error { return d.slotsAbove(ctx, slotLimit) }

// slotsAbove finds replication slots that hold more than limit bytes of WAL.
func (d *doctor) slotsAbove(ctx context.Context, limit int64) error {
	rows, err := d.e.db.Query(ctx, `
SELECT slot_name, active, coalesce(wal_status, ''),
       coalesce(pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_receive_lsn() ELSE pg_current_wal_lsn() END, restart_lsn), 0)::bigint
  FROM pg_replication_slots ORDER BY 4 DESC`)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var name, status string
		var active bool
		var held int64
		if err := rows.Scan(&name, &active, &status, &held); err != nil {
			return err
		}
		if held > limit || status == "lost" {
			d.findings = append(d.findings, slotFinding(name, active, status == "lost", held))
		}
	}
	return rows.Err()
}

// slotFinding is about a slot that holds too much WAL, or has lost the WAL that its reader needs.
func slotFinding(name string, active, lost bool, held int64) finding {
	drop := fmt.Sprintf("SELECT pg_drop_replication_slot('%s');", name)
	if lost {
		return finding{"server.slot", severityWarning, fmt.Sprintf("replication slot %s has lost WAL that it kept for its reader", name),
			"Its reader cannot go on: max_slot_wal_keep_size has ended the slot. It lacks what was written since it stopped.",
			"Make the slot again, and have its reader begin with a new snapshot (outbox needs no slot). Or: " + drop}
	}
	reads := "nothing reads it"
	if active {
		reads = "it is read, too slowly"
	}
	return finding{"server.slot", severityWarning, fmt.Sprintf("replication slot %s holds %s MiB of WAL, and %s", name, count(held>>20), reads),
		"The server keeps that WAL until it is read. When the disk is full it stops, and nothing can be recorded.",
		"Start its reader (outbox needs no slot), bound it by max_slot_wal_keep_size, or: " + drop}
}

// clockLimit is the largest accepted difference between the clocks of this machine and of the database.
const clockLimit = 2 * time.Second

func (d *doctor) clock(ctx context.Context) error {
	var theirs time.Time
	before := d.e.now()
	asked := time.Now() // not e's, which a test may have set
	if err := pg.QueryRow(ctx, d.e.db, pg.SQLNow).Scan(&theirs); err != nil {
		return err
	}
	took := time.Since(asked)
	ahead := before.Add(took / 2).Sub(theirs)
	if ahead.Abs()-took/2 <= clockLimit {
		return nil
	}
	direction := "behind"
	if ahead > 0 {
		direction = "ahead of"
	}
	d.add("clock", severityWarning, fmt.Sprintf("the clock of this machine is %s %s that of the database", length(ahead.Abs()), direction),
		"Leases and ages go by the database's clock and stay right. The times of events and of records in Kafka go by that of your services: if it is wrong there too, Kafka's retention is off, and Kafka may refuse records.",
		"Run NTP or chrony on both machines.")
	return nil
}
