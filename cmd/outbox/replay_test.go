package main

import (
	"encoding/json"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxarchive"
)

// Events are counted first and sent with --yes, from outbox, the archive, and files.
func TestReplayCommand(t *testing.T) {
	t.Parallel()
	d := newShop(t).withKafka(t)
	d.record(t, "a", "b", "a")
	stop := d.relay(t)
	defer stop()
	table, err := outboxarchive.NewTable(d.db, outboxarchive.TableConfig{Schema: d.schema, OutboxSchema: d.schema})
	require.NoError(t, err)
	require.NoError(t, table.Ensure(background))
	folder := t.TempDir()
	d.archiveInto(t, folder)

	text := d.ok(t, "replay", "--schema", d.schema)
	require.Contains(t, text, "would send 3, not 0; --yes does it")
	require.Contains(t, text, "test.thing.happened.v1")
	a := d.call(t, "replay", "--schema", d.schema, "--key", "a", "--yes", "--reason", "why", "--operator", "kim")
	require.Equal(t, exitOK, a.code, a.err)
	require.Regexp(t, `sent 2, not 0 \(to go on: --until 2\S+Z --after 3\)`, a.out)
	require.Regexp(t, `^to go on: outbox replay --key a --operator kim --reason why --schema `+regexp.QuoteMeta(word(d.schema))+` --until 2\S+Z --yes\n$`, a.err)
	var out struct {
		Dry       bool                `json:"dry_run"`
		Sent      int                 `json:"sent"`
		Read      int                 `json:"read"`
		Older     int                 `json:"older"`
		Forgotten int                 `json:"forgotten"`
		NotSent   int                 `json:"not_sent"`
		Next      int64               `json:"next"`
		Since     *time.Time          `json:"since"`
		Until     time.Time           `json:"until"`
		GoOn      string              `json:"go_on"`
		Counts    []replayCountJSON   `json:"counts"`
		Failed    []replayFailureJSON `json:"failed"`
	}
	d.json(t, &out, exitOK, "replay", "--schema", d.schema, "--archive", d.schema, "--aggregate", "Thing/b")
	require.True(t, out.Dry)
	require.Equal(t, 1, out.Sent)
	require.Equal(t, d.topic, out.Counts[0].Topic)
	d.json(t, &out, exitOK, "replay", "--schema", d.schema, "--files", folder, "--after", "1", "--yes", "--reason", "why", "--operator", "kim")
	require.Equal(t, 2, out.Sent)
	require.Contains(t, out.GoOn, " --after 3 ")
	require.Contains(t, out.GoOn, " --until "+instant(out.Until))
	require.Contains(t, d.ok(t, "replay", "--schema", d.schema, "--since", "1m", "--type", "none"), "would send 0")
	require.Contains(t, d.ok(t, "audit", "--schema", d.schema, "--action", "replay"), "kim")

	for args, says := range map[string]string{
		"--yes":                         "which events?",
		"--since 1d --yes":              "--reason",
		"--again":                       "--again needs --group",
		"--again=1h":                    "--again needs --group",
		"--group g --again=2999-01-02":  "in the future",
		"--files x --archive y":         "only one of them",
		"--files /no/such/folder":       "no such file",
		"--archive nowhere":             "outbox_archive is missing",
		"--id x":                        "want a UUID",
		"--since 2026-01-02 --until 1x": "--until",
	} {
		a := d.call(t, append([]string{"replay", "--schema", d.schema}, strings.Fields(args)...)...)
		require.NotEqual(t, exitOK, a.code, args)
		require.Contains(t, strings.Join(strings.Fields(a.err), " "), says, args)
	}
}

// Events that retention has removed since the count are not sent, and the command says so.
func TestReplayBesideRetention(t *testing.T) {
	t.Parallel()
	d := newShop(t).withKafka(t)
	d.record(t, "a")
	testenv.CreateTopic(t, d.brokers, d.topic, 1)
	_, err := d.db.Exec(background, pg.InSchema(`INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, occurred_at)
		SELECT gen_random_uuid(), event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, now() FROM {schema}.outbox, generate_series(1, 1499)`, d.schema))
	require.NoError(t, err)
	_, err = d.db.Exec(background, pg.InSchema(`CREATE FUNCTION {schema}.retain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN DELETE FROM {schema}.outbox; RETURN NULL; END $$;
		CREATE TRIGGER retain AFTER INSERT ON {schema}.outbox_audit FOR EACH ROW EXECUTE FUNCTION {schema}.retain()`, d.schema))
	require.NoError(t, err)
	a := d.call(t, "replay", "--schema", d.schema, "--since", "1h", "--yes", "--rate", "-1", "--reason", "why")
	require.Equal(t, exitOK, a.code, a.err)
	require.Contains(t, a.out, "sent 1,000, not 0")
	require.Contains(t, a.out, "500 of those that were counted are gone")
}

// archiveInto writes the events in outbox to files.
func (d *commandFixture) archiveInto(t testing.TB, path string) {
	t.Helper()
	folder, err := outboxarchive.OpenFolder(path)
	require.NoError(t, err)
	files, err := outboxarchive.NewFiles(folder, outboxarchive.FilesConfig{})
	require.NoError(t, err)
	source, err := outboxarchive.Recorded(d.db, d.schema)
	require.NoError(t, err)
	for e, err := range source.Events(background, outboxarchive.Filter{}) {
		require.NoError(t, err)
		require.NoError(t, files.Archive(background, pgx.Tx(nil), []outbox.ArchivedEvent{e}))
	}
}

