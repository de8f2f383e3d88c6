package delivery_test

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/pg"
)

// Workers and operators act at random, one after the other. After each step the table must be equal to a
// model:
//   - Of the open rows of a key, either the first ones are with one worker, or the first is PENDING. All
//     others are PARKED.
//   - A row is claimed only together with all earlier open rows of its key, or after they have ended.
//   - Each row is handled once.
func TestHistories(t *testing.T) {
	t.Parallel()
	seeds := 12
	if testing.Short() {
		seeds = 2
	}
	for seed := range seeds {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			newHistory(t, uint64(seed)).play()
		})
	}
}

const (
	historySteps    = 150
	historyAttempts = 3
)

// modelRow is the expected state of a row of event_delivery.
type modelRow struct {
	id       int64
	key      string // "": unordered
	status   delivery.Status
	attempts int
	worker   string
	stale    bool
	begun    bool // its worker has noted that the attempt has begun
	held     bool
	resolved bool
	effects  int // number of times that it was handled

	waits    bool // not due yet
	expired  int  // its lease was the n-th to expire
	requeued bool // requeued or held while a worker had later rows
}

func (r *modelRow) open() bool {
	return r.held || r.status != delivery.Done && r.status != delivery.Dead
}

func (r *modelRow) String() string {
	return fmt.Sprintf("%d %s %s attempt %d worker %q stale %t held %t resolved %t effects %d", r.id, r.key, r.status, r.attempts, r.worker, r.stale, r.held, r.resolved, r.effects)
}

// historyWorker is a worker, and the rows that it believes to have claimed.
type historyWorker struct {
	name  string
	store *delivery.Store
	mine  []delivery.Delivery
}

// of returns the rows of a key that the worker believes to have claimed.
func (w *historyWorker) of(key delivery.Key) (rows []delivery.Delivery) {
	for _, d := range w.mine {
		if d.Key == key && key.Ordered {
			rows = append(rows, d)
		}
	}
	return rows
}

func (w *historyWorker) forget(rows []delivery.Delivery) {
	w.mine = slices.DeleteFunc(w.mine, func(d delivery.Delivery) bool { return slices.Contains(ids(rows), d.ID) })
}

// history is a sequence of random steps of workers and operators.
type history struct {
	*tableFixture
	rng     *rand.Rand
	workers []*historyWorker
	janitor *delivery.Store // a short lease, so that it may expire rows
	rows    []*modelRow     // by id
	expired int
	trace   []string
}

func newHistory(t *testing.T, seed uint64) *history {
	h := &history{tableFixture: newTable(t), rng: rand.New(rand.NewPCG(seed, 16))}
	h.exec(`CREATE TABLE {schema}.effects (n bigserial PRIMARY KEY, delivery_id bigint NOT NULL, key text NOT NULL)`)
	h.janitor = h.store("janitor", time.Millisecond)
	for _, name := range []string{"a", "b", "c"} {
		h.workers = append(h.workers, &historyWorker{name: name, store: h.store(name, time.Hour)})
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("seed %d:\n%s", seed, strings.Join(h.trace, "\n"))
		}
	})
	return h
}

func (h *history) note(format string, args ...any) {
	h.trace = append(h.trace, fmt.Sprintf(format, args...))
}

func (h *history) play() {
	steps := []func(){h.insert, h.insert, h.claim, h.claim, h.claim, h.finish, h.finish, h.finish, h.fail, h.fail, h.giveBack, h.begin, h.begin, h.renew, h.expire, h.wait, h.requeue, h.requeue, h.resolve, h.hold, h.release, h.repair, h.free}
	for range historySteps {
		steps[h.rng.IntN(len(steps))]()
		h.compare()
	}
	for _, w := range h.workers {
		w.mine = nil // gone
	}
	for range 100 {
		h.expireAll()
		h.wait()
		h.claim()
		h.finishAll()
		h.compare()
		if !slices.ContainsFunc(h.rows, func(r *modelRow) bool { return r.open() && !r.held && !h.holds(r.key) }) {
			return
		}
	}
	h.t.Fatal("rows are left that nobody gets")
}

func (h *history) holds(key string) bool {
	return key != "" && slices.ContainsFunc(h.rows, func(r *modelRow) bool { return r.key == key && r.held })
}

