package relay

import (
	"context"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/lease"

	"github.com/outboxgo/outbox/internal/pg"
)

// windowStore reads an open window. [cursor.Store] does so in PostgreSQL.
type windowStore interface {
	Page(ctx context.Context, p cursor.Position, u cursor.Unpaged, limit int) (ids []int64, rest cursor.Unpaged, err error)
	Fetch(ctx context.Context, p cursor.Position, ids []int64) (events []envelope.Event, through int64, err error)
	FetchBare(ctx context.Context, p cursor.Position, id int64, headers bool) (envelope.Event, error)
}

// windowReader reads the open window of a session: first the ids of its events, page by page, and then the events in
// the order of ids. It belongs to the goroutine of the session. A prefetch runs in another goroutine and touches
// none of its fields.
type windowReader struct {
	store    windowStore
	unpaged  cursor.Unpaged
	IDs      cursor.IDSet // of the events that nothing has fetched yet
	Limits   ReadLimits
	fetching chan fetched // the prefetch, if one runs
}

// ReadLimits bound how much is read at once. A read that takes too long is repeated in smaller parts. If our own
// timeout has ended it, a connection may have died, and later parts grow at once. If PostgreSQL has cancelled it,
// the parts stay small for manyReads statements.
type ReadLimits struct {
	IDs     ReadLimit // of a page
	Events  ReadLimit // of a fetch
	tooLong int       // how often in a row a fetch of a single event took too long
}

// ReadLimit bounds the rows of one statement.
type ReadLimit struct {
	Now  int // at present
	Most int // that now may grow to
	All  int // that most may grow to
	good int // statements in a row that have read most rows
}

// LimitTo returns a limit that grows up to all rows.
func LimitTo(all int) ReadLimit { return ReadLimit{Now: all, Most: all, All: all} }

// keepBelow halves n and asks for no more than that from now on.
func (l *ReadLimit) keepBelow(n int) {
	l.Most = max(1, n/2)
	l.Now, l.good = l.Most, 0
}

// grow is called after a statement that was asked for n rows has gone well.
func (l *ReadLimit) grow(n int) {
	if n >= l.Most {
		l.good++
	}
	if l.good >= manyReads {
		l.Most, l.good = min(2*l.Most, l.All), 0
	}
	l.Now = min(2*l.Now, l.Most)
}

const (
	// manyReads statements have to go well before one is tried again that is twice as
	// large. If it is cancelled again, that costs two in a hundred of the time: those
	// before took about half as long each.
	manyReads  = 100
	minPageIDs = 100 // fewer are not asked for
	// maxTooLong is how often the fetch of a single event may take too long before the
	// event is taken for unreadable. To print 1 GB takes longer than many a
	// statement_timeout, and a short lease.
	maxTooLong = 3
)

// fetched is the result of a fetch.
type fetched struct {
	Events  []envelope.Event
	Through int64 // ids up to here have been read
	limits  ReadLimits
	Err     error
}

// NewWindowReader returns a reader without an open window.
func NewWindowReader(store windowStore, batchSize int) windowReader {
	return windowReader{store: store, Limits: ReadLimits{IDs: LimitTo(cursor.MaxPageIDs), Events: LimitTo(batchSize)}}
}

// Begin begins to read the window of a position, above its last id.
func (w *windowReader) Begin(p cursor.Position) (err error) {
	w.unpaged, err = cursor.UnpagedOf(p)
	return err
}

// forget drops everything that was read for a position that is not valid any more.
func (w *windowReader) forget() {
	if w.fetching != nil {
		<-w.fetching
		w.fetching = nil
	}
	w.unpaged, w.IDs = cursor.Unpaged{}, cursor.IDSet{}
}

// Paged reports whether all ids have been read.
func (w *windowReader) Paged() bool { return len(w.unpaged.Ranges) == 0 }

// drained reports whether all events have been taken.
func (w *windowReader) drained() bool { return w.Paged() && w.fetching == nil && w.IDs.Len() == 0 }

