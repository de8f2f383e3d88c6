package outboxops_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

func (h *opsFixture) deliveries(t testing.TB) *outboxops.Deliveries {
	t.Helper()
	d, err := outboxops.NewDeliveries(h.db, outboxops.DeliveriesConfig{Schema: h.schema})
	require.NoError(t, err)
	return d
}

// sqlDeliver makes a row of event_delivery: $1 is its key (empty: unordered), $2 the position,
// $3 the status, $4 whether it is held, $5 group, $6 action.
const sqlDeliver = `
INSERT INTO {schema}.event_delivery (position, order_key, attempt_count, max_attempts, held, next_retry_at, last_attempt_at, locked_until, locked_by,
       created_at, updated_at, occurred_at, recorded_at, event_id, status, consumer_group, action, stream, event_type, source, aggregate_type,
       aggregate_id, content_type, partition_key, last_error_code, last_error_message, processed_at, headers, payload)
SELECT $2::bigint, CASE WHEN $1::text <> '' THEN hashtextextended($5::text || $6::text || $1, 0) END, 3, 10, $4::bool,
       now() + CASE WHEN $3::text = 'PENDING' THEN interval '1 min' ELSE interval '-1 h' END, now(),
       CASE WHEN $3 = 'PROCESSING' THEN now() + interval '30 s' END, CASE WHEN $3 = 'PROCESSING' THEN 'host/1' END,
       now(), now(), now(), now(), gen_random_uuid(), $3, $5, $6, 'order-events', 'shop.order.created.v1', 'shop', 'Order', 'o-' || $1,
       'application/json', NULLIF($1, ''), CASE WHEN $3 = 'DEAD' THEN 'timeout' END, CASE WHEN $3 = 'DEAD' THEN 'it took too long' END,
       CASE WHEN $3 IN ('DONE', 'DEAD') THEN now() END, '{"traceparent": "00-x"}', '{"n": 1}'
RETURNING id`

// deliver makes rows of a key at positions 1, 2, 3 … Each mark is a row: D dead, H dead and
// held, P pending, K parked, W with a worker, F finished; a dash is a row that is not there.
func (h *opsFixture) deliver(t testing.TB, key, play string) (ids []int64) {
	t.Helper()
	return h.deliverTo(t, "stats", "COUNTED", key, play)
}

var deliveryMarks = map[string]string{"D": "DEAD", "H": "DEAD", "P": "PENDING", "K": "PARKED", "W": "PROCESSING", "F": "DONE"}

func (h *opsFixture) deliverTo(t testing.TB, group, action, key, play string) (ids []int64) {
	t.Helper()
	for i, mark := range strings.Split(play, "") {
		id := int64(0)
		if mark != "-" {
			require.NoError(t, h.db.QueryRow(background, h.sql(sqlDeliver), key, i+1, deliveryMarks[mark], mark == "H", group, action).Scan(&id))
		}
		ids = append(ids, id)
	}
	return ids
}

// played is what became of rows, in the marks of deliver; R is resolved.
func (h *opsFixture) played(t testing.TB, ids []int64) (play string) {
	t.Helper()
	for _, id := range ids {
		if id == 0 {
			play += "-"
			continue
		}
		var mark string
		require.NoError(t, h.db.QueryRow(background, h.sql(`
			SELECT CASE WHEN resolution IS NOT NULL THEN 'R' WHEN held THEN 'H' WHEN status = 'DEAD' THEN 'D' WHEN status = 'PENDING' THEN 'P'
			            WHEN status = 'PARKED' THEN 'K' WHEN status = 'PROCESSING' THEN 'W' ELSE 'F' END
			  FROM {schema}.event_delivery WHERE id = $1`), id).Scan(&mark))
		play += mark
	}
	return play
}