// compare checks that the table is equal to the model.
func (h *history) compare() {
	rows, err := h.db.Query(h.t.Context(), pg.InSchema(`
		SELECT d.id, CASE WHEN d.order_key IS NULL THEN '' ELSE d.aggregate_id END AS key, d.status, d.attempt_count, coalesce(d.locked_by, ''), coalesce(d.last_error_code, '') = 'stale',
		       d.held, d.resolved_at IS NOT NULL, (SELECT count(*) FROM {schema}.effects AS e WHERE e.delivery_id = d.id)
		  FROM {schema}.event_delivery AS d ORDER BY d.id`, h.schema))
	require.NoError(h.t, err)
	found, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (string, error) {
		var r modelRow
		err := row.Scan(&r.id, &r.key, &r.status, &r.attempts, &r.worker, &r.stale, &r.held, &r.resolved, &r.effects)
		return r.String(), err
	})
	require.NoError(h.t, err)
	want := make([]string, len(h.rows))
	for i, r := range h.rows {
		want[i] = r.String()
	}
	require.Equal(h.t, want, found)
}

func (h *history) worker() *historyWorker { return h.workers[h.rng.IntN(len(h.workers))] }

func (h *history) row(id int64) *modelRow {
	i, ok := slices.BinarySearchFunc(h.rows, id, func(r *modelRow, id int64) int { return cmp.Compare(r.id, id) })
	require.True(h.t, ok, id)
	return h.rows[i]
}

// pick returns some rows of a status at random.
func (h *history) pick(most int, statuses ...delivery.Status) (ids []int64) {
	for _, i := range h.rng.Perm(len(h.rows)) {
		if r := h.rows[i]; len(ids) < most && slices.Contains(statuses, r.status) {
			ids = append(ids, r.id)
		}
	}
	return ids
}

// openOf returns the open rows of a key.
func (h *history) openOf(key string) (open []*modelRow) {
	for _, r := range h.rows {
		if r.key == key && key != "" && r.open() {
			open = append(open, r)
		}
	}
	return open
}

// promote does the same as outbox_promote.
func (h *history) promote(key string) (promoted int64) {
	open := h.openOf(key)
	if len(open) == 0 || slices.ContainsFunc(open, func(r *modelRow) bool { return r.status != delivery.Parked }) {
		return 0
	}
	open[0].status, open[0].waits = delivery.Pending, false
	return 1
}

func (h *history) promoteAll(rows []int64) (promoted int64) {
	for _, id := range rows {
		promoted += h.promote(h.row(id).key)
	}
	return promoted
}

func (h *history) insert() {
	w, n := h.worker(), 1+h.rng.IntN(6)
	status, keys := delivery.Processing, make([]string, n)
	if h.rng.IntN(3) == 0 {
		status = delivery.Pending
	}
	for i := range keys {
		keys[i] = []string{"k", "k", "l", "m", "n", "o", ""}[h.rng.IntN(7)]
	}
	rows, seen := make([]delivery.New, n), map[string]bool{}
	h.note("%s inserts %v of %q", w.name, status, keys)
	for i, id := range h.record(keys...) {
		rows[i] = delivery.New{OutboxID: id, Action: action, Stream: stream, Status: status, MaxAttempts: historyAttempts}
		r := &modelRow{id: 1, key: keys[i], status: status}
		if k := keys[i]; k != "" {
			rows[i].Key = delivery.KeyOf(group, action, stream, k)
			if status == delivery.Pending && seen[k] {
				rows[i].Status, r.status = delivery.Parked, delivery.Parked
			}
			if !seen[k] && len(h.openOf(k)) > 0 || seen[k] && status == delivery.Processing && h.parks(k) {
				r.status = delivery.Parked
			}
			seen[k] = true
		}
		if len(h.rows) > 0 {
			r.id = h.rows[len(h.rows)-1].id + 1
		}
		if r.status == delivery.Processing {
			r.worker, r.attempts = w.name, 1
		}
		h.rows = append(h.rows, r)
	}
	var claimed []delivery.Delivery
	require.NoError(h.t, delivery.Transact(h.t.Context(), h.db, func(b *pgx.Batch) {
		w.store.Queue(b, rows, room, func(d []delivery.Delivery) error { claimed = d; return nil })
	}))
	for _, d := range claimed {
		r := h.row(d.ID)
		require.Equal(h.t, w.name, r.worker, r)
		r.worker = d.Holder
	}
	w.mine = append(w.mine, claimed...)
}

