package relay

import (
	"errors"
	"fmt"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/exactly"
	"github.com/outboxgo/outbox/internal/lease"
)

// proof is what Kafka has done. The end of an outage takes as much as has failed, or more: each start works while no
// record is accepted, and records are accepted while no transaction is confirmed.
type proof uint8

const (
	byStart proof = iota
	byRecord
	byCommit
)

// maxEndings is how many transactions in a row Kafka may end. A failover ends one.
const maxEndings = 3

func isDoubt(err error) bool {
	return errors.Is(err, cursor.ErrStale) || errors.Is(err, lease.ErrLeaseLost)
}

// outage reports a failure of Kafka, and what ends it. It is none if the lease is lost. If Kafka has answered that it
// has ended a transaction, it is one only if that goes on: the next start, or the next renewal of the lease, tells
// more. The caller holds mu.
func (x *Exactly) outage(err error, ends proof) error {
	if x.Held.Err() != nil || !x.Lease.Held() {
		return err
	}
	said := err
	if exactly.IsEnded(err) {
		if x.endings++; x.endings == 1 {
			x.Log.Warn("outbox: Kafka has ended a transaction, starting again unless the lease is lost: another process has initialized the transactional ids, or the transaction took too long, or the ids were not used for days", "error", err)
		}
		if x.endings <= maxEndings {
			return err
		}
		said, ends = fmt.Errorf("all of the last %d transactions were ended by Kafka: %w", x.endings, err), byCommit
	}
	x.hear(said)
	x.ends = max(x.ends, ends)
	return err
}

// proved ends an outage of Kafka, if that is enough.
func (x *Exactly) proved(by proof) {
	if x.mayEnd(by) {
		x.hear(nil)
	}
}

// mayEnd reports whether there is no outage that takes more to end.
func (x *Exactly) mayEnd(by proof) bool { return by >= x.ends || x.KafkaOutage.Current() == nil }

// hear takes a result of Kafka.
func (x *Exactly) hear(err error) {
	if x.KafkaOutage.Current() == nil {
		x.ends = byStart
	}
	x.KafkaOutage.Report(err)
	if x.Delivery.Heard != nil {
		x.Delivery.Heard(err)
	}
}

// readsAgain reports whether the session reads again what it has sent before, which is no progress.
func (x *Exactly) readsAgain() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.endings > 0
}
