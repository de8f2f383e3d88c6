package verify

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"
)

// Line is a line of a history: an event, or a record.
type Line struct {
	Event  *EventLine  `json:"event,omitempty"`
	Record *RecordLine `json:"record,omitempty"`
}

// EventLine is a committed event.
type EventLine struct {
	ID       string `json:"id"`
	Position int64  `json:"position"` // its place in the order of its key, such as its outbox id
	Key      string `json:"key"`      // of its record
	Topic    string `json:"topic"`
	// State is empty if a record must have the event. Otherwise it is pending, or a status of outbox_failed: waiting,
	// failed, parked, dead, resolved.
	State string `json:"state,omitempty"`
}

// RecordLine is a record that was read.
type RecordLine struct {
	ID        string `json:"id"` // of its event
	Topic     string `json:"topic"`
	Partition int32  `json:"partition"`
	Offset    int64  `json:"offset"`
}

// maxLine bounds a line of a history.
const maxLine = 1 << 20

// RunHistory judges a file of lines, in any order, each of which is a [Line] in JSON. Only Findings and Progress of
// the configuration are used.
func RunHistory(ctx context.Context, path string, cfg Config) (Report, error) {
	began := time.Now()
	c, remove, err := newCheck(ctx, cfg)
	if err != nil {
		return Report{}, err
	}
	defer remove()
	c.begin("lines read", 0)
	if err = eachLine(path, c.addLine); err == nil {
		err = c.classify()
	}
	if err == nil && len(c.report.Findings) > 0 {
		err = eachLine(path, c.nameLine)
	}
	c.report.Took = time.Since(began)
	return c.report, err
}

// eachLine calls f for each line of a file.
func eachLine(path string, f func(Line) error) (err error) {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	lines.Buffer(make([]byte, 64<<10), maxLine)
	for n := 1; lines.Scan(); n++ {
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		var line Line
		dec := json.NewDecoder(bytes.NewReader(lines.Bytes()))
		dec.DisallowUnknownFields()
		err := dec.Decode(&line)
		if _, more := dec.Token(); err == nil && !errors.Is(more, io.EOF) {
			err = errors.New("it has more than one object")
		}
		if err == nil {
			err = f(line)
		}
		if err != nil {
			return fmt.Errorf("%s, line %d: %w", path, n, err)
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

func (c *check) addLine(line Line) error {
	c.step.Done++
	if c.step.Done%tickEvery == 0 {
		if err := c.tick(); err != nil {
			return err
		}
	}
	switch e, r := line.Event, line.Record; {
	case e != nil && r == nil:
		topic, err := c.names.number([]byte(e.Topic))
		if err != nil {
			return err
		}
		s := sighting{event: idOf(e.ID), side: sideEvent, topic: topic, position: e.Position, key: hashKey([]byte(e.Key))}
		if e.State != "" {
			n := slices.Index(stateNames[:], e.State)
			if n < 0 {
				return fmt.Errorf("there is no state %.100q", e.State)
			}
			s.state = state(n)
		}
		it := s.item()
		return c.events.add(&it)
	case r != nil && e == nil:
		topic, err := c.names.number([]byte(r.Topic))
		if err != nil {
			return err
		}
		c.report.Records++
		it := (&sighting{event: idOf(r.ID), side: sideRecord, topic: topic, partition: r.Partition, position: r.Offset}).item()
		return c.events.add(&it)
	}
	return errors.New(`want {"event": …} or {"record": …}`)
}

// nameLine sets the texts of findings.
func (c *check) nameLine(line Line) error {
	var text, key string
	if line.Event != nil {
		text, key = line.Event.ID, line.Event.Key
	} else {
		text = line.Record.ID
	}
	id := idOf(text)
	for i := range c.report.Findings {
		f := &c.report.Findings[i]
		if f.event != id {
			continue
		}
		f.EventID = text
		if f.Kind == Inverted && line.Event != nil {
			f.Key = key
		}
	}
	return nil
}