// parks reports whether the rows of a key that are being inserted are parked, as the first of them was.
func (h *history) parks(key string) bool {
	open := h.openOf(key)
	return open[len(open)-1].status == delivery.Parked
}

func (h *history) claim() {
	w, limit, follow, suspects := h.worker(), 1+h.rng.IntN(6), h.rng.IntN(4), h.rng.IntN(3) == 0
	claimed, err := w.store.Claim(h.t.Context(), pairs, limit, follow, suspects, room)
	require.NoError(h.t, err)
	h.note("%s claims %d, %d behind, suspects %t: %v", w.name, limit, follow, suspects, ids(claimed))
	could, heads := 0, 0
	for _, r := range h.rows {
		if r.status == delivery.Pending && !r.waits && r.stale == suspects {
			could++
		}
	}
	var want []int64
	for _, d := range claimed {
		if r := h.row(d.ID); r.status == delivery.Pending {
			heads++
			require.True(h.t, !r.waits && r.stale == suspects, r)
			want = append(want, r.id)
			want = append(want, h.behind(r, follow, suspects)...)
		}
	}
	require.Equal(h.t, min(limit, could), heads)
	slices.Sort(want)
	require.Equal(h.t, want, ids(claimed), "in their order, and nothing else")
	for _, d := range claimed {
		r := h.row(d.ID)
		for _, earlier := range h.openOf(r.key) {
			require.False(h.t, earlier.id < r.id && !earlier.requeued && !slices.Contains(want, earlier.id), "%v is claimed before %v", r, earlier)
		}
	}
	for _, d := range claimed {
		r := h.row(d.ID)
		r.status, r.worker, r.attempts, r.expired, r.begun = delivery.Processing, d.Holder, r.attempts+1, 0, false
		require.Equal(h.t, r.attempts, d.Attempt)
	}
	w.forget(claimed) // rows that it has lost meanwhile
	w.mine = append(w.mine, claimed...)
}

// behind returns the rows that are claimed together with the first row of a key: only rows that were never
// tried.
func (h *history) behind(r *modelRow, follow int, suspects bool) (behind []int64) {
	if suspects || r.attempts > 0 {
		return nil
	}
	for _, next := range h.openOf(r.key) {
		if next == r || next.status != delivery.Parked {
			continue
		}
		if len(behind) == follow || next.attempts > 0 || next.stale {
			break
		}
		behind = append(behind, next.id)
	}
	return behind
}

// firsts returns the first rows of some of the keys that a worker has, and some without order, all of the
// same claim.
func (h *history) firsts(w *historyWorker) (chosen []delivery.Delivery) {
	skipped := map[delivery.Key]bool{}
	for _, d := range w.mine {
		if len(chosen) > 0 && d.Holder != chosen[0].Holder {
			continue
		}
		if skipped[d.Key] || h.rng.IntN(4) == 0 {
			skipped[d.Key] = d.Key.Ordered
			continue
		}
		chosen = append(chosen, d)
	}
	return chosen
}

func (h *history) finish() {
	w := h.worker()
	h.finishThese(w, h.firsts(w), h.rng.IntN(5))
}

func (h *history) finishThese(w *historyWorker, chosen []delivery.Delivery, how int) {
	if len(chosen) == 0 {
		return
	}
	var lost []delivery.Delivery
	for _, d := range chosen {
		if r := h.row(d.ID); r.worker != d.Holder {
			lost = append(lost, d)
		}
	}
	h.note("%s finishes %v, lost %v, %s", w.name, ids(chosen), ids(lost), []string{"alone", "with effects", "with effects", "rolled back", "repeatable read"}[how])
	promoted, err := h.finishHow(w, how, chosen)
	if len(lost) > 0 {
		require.ErrorIs(h.t, err, delivery.ErrLost)
		h.markDead(w, lost)
		return
	}
	require.NoError(h.t, err)
	if how == 3 {
		return
	}
	for _, d := range chosen {
		r := h.row(d.ID)
		r.status, r.worker, r.expired = delivery.Done, "", 0
		if how > 0 {
			r.effects++
		}
	}
	w.forget(chosen)
	want := h.promoteAll(ids(chosen))
	if how == 4 && slices.ContainsFunc(chosen, func(d delivery.Delivery) bool { return d.Key.Ordered }) {
		require.EqualValues(h.t, -1, promoted)
		if h.rng.IntN(2) == 0 {
			promoted, err = w.store.Promote(h.t.Context(), chosen)
		} else { // the worker was gone before Promote
			_, promoted, err = w.store.RepairHeads(h.t.Context(), -1<<63, 1000)
		}
		require.NoError(h.t, err)
	}
	require.Equal(h.t, want, promoted)
}

