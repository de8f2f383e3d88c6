package short

import (
	"maps"
	"slices"
	"sync"
	"time"
)

// Other stands for the values of a label that a metric does not name.
const Other = "_other"

const (
	unusedFor     = time.Hour   // after which a value of a label is forgotten
	sweepInterval = time.Minute // in which unused values are looked for at most once
)

// Labels are the values of a label of a metric, or of several labels, that the metric names: at most a number of them,
// because others choose the values. It is safe for concurrent use.
type Labels[K comparable] struct {
	most int
	gone func(K)

	mu    sync.Mutex
	used  map[K]time.Time // when last
	swept time.Time
}

// NewLabels returns no values, with room for a number of them. If there is no more room, values that were not used for
// an hour go, and each is passed to gone. With a nil function they stay, because the series of the metric do, too.
func NewLabels[K comparable](most int, gone func(K)) *Labels[K] {
	return &Labels[K]{most: most, gone: gone, used: map[K]time.Time{}}
}

// Use reports whether the metric names a value. A value that is new is named if there is room for it.
func (l *Labels[K]) Use(value K) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if _, known := l.used[value]; !known && len(l.used) >= l.most {
		if now.Sub(l.swept) >= sweepInterval {
			l.sweep(now)
		}
		if len(l.used) >= l.most {
			return false
		}
	}
	l.used[value] = now
	return true
}

// again is Use for a value that is not named if it is new.
func (l *Labels[K]) again(value K) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, known := l.used[value]
	if known {
		l.used[value] = time.Now()
	}
	return known
}

// drop makes room, although the series of a value stay.
func (l *Labels[K]) drop(value K) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.used, value)
}

// sweep removes what is unused. The caller holds mu.
func (l *Labels[K]) sweep(now time.Time) {
	l.swept = now
	if l.gone == nil {
		return
	}
	for value, at := range l.used {
		if now.Sub(at) > unusedFor {
			delete(l.used, value)
			l.gone(value)
		}
	}
}

// Lately returns the values that were used within the last hour, and forgets all others.
func (l *Labels[K]) Lately() []K {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sweep(time.Now())
	return slices.Collect(maps.Keys(l.used))
}

// Topics are the topics that metrics name. Those to which Kafka has never taken an event are few, so that they cannot
// take the room of the others: any text in a row is the name of such a topic.
type Topics struct{ taken, failed *Labels[string] }

const (
	maxTopics       = 1_000 // that Kafka has
	maxFailedTopics = 100   // that Kafka may not have
)

// NewTopics returns no topics. What becomes of topics that were not used for an hour is as in [NewLabels].
func NewTopics(gone func(topic string)) *Topics {
	return &Topics{NewLabels(maxTopics, gone), NewLabels(maxFailedTopics, gone)}
}

// Name returns a topic as metrics name it: as it is, or as [Other]. Taken says that Kafka has taken an event for it.
func (t *Topics) Name(topic string, taken bool) string {
	switch {
	case topic == "":
	case taken && t.taken.Use(topic):
		t.failed.drop(topic)
	case t.taken.again(topic), taken && t.failed.again(topic), !taken && t.failed.Use(topic):
	default:
		return Other
	}
	return topic
}

// Types are event types that metrics name, each with its topic.
type Types struct{ *Labels[[2]string] }

// maxTypes is in pairs of a topic and a type.
const maxTypes = 200

// NewTypes returns no types. What becomes of types that were not used for an hour is as in [NewLabels].
func NewTypes(gone func(topicAndType [2]string)) Types { return Types{NewLabels(maxTypes, gone)} }

// Name returns the type of an event as metrics name it: as it is, or as [Other]. The topic is that of [Topics.Name].
func (t Types) Name(topic, eventType string) string {
	if eventType == "" || topic != Other && t.Use([2]string{topic, eventType}) {
		return eventType
	}
	return Other
}
