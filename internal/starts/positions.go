package starts

import (
	"context"
	"time"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/wait"
)

// position is the offset of the group in a partition that is to be saved.
type position struct {
	offset, lost int64
	setBack      bool // offset may be lower than one that was saved
}

const (
	saveInterval = time.Minute
	saveTimeout  = 2 * time.Second
)

// keepSaving saves positions at intervals until ctx is cancelled. After an error it tries again earlier, so that the
// outage does not seem to last longer than it does.
func (m *Member) keepSaving(ctx context.Context, interval time.Duration) {
	for wait.Sleep(ctx, interval); ctx.Err() == nil; {
		pause := interval
		if m.save(context.Background()) != nil {
			pause = min(interval, m.cfg.Outages.Backoff(outageSaving))
		}
		wait.Sleep(ctx, pause)
	}
}

// Committed notes the committed offset of a partition.
func (m *Member) Committed(at kafka.Partition, offset int64) { m.note(at, position{offset: offset}) }

// begun notes the committed offset at which this member begins. If the position that was saved last is behind that
// offset, an earlier member has not saved that the offset was set back. Otherwise there is nothing to save.
func (m *Member) begun(at kafka.Partition, committed int64, saved partition) {
	m.mu.Lock()
	m.committed[at] = max(committed, saved.position)
	m.mu.Unlock()
	if committed < saved.position {
		m.note(at, position{offset: committed})
	}
}

// Passed notes records that Kafka has removed unread and that the client has skipped.
func (m *Member) Passed(at kafka.Partition, from, records int64) {
	m.reportLost(at, from, records)
	m.note(at, position{offset: None, lost: records})
}

// Truncated notes that Kafka has lost records: a broker without them leads the partition. How many is not known, so it
// counts one. New records have the offsets of those from resetTo on.
func (m *Member) Truncated(at kafka.Partition, resetTo int64, err error) {
	m.cfg.Log.Warn("outbox: Kafka has lost records of a partition, it is not known how many", "partition", at.Name(), "error", err)
	m.cfg.Lost(at, 1)
	m.mu.Lock()
	committed, known := m.committed[at]
	m.mu.Unlock()
	if !known || committed < resetTo {
		resetTo = None
	}
	m.note(at, position{offset: resetTo, lost: 1})
}

// Works notes that a partition is fetched.
func (m *Member) Works(at kafka.Partition) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.stalls, at)
}

func (m *Member) note(at kafka.Partition, p position) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before, ok := m.positions[at]
	p.setBack = before.setBack
	if p.offset != None {
		committed, known := m.committed[at]
		p.setBack = p.setBack || known && p.offset < committed
		m.committed[at] = p.offset
	}
	if ok && p.offset == None {
		p.offset = before.offset
	}
	p.lost += before.lost
	m.positions[at] = p
}

// SavePositions stores the committed offsets in PostgreSQL, because Kafka deletes the offsets of a
// group that has had no members for long.
func (m *Member) SavePositions(ctx context.Context) { _ = m.save(ctx) } // which reports the error

func (m *Member) save(ctx context.Context) error {
	m.mu.Lock()
	unsaved := m.positions
	m.positions = map[kafka.Partition]position{}
	var offsets []Offset
	for at, p := range unsaved {
		offsets = append(offsets, Offset{Partition: at, Topic: m.ids[at.Topic], At: p.offset, Lost: p.lost, SetBack: p.setBack})
	}
	m.mu.Unlock()
	if m.cfg.Store == nil || len(offsets) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, saveTimeout)
	defer cancel()
	began := time.Now()
	err := m.cfg.Store.Save(ctx, m.id.String(), offsets)
	m.cfg.Outages.Report(outageSaving, began, err)
	if err == nil {
		return nil
	}
	for at, p := range unsaved {
		m.putBack(at, p)
	}
	return err
}

// putBack notes a position again that could not be saved. A newer one counts instead, and what was lost adds up.
func (m *Member) putBack(at kafka.Partition, p position) {
	m.mu.Lock()
	defer m.mu.Unlock()
	newer, ok := m.positions[at]
	if ok && newer.offset != None {
		p.offset = newer.offset
	}
	p.lost += newer.lost
	p.setBack = p.setBack || newer.setBack
	m.positions[at] = p
}
