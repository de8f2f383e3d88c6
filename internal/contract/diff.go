package contract

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Who a change can break.
const (
	// Readers were built with the old contract, and get events of the new one.
	Readers = "readers"
	// Writers have the old contract: events that they have recorded, or still record, come to readers of the new one.
	Writers = "writers"
)

// Change is a difference of two contracts.
type Change struct {
	Event  string   `json:"event,omitempty"`
	Change string   `json:"change"`
	Breaks []string `json:"breaks"` // Readers, Writers, both or none
	Why    string   `json:"why,omitempty"`
}

// Compatibility returns what a schema registry calls the most that changes keep: FULL if they break none, BACKWARD if
// new readers read old events, FORWARD if old readers read new events, and NONE.
func Compatibility(changes []Change) string {
	breaks := map[string]bool{}
	for _, c := range changes {
		for _, who := range c.Breaks {
			breaks[who] = true
		}
	}
	switch {
	case breaks[Readers] && breaks[Writers]:
		return "NONE"
	case breaks[Readers]:
		return "BACKWARD"
	case breaks[Writers]:
		return "FORWARD"
	}
	return "FULL"
}

// Diff returns the changes from an old contract to a new one, by event type.
func Diff(before, after *Document) []Change {
	d := &differ{before: before, after: after, changes: []Change{}}
	if before.source != after.source {
		d.add(fmt.Sprintf("source was %s, is %s", before.source, after.source), "events are named by source, id and type, and readers may choose by source", Readers)
	}
	all := maps.Clone(before.events)
	maps.Copy(all, after.events)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		d.event = name
		was, existed := before.events[name]
		is, exists := after.events[name]
		switch {
		case !exists:
			d.add("event type removed", "readers wait for events that do not come, and nothing decodes those that are recorded", Readers, Writers)
		case !existed:
			d.added(is)
		default:
			d.changed(was, is)
		}
	}
	return d.changes
}

// differ collects the changes of an event type.
type differ struct {
	before, after *Document
	event         string
	changes       []Change
	compared      map[pair]bool // named schemas may contain themselves
}

func (d *differ) add(change, why string, breaks ...string) {
	if breaks == nil {
		breaks, why = []string{}, ""
	}
	d.changes = append(d.changes, Change{d.event, change, breaks, why})
}

// added judges a new event type. Handlers of a new version get the events of the version before only by upcasters.
func (d *differ) added(is event) {
	older := d.olderVersion(is)
	switch {
	case older == "":
		d.add("event type added", "")
	case d.reaches(older, d.event):
		d.add("new version, with upcasters from "+older, "")
	default:
		d.add("new version, without an upcaster from "+older, "handlers of the new version do not get events of the old one", Writers)
	}
}

// olderVersion returns the event type that is the version before, or "".
func (d *differ) olderVersion(is event) (name string) {
	highest := 0
	base := strings.TrimSuffix(d.event, fmt.Sprint(is.version))
	for other, e := range d.after.events {
		if e.version > highest && e.version < is.version && strings.TrimSuffix(other, fmt.Sprint(e.version)) == base {
			name, highest = other, e.version
		}
	}
	return name
}

// reaches reports whether upcasters lead from an event type to another one.
func (d *differ) reaches(from, to string) bool {
	seen, next := map[string]bool{}, []string{to}
	for len(next) > 0 {
		name := next[0]
		next = next[1:]
		if name == from {
			return true
		}
		if !seen[name] {
			seen[name] = true
			next = append(next, d.after.events[name].upcasts...)
		}
	}
	return false
}

// jsonType is the content type that readers decode without a codec.
const jsonType = "application/json"

// changed compares an event type that both contracts have.
func (d *differ) changed(was, is event) {
	if was.topic != is.topic {
		d.add(fmt.Sprintf("topic was %s, is %s", was.topic, is.topic), "a reader of one topic misses the events of the other one", Readers, Writers)
	}
	if was.key != is.key {
		d.add(fmt.Sprintf("partition key was %s, is %s", was.key, is.key), "events are in order by another key", Readers)
	}
	if was.aggregateType != is.aggregateType {
		d.add(fmt.Sprintf("aggregate type was %s, is %s", was.aggregateType, is.aggregateType), "readers may choose by the header ce_aggregatetype", Readers)
	}
	for _, name := range slices.Sorted(maps.Keys(was.attributes)) {
		if !is.attributes[name] {
			d.add("header "+name+" removed", "readers may need it", Readers)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(is.attributes)) {
		if !was.attributes[name] {
			d.add("header "+name+" added", "")
		}
	}
	d.upcasters(was, is)
	d.payload(was, is)
}

// upcasters compares from which event types there are upcasters.
func (d *differ) upcasters(was, is event) {
	for _, from := range was.upcasts {
		if _, exists := d.after.events[from]; exists && !d.reaches(from, d.event) {
			d.add("upcaster from "+from+" removed", "handlers do not get the events of that type any more", Writers)
		}
	}
	for _, from := range is.upcasts {
		if !slices.Contains(was.upcasts, from) {
			d.add("upcaster from "+from+" added", "")
		}
	}
}

// payload compares content types and schemas.
func (d *differ) payload(was, is event) {
	change := fmt.Sprintf("content type was %s, is %s", was.contentType, is.contentType)
	switch {
	case was.contentType == is.contentType && was.payload != nil && is.payload != nil:
		d.compared = map[pair]bool{}
		d.schema("", was.payload, is.payload)
	case was.contentType == is.contentType:
	case was.contentType == jsonType:
		d.add(change, "readers need the new codec", Readers)
	default:
		d.add(change, "readers need a codec for each content type", Readers, Writers)
	}
}

// String returns the change as a line.
func (c Change) String() string {
	line := "breaks " + strings.Join(c.Breaks, " and ") + ": "
	if len(c.Breaks) == 0 {
		line = "compatible: "
	}
	if c.Event != "" {
		line += c.Event + ": "
	}
	line += c.Change
	if c.Why != "" {
		line += " (" + c.Why + ")"
	}
	return line
}
