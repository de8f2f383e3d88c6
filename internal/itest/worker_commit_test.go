package itest

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// lateCommits has each COMMIT of an effect take a time, as while PostgreSQL waits for a synchronous standby. If a
// client cancels that wait, PostgreSQL commits without the standby. Here it rolls back.
func (f *workerFixture) lateCommits(took time.Duration) {
	f.t.Helper()
	f.exec(fmt.Sprintf(`CREATE FUNCTION {schema}.late() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(%v); RETURN NULL; END $$`, took.Seconds()))
	f.exec(`CREATE CONSTRAINT TRIGGER late AFTER INSERT ON {schema}.effect DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION {schema}.late()`)
}

// The COMMIT of a handler is not cancelled when the claim of its event ends, whose lease cannot be renewed meanwhile,
// or when the worker stops.
func TestCommitIsNotCancelled(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // which sessions are whose
	for name, tt := range map[string]struct {
		commit, lease, stop time.Duration // stop is a StopTimeout, or 0
		within              bool          // the commit ends before the worker has stopped
	}{
		"the claim ends":          {commit: 3 * time.Second, lease: time.Second},
		"a stop cuts attempts":    {commit: 1500 * time.Millisecond, lease: time.Minute, stop: 2 * time.Second, within: true},
		"a stop does not wait":    {commit: 3 * time.Second, lease: time.Minute, stop: time.Second},
		"a stop behind the claim": {commit: 4 * time.Second, lease: time.Second, stop: time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newWorkerFixture(t)
			f.lateCommits(tt.commit)
			db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["application_name"] = f.schema })
			cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, StopTimeout: tt.stop}, Lease: tt.lease, PollInterval: 20 * time.Millisecond}
			var calls atomic.Int64
			f.commit(step{"a", 1})
			stop := testenv.Run(t, f.worker(db, "bank", cfg, f.effects("COUNTED", func(step, outbox.Metadata) error {
				calls.Add(1)
				return nil
			})).Run)
			f.eventually(`SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND application_name = '`+f.schema+`'`, 1)
			if tt.stop > 0 {
				began := time.Now()
				stop()
				require.Less(t, time.Since(began), tt.stop+500*time.Millisecond)
				require.Equal(t, tt.within, f.count(`SELECT count(*) FROM {schema}.effect`) == 1)
				db.Close() // it does not wait for the COMMIT
				require.Less(t, time.Since(began), tt.stop+time.Second)
			}
			f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND attempt_count = 1`, 1)
			require.Equal(t, 1, f.count(`SELECT count(*) FROM {schema}.effect`))
			require.EqualValues(t, 1, calls.Load())
		})
	}
}