// The archive is made, shown and expired by commands.
func TestArchiveCommands(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	a := d.call(t, "archive", "status", "--schema", d.schema)
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.err, "outbox_archive is missing")
	require.Contains(t, d.ok(t, "archive", "create", "--schema", d.schema), "outbox_archive_")
	d.exec(t, `SELECT {s}.outbox_archive_prepare(ARRAY['2001-02-03'::timestamptz])`)
	require.Regexp(t, `outbox_archive_2001_02 +2001-02-01 +2001-03-01 .* yes`, d.ok(t, "archive", "status", "--schema", d.schema))
	require.NotContains(t, d.ok(t, "archive", "status", "--schema", d.schema, "--months", "-1"), "yes")
	require.Contains(t, d.ok(t, "archive", "expire", "--schema", d.schema), "--yes does it")
	require.Contains(t, d.ok(t, "archive", "expire", "--schema", d.schema, "--yes", "--reason", "five years are over"), "Dropped.")
	require.Contains(t, d.ok(t, "archive", "expire", "--schema", d.schema), "No such partitions.")
	var out struct{ Partitions []partitionJSON }
	d.json(t, &out, exitOK, "archive", "status", "--schema", d.schema)
	require.Len(t, out.Partitions, 4)
}

// Dropping partitions needs an operator and a reason, and the audit names each partition.
func TestArchiveExpireIsAudited(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	d.ok(t, "archive", "create", "--schema", d.schema)
	d.exec(t, `SELECT {s}.outbox_archive_prepare(ARRAY['2001-02-03', '2001-03-03']::timestamptz[])`)
	expire := func(args ...string) []string {
		return append([]string{"archive", "expire", "--schema", d.schema, "--yes"}, args...)
	}
	for _, args := range [][]string{{}, {"--reason", "\t"}, {"--reason", "over", "--operator", "\u200b"}} {
		a := d.call(t, expire(args...)...)
		require.Equal(t, exitUsage, a.code, "%q: %s", args, a.out)
	}
	var out struct {
		Audit []auditJSON
		More  bool
	}
	d.json(t, &out, exitOK, "audit", "--schema", d.schema)
	require.Empty(t, out.Audit)
	require.Contains(t, d.ok(t, "archive", "expire", "--schema", d.schema), "outbox_archive_2001_02")

	require.Contains(t, d.ok(t, expire("--operator", "kim", "--reason", "five years are over")...), "Dropped.")
	d.json(t, &out, exitOK, "audit", "--schema", d.schema, "--action", "expire")
	require.Len(t, out.Audit, 2)
	for i, name := range []string{"outbox_archive_2001_03", "outbox_archive_2001_02"} {
		a := out.Audit[i]
		require.Equal(t, []string{"expire", "kim", "five years are over", d.schema + "." + name, "", ""}, []string{a.Action, a.Operator, a.Reason, a.Key, a.Topic, a.Relay})
	}
	require.Regexp(t, `expire +partition .*\.outbox_archive_2001_02 +kim`, d.ok(t, "audit", "--schema", d.schema))
}

// Without --yes the command lists what it would drop, and says why it keeps more: as with --yes.
func TestArchiveExpireKeepsForGroup(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	d.ok(t, "archive", "create", "--schema", d.schema)
	d.exec(t, `SELECT {s}.outbox_archive_prepare(ARRAY['2001-01-03', '2001-02-03', '2001-03-03']::timestamptz[])`)
	d.exec(t, `INSERT INTO {s}.outbox_archive (id, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, created_at, size)
		SELECT n, gen_random_uuid(), 'a.b.c.v1', 's', 'a', 'k', '{}', 'application/json', at, at, 2
		  FROM (VALUES (1, timestamptz '2001-01-03'), (2, '2001-02-03'), (3, '2001-03-03')) AS e (n, at)`)
	d.exec(t, `INSERT INTO {s}.event_subscription (consumer_group, state, started) VALUES ('mail', 'starting', 1)`)
	var names [2][]string
	for i, args := range [][]string{{}, {"--yes", "--reason", "five years are over"}} {
		a := d.call(t, append([]string{"archive", "expire", "--schema", d.schema, "--json"}, args...)...)
		require.Equal(t, exitError, a.code, "%q: %s", args, a.out)
		require.Contains(t, a.err, "outbox_archive_2001_02")
		require.Contains(t, a.err, "group mail is starting, and has got its events up to outbox id 1 of 2")
		var out struct{ Partitions []partitionJSON }
		require.NoError(t, json.Unmarshal([]byte(a.out), &out), a.out)
		for _, p := range out.Partitions {
			names[i] = append(names[i], p.Name)
		}
	}
	require.Equal(t, []string{"outbox_archive_2001_01"}, names[1])
	require.Equal(t, names[1], names[0])
	a := d.call(t, "archive", "expire", "--schema", d.schema)
	require.NotContains(t, a.out, "2001", "what is kept is not listed")
	require.Contains(t, a.err, "group mail is starting")
}

// A replay with --again has removed the notes of the group before Kafka rejects the events, and says so.
func TestReplayAgainIsStopped(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newShop(t)
	cluster := d.withFakeKafka(t, kfake.SeedTopics(1, d.topic, outbox.DeadLetterTopic(d.topic)))
	d.record(t, "a", "b")
	d.exec(t, `INSERT INTO {s}.event_handled (consumer_group, aggregate_type, aggregate_id, action, event_source)
		SELECT 'stats', event_type, event_id::text, 'COUNTED', source FROM {s}.outbox`)
	cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: d.topic, Err: kerr.TopicAuthorizationFailed, Count: -1})
	a := d.call(t, "replay", "--group", "stats", "--again", "--since", "1h", "--yes", "--reason", "x")
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.out, "sent 0, not 1 (to go on: ")
	require.Contains(t, strings.Join(strings.Fields(a.out), " "), "2 notes of group stats are removed, and none of their events is sent")
}
