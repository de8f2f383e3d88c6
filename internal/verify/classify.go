package verify

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// classify reads what was sorted and reports what is wrong.
func (c *check) classify() error {
	c.begin("events compared", c.events.added)
	j := &eventPass{check: c}
	err := c.events.each(func(it *item) error { return j.add(sightingOf(it)) })
	if err == nil {
		err = j.end()
	}
	if err == nil {
		err = j.lookUp()
	}
	if err == nil {
		err = c.classifyOrder()
	}
	slices.SortStableFunc(c.report.Findings, func(a, b Finding) int {
		return cmp.Compare(slices.Index(Kinds, a.Kind), slices.Index(Kinds, b.Kind))
	})
	return err
}

// eventPass is one pass over the sightings, which come event by event.
type eventPass struct {
	*check
	begun   bool
	failed  state    // stateSent: there is no row
	row     sighting // of the event
	rows    int      // committed rows with this event id
	first   sighting // record
	last    sighting // record
	records int
	event   eventID
}

func (j *eventPass) add(s sighting) error {
	if !j.begun || s.event != j.event {
		if err := j.end(); err != nil {
			return err
		}
		*j = eventPass{check: j.check, begun: true, event: s.event}
	}
	j.step.Done++
	switch s.side {
	case sideFailed:
		if j.failed == stateSent || j.failed == stateResolved { // a row of outbox_failed counts more than the audit
			j.failed = s.state
		}
	case sideEvent:
		if j.rows > 0 && j.row.position == s.position { // of the archive, too
			return nil
		}
		j.row = s
		j.rows++
		j.report.Events++
	case sideRecord:
		return j.addRecord(s)
	}
	return nil
}

func (j *eventPass) addRecord(s sighting) error {
	j.records++
	if j.records == 1 {
		j.first = s
	}
	if j.rows == 0 {
		return nil
	}
	if j.records > j.rows {
		j.find(Finding{Kind: Repeated, event: s.event, OutboxID: j.row.position, Topic: j.topic(s.topic), Partition: s.partition, Offset: s.position,
			Why: fmt.Sprintf("its event is in %s, too", j.place(j.first))})
	}
	before := j.last
	j.last = s
	if j.records > 1 && before.topic == s.topic && before.partition == s.partition {
		return nil
	}
	a := arrival{topic: s.topic, key: j.row.key, partition: s.partition, offset: s.position, position: j.row.position, event: s.event}
	it := a.item()
	return j.keys.add(&it)
}

// end judges the event of which all sightings were added.
func (j *eventPass) end() error {
	switch {
	case !j.begun:
	case j.rows > 0 && j.records == 0:
		j.missing()
	case j.rows == 0 && j.records > 0 && j.failed == stateSent:
		if j.first.at < j.from || j.first.at >= j.to {
			j.report.Older++
			return nil
		}
		if j.exists == nil {
			j.phantom(j.first)
			return nil
		}
		if j.doubtful = append(j.doubtful, j.first); len(j.doubtful) == lookUpAtOnce {
			return j.lookUp()
		}
	}
	return nil
}

// missing judges an event without a record.
func (j *eventPass) missing() {
	topic := j.topics[j.row.topic]
	switch {
	case j.row.state != stateSent && (j.row.state != stateExpired || j.failed == stateSent):
		j.report.NotSent[stateNames[j.row.state]]++
	case j.failed != stateSent:
		j.report.NotSent[stateNames[j.failed]]++
	case !topic.missing && j.row.at < topic.keptFrom:
		j.report.Expired++
	default:
		why := "the relay has passed it, and no record has it"
		if topic.missing {
			why = "the relay has passed it, and its topic is missing"
		}
		j.find(Finding{Kind: Lost, event: j.row.event, OutboxID: j.row.position, Topic: j.topic(j.row.topic), Partition: -1, Why: why})
	}
}

func (c *check) phantom(s sighting) {
	c.find(Finding{Kind: Phantom, event: s.event, Topic: c.topic(s.topic), Partition: s.partition, Offset: s.position,
		Why: "no committed event has this id"})
}

// lookUpAtOnce is the number of records whose events are looked up by one statement.
const lookUpAtOnce = 10_000

// lookUp judges the doubtful records.
func (j *eventPass) lookUp() error {
	if len(j.doubtful) == 0 {
		return nil
	}
	ids := make([]eventID, len(j.doubtful))
	for i, s := range j.doubtful {
		ids[i] = s.event
	}
	exist, err := j.exists(ids)
	if err != nil {
		return err
	}
	for _, s := range j.doubtful {
		if exist[s.event] {
			j.report.Older++
		} else {
			j.phantom(s)
		}
	}
	j.doubtful = j.doubtful[:0]
	return nil
}

// classifyOrder compares, for each key in a partition, the order of offsets with that of outbox ids.
func (c *check) classifyOrder() error {
	c.begin("keys compared", c.keys.added)
	var newest arrival // with the highest id of its key in its partition
	var released arrival
	has, isReleased := false, false
	return c.keys.each(func(it *item) error {
		c.step.Done++
		a := arrivalOf(it)
		switch {
		case a.partition == marked:
			released, isReleased = a, true
		case !has || newest.topic != a.topic || newest.key != a.key || newest.partition != a.partition || newest.position < a.position:
			newest, has = a, true
		case newest.position > a.position && isReleased && released.topic == a.topic && released.key == a.key:
			c.report.Released++
		case newest.position > a.position:
			c.find(Finding{Kind: Inverted, event: a.event, other: newest.event, key: a.key, OutboxID: a.position, Topic: c.topic(a.topic), Partition: a.partition, Offset: a.offset,
				Why: fmt.Sprintf("event %d of its key came before it, at offset %d", newest.position, newest.offset)})
		}
		return nil
	})
}

// find counts a finding, and keeps it unless there are enough of its kind.
func (c *check) find(f Finding) {
	c.report.Found[f.Kind]++
	if c.report.Found[f.Kind] <= int64(c.cfg.Findings) {
		c.report.Findings = append(c.report.Findings, f)
	}
}

func (c *check) topic(number uint32) string { return c.names.texts[number] }

func (c *check) place(s sighting) string {
	return fmt.Sprintf("%s/%d/%d", c.topic(s.topic), s.partition, s.position)
}

// noteEvent adds a committed event of the range.
func (c *check) noteEvent(s sighting, at time.Time) error {
	r := &c.report
	if r.FirstAt.IsZero() {
		r.FirstID, r.LastID, r.FirstAt, r.LastAt = s.position, s.position, at, at
	}
	r.FirstID, r.LastID = min(r.FirstID, s.position), max(r.LastID, s.position)
	if at.Before(r.FirstAt) {
		r.FirstAt = at
	}
	if at.After(r.LastAt) {
		r.LastAt = at
	}
	it := s.item()
	return c.events.add(&it)
}
