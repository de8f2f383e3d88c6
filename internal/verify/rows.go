package verify

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

// pageRows is the number of rows that one statement reads.
const pageRows = 20_000

// sqlPosition reads the position of a relay.
const sqlPosition = tables.NewestCursors + `
SELECT c.snapshot::text, coalesce(c.window_snapshot::text, ''), c.last_processed_id, c.system_identifier = here.system_identifier
  FROM pg_control_system() AS here CROSS JOIN positions AS c WHERE c.relay = $1::text`

// sqlFailed reads the events that the relay did not send at the first attempt.
const sqlFailed = `
SELECT id, event_id, CASE WHEN resolution = 'expired' AND resolved_by IS NULL THEN 'expired' ELSE status END, parking_key FROM {schema}.outbox_failed WHERE id > $1 AND relay = $2::text ORDER BY id LIMIT $3`

// sqlActions reads what operators have done to failed events. Rows of outbox_failed are removed when their events are
// sent, or when they were resolved long ago.
const sqlActions = `
SELECT id, event_id, action, parking_key FROM {schema}.outbox_audit
 WHERE id > $1 AND relay = $2::text AND event_id IS NOT NULL AND action = ANY ('{retry,edit,resolve}'::text[]) ORDER BY id LIMIT $3`

// sqlBounds reads the lowest and the highest id.
const sqlBounds = `SELECT coalesce((SELECT id FROM {schema}.outbox ORDER BY id LIMIT 1), 0), coalesce((SELECT id FROM {schema}.outbox ORDER BY id DESC LIMIT 1), 0)`

const highestArchived = `SELECT id FROM {schema}.outbox_archive ORDER BY id DESC, event_id DESC LIMIT 1`

const eventColumns = `event_id, created_at, coalesce(topic, pg_catalog.split_part(event_type, '.', 2) || '-events'), coalesce(partition_key, aggregate_id), source`

// sqlEvents reads rows of outbox in the order of ids, whether the relay has attempted them, and whether they have
// expired.
const sqlEvents = `
SELECT o.id, ` + eventColumns + `, ` + tables.Attempted + `, coalesce(o.expires_at <= now(), false)
  FROM (SELECT $1::pg_snapshot AS snapshot, $2::pg_snapshot AS window_snapshot, $3::bigint AS last_processed_id) AS s
 CROSS JOIN LATERAL (SELECT * FROM {schema}.outbox WHERE id > $4 AND id < $5 ORDER BY id LIMIT $6) AS o
 ORDER BY o.id`

// archivedEvents reads rows of the archive. Retention has removed them from outbox, so the relay has attempted them.
// Two events may have the same id there.
const archivedEvents = `
SELECT id, ` + eventColumns + `, true, coalesce(headers ->> 'ce_expirytime' COLLATE "C" <= pg_catalog.to_json(now() AT TIME ZONE 'UTC') #>> '{}', false)
  FROM {schema}.outbox_archive
 WHERE id >= $1::bigint AND (id, event_id) > ($1::bigint, $2::uuid) AND id < $3
   AND created_at >= $4::timestamptz AND created_at < $5::timestamptz
 ORDER BY id, event_id LIMIT $6`

// sqlOldest reads when the first row was recorded that retention would remove if it were old enough. It leaves rows
// that no relay could read, and large ones if there is an archive.
const sqlOldest = `
SELECT id, created_at FROM {schema}.outbox AS o
 WHERE size <= 1048576
   AND NOT EXISTS (SELECT FROM {schema}.outbox_failed AS f WHERE f.outbox_id = o.id AND f.error_class = 'unreadable_row' AND f.status <> 'resolved')
 ORDER BY id LIMIT 1`

const oldestArchived = `SELECT id, created_at FROM {schema}.outbox_archive ORDER BY id, event_id LIMIT 1`

// The statements that look for single events.
const (
	sqlFind        = `SELECT event_id FROM {schema}.outbox WHERE event_id = ANY ($1::uuid[])`
	findArchived   = `SELECT event_id FROM {schema}.outbox_archive WHERE event_id = ANY ($1::uuid[])`
	sqlKeys        = `SELECT event_id, coalesce(partition_key, aggregate_id) FROM {schema}.outbox WHERE id = ANY ($1::bigint[])`
	keysOfArchived = `SELECT event_id, coalesce(partition_key, aggregate_id) FROM {schema}.outbox_archive WHERE id = ANY ($1::bigint[])`
)

// rows reads the tables.
type rows struct {
	*check
	db       *pgxpool.Pool
	position position
	sources  *names // of the events
	oldest   int64  // when the first event of the range was recorded
}

// position is how far the relay has come.
type position struct {
	snapshot string
	window   pgtype.Text
	last     int64
}

func (r *rows) query(settings string, read func(pgx.Rows) error, sql, schema string, args ...any) error {
	err := pg.Query(r.ctx, r.db, settings, read, pg.InSchema(sql, schema), args...)
	if pg.IsUndefined(err) {
		return pg.NotMigrated(schema, err)
	}
	return err
}

