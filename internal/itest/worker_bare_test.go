package itest

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/internal/wait"
)

// slowReads delays the statement that reads the payload of a delivery that was claimed without it.
type slowReads struct {
	statementLog
	delay time.Duration
}

func (s *slowReads) TraceBatchStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceBatchStartData) context.Context {
	for _, q := range d.Batch.QueuedQueries {
		if strings.Contains(q.SQL, `coalesce(d.locked_by, '') = $3::text`) {
			s.note("read")
			wait.Sleep(ctx, s.delay)
		}
	}
	return ctx
}

// A payload that is claimed apart from its row may take longer to read than a codec may take to decode it: it is large,
// or PostgreSQL does not answer. No codec is blamed for that, and each has all of its time.
func TestWorkerReadsPayloadSlowly(t *testing.T) {
	t.Parallel()
	for name, delay := range map[string]time.Duration{
		"for longer than a codec is waited for": 4 * time.Second,
		"until the time of a codec is over":     1200 * time.Millisecond,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, log, reads := newWorkerFixture(t), new(workerLog), &slowReads{delay: delay}
			f.commit(step{"a", 1})
			counted := f.effects("COUNTED", nil)
			_, stop := f.start(outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}, counted)
			f.await(1)
			stop()
			f.exec(`DELETE FROM {schema}.effect`)
			f.exec(`DELETE FROM {schema}.event_handled`)
			f.exec(`UPDATE {schema}.event_delivery SET status = 'PENDING', last_error_code = 'stale', processed_at = NULL, attempt_count = 0, content_type = 'application/vnd.step+json'`)

			f.db = testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer = reads })
			cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{Logger: log.logger()}, PollInterval: 50 * time.Millisecond}
			cfg.HandlerTimeout, cfg.SlowHandler = time.Second, 500*time.Millisecond
			cfg.Codecs = []outbox.Codec{{ContentType: "application/vnd.step+json", Encode: outbox.JSON().Encode, Decode: func(ctx context.Context, data []byte, event any) error {
				if err := ctx.Err(); err != nil {
					return err
				}
				return outbox.JSON().Decode(ctx, data, event)
			}}}
			f.start(cfg, counted)
			require.Eventually(t, func() bool {
				return f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status IN ('DONE', 'DEAD') OR attempt_count > 1`) == 1
			}, testenv.Patience, 10*time.Millisecond)
			require.Equal(t, "DONE 1", f.text(`SELECT concat_ws(' ', status, attempt_count) FROM {schema}.event_delivery`), log.String())
			require.Contains(t, reads.since(), "read", "it was claimed with its payload")
			require.Zero(t, log.count("codec or upcaster"), log.String())
		})
	}
}
