package outbox

import (
	"context"
	"errors"
	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/lease"

	"github.com/outboxgo/outbox/internal/idset"
	"github.com/outboxgo/outbox/internal/pg"
)

// windowStore reads an open window. [Store] does so in PostgreSQL.
type windowStore interface {
	Page(ctx context.Context, p cursor.Position, u cursor.Unpaged, limit int) (ids []int64, rest cursor.Unpaged, err error)
	Fetch(ctx context.Context, p cursor.Position, ids []int64) (events []envelope.Event, through int64, err error)
	FetchBare(ctx context.Context, p cursor.Position, id int64, headers bool) (envelope.Event, error)
}

// windowReader reads the open window of a session: first the ids of its events, page by
// page, and then the events in the order of ids. It belongs to the goroutine of the
// session. A prefetch runs beside it and touches none of its fields.
type windowReader struct {
	store    windowStore
	unpaged  cursor.Unpaged
	ids      idset.Set // of the events that nothing has fetched yet
	limits   readLimits
	fetching chan fetched // the prefetch, if one runs
}

// readLimits are how much is read at once. What takes too long is asked for again in
// smaller parts. If our own timeout has ended it, a connection may have died, and later
// parts grow at once. If PostgreSQL has cancelled it, they stay small for manyReads: the
// same would happen again.
type readLimits struct {
	ids     readLimit // of a page
	events  readLimit // of a fetch
	tooLong int       // how often in a row a fetch of a single event took too long
}

// readLimit bounds the rows of one statement.
type readLimit struct {
	now  int // at present
	most int // that now may grow to
	all  int // that most may grow to
	good int // statements in a row that have read most rows
}

func limitTo(all int) readLimit { return readLimit{now: all, most: all, all: all} }

// keepBelow halves n and asks for no more than that from now on.
func (l *readLimit) keepBelow(n int) {
	l.most = max(1, n/2)
	l.now, l.good = l.most, 0
}

// grow is called after a statement that was asked for n rows has gone well.
func (l *readLimit) grow(n int) {
	if n >= l.most {
		l.good++
	}
	if l.good >= manyReads {
		l.most, l.good = min(2*l.most, l.all), 0
	}
	l.now = min(2*l.now, l.most)
}

const (
	// manyReads statements have to go well before one is tried again that is twice as
	// large. If it is cancelled again, that costs two in a hundred of the time: those
	// before took about half as long each.
	manyReads  = 100
	maxPageIDs = 50_000 // takes about 50 ms
	minPageIDs = 100    // fewer are not asked for
	// maxTooLong is how often the fetch of a single event may take too long before the
	// event is taken for unreadable. To print 1 GB takes longer than many a
	// statement_timeout, and a short lease.
	maxTooLong = 3
)

// fetched is the result of a fetch.
type fetched struct {
	events  []envelope.Event
	through int64 // ids up to here have been read
	limits  readLimits
	err     error
}

func newWindowReader(store windowStore, batchSize int) windowReader {
	return windowReader{store: store, limits: readLimits{ids: limitTo(maxPageIDs), events: limitTo(batchSize)}}
}

// begin begins to read the window of a position, above its last id.
func (w *windowReader) begin(p cursor.Position) (err error) {
	w.unpaged, err = cursor.UnpagedOf(p)
	return err
}

// forget drops what was read for a position that is not valid any more.
func (w *windowReader) forget() {
	if w.fetching != nil {
		<-w.fetching
		w.fetching = nil
	}
	w.unpaged, w.ids = cursor.Unpaged{}, idset.Set{}
}

// paged reports whether all ids have been read.
func (w *windowReader) paged() bool { return len(w.unpaged.Ranges) == 0 }

// drained reports whether all events have been taken.
func (w *windowReader) drained() bool { return w.paged() && w.fetching == nil && w.ids.Len() == 0 }

// page reads a page of ids. It may have read none although it returns no error: the next
// call asks for less then.
func (w *windowReader) page(ctx context.Context, p cursor.Position) error {
	asked := w.limits.ids.now
	ids, rest, err := w.store.Page(ctx, p, w.unpaged, asked)
	switch {
	case pg.IsCancelled(err) && asked >= 2*minPageIDs:
		w.limits.ids.keepBelow(asked)
		return nil
	case tookTooLong(err):
		w.limits.ids.now = max(asked/2, minPageIDs)
		return err
	case err != nil:
		return err
	}
	w.limits.ids.grow(len(ids))
	for _, id := range ids {
		w.ids.Add(id)
	}
	w.unpaged = rest
	return nil
}

