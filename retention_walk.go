package outbox

import (
	"context"
	"time"
)

// walk removes rows of a table in the order of ids, by its primary key: no index
// is kept for retention alone. A row's time is the start of its transaction, and
// its id was drawn after that; so behind a row that is too young there are old
// ones only by way of long transactions and of clocks that were set. It ends at a
// batch of which every row is too young.
//
// mark is where the next walk begins, so that each passes the rows once that have
// become old since the last one, whatever stays behind: what must not go yet, and
// what a transaction commits there later. Those it meets when it begins from the
// start again, once in lookAgain.
type walk struct {
	batch func(ctx context.Context, after int64) (step, error)
	rest  func(took time.Duration) bool // false: stop

	mark  int64
	began time.Time // at the start of the table
}

// step is what a batch saw and did.
type step struct {
	looked   int64 // rows
	last     int64 // highest id it looked at
	young    int64 // lowest id of a row that is too young; 0: none was
	gone     int64
	more     bool   // there may be more to do
	standing string // relay that has not published what is old enough to go
}

// lookAgain is how long a row may stay that could not go in its turn.
const lookAgain = day

// run removes what may go, and returns how much that was, also with an error.
func (w *walk) run(ctx context.Context) (gone int64, err error) {
	if w.began.IsZero() || time.Since(w.began) > lookAgain {
		w.mark, w.began = 0, time.Now()
	}
	for at, young := w.mark, false; ; {
		start := time.Now()
		s, err := w.batch(ctx, at)
		if err != nil {
			return gone, err
		}
		at, gone = max(at, s.last), gone+s.gone
		if s.young > 0 && !young {
			w.mark, young = s.young-1, true
		}
		if !young {
			w.mark = at
		}
		if !s.more || !w.rest(time.Since(start)) {
			return gone, nil
		}
	}
}