func (h *history) finishHow(w *historyWorker, how int, chosen []delivery.Delivery) (promoted int64, err error) {
	ctx := h.t.Context()
	if how == 0 {
		return w.store.Finish(ctx, chosen)
	}
	level := pgx.ReadCommitted
	if how == 4 {
		level = pgx.RepeatableRead
	}
	tx, err := h.db.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
	require.NoError(h.t, err)
	defer func() { _ = tx.Rollback(ctx) }()
	_, err = tx.Exec(ctx, pg.InSchema(`INSERT INTO {schema}.effects (delivery_id, key) SELECT id, '' FROM unnest($1::bigint[]) AS id`, h.schema), ids(chosen))
	require.NoError(h.t, err)
	promoted, err = w.store.FinishIn(ctx, tx, chosen)
	if err != nil || how == 3 {
		return 0, err
	}
	return promoted, tx.Commit(ctx)
}

// markDead releases lost rows and all other rows of their keys, as a worker does.
func (h *history) markDead(w *historyWorker, lost []delivery.Delivery) {
	var rows []delivery.Delivery
	for _, d := range w.mine {
		if slices.Contains(ids(lost), d.ID) || d.Key.Ordered && slices.Contains(keys(lost), d.Key) {
			rows = append(rows, d)
		}
	}
	h.returned(w, rows)
}

func (h *history) giveBack() {
	w := h.worker()
	var rows []delivery.Delivery
	for _, d := range w.mine {
		if h.rng.IntN(2) == 0 && !slices.Contains(ids(rows), d.ID) {
			rows = append(rows, d)
			for _, behind := range w.of(d.Key) { // a row is only released together with the rows behind it
				if behind.ID > d.ID && !slices.Contains(ids(rows), behind.ID) {
					rows = append(rows, behind)
				}
			}
		}
	}
	h.returned(w, rows)
}

func (h *history) returned(w *historyWorker, rows []delivery.Delivery) {
	h.note("%s gives %v back", w.name, ids(rows))
	require.NoError(h.t, w.store.Release(h.t.Context(), rows))
	h.parkAll(rows)
	h.promoteAll(ids(rows))
	w.forget(rows)
}

// parkAll parks rows that were released untried.
func (h *history) parkAll(rows []delivery.Delivery) {
	for _, d := range rows {
		r := h.row(d.ID)
		if r.worker != d.Holder {
			continue
		}
		r.status, r.worker, r.attempts, r.waits, r.expired = delivery.Parked, "", r.attempts-1, false, 0
		if r.key == "" {
			r.status = delivery.Pending
		}
	}
}

func (h *history) fail() {
	w := h.worker()
	if len(w.mine) == 0 {
		return
	}
	d := w.mine[h.rng.IntN(len(w.mine))]
	var rest []delivery.Delivery
	if run := w.of(d.Key); len(run) > 0 {
		d, rest = run[0], run[1:]
		rest = slices.DeleteFunc(slices.Clone(rest), func(other delivery.Delivery) bool { return other.Holder != d.Holder })
	}
	f := delivery.Failure{Of: d, Code: "handler", Message: "no", Wait: time.Duration(h.rng.IntN(2)) * time.Hour, Dead: d.Attempt >= d.MaxAttempts || h.rng.IntN(4) == 0}
	f.Held = f.Dead && h.rng.IntN(2) == 0
	h.note("%s fails with %d, dead %t, held %t, rest %v", w.name, d.ID, f.Dead, f.Held, ids(rest))
	promoted, err := w.store.Fail(h.t.Context(), f, rest)
	r := h.row(d.ID)
	lost := r.worker != d.Holder
	if !lost {
		r.status, r.worker, r.waits, r.stale, r.held, r.expired = delivery.Pending, "", f.Wait > 0, false, f.Held, 0
		if f.Dead {
			r.status = delivery.Dead
		}
	}
	h.parkAll(rest)
	want := h.promote(r.key)
	w.forget(append(w.of(d.Key), d))
	if lost {
		require.ErrorIs(h.t, err, delivery.ErrLost)
		return
	}
	require.NoError(h.t, err)
	require.Equal(h.t, want, promoted)
}

