package outboxops_test

import (
	"context"
	"fmt"
	"slices"
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

// delivery is the id of a row of event_delivery.
func delivery(number int64) outboxops.FailureID {
	return outboxops.FailureID{Kind: outboxops.KindDelivery, Number: number}
}

// sqlDeliver makes a row of event_delivery: $1 is its key (empty: unordered), $2 the position,
// $3 the status, $4 whether it is held, $5 group, $6 action, $7 whether an attempt has failed.
const sqlDeliver = `
INSERT INTO {schema}.event_delivery (position, order_key, attempt_count, max_attempts, held, next_retry_at, last_attempt_at, locked_until, locked_by,
       created_at, updated_at, occurred_at, recorded_at, event_id, status, consumer_group, action, stream, event_type, source, aggregate_type,
       aggregate_id, content_type, partition_key, last_error_code, last_error_message, processed_at, headers, payload)
SELECT $2::bigint, CASE WHEN $1::text <> '' THEN hashtextextended($5::text || $6::text || $1, 0) END, 3, 10, $4::bool,
       now() + CASE WHEN $3::text = 'PENDING' THEN interval '1 min' ELSE interval '-1 h' END, now(),
       CASE WHEN $3 = 'PROCESSING' THEN now() + interval '30 s' END, CASE WHEN $3 = 'PROCESSING' THEN 'host/1' END,
       now(), now(), now(), now(), gen_random_uuid(), $3, $5, $6, 'order-events', 'shop.order.created.v1', 'shop', 'Order', 'o-' || $1,
       'application/json', NULLIF($1, ''), CASE WHEN $7::bool THEN 'timeout' END, CASE WHEN $7 THEN 'it took too long' END,
       CASE WHEN $3 IN ('DONE', 'DEAD') THEN now() END, '{"traceparent": "00-x"}', '{"n": 1}'
RETURNING id`

// deliver makes rows of a key at positions 1, 2, 3 and so on. Each mark is a row, a dash is a missing row:
//
//	D dead
//	H dead and held
//	P pending
//	E pending after an attempt that failed
//	K parked
//	W with a worker
//	X with a worker after an attempt that failed
//	F finished
func (h *opsFixture) deliver(t testing.TB, key, play string) (ids []int64) {
	t.Helper()
	return h.deliverTo(t, "stats", "COUNTED", key, play)
}

var deliveryMarks = map[string]string{"D": "DEAD", "H": "DEAD", "P": "PENDING", "E": "PENDING", "X": "PROCESSING", "K": "PARKED", "W": "PROCESSING", "F": "DONE"}

func (h *opsFixture) deliverTo(t testing.TB, group, action, key, play string) (ids []int64) {
	t.Helper()
	for i, mark := range strings.Split(play, "") {
		id := int64(0)
		if mark != "-" {
			require.NoError(t, h.db.QueryRow(background, h.sql(sqlDeliver), key, i+1, deliveryMarks[mark], mark == "H", group, action, strings.ContainsAny(mark, "DHEX")).Scan(&id))
		}
		ids = append(ids, id)
	}
	return ids
}

// played returns the present states of rows, in the marks of deliver; R is resolved.
func (h *opsFixture) played(t testing.TB, ids []int64) (play string) {
	t.Helper()
	for _, id := range ids {
		if id == 0 {
			play += "-"
			continue
		}
		var mark string
		require.NoError(t, h.db.QueryRow(background, h.sql(`
			SELECT CASE WHEN resolved_at IS NOT NULL THEN 'R' WHEN held THEN 'H' WHEN status = 'DEAD' THEN 'D' WHEN status = 'PENDING' THEN 'P'
			            WHEN status = 'PARKED' THEN 'K' WHEN status = 'PROCESSING' THEN 'W' ELSE 'F' END
			  FROM {schema}.event_delivery WHERE id = $1`), id).Scan(&mark))
		play += mark
	}
	return play
}

// Operators see deliveries, and filters pick them.
func TestListDeliveries(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	f := h.operator(t)
	dead := h.deliver(t, "a", "FDWK")[1]
	h.deliverTo(t, "mails", "SENT", "b", "PKKDE")
	h.deliverTo(t, "mails", "", "c", "HX")

	row, err := f.Get(background, delivery(dead))
	require.NoError(t, err)
	require.JSONEq(t, `{"n": 1}`, string(row.Payload))
	require.Equal(t, map[string]string{"traceparent": "00-x"}, row.Headers)
	require.Equal(t, []string{"stats", "COUNTED", "order-events", "a", "dead", "timeout", "shop.order.created.v1", "shop", "Order", "o-a", "application/json", ""},
		[]string{row.Group, row.Action, row.Topic, row.Key, row.Status, row.Class, row.Type, row.Source, row.AggregateType, row.AggregateID, row.ContentType, row.Relay})
	require.EqualError(t, row.Err, "it took too long")
	require.Equal(t, []int{3, 10, 2, 2}, []int{row.Attempts, row.MaxAttempts, row.Retries, int(row.OutboxID)})
	require.WithinDuration(t, time.Now(), row.ChangedAt, testenv.Patience)
	_, err = f.Get(background, delivery(1<<60))
	require.ErrorIs(t, err, outboxops.ErrNotFound)

	now := time.Now()
	for name, test := range map[string]struct {
		filter outboxops.FailureFilter
		want   int
	}{
		"dead, or an attempt has failed":    {outboxops.FailureFilter{}, 5},
		"group":                             {outboxops.FailureFilter{Group: "mails"}, 4},
		"action":                            {outboxops.FailureFilter{Action: "SENT"}, 2},
		"topic":                             {outboxops.FailureFilter{Topic: "order-events"}, 5},
		"another topic":                     {outboxops.FailureFilter{Topic: "others"}, 0},
		"kind":                              {outboxops.FailureFilter{Kind: outboxops.KindDelivery}, 5},
		"another kind":                      {outboxops.FailureFilter{Kind: outboxops.KindEvent}, 0},
		"relay":                             {outboxops.FailureFilter{Relay: "default"}, 0},
		"relay and group":                   {outboxops.FailureFilter{Relay: "default", Group: "mails"}, 0},
		"outbox id":                         {outboxops.FailureFilter{OutboxID: 2}, 0},
		"dead":                              {outboxops.FailureFilter{Statuses: []string{outbox.StatusDead}}, 3},
		"an attempt has failed":             {outboxops.FailureFilter{Statuses: []string{outbox.StatusFailed}}, 2},
		"not tried":                         {outboxops.FailureFilter{Statuses: []string{outbox.StatusWaiting}}, 2},
		"tried or not":                      {outboxops.FailureFilter{Statuses: []string{outbox.StatusWaiting, outbox.StatusFailed}}, 4},
		"done":                              {outboxops.FailureFilter{Statuses: []string{outboxops.StatusDone}}, 1},
		"done or parked":                    {outboxops.FailureFilter{Statuses: []string{outboxops.StatusDone, outbox.StatusParked}}, 4},
		"key":                               {outboxops.FailureFilter{Key: "b"}, 2},
		"key and group":                     {outboxops.FailureFilter{Key: "a", Group: "mails"}, 0},
		"aggregate":                         {outboxops.FailureFilter{AggregateType: "Order", AggregateID: "o-b"}, 2},
		"another aggregate":                 {outboxops.FailureFilter{AggregateType: "User"}, 0},
		"type":                              {outboxops.FailureFilter{Type: "shop.order.created.v1"}, 5},
		"another type":                      {outboxops.FailureFilter{Type: "x"}, 0},
		"class":                             {outboxops.FailureFilter{Class: "timeout"}, 5},
		"event":                             {outboxops.FailureFilter{EventID: strings.ToUpper(row.EventID)}, 1},
		"no event":                          {outboxops.FailureFilter{EventID: uuid.NewString()}, 0},
		"since":                             {outboxops.FailureFilter{Since: now.Add(-time.Hour)}, 5},
		"until":                             {outboxops.FailureFilter{Until: now.Add(-time.Hour)}, 0},
		"resolved":                          {outboxops.FailureFilter{Statuses: []string{outbox.StatusResolved}}, 0},
		"all that is there, but what waits": {outboxops.FailureFilter{Statuses: []string{outbox.StatusFailed, outbox.StatusParked, outbox.StatusDead, outboxops.StatusDone}}, 9},
	} {
		rows, err := f.List(background, test.filter, outboxops.FailurePage{})
		require.NoError(t, err, name)
		require.Len(t, rows, test.want, name)
		if !slices.Contains(test.filter.Statuses, outboxops.StatusDone) {
			counts, err := f.Count(background, test.filter)
			require.NoError(t, err, name)
			require.Equal(t, test.want, total(counts), name)
		}
	}
}

// A delivery that Kafka has brought has the record's place, value and headers.
func TestDeliveryFromKafka(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	f := h.operator(t)
	id := h.deliver(t, "k", "D")[0]
	record := `{"key": "aw==", "headers": [{"name": "Y2VfaWQ=", "value": "b25l"}, {"name": "/w==", "value": "AA=="}], "time": 1}`
	_, err := h.db.Exec(background, h.sql(`UPDATE {schema}.event_delivery SET position = 17, record_partition = 3, record_id = 'one', record_digest = 'x', record = convert_to($2, 'UTF8'),
		headers = NULL, payload = NULL, payload_bytes = 'value' WHERE id = $1`), id, record)
	require.NoError(t, err)
	row, err := f.Get(background, delivery(id))
	require.NoError(t, err)
	require.Equal(t, &outbox.KafkaMetadata{Topic: "order-events", Partition: 3, Offset: 17, Key: []byte("k")}, row.Kafka)
	require.Zero(t, row.OutboxID)
	require.Equal(t, "one", row.EventID)
	require.Equal(t, "value", string(row.Payload))
	require.Equal(t, map[string]string{"ce_id": "one", "\xff": "\x00"}, row.Headers)
	found, err := f.List(background, outboxops.FailureFilter{EventID: "one"}, outboxops.FailurePage{})
	require.NoError(t, err)
	require.Len(t, found, 1)
	require.NoError(t, f.Hold(background, row.ID, kim))
	require.NoError(t, f.Release(background, row.ID, kim))
	entries, err := f.Audit(background, row.ID, outboxops.AuditPage{})
	require.NoError(t, err)
	require.Len(t, entries, 2)
	require.Zero(t, entries[0].OutboxID, "an offset is none")
}

func total(counts []outboxops.FailureCount) (n int) {
	for _, c := range counts {
		n += c.Events
	}
	return n
}

// Failures of both kinds are listed as one, and each page goes on where the last one ended.
func TestListBothKinds(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	f := h.operator(t)
	h.insertFailed(t, 100)
	for n := range 10 {
		ids := h.deliver(t, fmt.Sprint(n), "DDDDD")
		_, err := h.db.Exec(background, h.sql(`UPDATE {schema}.event_delivery SET created_at = now() - interval '100 h' + $2 * interval '10 h' WHERE id = ANY ($1)`), ids, n)
		require.NoError(t, err)
	}
	// Later rows failed earlier here, which does not happen in practice. Then the order of the ids counts.
	_, err := h.db.Exec(background, h.sql(`UPDATE {schema}.outbox_failed SET failed_at = now() - (100 - id) * interval '1 hour'`))
	require.NoError(t, err)
	all, err := f.List(background, outboxops.FailureFilter{}, outboxops.FailurePage{Limit: 1000})
	require.NoError(t, err)
	require.Len(t, all, 130)
	numbers := map[outboxops.Kind][]int64{}
	for i, r := range all {
		require.True(t, i == 0 || !r.FailedAt.After(all[i-1].FailedAt), "the newest first")
		numbers[r.ID.Kind] = append(numbers[r.ID.Kind], r.ID.Number)
	}
	require.Len(t, numbers[outboxops.KindDelivery], 50)
	require.IsDecreasing(t, numbers[outboxops.KindEvent])
	require.IsDecreasing(t, numbers[outboxops.KindDelivery])
	for _, limit := range []int{1, 7, 100} {
		var paged []outboxops.Failure
		for page := (outboxops.FailurePage{Limit: limit}); ; {
			rows, err := f.List(background, outboxops.FailureFilter{}, page)
			require.NoError(t, err)
			if len(rows) == 0 {
				break
			}
			paged, page = append(paged, rows...), page.Next(rows)
		}
		require.Equal(t, all, paged)
	}
	for _, after := range [][]outboxops.FailureID{{{}}, nil} {
		rows, err := f.List(background, outboxops.FailureFilter{}, outboxops.FailurePage{After: after, Limit: 1})
		require.NoError(t, err)
		require.Equal(t, all[:1], rows)
	}
	_, err = f.List(background, outboxops.FailureFilter{Statuses: []string{"ded"}}, outboxops.FailurePage{After: []outboxops.FailureID{delivery(1), delivery(2)}, Limit: 1001})
	for _, field := range []string{`"ded"`, "After", "Limit"} {
		require.ErrorContains(t, err, field)
	}
}

// Both kinds of failures are counted in the same way. Unresolved failures are counted by type.
func TestCountBothKinds(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	f := h.operator(t)
	none, err := f.Unresolved(background)
	require.NoError(t, err)
	require.Empty(t, none)
	h.insertFailed(t, 100)
	h.deliver(t, "a", "DDEPKWF")
	h.deliverTo(t, "mails", "SENT", "b", "X")
	require.NoError(t, f.Resolve(background, delivery(h.deliver(t, "d", "D")[0]), kim))
	counts, err := f.Count(background, outboxops.FailureFilter{Kind: outboxops.KindDelivery})
	require.NoError(t, err)
	var got []string
	for _, c := range counts {
		require.WithinDuration(t, time.Now(), c.Oldest, testenv.Patience)
		require.False(t, c.More)
		got = append(got, fmt.Sprintf("%s %s %s %s %s %d", c.Group, c.Action, c.Status, c.Type, c.Class, c.Events))
	}
	require.Equal(t, []string{"stats COUNTED dead shop.order.created.v1 timeout 2", "mails SENT failed shop.order.created.v1 timeout 1",
		"stats COUNTED failed shop.order.created.v1 timeout 1"}, got)
	for status, want := range map[string]int{outbox.StatusResolved: 21, outbox.StatusParked: 21, outbox.StatusWaiting: 22} {
		counts, err := f.Count(background, outboxops.FailureFilter{Statuses: []string{status}})
		require.NoError(t, err)
		require.Equal(t, want, total(counts), status)
	}
	_, err = f.Count(background, outboxops.FailureFilter{Statuses: []string{outboxops.StatusDone}})
	require.ErrorContains(t, err, "not counted")

	unresolved, err := f.Unresolved(background)
	require.NoError(t, err)
	got = nil
	for _, u := range unresolved {
		got = append(got, fmt.Sprint(u.Kind, " ", u.Type, " ", u.Failures, u.More))
	}
	require.Equal(t, []string{"event a.order.placed.v1 40 false", "event a.user.joined.v1 40 false", "delivery shop.order.created.v1 2 false"}, got)
	require.WithinDuration(t, time.Now().Add(-98*time.Hour), unresolved[0].Oldest, time.Minute)
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
	require.NoError(t, h.operator(t).Resolve(background, delivery(resolved), kim))
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
		1: {Group: "mails"}, 2: {Statuses: []string{outboxops.DeliveryDead, outboxops.DeliveryParked}}, 4: {Group: "stats"}, 0: {Stream: "others"},
	} {
		counts, err := d.Count(background, filter)
		require.NoError(t, err)
		require.Len(t, counts, want)
	}
	_, err = d.Count(background, outboxops.DeliveryFilter{Statuses: []string{outboxops.DeliveryDone}})
	require.ErrorContains(t, err, "not counted")
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

// requeues are keys, and their states after the deliveries marked by ^ are requeued.
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

// A requeued delivery comes before the later deliveries of its key, unless a worker has one of them.
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

	row, err := h.operator(t).Get(background, delivery(groups[0]))
	require.NoError(t, err)
	require.Zero(t, row.Attempts)
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

// If a worker is claiming a later delivery at this moment, that delivery keeps its place, and the requeue
// does not wait for it.
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

// A requeue waits for a transaction that finishes the key at the same time, and sees its result.
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

// A resolved delivery is never handled, and the deliveries behind it go on.
func TestResolveDelivery(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	f := h.operator(t)
	for i, test := range []struct {
		key  string
		at   int
		want string
	}{
		{"HKK", 0, "RPK"}, {"DPK", 0, "RPK"}, {"PKK", 0, "RPK"}, {"PKK", 1, "PRK"}, {"WKK", 1, "WRK"}, {"HHK", 0, "RHK"}, {"D", 0, "R"},
	} {
		ids := h.deliver(t, fmt.Sprint("key-", i), test.key)
		id := delivery(ids[test.at])
		require.NoError(t, f.Resolve(background, id, kim))
		require.Equal(t, test.want, h.played(t, ids), test.key)
		row, err := f.Get(background, id)
		require.NoError(t, err)
		require.Equal(t, []string{"resolved", "kim", kim.Reason}, []string{row.Status, row.ResolvedBy, row.Resolution})
		require.WithinDuration(t, time.Now(), row.ResolvedAt, testenv.Patience)
		rows, err := f.List(background, outboxops.FailureFilter{Statuses: []string{outbox.StatusResolved}, Key: row.Key}, outboxops.FailurePage{})
		require.NoError(t, err)
		require.Len(t, rows, 1)
		require.Equal(t, id, rows[0].ID)
	}
	ids := h.deliver(t, "more", "WFD")
	require.ErrorIs(t, f.Resolve(background, delivery(ids[0]), kim), outboxops.ErrStatus)
	require.ErrorContains(t, f.Resolve(background, delivery(ids[1]), kim), "it is done")
	require.ErrorContains(t, f.Retry(background, delivery(ids[0]), kim), "it is waiting, and with a worker")
	require.ErrorIs(t, f.Retry(background, delivery(1<<60), kim), outboxops.ErrNotFound)
	require.ErrorIs(t, f.Edit(background, delivery(ids[0]), []byte(`{}`), kim), outboxops.ErrStatus)
	require.NoError(t, f.Resolve(background, delivery(ids[2]), kim))
	require.ErrorContains(t, f.Resolve(background, delivery(ids[2]), kim), "it is resolved")

	require.NoError(t, f.Retry(background, delivery(ids[2]), kim), "it is taken back")
	require.Equal(t, "WFK", h.played(t, ids))
	require.NoError(t, f.AuditRead(background, delivery(ids[2]), kim))
	require.ErrorIs(t, f.AuditRead(background, delivery(1<<60), kim), outboxops.ErrNotFound)
	entries, err := f.Audit(background, delivery(ids[2]), outboxops.AuditPage{})
	require.NoError(t, err)
	var actions []string
	for _, e := range entries {
		require.Equal(t, []string{"kim", kim.Reason, "stats", "COUNTED", "order-events", "more", ""}, []string{e.Operator, e.Reason, e.Group, e.Handler, e.Topic, e.Key, e.Relay})
		require.Equal(t, delivery(ids[2]), e.Failure)
		require.EqualValues(t, 3, e.OutboxID)
		require.NotEmpty(t, e.EventID)
		require.NotEmpty(t, e.Login)
		actions = append(actions, e.Action)
	}
	require.Equal(t, []string{"read", "retry", "resolve"}, actions)
	entries, err = f.Audit(background, delivery(ids[2]), outboxops.AuditPage{WithoutReads: true, Limit: 1})
	require.NoError(t, err)
	require.Len(t, entries, 1)
	all, err := f.Audit(background, outboxops.FailureID{}, outboxops.AuditPage{})
	require.NoError(t, err)
	require.Len(t, all, 10, "with those of others")
	for name, test := range map[string]struct {
		page outboxops.AuditPage
		want int
	}{
		"operator": {outboxops.AuditPage{Operator: "kim"}, 10}, "another operator": {outboxops.AuditPage{Operator: "lee"}, 0}, "action": {outboxops.AuditPage{Action: "read"}, 1},
		"group": {outboxops.AuditPage{Group: "stats"}, 10}, "another group": {outboxops.AuditPage{Group: "mails"}, 0},
		"since": {outboxops.AuditPage{Since: time.Now().Add(-time.Hour)}, 10}, "until": {outboxops.AuditPage{Until: time.Now().Add(-time.Hour)}, 0},
	} {
		entries, err := f.Audit(background, outboxops.FailureID{}, test.page)
		require.NoError(t, err, name)
		require.Len(t, entries, test.want, name)
	}
}

// holds are keys, and their states after the delivery marked by ^ holds its key.
var holds = []struct{ name, key, marked, want string }{
	{"alone", "D", "^", "H"},
	{"a later one waits for a retry", "DEK", "^  ", "HKK"},
	{"a later one waits", "DPKK", "^   ", "HKKK"},
	{"a worker has a later one", "DWK", "^  ", "HWK"},
	{"an earlier one waits", "PKD", "  ^", "KKH"},
	{"it is held already", "HK", "^ ", "HK"},
	{"the second of two", "DDP", " ^ ", "DHK"},
}

// Behind a delivery that holds its key nothing of the key is handled until it is released. The
// delivery stays dead.
func TestHoldDelivery(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	f := h.operator(t)
	for i, test := range holds {
		ids := h.deliver(t, fmt.Sprint("key-", i), test.key)
		id := delivery(ids[strings.IndexByte(test.marked, '^')])
		other := h.deliverTo(t, "mails", "SENT", fmt.Sprint("key-", i), "DPK")
		require.NoError(t, f.Hold(background, id, kim), test.name)
		require.Equal(t, test.want, h.played(t, ids), test.name)
		require.NoError(t, f.Release(background, id, kim), test.name)
		free := strings.ReplaceAll(test.want, "H", "D")
		if !strings.Contains(free, "W") {
			free = strings.Replace(free, "K", "P", 1)
		}
		require.Equal(t, free, h.played(t, ids), test.name)
		require.ErrorContains(t, f.Release(background, id, kim), "its key is not held")
		require.Equal(t, "DPK", h.played(t, other), "of another group")
	}
	ids := append(h.deliver(t, "k", "PKWFD"), h.deliver(t, "", "D")...)
	require.NoError(t, f.Resolve(background, delivery(ids[4]), kim))
	for _, id := range ids {
		require.ErrorIs(t, f.Hold(background, delivery(id), kim), outboxops.ErrStatus)
	}
	require.ErrorIs(t, f.Hold(background, delivery(1<<60), kim), outboxops.ErrNotFound)
	two := h.deliver(t, "two", "HHK")
	require.NoError(t, f.Release(background, delivery(two[1]), kim))
	require.Equal(t, "DDP", h.played(t, two), "the key is released, whatever holds it")
	entries, err := f.Audit(background, delivery(two[0]), outboxops.AuditPage{})
	require.NoError(t, err)
	require.Len(t, entries, 1)
	require.Equal(t, "release", entries[0].Action)
}

// All that a filter picks is changed in parts, and counted first.
func TestRetryAllDeliveries(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	f := h.operator(t)
	for n := range 150 {
		h.deliver(t, fmt.Sprint(n), "DD")
	}
	h.deliver(t, "resolved", "D")
	require.NoError(t, f.Resolve(background, delivery(h.deliver(t, "resolved", "-D")[1]), kim))
	h.deliverTo(t, "mails", "SENT", "x", "D")
	var progress []int
	cfg := outboxops.BulkConfig{DryRun: true, Rate: 100_000, Progress: func(done int) { progress = append(progress, done) }, Topics: map[string]int{}}
	filter := outboxops.FailureFilter{Group: "stats", Class: "timeout"}
	n, err := f.RetryAll(background, filter, cfg, kim)
	require.NoError(t, err)
	require.Equal(t, 301, n)
	require.Equal(t, map[string]int{"order-events": 301}, cfg.Topics)
	require.Equal(t, 1, h.count(t, "outbox_audit"), "nothing was done")

	cfg.DryRun, cfg.Topics, progress = false, nil, nil
	n, err = f.RetryAll(background, filter, cfg, kim)
	require.NoError(t, err)
	require.Equal(t, 301, n)
	require.Equal(t, []int{100, 200, 300, 301}, progress)
	counts, err := h.deliveries(t).Count(background, outboxops.DeliveryFilter{Group: "stats"})
	require.NoError(t, err)
	require.Len(t, counts, 2)
	require.Equal(t, []int{150, 151}, []int{counts[0].Deliveries, counts[1].Deliveries}, "parked, pending")

	for _, status := range []string{outbox.StatusWaiting, outbox.StatusParked, outboxops.StatusDone} {
		n, err = f.RetryAll(background, outboxops.FailureFilter{Statuses: []string{status}}, cfg, kim)
		require.NoError(t, err)
		require.Zero(t, n, "what is not dead is not retried")
	}
	resolved := outboxops.BulkConfig{DryRun: true, Handlers: map[outboxops.FailureHandler]int{}}
	n, err = f.RetryAll(background, outboxops.FailureFilter{Statuses: []string{outbox.StatusResolved}}, resolved, kim)
	require.NoError(t, err)
	require.Equal(t, 1, n, "but what is resolved, if the filter names it")
	require.Len(t, resolved.Handlers, 1)
	n, err = f.ResolveAll(background, outboxops.FailureFilter{Statuses: []string{outbox.StatusResolved}}, resolved, kim)
	require.NoError(t, err)
	require.Zero(t, n, "it is resolved already")
	n, err = f.ResolveAll(background, outboxops.FailureFilter{Statuses: []string{outbox.StatusParked, outbox.StatusDead}}, cfg, kim)
	require.NoError(t, err)
	require.Equal(t, 151, n)
	h.insertFailed(t, 1000)
	progress = nil
	n, err = f.RetryAll(background, outboxops.FailureFilter{Statuses: []string{outbox.StatusDead}}, cfg, kim)
	require.NoError(t, err)
	require.Equal(t, 200, n)
	h.deliverTo(t, "mails", "SENT", "y", "DD")
	n, err = f.RetryAll(background, outboxops.FailureFilter{Type: "shop.order.created.v1"}, cfg, kim)
	require.NoError(t, err)
	require.Equal(t, 2, n)
	ctx, cancel := context.WithCancel(background)
	cfg.Progress = func(int) { cancel() }
	n, err = f.ResolveAll(ctx, outboxops.FailureFilter{}, cfg, kim)
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, 100, n)
}

func TestDeliveriesRefuse(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Schema(t)
	_, err := outboxops.NewDeliveries(nil, outboxops.DeliveriesConfig{Schema: strings.Repeat("x", 64)})
	for _, field := range []string{"db", "Schema"} {
		require.ErrorContains(t, err, field)
	}
	d, err := outboxops.NewDeliveries(db, outboxops.DeliveriesConfig{Schema: schema})
	require.NoError(t, err)
	_, err = d.Count(background, outboxops.DeliveryFilter{Statuses: []string{"dead"}})
	require.ErrorContains(t, err, `"dead"`)
	_, err = d.Count(background, outboxops.DeliveryFilter{})
	require.ErrorIs(t, err, outbox.ErrNotMigrated)
}

// Under another isolation level, a statement would decide by the state before the lock.
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
