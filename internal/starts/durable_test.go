package starts

import (
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// sqlNoteWrites notes under which synchronous_commit rows are written.
const sqlNoteWrites = `
CREATE TABLE {schema}.writes (at text NOT NULL);
CREATE FUNCTION {schema}.note_write() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO {schema}.writes VALUES (current_setting('synchronous_commit'));
    RETURN NULL;
END $$;
CREATE TRIGGER note_write AFTER INSERT OR UPDATE ON {schema}.consumer_start FOR EACH ROW EXECUTE FUNCTION {schema}.note_write();
CREATE TRIGGER note_write AFTER INSERT OR UPDATE ON {schema}.consumer_handler FOR EACH ROW EXECUTE FUNCTION {schema}.note_write();
CREATE TRIGGER note_write AFTER INSERT OR UPDATE ON {schema}.consumer_gap FOR EACH ROW EXECUTE FUNCTION {schema}.note_write()`

// What Kafka is told next depends on what the store has written: that must survive a crash of PostgreSQL, whatever the
// role's synchronous_commit is.
func TestWritesAreDurable(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	db, schema := testenv.Migrated(t)
	_, err := db.Exec(t.Context(), pg.InSchema(sqlNoteWrites, schema), pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	relaxed := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["synchronous_commit"] = "off" })
	s, id := NewStore(relaxed, schema, "g"), kafka.TopicID{1}
	at := Offset{Partition: kafka.Partition{Topic: "sales"}, Topic: id, At: 5}
	for _, write := range []struct {
		name string
		do   func() error
	}{
		{"list", func() error {
			return s.list(t.Context(), map[string]topic{"sales": {id: id, partitions: map[int32]partition{0: {position: None}}}})
		}},
		{"register", func() error { return s.register(t.Context(), "sales", id, []Handler{count}, map[int32]int64{0: 5}) }},
		{"begin", func() error { return s.Begin(t.Context(), []Offset{at}) }},
		{"open", func() error { return s.open(t.Context(), []Gap{{Handler: sum, From: 5, id: id}}) }},
		{"pass", func() error {
			gaps := requireGaps(t, s, 5)
			gaps[0].From = 6
			return s.pass(t.Context(), gaps, 9)
		}},
		{"assign", func() error { _, err := s.assign(t.Context(), uuid.NewString(), []Offset{at}); return err }},
		{"suspect", func() error { _, err := s.suspect(t.Context(), at, false); return err }},
		{"save", func() error { return s.Save(t.Context(), uuid.NewString(), []Offset{at}) }},
	} {
		require.NoError(t, write.do(), write.name)
		rows, err := db.Query(t.Context(), pg.InSchema(`DELETE FROM {schema}.writes RETURNING at`, schema))
		require.NoError(t, err)
		settings, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		require.NotEmpty(t, settings, write.name)
		for _, setting := range settings {
			assert.Equal(t, "local", setting, write.name)
		}
	}
}