// scan reads a row, and reports whether there is one.
func (r *rows) scan(dest []any, sql, schema string, args ...any) (has bool, err error) {
	err = r.query(pg.PlannerSettings, func(found pgx.Rows) error {
		_, err := pgx.ForEachRow(found, dest, func() error {
			has = true
			return nil
		})
		return err
	}, sql, schema, args...)
	return has, err
}

// readFailed reads the position of the relay, and after that the events that it did not send.
func (r *rows) readFailed() error {
	var window string
	var here bool
	has, err := r.scan([]any{&r.position.snapshot, &window, &r.position.last, &here}, sqlPosition, r.cfg.Schema, r.cfg.Relay)
	r.position.window = pgtype.Text{String: window, Valid: window != ""}
	switch {
	case err != nil:
		return fmt.Errorf("read the position of the relay: %w", err)
	case !has:
		return fmt.Errorf("relay %q: %w", r.cfg.Relay, ErrNoRelay)
	case !here:
		return ErrOtherCluster
	}
	if err := r.readStates(sqlFailed, func(status string) (state, bool) {
		s := state(slices.Index(stateNames[:], status))
		return s, s == stateDead || s == stateResolved
	}); err != nil {
		return fmt.Errorf("read outbox_failed: %w", err)
	}
	if err := r.readStates(sqlActions, func(action string) (state, bool) {
		if action == "resolve" {
			return stateResolved, true
		}
		return stateSent, true
	}); err != nil {
		return fmt.Errorf("read outbox_audit: %w", err)
	}
	return nil
}