// What an operator sees of deliveries, and how they are picked.
func TestDeliveries(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	d := h.deliveries(t)
	dead := h.deliver(t, "a", "FDWK")[1]
	h.deliverTo(t, "mails", "SENT", "b", "PKKD")
	h.deliverTo(t, "mails", "", "c", "H")

	row, err := d.Get(background, dead)
	require.NoError(t, err)
	require.JSONEq(t, `{"n": 1}`, string(row.Payload))
	require.Equal(t, map[string]string{"traceparent": "00-x"}, row.Headers)
	require.Equal(t, []string{"stats", "COUNTED", "order-events", "a", "DEAD", "timeout", "shop.order.created.v1", "shop", "Order", "o-a", "application/json"},
		[]string{row.Group, row.Action, row.Stream, row.Key, row.Status, row.ErrorCode, row.Type, row.Source, row.AggregateType, row.AggregateID, row.ContentType})
	require.EqualError(t, row.Err, "it took too long")
	require.Equal(t, []int{3, 10, 2}, []int{row.Attempts, row.MaxAttempts, int(row.OutboxID)})
	require.WithinDuration(t, time.Now(), row.ProcessedAt, testenv.Patience)
	_, err = d.Get(background, 1<<60)
	require.ErrorIs(t, err, outboxops.ErrNotFound)

	now := time.Now()
	for name, test := range map[string]struct {
		filter outboxops.DeliveryFilter
		want   int
	}{
		"all that is not done": {outboxops.DeliveryFilter{}, 8},
		"group":                {outboxops.DeliveryFilter{Group: "mails"}, 5},
		"action":               {outboxops.DeliveryFilter{Action: "SENT"}, 4},
		"stream":               {outboxops.DeliveryFilter{Stream: "order-events"}, 8},
		"another stream":       {outboxops.DeliveryFilter{Stream: "others"}, 0},
		"dead":                 {outboxops.DeliveryFilter{Statuses: []string{outboxops.DeliveryDead}}, 3},
		"with a worker":        {outboxops.DeliveryFilter{Statuses: []string{outboxops.DeliveryProcessing}}, 1},
		"done":                 {outboxops.DeliveryFilter{Statuses: []string{outboxops.DeliveryDone}}, 1},
		"done or parked":       {outboxops.DeliveryFilter{Statuses: []string{outboxops.DeliveryDone, outboxops.DeliveryParked}}, 4},
		"key":                  {outboxops.DeliveryFilter{Key: "b"}, 4},
		"key and group":        {outboxops.DeliveryFilter{Key: "a", Group: "mails"}, 0},
		"type":                 {outboxops.DeliveryFilter{Type: "shop.order.created.v1"}, 8},
		"another type":         {outboxops.DeliveryFilter{Type: "x"}, 0},
		"code":                 {outboxops.DeliveryFilter{ErrorCode: "timeout"}, 3},
		"event":                {outboxops.DeliveryFilter{EventID: strings.ToUpper(row.EventID)}, 1},
		"no event":             {outboxops.DeliveryFilter{EventID: uuid.NewString()}, 0},
		"since":                {outboxops.DeliveryFilter{Since: now.Add(-time.Hour)}, 8},
		"until":                {outboxops.DeliveryFilter{Until: now.Add(-time.Hour)}, 0},
		"resolved":             {outboxops.DeliveryFilter{Resolved: true}, 0},
	} {
		rows, err := d.List(background, test.filter, outboxops.DeliveryPage{})
		require.NoError(t, err, name)
		require.Len(t, rows, test.want, name)
	}

	all, err := d.List(background, outboxops.DeliveryFilter{}, outboxops.DeliveryPage{})
	require.NoError(t, err)
	var paged []outboxops.Delivery
	for page := (outboxops.DeliveryPage{Limit: 3}); ; page.After = paged[len(paged)-1].ID {
		rows, err := d.List(background, outboxops.DeliveryFilter{}, page)
		require.NoError(t, err)
		if len(rows) == 0 {
			break
		}
		paged = append(paged, rows...)
	}
	require.Equal(t, all, paged)
	require.IsDecreasing(t, deliveryIDs(all))
	require.Nil(t, all[0].Payload)
}

func deliveryIDs(all []outboxops.Delivery) (ids []int64) {
	for _, d := range all {
		ids = append(ids, d.ID)
	}
	return ids
}

