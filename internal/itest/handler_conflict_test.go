package itest

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// conflicts has the first n statements of a kind on a table roll back for a serialization failure.
const conflicts = `
CREATE SEQUENCE {schema}.conflicts;
CREATE FUNCTION {schema}.conflict() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF nextval('{schema}.conflicts') <= TG_ARGV[0]::int THEN
        RAISE EXCEPTION 'could not serialize access due to read/write dependencies' USING ERRCODE = 'serialization_failure';
    END IF;
    RETURN NULL;
END $$`

// PostgreSQL may roll a handler's transaction back in a statement of ours: of the note, or of the end of the delivery.
// Such a conflict is no outage of PostgreSQL, and uses up no attempt.
func TestConflictsAreNoOutage(t *testing.T) {
	t.Parallel()
	const most = 16 // more than are repeated as a batch and alone
	for name, on := range map[string]string{
		"of the note": `CREATE CONSTRAINT TRIGGER c AFTER INSERT ON {schema}.event_handled FOR EACH ROW EXECUTE FUNCTION {schema}.conflict(16)`,
		"of the delivery": `CREATE CONSTRAINT TRIGGER c AFTER UPDATE ON {schema}.event_delivery FOR EACH ROW WHEN (NEW.status = 'DONE')
		                    EXECUTE FUNCTION {schema}.conflict(16)`,
	} {
		t.Run("worker "+name, func(t *testing.T) {
			t.Parallel()
			f := newWorkerFixture(t)
			f.exec(conflicts)
			f.exec(on)
			log := new(workerLog)
			cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Logger: log.logger()}}
			cfg.Retry.MaxRetries = -1
			f.start(cfg, f.effects("COUNTED", nil))
			f.commit(step{"a", 1}, step{"a", 2}, step{"b", 1})
			f.await(3)
			f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE'`, 3)
			require.Greater(t, f.count(`SELECT last_value::int FROM {schema}.conflicts`), most)
			require.NotContains(t, log.String(), "PostgreSQL fails")
			require.NotContains(t, log.String(), "works again")
			require.Contains(t, log.String(), "transaction conflicts with another one")
		})
	}
	t.Run("consumer", func(t *testing.T) {
		t.Parallel()
		s := newConsumerFixture(t, 1)
		for _, sql := range []string{conflicts, `CREATE CONSTRAINT TRIGGER c AFTER INSERT ON {schema}.event_handled FOR EACH ROW EXECUTE FUNCTION {schema}.conflict(16)`} {
			_, err := s.db.Exec(background, pg.InSchema(sql, s.schema))
			require.NoError(t, err)
		}
		log := new(testenv.Buffer)
		cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Logger: slog.New(slog.NewTextHandler(log, nil))}}
		cfg.Retry.MaxRetries = -1
		testenv.Run(t, s.relay(t, quick).Run)
		testenv.Run(t, s.consumer(t, cfg, outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
			return s.count(ctx, tx, e, m)
		})).Run)
		s.sell(t, sale{Product: "a", Amount: 1}, sale{Product: "b", Amount: 1}, sale{Product: "c", Amount: 1})
		require.Eventually(t, func() bool { return len(s.counts(t)) == 3 }, testenv.Patience, 10*time.Millisecond)
		require.NotContains(t, log.String(), "PostgreSQL fails")
		require.Contains(t, log.String(), "transaction conflicts with another one")
		require.NotContains(t, s.parked(t), "DEAD")
	})
}
