package retention_test

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/retention"
	"github.com/outboxgo/outbox/internal/testenv"
)

// leadAs returns a store of a relay or a group with rules, and its lease.
func (d *fixture) leadAs(t *testing.T, name string, rules retention.Rules) (*retention.Store, *retention.Proof) {
	t.Helper()
	l, err := lease.NewStore(d.DB, d.Schema, name, time.Minute).Acquire(context.Background())
	require.NoError(t, err)
	return retention.NewStore(d.DB, d.Schema, rules), &retention.Proof{Lease: l, Relay: name}
}

// discard is an archive that keeps nothing.
func discard(context.Context, pgx.Tx, []retention.Row) error { return nil }

// The archive gets each event, although the cleaner of another relay, whose process has no archive, runs first: that
// one used to remove the events. The log says once why it removes nothing.
func TestArchiveMissesNothing(t *testing.T) {
	t.Parallel()
	for name, tables := range map[string]func(*testing.T) *fixture{
		"plain":       newFixture,
		"partitioned": func(t *testing.T) *fixture { return newPartitionsFixture(t, 10) },
	} {
		for archiver, said := range map[string]string{"shop": "archiving_relay=shop", "worker:stats": "archiving_group=stats"} {
			t.Run(name+", "+archiver, func(t *testing.T) {
				t.Parallel()
				d, ctx, log := tables(t), context.Background(), new(testenv.Buffer)
				var archived []int64
				a := d.cleanerAs(t, archiver, archiving(10, func(_ context.Context, _ pgx.Tx, rows []retention.Row) error {
					for _, e := range rows {
						archived = append(archived, e.OutboxID)
					}
					return nil
				}), slog.DiscardHandler)
				removed, err := a.CleanOutbox(ctx)
				require.NoError(t, err)
				require.Zero(t, removed)

				d.Insert(t, 35)
				d.age(t, "outbox", "created_at", "8 days")
				d.send(t, "default")
				d.send(t, "audit")
				recorded := d.IDs(t, "outbox")
				plain := d.cleanerAs(t, "analytics", inBatches(10), slog.NewTextHandler(log, nil))
				for range 2 {
					removed, err = plain.CleanOutbox(ctx)
					require.NoError(t, err)
					require.Zero(t, removed)
				}
				require.Equal(t, recorded, d.IDs(t, "outbox"))
				require.Equal(t, 1, strings.Count(log.String(), said), log.String())

				_, err = a.CleanOutbox(ctx)
				require.NoError(t, err)
				require.NotEmpty(t, archived)
				all := slices.Concat(archived, d.IDs(t, "outbox"))
				slices.Sort(all)
				require.Equal(t, recorded, slices.Compact(all))
			})
		}
	}
}

// cleanerAs is cleanerOn for a name.
func (d *fixture) cleanerAs(t *testing.T, name string, rules retention.Rules, log slog.Handler) *retention.Cleaner {
	t.Helper()
	r, l := d.leadAs(t, name, rules)
	return d.cleanerOn(r, l, slog.New(log))
}

// Statements without an archive remove nothing once a process archives that did not when their run began. They neither
// finish the review of a partition nor drop one that was reviewed. Of a name with two processes, only the one whose
// lease archives drops partitions.
func TestArchiveBeginsDuringARun(t *testing.T) {
	t.Parallel()
	d, ctx := full(t), context.Background()
	d.send(t, "default")
	plain, l := d.leadAs(t, "analytics", keep)
	v := d.first(t, plain, l)
	require.True(t, v.Done)
	d.Exec(t, `INSERT INTO {schema}.outbox_archiver (name, epoch) VALUES ('shop', 1)`)
	for name, remove := range map[string]func() (retention.Step, error){
		"plain": func() (retention.Step, error) { return plain.Published(ctx, l, 0) },
		"part":  func() (retention.Step, error) { return plain.PublishedIn(ctx, l, 0, 1000) },
	} {
		s, err := remove()
		require.NoError(t, err)
		require.Zero(t, s.Removed, name)
	}
	require.False(t, d.first(t, plain, l).Done)
	require.ErrorIs(t, dropWhole(plain, ctx, l, v), retention.ErrReview)
	require.Len(t, d.IDs(t, "outbox"), 25)

	d.Exec(t, `INSERT INTO {schema}.outbox_archiver (name, epoch) VALUES ('analytics', $1)`, l.Epoch-1)
	require.ErrorIs(t, dropWhole(plain, ctx, l, v), retention.ErrReview, "an earlier process has archived")
	d.Exec(t, `UPDATE {schema}.outbox_archiver SET epoch = $1 WHERE name = 'analytics'`, l.Epoch)
	require.NoError(t, dropWhole(plain, ctx, l, v))
	require.Len(t, d.IDs(t, "outbox"), 16)
}

