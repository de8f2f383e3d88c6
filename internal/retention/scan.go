package retention

import (
	"cmp"
	"context"
	"time"
)

// Scan removes rows of a table in the order of ids, by the primary key: there is no index for retention alone. The
// time of a row is the start of its transaction, and its id was drawn later. So after a row that is too young, old
// rows come only from long transactions and from clocks that were set. A scan ends at a batch in which every row is
// too young.
//
// mark is where the next scan begins, so each scan reads only the rows that have become old since the last one. Rows
// below mark that had to stay, or that a transaction commits there later, are found when a scan begins at the start
// of the table, once in RescanAfter.
type Scan struct {
	Batch func(ctx context.Context, after int64) (Step, error)
	Pause func(took time.Duration) bool // between two batches; false: stop
	Again time.Duration                 // begin at the start of the table so often; zero means RescanAfter

	mark  int64
	began time.Time // when a scan last began at the start of the table
}

// Step is the result of a batch.
type Step struct {
	scanned int64 // number of rows that it scanned at
	Last    int64 // highest id among them
	Young   int64 // lowest id of a row that is too young; 0: there was none
	Removed int64
	full    bool   // there may be more rows behind last
	More    bool   // there may be more to do
	Lagging string // relay that has not published rows that are old enough to go
	Foreign string // relay whose position was not written in this cluster, so all rows stay
	huge    hugeRows
}

// hugeRows are rows that would go if they were not too large for the archive.
type hugeRows struct{ n, first int64 } // their number, and the lowest id

// add adds others.
func (h *hugeRows) add(others hugeRows) {
	if h.n == 0 || others.n > 0 && others.first < h.first {
		h.first = others.first
	}
	h.n += others.n
}

// RescanAfter is how long a row may stay that could not be removed when it became old.
const RescanAfter = 24 * time.Hour

// Run returns how many rows it removed, also with an error.
func (w *Scan) Run(ctx context.Context) (removed int64, err error) {
	if w.began.IsZero() || time.Since(w.began) > cmp.Or(w.Again, RescanAfter) {
		w.mark, w.began = 0, time.Now()
	}
	for at, young := w.mark, false; ; {
		start := time.Now()
		s, err := w.Batch(ctx, at)
		if err != nil {
			return removed, err
		}
		at, removed = max(at, s.Last), removed+s.Removed
		if s.Young > 0 && !young {
			w.mark, young = s.Young-1, true
		}
		if !young {
			w.mark = at
		}
		if !s.More || !w.Pause(time.Since(start)) {
			return removed, nil
		}
	}
}