func (h *history) renew() {
	w := h.worker()
	var want []delivery.Ref
	for _, d := range w.mine {
		if r := h.row(d.ID); r.worker == d.Holder {
			want, r.expired = append(want, d.Ref), 0
		}
	}
	h.note("%s renews", w.name)
	renewed, err := w.store.Renew(h.t.Context(), refs(w.mine))
	require.NoError(h.t, err)
	require.ElementsMatch(h.t, want, renewed)
}

// begin notes that an attempt on a row begins.
func (h *history) begin() {
	w := h.worker()
	if len(w.mine) == 0 {
		return
	}
	d := w.mine[h.rng.IntN(len(w.mine))]
	h.note("%s begins %d", w.name, d.ID)
	err := w.store.Begin(h.t.Context(), []delivery.Delivery{d})
	if r := h.row(d.ID); r.worker != d.Holder {
		require.ErrorIs(h.t, err, delivery.ErrLost)
	} else {
		require.NoError(h.t, err)
		r.begun = true
	}
}

// endLeases ends the leases of rows in this order.
func (h *history) endLeases(ids []int64) {
	for _, id := range ids {
		h.expired++
		h.row(id).expired = h.expired
		h.exec(`UPDATE {schema}.event_delivery SET locked_until = clock_timestamp() WHERE id = $1`, id)
	}
}

func (h *history) expire() {
	h.endLeases(h.pick(h.rng.IntN(4), delivery.Processing))
	h.takeOver(1+h.rng.IntN(3), h.rng.IntN(2) == 0)
}

func (h *history) expireAll() {
	h.endLeases(h.pick(len(h.rows), delivery.Processing))
	h.takeOver(len(h.rows), false)
}

// takeOver expires rows. The rest of a run goes with each.
func (h *history) takeOver(limit int, hold bool) {
	var gone []*modelRow
	for _, r := range h.rows {
		if r.expired > 0 {
			gone = append(gone, r)
		}
	}
	slices.SortFunc(gone, func(a, b *modelRow) int { return cmp.Compare(a.expired, b.expired) })
	gone = gone[:min(limit, len(gone))]
	for _, first := range slices.Clone(gone) {
		for _, r := range h.openOf(first.key) {
			if r.worker == first.worker && r.worker != "" && !slices.Contains(gone, r) {
				gone = append(gone, r)
			}
		}
	}
	var want, got []int64
	for _, r := range gone {
		want = append(want, r.id)
		r.worker, r.stale, r.waits, r.expired = "", true, false, 0
		counted := r.begun
		if !counted {
			r.attempts--
		}
		switch {
		case counted && r.attempts >= historyAttempts:
			r.status, r.held = delivery.Dead, hold
		case r.key == "":
			r.status = delivery.Pending
		default:
			r.status = delivery.Parked
		}
	}
	h.promoteAll(want)
	h.note("leases of %v have expired, hold %t", want, hold)
	expired, err := h.janitor.TakeOver(h.t.Context(), limit, hold)
	require.NoError(h.t, err)
	for _, e := range expired {
		got = append(got, e.ID)
	}
	require.ElementsMatch(h.t, want, got)
}

// wait makes all retries due.
func (h *history) wait() {
	h.note("retries are due")
	h.exec(`UPDATE {schema}.event_delivery SET next_retry_at = now() WHERE next_retry_at > now()`)
	for _, r := range h.rows {
		r.waits = false
	}
}