// A cleaner with an archive notes that as soon as it leads, long before its first run, and so does that of the next
// leader.
func TestArchiverIsNotedAtOnce(t *testing.T) {
	t.Parallel()
	d := newFixture(t)
	for range 2 {
		d.Exec(t, `UPDATE {schema}.outbox_lease SET expires_at = '-infinity'`)
		r, l := d.leadAs(t, "shop", archiving(10, discard))
		log := slog.New(slog.DiscardHandler)
		c := retention.NewCleaner(lease.Leadership{Lease: l.Lease, Held: context.Background(), StatementTimeout: time.Minute},
			retention.CleanerConfig{Name: "shop", Rules: r.Cfg, Poll: time.Second}, r, func() bool { return false }, log, outage.NewLogs(log))
		testenv.Run(t, func(ctx context.Context) error { c.Run(ctx); return nil })
		require.Eventually(t, func() bool {
			return d.Count(t, `outbox_archiver AS a JOIN {schema}.outbox_lease AS l ON l.name = a.name AND l.epoch = a.epoch`) == 1
		}, testenv.Patience, 5*time.Millisecond)
	}
	require.Equal(t, 1, d.Count(t, "outbox_archiver"))
}

// An operator ends the archive, with a reason, once no process with an archive leads. Then events go without one.
func TestStopArchive(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	stop := func() (n int, err error) {
		err = d.DB.QueryRow(ctx, pg.InSchema(`SELECT {schema}.outbox_stop_archive('kim', 'too dear')`, d.Schema)).Scan(&n)
		return n, err
	}
	for _, name := range []string{"shop", "worker:stats"} {
		_, err := d.cleanerAs(t, name, archiving(10, discard), slog.DiscardHandler).CleanOutbox(ctx)
		require.NoError(t, err)
	}
	_, err := stop()
	require.Equal(t, "55000", pg.Code(err), "%v", err)
	require.ErrorContains(t, err, "shop")
	require.Equal(t, 2, d.Count(t, "outbox_archiver"))

	d.Exec(t, `UPDATE {schema}.outbox_lease SET expires_at = '-infinity'`)
	n, err := stop()
	require.NoError(t, err)
	require.Equal(t, 2, n)
	require.Equal(t, 1, d.Count(t, `outbox_audit WHERE action = 'stop-archive' AND operator = 'kim' AND reason = 'too dear' AND relay = 'shop' AND consumer_group IS NULL`))
	require.Equal(t, 1, d.Count(t, `outbox_audit WHERE action = 'stop-archive' AND relay = '' AND consumer_group = 'stats'`))
	n, err = stop()
	require.NoError(t, err)
	require.Zero(t, n)
	require.Equal(t, 2, d.Count(t, "outbox_audit"))

	d.Insert(t, 3)
	d.age(t, "outbox", "created_at", "8 days")
	d.send(t, "default")
	removed, err := d.cleanerAs(t, "analytics", keep, slog.DiscardHandler).CleanOutbox(ctx)
	require.NoError(t, err)
	require.EqualValues(t, 3, removed)
}

// A position that was not written in this cluster, or is ahead of it, keeps all rows, and the log has its name, once.
func TestForeignPositionIsNamed(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]string{
		"of another cluster": `system_identifier = system_identifier + 1`,
		"ahead":              `snapshot = '1000000000000:1000000000000:'`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, ctx, log := newFixture(t), context.Background(), new(testenv.Buffer)
			d.Insert(t, 3)
			d.age(t, "outbox", "created_at", "8 days")
			d.send(t, "default")
			d.Exec(t, `INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
				SELECT 'worker:mine', 3, pg_current_snapshot(), 3, system_identifier, 1 FROM pg_control_system()`)
			d.Exec(t, `UPDATE {schema}.outbox_cursor SET `+change+` WHERE relay = 'worker:mine'`)
			c := d.cleanerOf(t, keep, slog.New(slog.NewTextHandler(log, nil)))
			for range 4 {
				removed, err := c.CleanOutbox(ctx)
				require.NoError(t, err)
				require.Zero(t, removed)
			}
			require.Equal(t, 1, strings.Count(log.String(), "foreign_group=mine"), log.String())
			d.Exec(t, `DELETE FROM {schema}.outbox_cursor WHERE relay = 'worker:mine'`)
			removed, err := c.CleanOutbox(ctx)
			require.NoError(t, err)
			require.EqualValues(t, 3, removed)
		})
	}
}
