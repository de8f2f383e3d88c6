package starts

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"time"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/wait"
)

// silence is partitions of which Kafka does not say where they begin or end, with the reason. Mostly such a partition
// has no leader. Reading begins without it, so that no other partition waits for it.
type silence map[kafka.Partition]error

var errSilent = errors.New("the answer of Kafka does not name the partition")

// with returns a silence with one more partition.
func (s silence) with(at kafka.Partition, cause error) silence {
	if s == nil {
		s = silence{}
	}
	s[at] = cause
	return s
}

// cause returns one of the reasons, nil if there is none.
func (s silence) cause() error {
	for _, err := range s {
		return err
	}
	return nil
}

// listTimeout bounds the wait for a broker that leads some of the partitions.
const listTimeout = 5 * time.Second

// ask asks Kafka for the first offsets of partitions, and for the ends where [kafka.EndOffset] is wanted. It returns
// the first offsets, the wanted offsets, and the partitions of which Kafka does not say the wanted one.
func (m *Member) ask(ctx context.Context, wanted map[kafka.Partition]int64) (firsts, found map[kafka.Partition]int64, silent silence) {
	beginnings, ends := map[kafka.Partition]int64{}, map[kafka.Partition]int64{}
	for at := range wanted {
		beginnings[at] = kafka.FirstOffset
	}
	firsts, err := m.askOnce(ctx, beginnings)
	for at := range firsts {
		if wanted[at] == kafka.EndOffset {
			ends[at] = kafka.EndOffset
		}
	}
	found, silent = maps.Clone(firsts), silence{}
	ended, endErr := m.askOnce(ctx, ends)
	for at := range ends {
		delete(found, at)
	}
	maps.Copy(found, ended)
	for at := range wanted {
		if _, ok := found[at]; !ok {
			silent[at] = cmp.Or(err, endErr, errSilent)
		}
	}
	return firsts, found, silent
}

func (m *Member) askOnce(ctx context.Context, wanted map[kafka.Partition]int64) (map[kafka.Partition]int64, error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	return kafka.ListOffsets(ctx, m.client, kafka.Committed, wanted)
}

// await notes the partitions without which reading has begun.
func (m *Member) await(silent silence) {
	now := time.Now()
	m.mu.Lock()
	for at := range silent {
		m.awaited[at] = kafka.EndOffset
	}
	m.mu.Unlock()
	m.reportSilent(now, silent)
}

// reportSilent reports an outage of each topic with a silent partition.
func (m *Member) reportSilent(began time.Time, silent silence) {
	for at, err := range silent {
		m.cfg.Outages.Report(outageTopic+at.Topic, began, err)
	}
}

// awaits reports whether reading has begun without a partition of a topic.
func (m *Member) awaits(topic string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for at := range m.awaited {
		if at.Topic == topic {
			return true
		}
	}
	return false
}

// keepAsking asks for the offsets of partitions without which reading has begun, until ctx is cancelled. When Kafka
// says those of one, a new client reads it.
func (m *Member) keepAsking(ctx context.Context) {
	for ; ctx.Err() == nil; wait.Sleep(ctx, MissingInterval) {
		m.mu.Lock()
		wanted := maps.Clone(m.awaited)
		m.mu.Unlock()
		began := time.Now()
		_, found, silent := m.ask(ctx, wanted)
		if ctx.Err() != nil {
			return
		}
		for at := range found {
			m.endOutdated("Kafka says now where a partition begins, a new client reads it", at.Topic)
		}
		m.reportSilent(began, silent)
	}
}
