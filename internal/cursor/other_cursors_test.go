package cursor_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	cursors "github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/lease"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// The cursors that others use, put in place of ours, fail where ours does not,
// each in its own way. What they do is in the ids that SQLOpen reads and in
// their order; all else is ours.
type otherCursor struct {
	name  string
	ids   string // replaces the ids that SQLOpen reads
	order string // replaces the order in which they are looked up
	fails map[string]flaw
}

var otherCursors = []otherCursor{
	{
		name: "snapshot windows, ours", ids: cursors.SQLOpen, // unchanged
	},
	{
		name:  "id",
		ids:   `SELECT id FROM {schema}.outbox WHERE id > $10::bigint ORDER BY id LIMIT $7`,
		fails: map[string]flaw{"late commit": lost, "early id, late row": lost},
	},
	{
		name: "id guarded by xmin",
		ids: `SELECT id FROM {schema}.outbox WHERE id > $10::bigint AND xid < pg_snapshot_xmin(pg_current_snapshot())
		       ORDER BY id LIMIT $7`,
		fails: map[string]flaw{"early id, late row": lost, "open transaction": stalled, "open transaction elsewhere": stalled,
			"third one open": lost},
	},
	{
		name: "(xid, id) below xmin",
		ids: `SELECT id FROM {schema}.outbox o
		       WHERE xid < pg_snapshot_xmin(pg_current_snapshot())
		         AND (xid, id) > (coalesce((SELECT p.xid FROM {schema}.outbox p WHERE p.id = $9), '1'::xid8), $9::bigint)
		       ORDER BY xid, id LIMIT $7`,
		order: "xid, id",
		fails: map[string]flaw{"early transaction id": inverted, "third one open": inverted,
			"open transaction": stalled, "open transaction elsewhere": stalled},
	},
	{
		name: "window up to xmin, by id",
		ids: `SELECT id FROM {schema}.outbox
		       WHERE xid >= pg_snapshot_xmin($5::pg_snapshot) AND xid < pg_snapshot_xmin(pg_current_snapshot())
		       ORDER BY id LIMIT $7`,
		fails: map[string]flaw{"third one open": inverted,
			"open transaction": stalled, "open transaction elsewhere": stalled},
	},
}

type flaw string

const (
	none     flaw = ""
	lost     flaw = "an event is lost"
	stalled  flaw = "events wait for another transaction"
	inverted flaw = "version 2 comes before version 1"
)

// No other test may have a transaction open in the cluster meanwhile: most of these cursors wait
// for it.
func TestOtherCursorsFail(t *testing.T) {
	testenv.Long(t)
	// Not parallel: most of these cursors wait for any transaction that is open in the cluster.
	for _, cursor := range otherCursors {
		for _, play := range plays {
			t.Run(cursor.name+"/"+play.name, func(t *testing.T) {
				d := newStage(t, cursor)
				require.Equal(t, cursor.fails[play.name], play.run(t, d))
			})
		}
	}
}

// plays are short stories of transactions. Each returns how the cursor failed.
var plays = []struct {
	name string
	run  func(*testing.T, *stage) flaw
}{
	{"late commit", func(t *testing.T, s *stage) flaw {
		late := s.begin(t)
		s.insert(t, late, 1)
		s.commit(t, s.inserted(t, 2))
		s.poll(t)
		s.commit(t, late)
		s.poll(t)
		return s.flawOf(1, 2)
	}},
	{"early id, late row", func(t *testing.T, s *stage) flaw {
		first, second := s.begin(t), s.begin(t)
		s.takeID(t, first)
		s.takeID(t, second)
		s.insert(t, second, 1)
		s.insert(t, first, 2)
		s.commit(t, first)
		s.poll(t)
		s.commit(t, second)
		s.poll(t)
		return s.flawOf(1, 2)
	}},
	{"open transaction", func(t *testing.T, s *stage) flaw {
		open := s.begin(t)
		s.takeID(t, open)
		s.commit(t, s.inserted(t, 1))
		s.poll(t)
		if len(s.read) == 0 {
			return stalled
		}
		s.commit(t, open)
		s.poll(t)
		return s.flawOf(1)
	}},
	{"open transaction elsewhere", func(t *testing.T, s *stage) flaw {
		open, err := testenv.OtherDatabase(t).Begin(s.ctx)
		require.NoError(t, err)
		defer open.Rollback(s.ctx)
		s.takeID(t, open)
		s.commit(t, s.inserted(t, 1))
		s.poll(t)
		if len(s.read) == 0 {
			return stalled
		}
		return s.flawOf(1)
	}},
	{"early transaction id", func(t *testing.T, s *stage) flaw {
		early := s.begin(t)
		s.takeID(t, early)
		s.commit(t, s.inserted(t, 1)) // version 1, of a later transaction
		s.insert(t, early, 2)         // version 2, after it was committed
		s.commit(t, early)
		s.poll(t)
		return s.ordered(1, 2)
	}},
	{"third one open", func(t *testing.T, s *stage) flaw {
		early := s.begin(t)
		s.takeID(t, early)
		third := s.begin(t)
		s.takeID(t, third)
		s.commit(t, s.inserted(t, 1))
		s.insert(t, early, 2)
		s.commit(t, early)
		s.poll(t)
		s.commit(t, third)
		s.poll(t)
		return s.ordered(1, 2)
	}},
}