// Page reads a page of ids. It may have read none although it returns no error: the next call asks for less.
func (w *windowReader) Page(ctx context.Context, p cursor.Position) error {
	asked := w.Limits.IDs.Now
	ids, rest, err := w.store.Page(ctx, p, w.unpaged, asked)
	switch {
	case pg.IsCancelled(err) && asked >= 2*minPageIDs:
		w.Limits.IDs.keepBelow(asked)
		return nil
	case tookTooLong(err):
		w.Limits.IDs.Now = max(asked/2, minPageIDs)
		return err
	case err != nil:
		return err
	}
	w.Limits.IDs.grow(len(ids))
	for _, id := range ids {
		w.IDs.Add(id)
	}
	w.unpaged = rest
	return nil
}

// prefetch fetches the next events while the current batch is sent. run runs a function in another goroutine. The
// row that announces the window was written before, so the rest of the window cannot change.
func (w *windowReader) prefetch(p cursor.Position, statement lease.StatementContext, run func(func())) {
	if w.IDs.Len() == 0 {
		return
	}
	store, ids, limits, result := w.store, w.IDs.First(w.Limits.Events.Now), w.Limits, make(chan fetched, 1)
	w.fetching = result
	run(func() {
		got := fetched{limits: limits, Err: lease.ErrLeaseLost} // the result if the fetch panics
		defer func() { result <- got }()
		got = Fetch(statement, store, p, ids, limits)
	})
}

// prefetched returns the events that were prefetched. It returns none if there was no prefetch or it failed: then
// Take fetches them.
func (w *windowReader) prefetched() []envelope.Event {
	if w.fetching == nil {
		return nil
	}
	got := <-w.fetching
	w.fetching = nil
	return w.keep(got)
}

// Take fetches the next events. It may return none and no error: the next call asks for less.
func (w *windowReader) Take(p cursor.Position, statement lease.StatementContext) ([]envelope.Event, error) {
	got := Fetch(statement, w.store, p, w.IDs.First(w.Limits.Events.Now), w.Limits)
	return w.keep(got), got.Err
}

func (w *windowReader) keep(got fetched) []envelope.Event {
	w.Limits = got.limits
	w.IDs.RemoveThrough(got.Through)
	return got.Events
}

// Fetch reads the events of ids, or as many as can be read at once. It has read none, and
// returns no error, when it asked for too many.
func Fetch(statement lease.StatementContext, store windowStore, p cursor.Position, ids []int64, limits ReadLimits) (got fetched) {
	ctx, cancel := statement()
	got.Events, got.Through, got.Err = store.Fetch(ctx, p, ids)
	cancel()
	several := len(ids) > 1
	switch {
	case got.Err == nil:
		limits.Events.grow(len(ids))
		limits.tooLong = 0
	case pg.IsCancelled(got.Err) && several:
		limits.Events.keepBelow(len(ids))
		got.Err = nil
	case tookTooLong(got.Err) && several:
		limits.Events.Now = len(ids) / 2
		got.Events, got.Through = nil, 0
	case pg.IsUnreadable(got.Err) && several:
		limits.Events.Now = 1 // it is the one behind those that came, and fails alone, too
		got.Err = nil
	case tookTooLong(got.Err):
		limits.tooLong++
	}
	if !several && (pg.IsUnreadable(got.Err) || limits.tooLong >= maxTooLong) {
		if got = fetchUnreadable(statement, store, p, ids[0], got.Err); got.Err == nil {
			limits.tooLong = 0 // of the next event
		}
	}
	if got.Err != nil {
		got.Events, got.Through = nil, 0
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
		return fetched{Err: err}
	}
	// Perhaps everything took too long until now, or failed for a moment.
	ctx, cancel := statement()
	defer cancel()
	got.Events, got.Through, got.Err = store.Fetch(ctx, p, []int64{id})
	if !tookTooLong(got.Err) && !pg.IsUnreadable(got.Err) {
		return got
	}
	e.Unreadable = &envelope.UnreadableError{ID: id, EventID: string(e.EventID), Column: column, Err: cause}
	return fetched{Events: []envelope.Event{e}, Through: id}
}
