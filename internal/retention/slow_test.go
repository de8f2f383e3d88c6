package retention_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/retention"
	"github.com/outboxgo/outbox/internal/testenv"
)

// slowArchive is an archive that has time for so many rows at once, and none for a row with the id never.
type slowArchive struct {
	most  int
	never int64
	sizes []int // of the batches that it got
}

func (a *slowArchive) archive(ctx context.Context, _ pgx.Tx, rows []retention.Row) error {
	a.sizes = append(a.sizes, len(rows))
	for _, row := range rows {
		if len(rows) > a.most || row.OutboxID == a.never {
			<-ctx.Done()
		}
	}
	return ctx.Err()
}

// slowly cleans outbox with such an archive, in batches of eight.
func (d *fixture) slowly(t *testing.T, a *slowArchive) (removed int64, log *testenv.Buffer, err error) {
	t.Helper()
	log = new(testenv.Buffer)
	c := d.cleanerOf(t, archiving(8, a.archive), slog.New(slog.NewTextHandler(log, nil)))
	c.StatementTimeout = time.Second
	removed, err = c.CleanOutbox(context.Background())
	return removed, log, err
}

// A batch that takes too long is halved until it does not, and the batches after it grow again.
func TestSlowBatchShrinks(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		fixture func(*testing.T) *fixture
		removed int
	}{
		"plain":       {func(t *testing.T) *fixture { d := newFixture(t); d.Insert(t, 16); return d }, 16},
		"partitioned": {full, 19},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := test.fixture(t)
			d.send(t, "default")
			d.age(t, "outbox", "created_at", "8 days")
			slow := slowArchive{most: 3}
			removed, log, err := d.slowly(t, &slow)
			require.NoError(t, err)
			require.EqualValues(t, test.removed, removed)
			require.Equal(t, []int{8, 4, 2, 4, 2}, slow.sizes[:5], "it grows again")
			require.Contains(t, log.String(), "rows=4")
			require.NotContains(t, log.String(), "cannot be archived")
		})
	}
}

// A row that takes too long alone is named.
func TestSlowRowIsNamed(t *testing.T) {
	t.Parallel()
	d := newFixture(t)
	d.Insert(t, 8)
	d.send(t, "default")
	d.age(t, "outbox", "created_at", "8 days")
	slow := slowArchive{most: 8, never: 6}
	removed, log, err := d.slowly(t, &slow)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "row 6 of outbox")
	require.EqualValues(t, 5, removed)
	require.Equal(t, []int64{6, 7, 8}, d.IDs(t, "outbox"))
	require.NotContains(t, log.String(), "cannot be archived", "PostgreSQL can print it")
}