func TestCountDeliveries(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	d := h.deliveries(t)
	counts, err := d.Count(background, outboxops.DeliveryFilter{})
	require.NoError(t, err)
	require.Empty(t, counts)
	h.deliver(t, "a", "FFDWK")
	h.deliver(t, "b", "PKK")
	h.deliver(t, "c", "DH")
	resolved := h.deliver(t, "d", "D")[0]
	require.NoError(t, d.Resolve(background, resolved, kim))
	h.deliverTo(t, "mails", "SENT", "b", "P")
	counts, err = d.Count(background, outboxops.DeliveryFilter{})
	require.NoError(t, err)
	var got []string
	for _, c := range counts {
		require.WithinDuration(t, time.Now(), c.Oldest, testenv.Patience)
		require.Equal(t, c.Status == outboxops.DeliveryPending || c.Status == outboxops.DeliveryProcessing, !c.Due.IsZero(), c.Status)
		got = append(got, fmt.Sprintf("%s %s %s %s %d %d", c.Group, c.Stream, c.Action, c.Status, c.Deliveries, c.Held))
	}
	require.Equal(t, []string{"mails order-events SENT PENDING 1 0", "stats order-events COUNTED DEAD 3 1", "stats order-events COUNTED PARKED 3 0",
		"stats order-events COUNTED PENDING 1 0", "stats order-events COUNTED PROCESSING 1 0"}, got)
	for want, filter := range map[int]outboxops.DeliveryFilter{
		1: {Group: "mails"}, 3: {Action: "COUNTED", Key: "c", Statuses: []string{outboxops.DeliveryDead}}, 4: {Group: "stats"}, 0: {Stream: "others"},
	} {
		counts, err := d.Count(background, filter)
		require.NoError(t, err)
		if want == 3 { // rows of one kind
			require.Len(t, counts, 1)
			require.Equal(t, 2, counts[0].Deliveries)
			continue
		}
		require.Len(t, counts, want)
	}
	for _, filter := range []outboxops.DeliveryFilter{{Resolved: true}, {Statuses: []string{outboxops.DeliveryDone}}} {
		_, err := d.Count(background, filter)
		require.ErrorContains(t, err, "not counted")
	}
}

// Groups of workers have a cursor as relays have, and are none.
func TestDeliveryGroups(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	groups, err := h.deliveries(t).Groups(background)
	require.NoError(t, err)
	require.Empty(t, groups)
	_, err = h.db.Exec(background, h.sql(`
		INSERT INTO {schema}.event_subscription (consumer_group, state, relay) VALUES ('stats', 'active', NULL), ('mails', 'left', 'default'), ('new', 'active', NULL);
		INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
		SELECT r, 0, '1:1:', 0, system_identifier, 1 FROM pg_control_system(), unnest('{worker:stats,worker:mails,default}'::text[]) AS r`))
	require.NoError(t, err)
	h.commit(t, numbered("k", 1, 3)...)
	groups, err = h.deliveries(t).Groups(background)
	require.NoError(t, err)
	require.Len(t, groups, 3)
	require.Equal(t, []string{"mails", "new", "stats"}, []string{groups[0].Group, groups[1].Group, groups[2].Group})
	require.Equal(t, []int64{3, 0, 3}, []int64{groups[0].Pending, groups[1].Pending, groups[2].Pending})
	require.Equal(t, []outboxops.SubscriptionState{outboxops.SubscriptionLeft, outboxops.SubscriptionActive}, []outboxops.SubscriptionState{groups[0].State, groups[2].State})
	require.Equal(t, []string{"default", ""}, []string{groups[0].Relay, groups[2].Relay})
	for _, at := range []time.Time{groups[0].ChangedAt, groups[2].CreatedAt, groups[2].Oldest, groups[2].ProgressAt} {
		require.WithinDuration(t, time.Now(), at, testenv.Patience)
	}
	inspector, err := outboxops.NewInspector(h.db, outboxops.InspectorConfig{Schema: h.schema})
	require.NoError(t, err)
	relays, err := inspector.Relays(background)
	require.NoError(t, err)
	require.Len(t, relays, 1)
	require.Equal(t, "default", relays[0].Name)
}

// requeues are keys and what becomes of them when the deliveries marked by ^ are requeued.
var requeues = []struct{ name, key, marked, want string }{
	{"alone", "D", "^", "P"},
	{"behind what is done", "FD", " ^", "FP"},
	{"before a later one that waits for a retry", "DP", "^ ", "PK"},
	{"before a later one with followers", "FDPKK", " ^   ", "FPKKK"},
	{"while a worker has a later one", "DW", "^ ", "KW"},
	{"while a worker has a later one with followers", "DWK", "^  ", "KWK"},
	{"behind an earlier one that is open", "PD", " ^", "PK"},
	{"among those that wait", "PKDK", "  ^ ", "PKKK"},
	{"the one that holds the key", "HKK", "^  ", "PKK"},
	{"before one that holds the key", "DHK", "^  ", "KHK"},
	{"behind one that holds the key", "HDK", " ^ ", "HKK"},
	{"two of a key", "DDF", "^^ ", "PKF"},
	{"two around one that waits", "DPD", "^ ^", "PKK"},
	{"two while a worker has one", "DDW", "^^ ", "KKW"},
	{"one of two", "DD", " ^", "DP"},
	{"what is not dead stays", "WKDK", "^^ ^", "WKDK"},
}

