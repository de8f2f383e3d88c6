package faults

import (
	"hash/fnv"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

const (
	// farExpiry is for events that must arrive like those that do not expire.
	farExpiry = 24 * time.Hour
	// nearExpiry is the longest expiry of the others. Most arrive before, unless a server or all relays are away.
	nearExpiry = 4 * time.Second
)

// expire lets some events expire, which name chooses, from a moment on: one in eight
// soon, and another one in a day.
func expire(e outbox.DomainEvent, name string, from time.Time) outbox.DomainEvent {
	hash := fnv.New32a()
	_, _ = hash.Write([]byte("expires " + name)) // never fails
	chance := hash.Sum32()
	expires := from.Add(farExpiry)
	switch chance % 8 {
	case 0:
		expires = from.Add(50*time.Millisecond + time.Duration(chance/8)*time.Microsecond%nearExpiry)
	case 1:
	default:
		return e
	}
	return outbox.With(e, outbox.EventOptions{Expires: expires})
}

// expiredResult is what became of events, or of their deliveries, that expire soon.
type expiredResult struct {
	Events      int   `json:"events"`
	InTime      int   `json:"in_time"`
	Expired     int   `json:"expired"` // noted as expired
	Resumed     int   `json:"resumed"` // handled by a worker although expired, because an earlier attempt may have begun
	Behind      int   `json:"behind"`  // arrived behind a later event of their key, see releaseExpired
	Early       int   `json:"early"`   // noted as expired before they were
	Late        int   `json:"late"`    // delivered after they had expired
	Worst       int64 `json:"late_worst_ms"`
	Unaccounted int   `json:"unaccounted"` // neither delivered nor noted as expired
}

// wrong counts what must not be, at the end of a run.
func (v expiredResult) wrong() int { return v.Early + v.Late + v.Unaccounted }

// expiryGrace is how long it may take from a look at the clock to what is then done: the machine may be busy.
const expiryGrace = time.Second

// isLate reports whether an event was sent or handled too late, and notes the worst. A process that was frozen when an
// event expired, or got a late answer then, has looked at the clock before.
func (v *expiredResult) isLate(c *crew, expires, began time.Time) bool {
	late := began.Sub(expires)
	if late <= 0 || slices.ContainsFunc(c.slow, func(f *span) bool { return f.overlaps(expires, began) }) {
		return false
	}
	v.Worst = max(v.Worst, late.Milliseconds())
	return late > expiryGrace
}

// expiring is a committed event of the suite that expires soon.
type expiring struct {
	OutboxID int64 // 0 while it is delayed
	ID       string
	At       time.Time
}

// sqlExpiring reads what expires soon; the others expire behind $1.
const sqlExpiring = `
SELECT id, payload->>'id', expires_at FROM outbox WHERE expires_at < $1
 UNION ALL SELECT 0, payload->>'id', expires_at FROM outbox_delayed WHERE expires_at < $1`

func (s *suite) expiring(t *testing.T) []expiring {
	t.Helper()
	rows, err := s.db.Query(s.ctx, sqlExpiring, s.start.Add(farExpiry))
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[expiring])
	require.NoError(t, err)
	return all
}

// expiries are what PostgreSQL has of events that have expired: by outbox id, when that was written at the latest.
func (s *suite) expiries(t *testing.T) map[int64]time.Time {
	t.Helper()
	noted := map[int64]time.Time{}
	rows, err := s.db.Query(s.ctx, `SELECT sent_from, sent_to, sent, created_at FROM outbox_cursor WHERE sent IS NOT NULL ORDER BY id`)
	require.NoError(t, err)
	var row tables.SentRow
	var at time.Time
	_, err = pgx.ForEachRow(rows, []any{&row.From, &row.To, &row.Bytes, &at}, func() error {
		events, _, err := row.Events()
		for _, e := range events {
			if _, again := noted[e.OutboxID]; e.Expired && !again {
				noted[e.OutboxID] = at
			}
		}
		return err
	})
	require.NoError(t, err)
	var id int64
	rows, err = s.db.Query(s.ctx, `SELECT outbox_id, resolved_at FROM outbox_failed WHERE resolution = 'expired'`)
	require.NoError(t, err)
	_, err = pgx.ForEachRow(rows, []any{&id, &at}, func() error {
		noted[id] = at
		return nil
	})
	require.NoError(t, err)
	return noted
}