// prefetch fetches the next events while others are in flight. run runs a function in
// another goroutine. The row that announces the window was written before, so the rest of
// the window cannot change.
func (w *windowReader) prefetch(p cursor.Position, statement lease.StatementContext, run func(func())) {
	if w.ids.Len() == 0 {
		return
	}
	store, ids, limits, result := w.store, w.ids.First(w.limits.events.now), w.limits, make(chan fetched, 1)
	w.fetching = result
	run(func() {
		got := fetched{limits: limits, err: lease.ErrLeaseLost} // what a panic means
		defer func() { result <- got }()
		got = fetch(statement, store, p, ids, limits)
	})
}

// prefetched returns the events that were fetched ahead. It returns none if nothing was,
// or if that failed: then take fetches them.
func (w *windowReader) prefetched() []envelope.Event {
	if w.fetching == nil {
		return nil
	}
	got := <-w.fetching
	w.fetching = nil
	return w.keep(got)
}

// take fetches the next events. It may return none and no error: the next call asks for
// less then.
func (w *windowReader) take(p cursor.Position, statement lease.StatementContext) ([]envelope.Event, error) {
	got := fetch(statement, w.store, p, w.ids.First(w.limits.events.now), w.limits)
	return w.keep(got), got.err
}

func (w *windowReader) keep(got fetched) []envelope.Event {
	w.limits = got.limits
	w.ids.RemoveThrough(got.through)
	return got.events
}

// fetch reads the events of ids, or as many as can be read at once. It has read none, and
// returns no error, when it asked for too many.
func fetch(statement lease.StatementContext, store windowStore, p cursor.Position, ids []int64, limits readLimits) (got fetched) {
	ctx, cancel := statement()
	got.events, got.through, got.err = store.Fetch(ctx, p, ids)
	cancel()
	several := len(ids) > 1
	switch {
	case got.err == nil:
		limits.events.grow(len(ids))
		limits.tooLong = 0
	case errors.Is(got.err, cursor.ErrTooMuch):
		limits.events.keepBelow(len(got.events))
		got.err = nil
	case pg.IsCancelled(got.err) && several:
		limits.events.keepBelow(len(ids))
		got.err = nil
	case tookTooLong(got.err) && several:
		limits.events.now = len(ids) / 2
		got.events, got.through = nil, 0
	case pg.IsUnreadable(got.err) && several:
		limits.events.now = 1 // it is the one behind those that came, and fails alone, too
		got.err = nil
	case tookTooLong(got.err):
		limits.tooLong++
	}
	if !several && (pg.IsUnreadable(got.err) || limits.tooLong >= maxTooLong) {
		got = fetchUnreadable(statement, store, p, ids[0], got.err)
	}
	if got.err != nil {
		got.events, got.through = nil, 0
	}
	got.limits = limits
	return got
}

// fetchUnreadable reads an event that cannot be read as a whole. The cause is the error of
// the last try.
func fetchUnreadable(statement lease.StatementContext, store windowStore, p cursor.Position, id int64, cause error) (got fetched) {
	bare := func(headers bool) (envelope.Event, error) {
		ctx, cancel := statement()
		defer cancel()
		return store.FetchBare(ctx, p, id, headers)
	}
	column := "payload"
	e, err := bare(true)
	if pg.IsUnreadable(err) || tookTooLong(err) {
		column = "headers"
		e, err = bare(false)
	}
	if err != nil {
		return fetched{err: err}
	}
	// Perhaps everything took too long until now, or failed for a moment.
	ctx, cancel := statement()
	defer cancel()
	got.events, got.through, got.err = store.Fetch(ctx, p, []int64{id})
	if !tookTooLong(got.err) && !pg.IsUnreadable(got.err) {
		return got
	}
	e.Unreadable = &envelope.UnreadableError{Id: id, EventID: string(e.EventID), Column: column, Err: cause}
	return fetched{events: []envelope.Event{e}, through: id}
}