// A requeued delivery goes before the later ones of its key, unless a worker has one of them.
func TestRequeue(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	for i, test := range requeues {
		ids := h.deliver(t, fmt.Sprint("key-", i), test.key)
		var marked []int64
		for n, id := range ids {
			if test.marked[n] == '^' {
				marked = append(marked, id)
			}
		}
		done := h.requeue(t, h.db, marked)
		require.Equal(t, strings.Count(test.marked, "^") == done, strings.Contains(test.name, "stays") == false, test.name)
		require.Equal(t, test.want, h.played(t, ids), test.name)
	}
	unordered := h.deliver(t, "", "DDWP")
	require.Equal(t, 2, h.requeue(t, h.db, unordered))
	require.Equal(t, "PPWP", h.played(t, unordered), "without an order")
	groups := append(h.deliverTo(t, "z", "A", "k", "DP"), h.deliverTo(t, "a", "A", "k", "DW")...)
	require.Equal(t, 2, h.requeue(t, h.db, groups))
	require.Equal(t, "PKKW", h.played(t, groups), "of several groups")

	row, err := h.deliveries(t).Get(background, groups[0])
	require.NoError(t, err)
	require.Zero(t, row.Attempts)
	require.Zero(t, row.ProcessedAt)
	require.WithinDuration(t, time.Now(), row.NextRetryAt, testenv.Patience)
	require.LessOrEqual(t, row.NextRetryAt, time.Now())
}

type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

func (h *opsFixture) requeue(t testing.TB, db querier, ids []int64) (done int) {
	t.Helper()
	require.NoError(t, db.QueryRow(background, h.sql(`SELECT {schema}.outbox_requeue_deliveries($1, 'kim', 'why')`), ids).Scan(&done))
	return done
}

// A later delivery that a worker is taking at this moment keeps its place, and nobody waits
// for it.
func TestRequeueWhileTheHeadIsClaimed(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	ids := h.deliver(t, "k", "DPK")
	claim, err := h.db.Begin(background)
	require.NoError(t, err)
	defer func() { _ = claim.Rollback(background) }()
	_, err = claim.Exec(background, h.sql(`UPDATE {schema}.event_delivery SET status = 'PROCESSING', locked_by = 'w', locked_until = now() WHERE id = $1`), ids[1])
	require.NoError(t, err)
	require.Equal(t, 1, h.requeue(t, h.db, ids[:1]))
	require.NoError(t, claim.Commit(background))
	require.Equal(t, "KWK", h.played(t, ids))
}

// Whoever finishes a key at the same time is waited for, and what he did is seen.
func TestRequeueWaitsForTheKey(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	for name, finish := range map[string]struct{ sql, want string }{
		"promoted": {`UPDATE {schema}.event_delivery SET status = 'PENDING' WHERE id = $1`, "PFK"},
		"claimed":  {`UPDATE {schema}.event_delivery SET status = 'PROCESSING', locked_by = 'w', locked_until = now() WHERE id = $1`, "KFW"},
		"finished": {`UPDATE {schema}.event_delivery SET status = 'DONE' WHERE id = $1`, "PFF"},
	} {
		ids := h.deliver(t, name, "DWK")
		tx, err := h.db.Begin(background)
		require.NoError(t, err)
		defer func() { _ = tx.Rollback(background) }()
		_, err = tx.Exec(background, h.sql(`SELECT {schema}.outbox_lock_keys('stats', array_agg(order_key)) FROM {schema}.event_delivery WHERE id = $1`), ids[0])
		require.NoError(t, err)
		ended := make(chan int, 1)
		go func() { ended <- h.requeue(t, h.db, ids[:1]) }()
		require.Never(t, func() bool { return len(ended) > 0 }, 100*time.Millisecond, 10*time.Millisecond, "it waits")
		_, err = tx.Exec(background, h.sql(`UPDATE {schema}.event_delivery SET status = 'DONE', locked_by = NULL, locked_until = NULL WHERE id = $1`), ids[1])
		require.NoError(t, err)
		_, err = tx.Exec(background, h.sql(finish.sql), ids[2])
		require.NoError(t, err)
		require.NoError(t, tx.Commit(background))
		require.Equal(t, 1, <-ended)
		require.Equal(t, finish.want, h.played(t, ids), name)
	}
}

