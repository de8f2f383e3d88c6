package itest

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
)

// published is a counter whose outbox is in a publication.
type published struct {
	*counter
	name string // of the publication
}

func newPublished(t testing.TB, partitionRows int64) *published {
	t.Helper()
	p := &published{counter: newCounter(t, parcels(t)), name: fmt.Sprintf("test_%.8s", uuid.NewString())}
	t.Cleanup(func() { p.exec(t, `DROP PUBLICATION IF EXISTS `+pgx.Identifier{p.name}.Sanitize()) })
	if partitionRows > 0 {
		require.NoError(t, outbox.Migrate(background, p.db, outbox.MigrateConfig{Schema: p.schema, PartitionRows: partitionRows}))
	}
	return p
}

func (p *published) migrate() error {
	return outbox.Migrate(background, p.db, outbox.MigrateConfig{Schema: p.schema, Publication: p.name})
}

func (p *published) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	_, err := p.db.Exec(background, p.sql(sql), args...)
	require.NoError(t, err)
}

func (p *published) record(t testing.TB, events ...outbox.DomainEvent) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(background, p.db, func(tx pgx.Tx) error { return p.rec.Record(background, tx, events...) }))
}

// text returns a column of texts in one line.
func (p *published) text(t testing.TB, sql string) (text string) {
	t.Helper()
	require.NoError(t, p.db.QueryRow(background, p.sql(`SELECT coalesce(string_agg(v::text, ' ' ORDER BY n), '') FROM (`+sql+`) AS all_of (n, v)`)).Scan(&text))
	return text
}

func (p *published) tables(t testing.TB) string {
	t.Helper()
	return p.text(t, fmt.Sprintf(`SELECT 1, tablename FROM pg_publication_tables WHERE pubname = '%s' AND schemaname = '%s'`, p.name, p.schema))
}

const sqlForeignEvent = `
INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, partition_key, occurred_at)
VALUES (gen_random_uuid(), $1, 'elsewhere', 'Parcel', 'a-1', '{}', 'application/json', $2, $3, now())`

// Each row has its topic and its key, as a relay would derive them, whichever client inserts it.
func TestPublishedRowsAreComplete(t *testing.T) {
	t.Parallel()
	for name, rows := range map[string]int64{"plain": 0, "partitioned": 100} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPublished(t, rows)
			p.record(t, good)
			require.Equal(t, "<NULL>", p.text(t, `SELECT id, coalesce(topic, partition_key, '<NULL>') FROM {s}.outbox`), "off by default")
			require.NoError(t, p.migrate())

			p.record(t, good)
			p.record(t, good, good, rawParcel{parcel{ID: "raw", Sent: noon, Address: "kim", Content: []byte("x")}})
			many := make([]outbox.DomainEvent, 600) // by COPY
			for i := range many {
				many[i] = good
			}
			p.record(t, many...)
			topic, key := "Other.topic_1", "k"
			p.exec(t, sqlForeignEvent, "acme.order.created.v1", nil, nil)
			p.exec(t, sqlForeignEvent, "NO_TOPIC", topic, key)

			require.Equal(t, "603 parcel-events/good 1 raw/kim 1 order-events/a-1 1 Other.topic_1/k", p.text(t, `SELECT min(id), count(*) || ' ' || topic || '/' || partition_key FROM {s}.outbox WHERE id > 1 GROUP BY topic, partition_key`))
		})
	}
}

// What would stop a connector for ever is refused, and the error names the column.
func TestPublishedRowsAreRefused(t *testing.T) {
	t.Parallel()
	p := newPublished(t, 0)
	require.NoError(t, p.migrate())
	for _, tt := range []struct {
		eventType string
		topic     any
		column    string
	}{
		{"NO_TOPIC", nil, "event_type 'NO_TOPIC'"}, {"a..b", nil, "event_type"}, {"주문.a", nil, "event_type"}, {"", nil, "event_type"},
		{"a.b", "", "column topic is ''"}, {"a.b", "..", "column topic"}, {"a.b", "a b", "column topic"}, {"a.b", "주문", "column topic"}, {"a.b", "a\n", "column topic"},
	} {
		_, err := p.db.Exec(background, p.sql(sqlForeignEvent), tt.eventType, tt.topic, nil)
		require.Equal(t, "23514", pg.Code(err), "%q %q: %v", tt.eventType, tt.topic, err)
		require.ErrorContains(t, err, tt.column)
	}
	require.Empty(t, p.text(t, `SELECT id, id FROM {s}.outbox`))
}

