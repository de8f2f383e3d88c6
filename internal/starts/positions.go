package starts

import (
	"context"
	"time"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/wait"
)

// position is the offset of the group in a partition that is to be saved.
type position struct{ offset, lost int64 }

const (
	saveInterval = time.Minute
	saveTimeout  = 2 * time.Second
)

// keepSaving saves positions until ctx is cancelled.
func (m *Member) keepSaving(ctx context.Context) {
	for ctx.Err() == nil {
		wait.Sleep(ctx, saveInterval)
		if ctx.Err() == nil {
			m.SavePositions(context.Background())
		}
	}
}

// Committed notes the committed offset of a partition.
func (m *Member) Committed(at kafka.Partition, offset int64) { m.note(at, position{offset: offset}) }

// Passed notes records that Kafka has removed unread and that the client has skipped.
func (m *Member) Passed(at kafka.Partition, from, records int64) {
	m.reportLost(at, from, records)
	m.note(at, position{offset: None, lost: records})
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
	if ok && p.offset == None {
		p.offset = before.offset
	}
	p.lost += before.lost
	m.positions[at] = p
}

// SavePositions stores the committed offsets in PostgreSQL, because Kafka deletes the offsets of a
// group that has had no members for long.
func (m *Member) SavePositions(ctx context.Context) {
	m.mu.Lock()
	unsaved := m.positions
	m.positions = map[kafka.Partition]position{}
	var offsets []Offset
	for at, p := range unsaved {
		offsets = append(offsets, Offset{Partition: at, Topic: m.ids[at.Topic], At: p.offset, Lost: p.lost})
	}
	m.mu.Unlock()
	if m.cfg.Store == nil || len(offsets) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, saveTimeout)
	defer cancel()
	began := time.Now()
	err := m.cfg.Store.Save(ctx, offsets)
	m.cfg.Outages.Report(outageSaving, began, err)
	if err == nil {
		return
	}
	for at, p := range unsaved {
		m.putBack(at, p)
	}
}

// putBack notes a position again that could not be saved, unless there is a newer one.
func (m *Member) putBack(at kafka.Partition, p position) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if newer, ok := m.positions[at]; ok && newer.offset != None {
		p.offset = newer.offset
		p.lost += newer.lost
	}
	m.positions[at] = p
}