// readStates reads events with a state and a key. about returns the state, and whether the key has no order any more.
func (r *rows) readStates(sql string, about func(string) (state, bool)) error {
	r.begin("failed events read", 0)
	for last, n := int64(math.MinInt64), pageRows; n == pageRows; {
		n = 0
		err := r.query(pg.PlannerSettings, func(found pgx.Rows) error {
			var id uuid.UUID
			var text, key string
			_, err := pgx.ForEachRow(found, []any{&last, (*[16]byte)(&id), &text, &key}, func() error {
				n++
				state, released := about(text)
				if released {
					if err := r.release(key); err != nil {
						return err
					}
				}
				if state == stateSent {
					return nil
				}
				it := (&sighting{event: eventID(id), side: sideFailed, state: state}).item()
				return r.events.add(&it)
			})
			return err
		}, sql, r.cfg.Schema, last, r.cfg.Relay, pageRows)
		if err == nil {
			err = r.add(n)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// release notes that a key has no order.
func (r *rows) release(parkingKey string) error {
	topic, key, _ := strings.Cut(parkingKey, "/")
	number, err := r.names.number([]byte(topic))
	if err != nil {
		return err
	}
	it := (&arrival{topic: number, key: hashKey([]byte(key)), partition: marked}).item()
	return r.keys.add(&it)
}

// readAll reads the events of the range, and sets the window in which records must have events.
func (r *rows) readAll() error {
	var first, highest, archived int64
	_, err := r.scan([]any{&first, &highest}, sqlBounds, r.cfg.Schema)
	if err == nil && r.cfg.Archive != "" { // outbox may be empty
		_, err = r.scan([]any{&archived}, highestArchived, r.cfg.Archive)
		highest = max(highest, archived)
	}
	if err != nil {
		return fmt.Errorf("read the range of ids: %w", err)
	}
	after, before := int64(math.MinInt64), highest+1
	if r.cfg.After != 0 {
		after = r.cfg.After
	}
	if r.cfg.Before != 0 {
		before = min(before, r.cfg.Before)
	}
	r.begin("events read", max(before-max(after, first-1)-1, 0))
	if err := r.readEvents(after, before); err != nil {
		return fmt.Errorf("read events: %w", err)
	}
	if r.cfg.Archive != "" {
		if err := r.readArchived(after, before); err != nil {
			return fmt.Errorf("read the archive: %w", err)
		}
	}
	return r.setWindow()
}

func (r *rows) readEvents(after, before int64) error {
	for n := pageRows; n == pageRows; {
		n = 0
		err := r.query(pg.PlannerSettings, func(found pgx.Rows) (err error) {
			n, after, _, err = r.page(found, after)
			return err
		}, sqlEvents, r.cfg.Schema, r.position.snapshot, r.position.window, r.position.last, after, before, pageRows)
		if err == nil {
			err = r.add(n)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *rows) readArchived(after, before int64) error {
	since, until := pg.OrNull(r.cfg.Since), pg.OrNull(r.cfg.Until)
	if !since.Valid {
		since = pgtype.Timestamptz{InfinityModifier: pgtype.NegativeInfinity, Valid: true}
	}
	if !until.Valid {
		until = pgtype.Timestamptz{InfinityModifier: pgtype.Infinity, Valid: true}
	}
	id := uuid.Max
	for n := pageRows; n == pageRows; {
		err := r.query(pg.PlannerSettings, func(found pgx.Rows) (err error) {
			n, after, id, err = r.page(found, after)
			return err
		}, archivedEvents, r.cfg.Archive, after, id.String(), before, since, until, pageRows)
		if err == nil {
			err = r.add(n)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// page reads rows, and returns how many there were and the last of them.
func (r *rows) page(found pgx.Rows, after int64) (n int, last int64, id uuid.UUID, err error) {
	defer found.Close()
	last = after
	var at time.Time
	var attempted, expired bool
	for found.Next() {
		n++
		if err := found.Scan(&last, (*[16]byte)(&id), pg.Time{At: &at}, nil, nil, nil, &attempted, &expired); err != nil {
			return n, last, id, err
		}
		if at.Before(r.cfg.Since) || !r.cfg.Until.IsZero() && !at.Before(r.cfg.Until) {
			continue
		}
		raw := found.RawValues() // a text has the same bytes in both formats of the protocol
		topic, err := r.names.number(raw[3])
		if err != nil {
			return n, last, id, err
		}
		s := sighting{event: eventID(id), side: sideEvent, topic: topic, position: last, key: hashKey(raw[4]), at: at.UnixMicro()}
		switch {
		case !attempted:
			s.state = statePending
		case expired:
			s.state = stateExpired
		}
		if _, err := r.sources.number(raw[5]); err != nil {
			return n, last, id, err
		}
		if err := r.noteEvent(s, at); err != nil {
			return n, last, id, err
		}
	}
	return n, last, id, found.Err()
}

// margin is how much older than their neighbours rows may be because of a long transaction, and how much clocks may
// differ.
const margin = time.Hour

// setWindow decides which records must have events. It is called when all events were read.
func (r *rows) setWindow() error {
	schema, sql := r.cfg.Schema, sqlOldest
	if r.cfg.Archive != "" {
		schema, sql = r.cfg.Archive, oldestArchived
	}
	var first int64
	var at time.Time
	oldest := []any{&first, pg.Time{At: &at}}
	has, err := r.scan(oldest, sql, schema)
	if err == nil && !has && r.cfg.Archive != "" { // nothing is archived yet
		_, err = r.scan(oldest, sqlOldest, r.cfg.Schema)
	}
	if err != nil {
		return fmt.Errorf("read the oldest event: %w", err)
	}
	if first > 1 { // some may have been removed
		at = at.Add(margin)
	}
	r.oldest = microsOf(r.report.FirstAt, endless)
	r.from = max(microsOf(at, endless), microsOf(r.cfg.Since, beginning))
	r.to = microsOf(r.cfg.Until, endless)
	if r.cfg.After != 0 {
		r.from = max(r.from, r.oldest)
	}
	if r.cfg.Before != 0 {
		r.to = min(r.to, microsOf(r.report.LastAt, beginning))
	}
	if r.cfg.After != 0 || r.cfg.Before != 0 || !r.cfg.Since.IsZero() || !r.cfg.Until.IsZero() {
		r.exists = r.find
	}
	if r.from != endless {
		r.report.PhantomsSince = time.UnixMicro(r.from)
	}
	return nil
}

// find returns which of some events are committed, in the range or not.
func (r *rows) find(ids []eventID) (map[eventID]bool, error) {
	exist, texts := map[eventID]bool{}, make([]string, len(ids))
	for i, id := range ids {
		texts[i] = uuid.UUID(id).String()
	}
	read := func(found pgx.Rows) error {
		var id uuid.UUID
		_, err := pgx.ForEachRow(found, []any{(*[16]byte)(&id)}, func() error {
			exist[eventID(id)] = true
			return nil
		})
		return err
	}
	err := r.query(pg.Unbounded, read, sqlFind, r.cfg.Schema, texts)
	if err == nil && r.cfg.Archive != "" {
		err = r.query(pg.Unbounded, read, findArchived, r.cfg.Archive, texts)
	}
	if err != nil {
		return nil, fmt.Errorf("look for events: %w", err)
	}
	return exist, nil
}

// nameKeys sets the texts of the findings that the sorted items do not have.
func (r *rows) nameKeys() error {
	var ids []int64
	for i := range r.report.Findings {
		f := &r.report.Findings[i]
		f.EventID = uuid.UUID(f.event).String()
		if f.Kind == Inverted {
			ids = append(ids, f.OutboxID)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	read := func(found pgx.Rows) error {
		var id uuid.UUID
		var key string
		_, err := pgx.ForEachRow(found, []any{(*[16]byte)(&id), &key}, func() error {
			for i := range r.report.Findings {
				if f := &r.report.Findings[i]; f.Kind == Inverted && f.event == eventID(id) {
					f.Key = key
				}
			}
			return nil
		})
		return err
	}
	err := r.query(pg.Unbounded, read, sqlKeys, r.cfg.Schema, ids)
	if err == nil && r.cfg.Archive != "" {
		err = r.query(pg.Unbounded, read, keysOfArchived, r.cfg.Archive, ids)
	}
	if err != nil {
		return fmt.Errorf("read keys: %w", err)
	}
	return nil
}