// compareExpiring sets the counts of the events that expire soon, and returns those that need not arrive. late are
// those that have arrived too late.
func (s *suite) compareExpiring(t *testing.T, v *expiredResult, late map[string]bool) (missing map[string]bool) {
	t.Helper()
	open := map[string]bool{} // poison, which a relay or an operator may still deliver
	for _, f := range s.failed(t) {
		open[f.ID] = f.Status != "resolved"
	}
	noted := s.expiries(t)
	missing = map[string]bool{}
	for _, e := range s.expiring(t) {
		at, expired := noted[e.OutboxID]
		if *faultExactly { // no places are kept
			at, expired = time.Now(), time.Now().After(e.At)
		}
		switch {
		case open[e.ID]:
			continue
		case late[e.ID]:
			v.Late++
		case s.topics.Has(e.ID):
			v.InTime++
		case !expired:
			v.Unaccounted++
		default:
			v.Expired++
			missing[e.ID] = true
			if at.Before(e.At) {
				v.Early++
				t.Logf("event %s of outbox row %d was dropped before %v, and expires at %v", e.ID, e.OutboxID, at, e.At)
			}
		}
		v.Events++
	}
	return missing
}

// awaitExpiring waits until each event that expires soon is delivered or noted as expired.
func (s *suite) awaitExpiring(t *testing.T) {
	t.Helper()
	for began := time.Now(); time.Since(began) < testenv.Patience; {
		var v expiredResult
		if s.compareExpiring(t, &v, nil); v.Unaccounted == 0 {
			return
		}
		s.sleep(t, time.Second)
	}
}

// late returns the events of which a record was passed to the client too late, repeats included.
func (s *suite) late(t *testing.T, arrived []oracle.Event, v *expiredResult) map[string]bool {
	t.Helper()
	late := map[string]bool{}
	for i, p := range s.topics.Places() {
		if !p.Expires.IsZero() && v.isLate(s.crew, p.Expires, p.Sent) {
			late[arrived[i].ID] = true
			t.Logf("event %s, at %s/%d/%d, was sent %v after it had expired", arrived[i].ID, p.Topic, p.Partition, p.Offset, p.Sent.Sub(p.Expires))
		}
	}
	return late
}

// releaseExpired takes events out of the order of their keys that arrived behind a later one although a relay sent them
// before. A leader taken for gone has sent such an event in time, and its record was held on the way. The next leader
// has skipped the event, which had expired then, and has sent the later one. Consumers drop the event.
func (s *suite) releaseExpired(t *testing.T, arrived []oracle.Event, v *expiredResult) {
	t.Helper()
	type newest struct {
		version int64
		oracle.Place
	}
	taken := s.takeovers(t)
	keys, seen := map[string]newest{}, map[string]bool{}
	for i, p := range s.topics.Places() {
		e := &arrived[i]
		if seen[e.ID] {
			continue
		}
		seen[e.ID] = true
		last := keys[e.Key]
		if e.Version > last.version {
			keys[e.Key] = newest{e.Version, p}
			continue
		}
		const precision = time.Millisecond // of the times of records
		takeover := slices.IndexFunc(taken, func(at time.Time) bool {
			return !at.Before(p.Sent) && at.Before(last.Sent.Add(precision))
		})
		behind := takeover >= 0 && p.Producer != last.Producer && !p.Expires.IsZero() && !last.Sent.Before(p.Expires.Truncate(precision))
		t.Logf("version %d of %s, %+v, came behind version %d, %+v; takeovers at %v; as a record of a leader taken for gone may: %t",
			e.Version, e.Key, p, last.version, last.Place, taken, behind)
		if behind {
			v.Behind++
			e.Key = e.ID
		}
	}
}

// takeovers returns when another process became leader and could be sure that no other one sends: in order.
func (s *suite) takeovers(t *testing.T) []time.Time {
	t.Helper()
	rows, err := s.db.Query(s.ctx, `
		SELECT greatest(at, (became).exclusive_at) FROM lease_history WHERE (was).holder <> (became).holder ORDER BY 1`)
	require.NoError(t, err)
	at, err := pgx.CollectRows(rows, pgx.RowTo[time.Time])
	require.NoError(t, err)
	return at
}
