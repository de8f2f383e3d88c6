package faults

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/outboxgo/outbox/faults/internal/proxy"
	"github.com/stretchr/testify/require"
)

// run has the steps happen, and ends all faults after them. A step whose group has no member that is well begins later,
// or never.
func (m *market) run(t *testing.T, steps []marketStep, lasts time.Duration) {
	t.Helper()
	began := time.Now()
	var begun []marketStep
	for len(begun) > 0 || time.Since(began) < lasts {
		m.look(t)
		now := time.Now()
		if now.Sub(began) > lasts {
			steps = nil
		}
		begun = slices.DeleteFunc(begun, func(s marketStep) bool {
			over := !now.Before(s.until)
			if over {
				s.end()
			}
			return over
		})
		if i := slices.IndexFunc(steps, func(s marketStep) bool { return now.Sub(began) >= s.at && m.begin(t, &s) && m.note(t, s, &begun) }); i >= 0 {
			steps = slices.Delete(steps, i, i+1)
		}
		m.sleep(t, 20*time.Millisecond)
	}
}

// note logs a step that has begun, and has it end.
func (m *market) note(t *testing.T, s marketStep, begun *[]marketStep) bool {
	t.Helper()
	t.Logf("%5.1f s: %s %s %s%s for %v (%d events)", time.Since(m.start).Seconds(), s.kind, s.group, s.about, map[bool]string{true: fmt.Sprint(s.count)}[s.kind == stepRelease],
		s.lasts.Round(time.Millisecond), m.shop.events.Load())
	if s.end != nil {
		s.until = time.Now().Add(s.lasts)
		*begun = append(*begun, s)
	}
	return true
}

// begin begins a step, and reports whether it could.
func (m *market) begin(t *testing.T, s *marketStep) bool {
	t.Helper()
	switch s.kind {
	case stepOutage:
		return m.outage(t, s)
	case stepSequence:
		m.setSequencesBack(t)
	case stepRelease:
		m.release(s)
	default:
		slot := m.slotOf(s)
		if slot == nil {
			return false
		}
		s.about += fmt.Sprint("process ", slot.number, " of release ", slot.has)
		switch s.kind {
		case stepKill:
			m.killOne(t, s, slot)
		case stepFreeze:
			m.freezeOne(t, s, slot)
		case stepCut:
			m.cutOne(t, s, slot)
		case stepStop:
			m.ask(slot)
		}
	}
	return true
}

// slotOf returns a member that a step can be about, or nil.
func (m *market) slotOf(s *marketStep) *marketSlot {
	var of []*marketSlot
	for _, slot := range m.slots {
		if slot.group == s.group {
			of = append(of, slot)
		}
	}
	for i := range of {
		if slot := of[(s.slot+i)%len(of)]; m.isReady(slot) {
			return slot
		}
	}
	return nil
}

// reach waits until a member is inside a transaction of a handler, where it stays for a moment. A member that has
// nothing to do is not waited for.
func (m *market) reach(t *testing.T, slot *marketSlot) {
	t.Helper()
	asked := filepath.Join(m.signs, fmt.Sprint(signInside, slot.number))
	reached := filepath.Join(m.signs, fmt.Sprint(signReached, slot.number))
	require.NoError(t, os.WriteFile(asked, nil, 0o600))
	inside := func() bool { _, err := os.Stat(reached); return err == nil }
	if m.await(t, 2*time.Second, inside) {
		m.inside++
		_ = os.Remove(reached) // it is there
	} else {
		_ = os.Remove(asked) // it is there, or the member has just come
	}
}

func (m *market) killOne(t *testing.T, s *marketStep, slot *marketSlot) {
	t.Helper()
	m.reach(t, slot)
	m.kill(slot.process)
	m.vacate(slot)
	slot.at = time.Now().Add(s.lasts)
}

func (m *market) freezeOne(t *testing.T, s *marketStep, slot *marketSlot) {
	t.Helper()
	m.reach(t, slot)
	slot.process.freeze(t)
	slot.hurt = true
	m.freezes++
	s.end = func() {
		slot.process.thaw(t)
		slot.hurt = false
	}
}

// cutOne has nothing pass between a member and PostgreSQL, although the connections are open. In the end they go on, or
// are reset.
func (m *market) cutOne(t *testing.T, s *marketStep, slot *marketSlot) {
	t.Helper()
	m.reach(t, slot)
	slot.proxy.Set(proxy.Fault{HoldUp: true, HoldDown: true})
	slot.hurt = true
	m.cuts++
	reset := s.reset
	s.end = func() {
		if reset {
			slot.proxy.Reset()
		}
		slot.proxy.Set(proxy.Fault{})
		slot.hurt = false
	}
}

// outage takes what handlers need, unless that is missing already.
func (m *market) outage(t *testing.T, s *marketStep) bool {
	t.Helper()
	action := map[string]string{signGone + passedAction: passedAction, signGone + notedAction: notedAction}[s.about]
	if slices.Contains(m.gone, action) {
		return false
	}
	name, how := filepath.Join(m.signs, s.about), ""
	if s.hangs {
		how = hangs
		s.about += ", which hangs,"
	}
	require.NoError(t, os.WriteFile(name, []byte(how), 0o600))
	m.outages++
	m.gone = append(m.gone, action)
	s.end = func() {
		require.NoError(t, os.Remove(name))
		m.gone = slices.DeleteFunc(m.gone, func(a string) bool { return a == action })
	}
	return true
}

// release has as many members of a group in the second release as the step says, in the end.
func (m *market) release(s *marketStep) {
	n := 0
	for _, slot := range m.slots {
		if slot.group != s.group {
			continue
		}
		slot.release = 1
		if n < s.count {
			slot.release = 2
		}
		n++
	}
	m.releases++
}

// setSequencesBack sets sequences back, as a restore without them does.
func (m *market) setSequencesBack(t *testing.T) {
	t.Helper()
	_, err := m.db.Exec(m.ctx, `SELECT setval(s::regclass, 1) FROM unnest(ARRAY['event_delivery_id_seq', 'event_handled_id_seq', 'outbox_failed_id_seq', 'outbox_audit_id_seq']) AS s`)
	require.NoError(t, err)
	m.setBack++
}

// awaitDone has the second release everywhere, and waits until everything is done. Events are recorded until all bad
// ones are dead: without another event of the action that succeeds, a bad one is not known to be bad.
func (m *market) awaitDone(t *testing.T, stopWriting func()) {
	t.Helper()
	for _, slot := range m.slots {
		slot.release = 2
	}
	m.shop.calm.Store(true)
	healed := time.Now()
	await := func(so func() bool) {
		for !so() && time.Since(healed) < marketLimit {
			m.look(t)
			m.sleep(t, 200*time.Millisecond)
		}
	}
	await(func() bool { return m.number(t, sqlDeadAlive) == 0 })
	stopWriting()
	await(func() bool { return m.number(t, sqlOpen) == 0 && m.number(t, sqlMissing) == 0 })
	m.doneAfter = time.Since(healed)
	t.Logf("%5.1f s: done %v after the last fault", time.Since(m.start).Seconds(), m.doneAfter.Round(time.Millisecond))
}
