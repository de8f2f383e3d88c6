package consumer

import (
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/starts"
)

// uncleanEnds is what a worker does after processes have ended uncleanly at the offset at which it begins. A record may
// end each process that decodes or handles it: a handler calls os.Exit, or memory runs out.
//
// After an unclean end, the worker waits for the commit of its first batch before it takes the next one. So if the next
// process ends at the same offset, a record of the first batch may have ended it. After [starts.MostUncleanEnds] of
// them, the records of that batch are suspects. The worker notes the offset of each in PostgreSQL, and handles it
// alone: one at a time in all partitions of the process, so that none is suspected for another, see alonePlace. A
// record that was noted that often, and at which processes have ended, is not decoded. It gets a dead letter as one
// that cannot be decoded.
type uncleanEnds struct {
	ends     int // 0 once the first batch is committed
	suspects int // records that are still to be handled alone
	noted    bool
}

// beginUnclean notes the unclean ends at the offset at which reading begins.
func (w *partitionWorker) beginUnclean(a starts.Assignment) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.unclean = uncleanEnds{ends: a.UncleanEnds}
	if w.parking != nil && (a.UncleanEnds >= starts.MostUncleanEnds || a.Suspected) {
		w.unclean.suspects, w.unclean.noted = w.cfg.MaxPoll, a.Suspected
	}
}

// handleSuspects handles the first records alone, if processes have ended at the offset of the first one. It returns
// the others, or none if the worker is stopped.
func (w *partitionWorker) handleSuspects(records []*kgo.Record) (others []*kgo.Record) {
	for i, r := range records {
		w.mu.Lock()
		u := w.unclean
		w.mu.Unlock()
		if u.suspects == 0 {
			return records[i:]
		}
		if i == 0 && !u.noted {
			w.log.Warn("outbox: processes have ended uncleanly at one offset, records are handled one by one",
				"partition", w.partition.Name(), "offset", r.Offset, "ends", u.ends, "records", u.suspects)
		}
		if !w.handleAlone(r) {
			return nil
		}
	}
	return nil
}

// handleAlone handles a suspect, and notes its offset before. Records before it must be committed then: a process that
// begins at one of them notes that one, and forgets how many processes have ended at the later one. It returns false if
// the worker is stopped.
func (w *partitionWorker) handleAlone(r *kgo.Record) bool {
	w.awaitCommit()
	defer w.endAlone()
	if !w.beginAlone(r.Offset) {
		w.forgetSuspect()
		return false
	}
	if ends := w.place.ends; ends >= starts.MostUncleanEnds {
		w.ending = &endingError{ends}
		w.log.Warn("outbox: processes have ended each time a record was handled alone, it is not decoded and gets a dead letter",
			"partition", w.partition.Name(), "offset", r.Offset, "ends", ends)
	}
	w.handle(w.handleMissed([]*kgo.Record{r}))
	w.ending = nil
	if w.stopping.Err() != nil {
		w.forgetSuspect()
		return false
	}
	w.mu.Lock()
	w.unclean.suspects, w.unclean.noted = w.unclean.suspects-1, true
	last := w.unclean.suspects == 0
	w.mu.Unlock()
	return !last || w.endSuspects()
}

// endingError is the error of a record at which processes have ended.
type endingError struct{ ends int }

func (e *endingError) Error() string {
	return fmt.Sprintf("not decoded: %d processes have ended while they decoded or handled this record alone", e.ends)
}

// commitFirst waits until the first batch behind an unclean end is committed.
func (w *partitionWorker) commitFirst() {
	w.mu.Lock()
	ends := w.unclean.ends
	w.mu.Unlock()
	if ends == 0 || !w.awaitCommit() {
		return
	}
	w.mu.Lock()
	w.unclean.ends = 0
	w.mu.Unlock()
}

// awaitCommit waits until what was handled is committed, or saved in a gap. It returns false in a gap.
func (w *partitionWorker) awaitCommit() (committed bool) {
	w.mu.Lock()
	gap := w.gap
	w.mu.Unlock()
	if gap != nil {
		if gap.saved < gap.next {
			w.saveGap(gap)
		}
		return false
	}
	for w.stopping.Err() == nil {
		if _, advanced := w.uncommitted(); !advanced {
			break
		}
		w.pause(awaitCommitPause)
	}
	return true
}

// awaitCommitPause is how often awaitCommit looks whether Kafka has the commit.
const awaitCommitPause = 10 * time.Millisecond