// What is resolved is never handled, and what waits behind it goes on.
func TestResolveDelivery(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	d := h.deliveries(t)
	for i, test := range []struct {
		key  string
		at   int
		want string
	}{
		{"HKK", 0, "RPK"}, {"DPK", 0, "RPK"}, {"PKK", 0, "RPK"}, {"PKK", 1, "PRK"}, {"WKK", 1, "WRK"}, {"HHK", 0, "RHK"}, {"D", 0, "R"},
	} {
		ids := h.deliver(t, fmt.Sprint("key-", i), test.key)
		require.NoError(t, d.Resolve(background, ids[test.at], kim))
		require.Equal(t, test.want, h.played(t, ids), test.key)
		row, err := d.Get(background, ids[test.at])
		require.NoError(t, err)
		require.Equal(t, []string{"DEAD", "resolved", "kim", kim.Reason}, []string{row.Status, row.Resolution, row.ResolvedBy, row.Note})
		require.WithinDuration(t, time.Now(), row.ResolvedAt, testenv.Patience)
		require.False(t, row.ProcessedAt.IsZero())
		rows, err := d.List(background, outboxops.DeliveryFilter{Resolved: true, Key: row.Key}, outboxops.DeliveryPage{})
		require.NoError(t, err)
		require.Equal(t, []int64{row.ID}, deliveryIDs(rows))
	}
	ids := h.deliver(t, "more", "WFD")
	require.ErrorIs(t, d.Resolve(background, ids[0], kim), outboxops.ErrStatus)
	require.ErrorContains(t, d.Resolve(background, ids[1], kim), "it is DONE")
	require.ErrorContains(t, d.Requeue(background, ids[0], kim), "it is PROCESSING")
	require.ErrorIs(t, d.Requeue(background, 1<<60, kim), outboxops.ErrNotFound)
	require.NoError(t, d.Resolve(background, ids[2], kim))
	require.ErrorContains(t, d.Resolve(background, ids[2], kim), "it is DEAD and resolved")

	require.NoError(t, d.Requeue(background, ids[2], kim), "it is taken back")
	require.Equal(t, "WFK", h.played(t, ids))
	require.NoError(t, d.AuditRead(background, ids[2], kim))
	require.ErrorIs(t, d.AuditRead(background, 1<<60, kim), outboxops.ErrNotFound)
	entries, err := d.Audit(background, ids[2], outboxops.AuditPage{})
	require.NoError(t, err)
	var actions []string
	for _, e := range entries {
		require.Equal(t, []string{"kim", kim.Reason, "stats", "COUNTED", "order-events", "more", ""}, []string{e.Operator, e.Reason, e.Group, e.Handler, e.Topic, e.Key, e.Relay})
		require.Equal(t, []int64{ids[2], 3}, []int64{e.Delivery, e.OutboxID})
		require.NotEmpty(t, e.EventID)
		require.NotEmpty(t, e.Login)
		actions = append(actions, e.Action)
	}
	require.Equal(t, []string{"read", "requeue", "resolve"}, actions)
	entries, err = d.Audit(background, ids[2], outboxops.AuditPage{WithoutReads: true, Limit: 1})
	require.NoError(t, err)
	require.Len(t, entries, 1)
	all, err := h.operator(t).Audit(background, outboxops.FailureID{}, outboxops.AuditPage{})
	require.NoError(t, err)
	require.Len(t, all, 10, "with those of failures")
	require.Equal(t, ids[2], all[0].Delivery)
}