// Migrate may be called at every start: it makes the publication once, and leaves its tables alone.
func TestPublication(t *testing.T) {
	t.Parallel()
	p := newPublished(t, 100)
	require.NoError(t, p.migrate())
	require.Equal(t, "outbox", p.tables(t), "changes of partitions are those of outbox")
	require.Equal(t, "true false false false true", p.text(t, fmt.Sprintf(`SELECT 1, concat_ws(' ', pubinsert::text, pubupdate::text, pubdelete::text, pubtruncate::text, pubviaroot::text)
		FROM pg_publication WHERE pubname = '%s'`, p.name)), "rows that retention removes are no events")
	require.NoError(t, p.migrate())

	quoted := pgx.Identifier{p.name}.Sanitize()
	p.exec(t, `ALTER PUBLICATION `+quoted+` DROP TABLE {s}.outbox`)
	require.NoError(t, p.migrate())
	require.Empty(t, p.tables(t), "a relay sends the events now")

	p.exec(t, `DROP PUBLICATION `+quoted)
	p.exec(t, `INSERT INTO {s}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch) VALUES ('main', 0, pg_current_snapshot(), 0, 1, 1)`)
	require.NoError(t, p.migrate())
	require.Empty(t, p.tables(t), "a relay has sent events here")
	p.exec(t, `DELETE FROM {s}.outbox_cursor`)

	p.exec(t, `ALTER PUBLICATION `+quoted+` SET (publish = 'insert, delete')`)
	require.ErrorContains(t, p.migrate(), "is there with other options")
	for _, name := range []string{"a b", "Shop", "주문", "1a", strings.Repeat("a", 64)} {
		err := outbox.Migrate(background, p.db, outbox.MigrateConfig{Schema: p.schema, Publication: name})
		require.ErrorIs(t, err, outbox.ErrMalformed)
		require.ErrorContains(t, err, "field Publication")
	}
}

// Of all transactions, only one that has recorded something delays the trigger.
func TestPublicationWaits(t *testing.T) {
	t.Parallel()
	p := newPublished(t, 0)
	tx := p.begin(t)
	require.NoError(t, p.rec.Record(background, tx, good))
	done := make(chan error, 1)
	go func() { done <- p.migrate() }()
	p.record(t, good) // others go on
	select {
	case err := <-done:
		t.Fatalf("Migrate did not wait: %v", err)
	default:
	}
	require.NoError(t, tx.Commit(background))
	require.NoError(t, <-done)
	p.record(t, good)
	require.Equal(t, "parcel-events", p.text(t, `SELECT id, topic FROM {s}.outbox`))
}

// Only the owner of a publication can mark it for cuts. The error names him, and the statement that he has to run.
func TestPublicationOfAnotherRole(t *testing.T) {
	t.Parallel()
	p := newPublished(t, 0)
	require.NoError(t, p.migrate())
	role := fmt.Sprintf("dba_%.8s", uuid.NewString())
	quoted := pgx.Identifier{p.name}.Sanitize()
	p.exec(t, `DROP PUBLICATION `+quoted+`; CREATE PUBLICATION `+quoted+` WITH (publish = 'insert', publish_via_partition_root = true); CREATE ROLE `+role)
	t.Cleanup(func() { p.exec(t, `DROP OWNED BY `+role+`; DROP ROLE `+role) })
	p.exec(t, `GRANT USAGE ON SCHEMA {s} TO `+role+`; GRANT EXECUTE ON FUNCTION {s}.outbox_publish(text) TO `+role)
	err := pgx.BeginFunc(background, p.db, func(tx pgx.Tx) error {
		_, err := tx.Exec(background, p.sql(`SET LOCAL ROLE `+role+`; SELECT {s}.outbox_publish('`+p.name+`')`))
		return err
	})
	require.Equal(t, "42501", pg.Code(err), "%v", err)
	owner := p.text(t, `SELECT 1, pg_get_userbyid(pubowner) FROM pg_publication WHERE pubname = '`+p.name+`'`)
	require.ErrorContains(t, err, "publication "+p.name+" belongs to role "+owner+", which has to run COMMENT ON PUBLICATION "+p.name+" IS 'outbox: ")
	require.NoError(t, p.migrate())
}
