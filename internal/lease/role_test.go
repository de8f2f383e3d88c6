package lease_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A role that could not take its lease in an outage of PostgreSQL reports the end of the outage before it works. If it
// reported the end after the work, a worker would not be ready for as long as it has the lease.
func TestRoleReportsLeaseBeforeWork(t *testing.T) {
	t.Parallel()
	_, schema := testenv.Migrated(t)
	errDial := errors.New("PostgreSQL is down")
	var down atomic.Bool
	db := testenv.Pool(t, func(c *pgxpool.Config) {
		c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			if down.Load() {
				return nil, errDial
			}
			return new(net.Dialer).DialContext(ctx, network, address)
		}
	})
	down.Store(true)
	var reports testenv.Kept[error]
	atWork, epochs := make(chan []error), make(chan int64, 1)
	role := &lease.Role{
		Lease: lease.NewGroupLease(db, schema, "worker:bank", time.Second), Name: "the lease of the test",
		Cut: context.Background(), StopTimeout: time.Second, Log: slog.New(slog.DiscardHandler),
		Work: func(ctx context.Context, _ lease.Leadership) {
			select {
			case atWork <- reports.All():
			case <-ctx.Done():
			}
			<-ctx.Done()
		},
		Alert: func(ctx context.Context) {
			epochs <- lease.EpochOf(ctx)
			<-ctx.Done()
		},
		Report: func(_ time.Time, err error) {
			reports.Add(err)
			down.Store(false)
		},
	}
	testenv.Run(t, func(ctx context.Context) error { role.Run(ctx); return nil })
	select {
	case before := <-atWork:
		require.Len(t, before, 2)
		require.ErrorIs(t, before[0], errDial)
		require.NoError(t, before[1])
		require.EqualValues(t, 1, <-epochs)
	case <-time.After(testenv.Patience):
		require.Fail(t, "the role does not work")
	}
}