// All that a filter picks is changed in parts, and counted first.
func TestRequeueAll(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	d := h.deliveries(t)
	for n := range 150 {
		h.deliver(t, fmt.Sprint(n), "DD")
	}
	h.deliver(t, "resolved", "D")
	require.NoError(t, d.Resolve(background, h.deliver(t, "resolved", "-D")[1], kim))
	h.deliverTo(t, "mails", "SENT", "x", "D")
	var progress []int
	cfg := outboxops.BulkConfig{DryRun: true, Rate: 100_000, Progress: func(done int) { progress = append(progress, done) }, Topics: map[string]int{}}
	filter := outboxops.DeliveryFilter{Group: "stats", ErrorCode: "timeout"}
	n, err := d.RequeueAll(background, filter, cfg, kim)
	require.NoError(t, err)
	require.Equal(t, 301, n)
	require.Equal(t, map[string]int{"order-events": 301}, cfg.Topics)
	require.Equal(t, 1, h.count(t, "outbox_audit"), "nothing was done")

	cfg.DryRun, cfg.Topics, progress = false, nil, nil
	n, err = d.RequeueAll(background, filter, cfg, kim)
	require.NoError(t, err)
	require.Equal(t, 301, n)
	require.Equal(t, []int{100, 200, 300, 301}, progress)
	counts, err := d.Count(background, outboxops.DeliveryFilter{Group: "stats"})
	require.NoError(t, err)
	require.Len(t, counts, 2)
	require.Equal(t, []int{150, 151}, []int{counts[0].Deliveries, counts[1].Deliveries}, "parked, pending")

	n, err = d.RequeueAll(background, outboxops.DeliveryFilter{Statuses: []string{outboxops.DeliveryPending}}, cfg, kim)
	require.NoError(t, err)
	require.Zero(t, n, "what is not dead is not requeued")
	n, err = d.ResolveAll(background, outboxops.DeliveryFilter{Statuses: []string{outboxops.DeliveryParked, outboxops.DeliveryDead}}, cfg, kim)
	require.NoError(t, err)
	require.Equal(t, 151, n)
	_, err = d.RequeueAll(background, outboxops.DeliveryFilter{Resolved: true}, cfg, kim)
	require.ErrorContains(t, err, "one by one")
	ctx, cancel := context.WithCancel(background)
	cfg.Progress = func(int) { cancel() }
	n, err = d.ResolveAll(ctx, outboxops.DeliveryFilter{}, cfg, kim)
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, 100, n)
}

func TestDeliveriesRefuse(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Schema(t)
	_, err := outboxops.NewDeliveries(nil, outboxops.DeliveriesConfig{Schema: strings.Repeat("x", 64), MaxRead: -1})
	for _, field := range []string{"db", "Schema", "MaxRead"} {
		require.ErrorContains(t, err, field)
	}
	d, err := outboxops.NewDeliveries(db, outboxops.DeliveriesConfig{Schema: schema})
	require.NoError(t, err)
	_, err = d.List(background, outboxops.DeliveryFilter{Statuses: []string{"dead"}}, outboxops.DeliveryPage{After: -1, Limit: 1001})
	for _, field := range []string{`"dead"`, "After", "Limit"} {
		require.ErrorContains(t, err, field)
	}
	_, err = d.Audit(background, 0, outboxops.AuditPage{})
	require.ErrorContains(t, err, "above 0")
	for _, action := range []func(outboxops.AuditInfo) error{
		func(a outboxops.AuditInfo) error { return d.Requeue(background, 1, a) },
		func(a outboxops.AuditInfo) error { return d.Resolve(background, 1, a) },
		func(a outboxops.AuditInfo) error { return d.AuditRead(background, 1, a) },
		func(a outboxops.AuditInfo) error {
			_, err := d.RequeueAll(background, outboxops.DeliveryFilter{}, outboxops.BulkConfig{Rate: -1}, a)
			require.ErrorContains(t, err, "Rate")
			return err
		},
	} {
		err := action(outboxops.AuditInfo{Operator: " "})
		require.ErrorContains(t, err, "Operator")
		require.ErrorContains(t, err, "Reason")
	}
	_, listErr := d.List(background, outboxops.DeliveryFilter{}, outboxops.DeliveryPage{})
	_, countErr := d.Count(background, outboxops.DeliveryFilter{})
	_, getErr := d.Get(background, 1)
	for _, err := range []error{listErr, countErr, getErr, d.Requeue(background, 1, kim)} {
		require.ErrorIs(t, err, outbox.ErrNotMigrated)
	}
}

// Under another isolation level a statement would decide by what was there before the lock.
func TestRequeueRefusesOtherIsolation(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	ids := h.deliver(t, "k", "D")
	err := pgx.BeginTxFunc(background, h.db, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
		_, err := tx.Exec(background, h.sql(`SELECT {schema}.outbox_requeue_deliveries($1, 'kim', 'why')`), ids)
		return err
	})
	require.ErrorContains(t, err, "READ COMMITTED only")
	require.Equal(t, "D", h.played(t, ids))
}

// Workers wait for the lock of a key, so a transaction in which an operator leaves it ends.
func TestRequeueIsNotLeftOpen(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	ids := h.deliver(t, "k", "D")
	tx, err := h.db.Begin(background)
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(background) }()
	require.Equal(t, 1, h.requeue(t, tx, ids))
	var idle string
	require.NoError(t, tx.QueryRow(background, `SHOW idle_in_transaction_session_timeout`).Scan(&idle))
	require.Equal(t, "10s", idle)
}