// stage is a fixture with a cursor and what it has read.
type stage struct {
	*fixture
	ctx   context.Context
	lease *lease.Lease
	pos   cursors.Position
	read  []string // aggregate ids, which are the events' numbers in the play
}

func newStage(t *testing.T, other otherCursor) *stage {
	t.Helper()
	s := &stage{fixture: newFixture(t), ctx: context.Background()}
	other.replace(t, s.cursors)
	var err error
	s.lease, err = s.leases.Acquire(s.ctx)
	require.NoError(t, err)
	s.pos, err = s.cursors.Load(s.ctx, s.lease)
	require.NoError(t, err)
	return s
}

// replace puts the cursor in place of that of a store.
func (c otherCursor) replace(t *testing.T, store *cursors.Store) {
	t.Helper()
	if c.ids != cursors.SQLOpen {
		store.SQLOpen = c.open(t, store)
	}
	if c.order != "" {
		store.InOrder = func([]envelope.Event) {} // as they were read
	}
}

// open returns the SQLOpen of a store with the cursor's reading of ids.
func (c otherCursor) open(t *testing.T, store *cursors.Store) string {
	t.Helper()
	before, rest, ok := strings.Cut(store.SQLOpen, "WITH ids AS MATERIALIZED (")
	require.True(t, ok)
	_, after, ok := strings.Cut(rest, "), found AS")
	require.True(t, ok)
	// Every parameter keeps a use, or its type would not be known.
	unused := ` UNION ALL SELECT 0 WHERE $5::pg_snapshot IS NULL OR $6::xid8 IS NULL OR $9::bigint IS NULL`
	open := before + pg.InSchema("WITH ids AS MATERIALIZED (SELECT id, xid FROM (("+c.ids+")"+unused+") AS i JOIN {schema}.outbox USING (id)), found AS", store.Schema()) + after
	if c.order != "" {
		head, rest, ok := strings.Cut(open, "ORDER BY id) AS i")
		require.True(t, ok)
		open = head + "ORDER BY " + c.order + ") AS i" + rest
	}
	return open
}

func (s *stage) begin(t *testing.T) pgx.Tx {
	t.Helper()
	tx, err := s.DB.Begin(s.ctx)
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(s.ctx) })
	return tx
}

func (s *stage) takeID(t *testing.T, tx pgx.Tx) {
	t.Helper()
	_, err := tx.Exec(s.ctx, `SELECT pg_current_xact_id()`)
	require.NoError(t, err)
}

func (s *stage) insert(t *testing.T, tx pgx.Tx, number int) {
	t.Helper()
	_, err := tx.Exec(s.ctx, pg.InSchema(`
		INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
		VALUES (gen_random_uuid(), 'a.b.c.v1', 's', 'a', $1, '{}', 'application/json', now())`, s.Schema), fmt.Sprint(number))
	require.NoError(t, err)
}

// inserted returns a new transaction that has inserted.
func (s *stage) inserted(t *testing.T, number int) pgx.Tx {
	t.Helper()
	tx := s.begin(t)
	s.insert(t, tx, number)
	return tx
}

func (s *stage) commit(t *testing.T, tx pgx.Tx) {
	t.Helper()
	require.NoError(t, tx.Commit(s.ctx))
}

// poll reads until there is nothing more.
func (s *stage) poll(t *testing.T) {
	t.Helper()
	for range 10 {
		next, events, _, err := s.cursors.Open(s.ctx, s.lease, s.pos, 100)
		require.NoError(t, err)
		s.pos = next
		if len(events) == 0 {
			return
		}
		for _, e := range events {
			s.read = append(s.read, string(e.AggregateID))
			s.pos.Last = e.ID
			s.pos.Highest = max(s.pos.Highest, e.ID)
		}
	}
	t.Fatal("the same events again and again")
}

// flawOf returns what is wrong with the events that were read.
func (s *stage) flawOf(numbers ...int) flaw {
	for _, n := range numbers {
		if !slices.Contains(s.read, fmt.Sprint(n)) {
			return lost
		}
	}
	return none
}

// ordered says whether all events were read, and these in this order.
func (s *stage) ordered(numbers ...int) flaw {
	if f := s.flawOf(numbers...); f != none {
		return f
	}
	if slices.Index(s.read, fmt.Sprint(numbers[0])) > slices.Index(s.read, fmt.Sprint(numbers[1])) {
		return inverted
	}
	return none
}