func (h *history) requeue() {
	chosen := h.pick(1+h.rng.IntN(3), delivery.Dead)
	h.note("%v are requeued", chosen)
	h.exec(`SELECT {schema}.outbox_requeue_deliveries($1, 'me', 'why')`, chosen)
	for _, id := range chosen {
		r := h.row(id)
		r.status, r.held, r.attempts, r.resolved, r.waits = delivery.Parked, false, 0, false, false
		if r.key == "" {
			r.status = delivery.Pending
		}
		for _, later := range h.openOf(r.key) {
			r.requeued = r.requeued || later.id > r.id && later.status == delivery.Processing
		}
	}
	for _, id := range chosen {
		open := h.openOf(h.row(id).key)
		if i := slices.IndexFunc(open, func(r *modelRow) bool { return r.status == delivery.Pending }); i > 0 {
			open[i].status = delivery.Parked
		}
		h.promote(h.row(id).key)
	}
}

func (h *history) resolve() {
	var chosen []int64
	for _, id := range h.pick(1+h.rng.IntN(3), delivery.Dead, delivery.Pending, delivery.Parked) {
		if !h.row(id).resolved {
			chosen = append(chosen, id)
		}
	}
	h.note("%v are resolved", chosen)
	h.exec(`SELECT {schema}.outbox_resolve_deliveries($1, 'me', 'why')`, chosen)
	for _, id := range chosen {
		r := h.row(id)
		r.status, r.held, r.resolved = delivery.Dead, false, true
	}
	h.promoteAll(chosen)
}

// hold makes dead rows hold their keys. Rows that a worker has claimed stay claimed.
func (h *history) hold() {
	chosen := h.pick(1+h.rng.IntN(2), delivery.Dead)
	h.note("%v hold their keys", chosen)
	h.exec(`SELECT {schema}.outbox_hold_deliveries($1, 'me', 'why')`, chosen)
	for _, id := range chosen {
		r := h.row(id)
		if r.resolved || r.key == "" {
			continue
		}
		r.held = true
		for _, other := range h.openOf(r.key) {
			if other.status == delivery.Pending {
				other.status = delivery.Parked
			}
			r.requeued = r.requeued || other.id > r.id && other.status == delivery.Processing
		}
	}
}

func (h *history) release() {
	chosen := h.pick(1+h.rng.IntN(2), delivery.Dead, delivery.Parked)
	h.note("the keys of %v are released", chosen)
	h.exec(`SELECT {schema}.outbox_release_deliveries($1, 'me', 'why')`, chosen)
	for _, id := range chosen {
		for _, r := range h.openOf(h.row(id).key) {
			r.held = false
		}
	}
	h.promoteAll(chosen)
}

// repair requires that RepairHeads finds nothing.
func (h *history) repair() {
	behind := int64(-1 << 63)
	for range 20 {
		last, repaired, err := h.janitor.RepairHeads(h.t.Context(), behind, 2)
		require.NoError(h.t, err)
		require.Zero(h.t, repaired)
		if behind = last; behind == -1<<63 {
			return
		}
	}
	h.t.Fatal("the sweep does not end")
}

// free finishes the claimed rows of all workers, so that their keys become free, and requeues some of these
// rows.
func (h *history) free() {
	h.wait()
	h.claim()
	for _, w := range h.workers {
		for _, rows := range byClaim(w.mine) {
			h.finishThese(w, rows, 1)
		}
	}
	h.insert()
	for _, w := range h.workers {
		for _, rows := range byClaim(w.mine) {
			h.finishThese(w, rows, 1)
		}
	}
	h.requeue()
}

// byClaim groups rows by their claim.
func byClaim(rows []delivery.Delivery) (claims [][]delivery.Delivery) {
	for _, d := range rows {
		if n := slices.IndexFunc(claims, func(of []delivery.Delivery) bool { return of[0].Holder == d.Holder }); n >= 0 {
			claims[n] = append(claims[n], d)
			continue
		}
		claims = append(claims, []delivery.Delivery{d})
	}
	return claims
}

// finishAll finishes the claimed rows of all workers.
func (h *history) finishAll() {
	for _, w := range h.workers {
		for _, rows := range byClaim(w.mine) {
			_, err := h.finishHow(w, 1, rows)
			require.NoError(h.t, err)
		}
		for _, d := range w.mine {
			r := h.row(d.ID)
			r.status, r.worker, r.effects = delivery.Done, "", r.effects+1
		}
		h.promoteAll(ids(w.mine))
		w.mine = nil
	}
}
