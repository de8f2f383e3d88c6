package tables

import (
	"cmp"
	"encoding/binary"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// Sent is what became of an event that a relay has attempted.
type Sent struct {
	OutboxID  int64
	Topic     string // "": it was not sent, and went into outbox_failed unless it had expired
	Partition int32
	Offset    int64 // -1: Kafka has not told it
	Expired   bool  // it was not sent
}

// SentRow is what a row of outbox_cursor says of the events between the row before it and itself. The columns
// sent_from and sent_to are the lowest and the highest of their ids.
type SentRow struct {
	From, To int64
	Bytes    []byte // the column sent; nil for none
}

// The column sent has, as varints unless it says otherwise:
//
//   - the version, 1
//   - the time of the first record, or of the first event that had expired, in milliseconds since 1970
//   - the number of topics, and for each its length and its name as bytes
//   - the number of partitions, and for each the index of its topic, its number and the offset of its first record
//   - for each event, in the order of ids, 4 times the number of its partition, from 1 on, or 0 if it was not sent.
//     1 is added if ids are left out in front of it; then their number follows. 2 is added if its offset does not
//     follow that of the event before it in its partition; then the difference follows. Without a partition, 2 means
//     that the event had expired.
//
// So most events take one byte.
const sentVersion = 1

const (
	sentGap  = 1 // ids are left out
	sentJump = 2 // offsets are left out
	sentFlag = 4 // the number of the partition times this

	sentExpired = sentJump // of an event without a partition
)

// SentEncoder makes a [SentRow]. The zero value is ready. It belongs to one goroutine.
type SentEncoder struct {
	row        SentRow
	at         int64
	topics     map[string]uint64
	last       string // the topic of the event before; most batches have few topics
	lastTopic  uint64
	names      []byte
	partitions map[sentPartition]*sentAt
	parts      []byte
	events     []byte
	is         bool // an event was sent or has expired
}

type sentPartition struct {
	topic  uint64
	number int32
}

// sentAt is the state of a partition.
type sentAt struct {
	slot uint64
	next int64 // the offset to expect
}

// Add adds an event. Events come in the order of ids; at is the time of its record.
func (e *SentEncoder) Add(s Sent, at time.Time) {
	if e.events == nil {
		e.row.From, e.row.To = s.OutboxID, s.OutboxID-1
	}
	var token uint64
	var jump int64
	if !e.is && (s.Topic != "" || s.Expired) {
		e.is, e.at = true, at.UnixMilli()
	}
	if s.Expired {
		token = sentExpired
	} else if s.Topic != "" {
		p := e.partition(s)
		if token, jump = p.slot*sentFlag, s.Offset-p.next; jump != 0 {
			token |= sentJump
		}
		p.next = s.Offset + 1
	}
	gap := s.OutboxID - e.row.To - 1
	if gap > 0 {
		token |= sentGap
	}
	e.events = binary.AppendUvarint(e.events, token)
	if gap > 0 {
		e.events = binary.AppendUvarint(e.events, uint64(gap))
	}
	if jump != 0 {
		e.events = binary.AppendVarint(e.events, jump)
	}
	e.row.To = s.OutboxID
}

// partition returns the state of an event's partition.
func (e *SentEncoder) partition(s Sent) *sentAt {
	if s.Topic != e.last {
		e.last, e.lastTopic = s.Topic, e.topic(s.Topic)
	}
	at := sentPartition{e.lastTopic, s.Partition}
	p := e.partitions[at]
	if p == nil {
		p = &sentAt{uint64(len(e.partitions)) + 1, s.Offset}
		e.partitions[at] = p
		e.parts = binary.AppendUvarint(e.parts, at.topic)
		e.parts = binary.AppendVarint(e.parts, int64(s.Partition))
		e.parts = binary.AppendVarint(e.parts, s.Offset)
	}
	return p
}

// topic returns the index of a topic.
func (e *SentEncoder) topic(name string) uint64 {
	topic, known := e.topics[name]
	if !known {
		if e.topics == nil {
			e.topics, e.partitions = map[string]uint64{}, map[sentPartition]*sentAt{}
		}
		topic = uint64(len(e.topics))
		e.topics[name] = topic
		e.names = binary.AppendUvarint(e.names, uint64(len(name)))
		e.names = append(e.names, name...)
	}
	return topic
}

// Row returns the row. It has no bytes if no event was sent or has expired.
func (e *SentEncoder) Row() SentRow {
	if !e.is {
		return SentRow{}
	}
	b := binary.AppendUvarint(nil, sentVersion)
	b = binary.AppendVarint(b, e.at)
	b = binary.AppendUvarint(b, uint64(len(e.topics)))
	b = append(b, e.names...)
	b = binary.AppendUvarint(b, uint64(len(e.partitions)))
	b = append(b, e.parts...)
	b = append(b, e.events...)
	e.row.Bytes = b
	return e.row
}

// MostSentBytes is more than a row takes whose events are as many as a batch may have, each in a topic of its own.
const MostSentBytes = 4 << 20

// ErrSent means that a row cannot be read.
var ErrSent = errors.New("column sent of outbox_cursor cannot be read: it is damaged, or of a later release")

// Events returns what a row says of its events, in the order of ids, and the time of the first record. The memory that
// it takes is bounded by the length of the row.
func (r SentRow) Events() (all []Sent, at time.Time, err error) {
	d := sentDecoder{b: r.Bytes}
	if d.uvarint() != sentVersion {
		return nil, at, ErrSent
	}
	at = time.UnixMilli(d.varint())
	topics := make([]string, d.count())
	for i := range topics {
		topics[i] = string(d.bytes(d.count()))
	}
	partitions := make([]Sent, d.count()) // of each the offset to expect
	for i := range partitions {
		topic := d.uvarint()
		if topic >= uint64(len(topics)) {
			return nil, at, ErrSent
		}
		partitions[i] = Sent{Topic: topics[topic], Partition: int32(d.varint()), Offset: d.varint()} //nolint:gosec // as it was written
	}
	for last := r.From - 1; len(d.b) > 0; {
		token := d.uvarint()
		last++
		if token&sentGap != 0 {
			last += int64(d.uvarint()) //nolint:gosec // as it was written
		}
		s := Sent{OutboxID: last, Offset: -1}
		switch slot := token / sentFlag; {
		case slot == 0:
			s.Expired = token&sentExpired != 0
		case slot > uint64(len(partitions)):
			return nil, at, ErrSent
		default:
			p := &partitions[slot-1]
			if token&sentJump != 0 {
				p.Offset += d.varint()
			}
			s.Topic, s.Partition, s.Offset = p.Topic, p.Partition, p.Offset
			p.Offset++
		}
		all = append(all, s)
	}
	if d.bad || len(all) == 0 || all[len(all)-1].OutboxID != r.To {
		return nil, at, ErrSent
	}
	return all, at, nil
}

// sentDecoder reads from the start of b. When it cannot, it is bad, and b is empty.
type sentDecoder struct {
	b   []byte
	bad bool
}

func (d *sentDecoder) uvarint() uint64 {
	v, n := binary.Uvarint(d.b)
	d.skip(n)
	return v
}

func (d *sentDecoder) varint() int64 {
	v, n := binary.Varint(d.b)
	d.skip(n)
	return v
}

func (d *sentDecoder) skip(n int) {
	if n <= 0 {
		d.b, d.bad = nil, true
		return
	}
	d.b = d.b[n:]
}

// count reads a number of things that take at least a byte each.
func (d *sentDecoder) count() int {
	n := d.uvarint()
	if n > uint64(len(d.b)) {
		d.b, d.bad = nil, true
		return 0
	}
	return int(n) //nolint:gosec // at most the length of b
}

func (d *sentDecoder) bytes(n int) []byte {
	b := d.b[:n]
	d.b = d.b[n:]
	return b
}

// SQLSent reads the rows of outbox_cursor that say where events with ids from $1 to $2 are; $3 is [MostSentBytes]. The
// BRIN index finds them, so bitmap scans have to be enabled. It is as good as rows are in order: where retention has
// made room, old and new rows share pages, and the statement reads more of the table.
const SQLSent = `
SELECT relay::text, epoch, id, sent_from, sent_to, sent FROM {schema}.outbox_cursor
 WHERE sent_from <= $2::bigint AND sent_to >= $1::bigint AND octet_length(sent) <= $3::int`

// SentPlace is one record of an event, or says that the event had expired. An archive keeps it as JSON.
type SentPlace struct {
	Relay     string    `json:"relay"`
	Topic     string    `json:"topic"`
	Partition int32     `json:"partition"`
	Offset    int64     `json:"offset"`
	At        time.Time `json:"at"`
	Expired   bool      `json:"expired,omitempty"`
	Batch     int64     `json:"-"` // outbox_cursor.id
}

// ReadSent reads what SQLSent returns, and returns the places of some events by their ids, the first one first.
func ReadSent(rows pgx.Rows, wanted func(outboxID int64) bool) (map[int64][]SentPlace, error) {
	type found struct {
		epoch, row, event int64
		SentPlace
	}
	var all []found
	var relay string
	var epoch, id int64
	var row SentRow
	_, err := pgx.ForEachRow(rows, []any{&relay, &epoch, &id, &row.From, &row.To, &row.Bytes}, func() error {
		events, at, err := row.Events()
		for _, s := range events {
			if (s.Topic != "" || s.Expired) && wanted(s.OutboxID) {
				all = append(all, found{epoch, id, s.OutboxID, SentPlace{relay, s.Topic, s.Partition, s.Offset, at.UTC(), s.Expired, id}})
			}
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(all, func(a, b found) int {
		return cmp.Or(cmp.Compare(a.Relay, b.Relay), cmp.Compare(a.epoch, b.epoch), cmp.Compare(a.row, b.row))
	})
	places := map[int64][]SentPlace{}
	for _, f := range all {
		places[f.event] = append(places[f.event], f.SentPlace)
	}
	return places, nil
}
