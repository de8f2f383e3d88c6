package deadletter

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/short"
)

// Replays tells the records that were sent back from a dead-letter topic from records that only
// claim it. A client that may write to a topic may write any header there, but may not write to its
// dead-letter topic. So the headers count only if the dead-letter topic has the dead letter that
// they name. It is safe for concurrent use.
//
// Forged headers must cost little. What was read of a dead letter is remembered, and Kafka is asked for the end of
// a partition once for all records of a [Replays.Check].
type Replays struct {
	client func() (*kgo.Client, error)
	busy   chan struct{} // holds one while a goroutine asks Kafka or uses known

	// known has the dead letters that were read, and offsets without one.
	known map[place]remembered
	// missing says since when Kafka has not known dead-letter topics.
	missing map[string]time.Time
}

// place is the position of a record.
type place struct {
	kafka.Partition
	offset int64
	topic  kafka.TopicID // a topic that was deleted and created again has the same offsets; zero until Kafka is asked
}

// remembered is what [Replays] remembers of a dead letter. It has the same size for all of them.
type remembered struct {
	exists   bool
	edited   bool              // an operator has written its value
	about    [sha256.Size]byte // see aboutOf
	original string            // the digest of the original, "" for a dead letter of which sizeOnly is known
	sizeOnly string            // the size of the omitted value, of an earlier release that wrote no digest
	rest     string            // then the digest without the value
}

// maxKnown bounds the dead letters that are remembered. They need 3 MB.
const maxKnown = 10_000

// NewReplays returns the replays of dead-letter topics that a client may read. The client is asked for when the first
// record claims to be a replay. It should be none that fetches: a broker answers the fetches of a client one by one.
func NewReplays(client func() (*kgo.Client, error)) *Replays {
	return &Replays{client: client, busy: make(chan struct{}, 1), known: map[place]remembered{}, missing: map[string]time.Time{}}
}

// ErrNoReplay is the error of a record whose headers say that it was sent back, and that
// is no copy of a dead letter, or of none that can be looked at.
var ErrNoReplay = errors.New("not a copy of a dead letter")

// askTimeout bounds a question, so that a partition that is revoked does not wait for the question
// of another.
const askTimeout = 5 * time.Second

// Check returns an answer for each record of a topic: without an error if it is a copy of a dead letter in one of the
// dead-letter topics, for the group and action that its headers name, or else [ErrNoReplay]. The error is that of an
// outage: then the caller asks again. What was read before the outage is remembered.
func (p *Replays) Check(ctx context.Context, records []*kgo.Record, topics ...string) (answers []Answer, err error) {
	answers = make([]Answer, len(records))
	var asked []claim
	for i, r := range records {
		headers := lastOwn(r)
		at, offset, err := parseOrigin(headers[ReplayFrom])
		switch {
		case err != nil:
			answers[i].Err = fmt.Errorf("%w: header %s %w", ErrNoReplay, ReplayFrom, err)
		case !slices.Contains(topics, at.Topic):
			answers[i].Err = fmt.Errorf("%w: %s is not the dead-letter topic of %s", ErrNoReplay, short.Text(at.Topic, 300), r.Topic)
		default:
			asked = append(asked, claim{index: i, place: place{Partition: at, offset: offset}, headers: headers})
		}
	}
	slices.SortFunc(asked, func(a, b claim) int { // a read brings some dead letters behind the one that it is for
		return cmp.Or(cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Number, b.Number), cmp.Compare(a.offset, b.offset))
	})
	var of partitionEnd
	for _, c := range asked {
		dead, err := p.find(ctx, c.place, &of)
		if err != nil && !errors.Is(err, ErrNoReplay) {
			return nil, err
		}
		if err == nil && !isCopy(records[c.index], c.headers, dead) {
			err = fmt.Errorf("%w: %s is another record, or there is none", ErrNoReplay, c.headers[ReplayFrom])
		}
		answers[c.index] = Answer{Err: err, Edited: dead.edited}
	}
	return answers, nil
}

// Answer says whether a record is a copy of a dead letter.
type Answer struct {
	Err error
	// Edited is set if an operator has edited the dead letter. Then its value is another one than that of the original.
	Edited bool
}

// claim is the claim of a record that it is a copy of a dead letter.
type claim struct {
	index int
	place
	headers map[string]string
}

// partitionEnd has the span of a partition as it was when Kafka was asked, or the answer that it cannot be read. It
// belongs to one [Replays.Check]: a dead letter is older than its copy, so no dead letter is behind this end.
type partitionEnd struct {
	kafka.Span
	reader *kafka.Reader
	err    error // [ErrNoReplay]
}

// answers reports whether Kafka need not be asked about a partition. If the topic cannot be read, or does not have the
// partition, this is true of its partitions with higher numbers, too.
func (e *partitionEnd) answers(at kafka.Partition) bool {
	return at == e.Partition || e.err != nil && at.Topic == e.Topic && at.Number > e.Number
}

// ask asks Kafka about a partition.
func (p *Replays) ask(ctx context.Context, at kafka.Partition) (partitionEnd, error) {
	client, err := p.client()
	if err != nil {
		return partitionEnd{}, err
	}
	end := partitionEnd{reader: kafka.NewReader(client)}
	if end.Span, err = end.reader.Span(ctx, at, 0); err != nil {
		end.Partition, end.err = at, orNoReplay(err)
		if !errors.Is(end.err, ErrNoReplay) || p.mayReturn(at.Topic, err) {
			return partitionEnd{}, err
		}
		return end, nil
	}
	delete(p.missing, at.Topic)
	return end, nil
}

// mayReturn reports whether a dead-letter topic that a broker does not know may only be new to that broker, which has
// just started. Records that claim to be replays wait for missingPatience then, once. If the broker knows the topic, it
// knows all partitions: forged numbers delay nothing.
func (p *Replays) mayReturn(topic string, err error) bool {
	if !errors.Is(err, kerr.UnknownTopicOrPartition) || errors.Is(err, kafka.ErrNoPartition) {
		return false
	}
	since, known := p.missing[topic]
	if !known {
		since = time.Now()
		p.missing[topic] = since
	}
	return time.Since(since) < missingPatience
}

// missingPatience is how long a dead-letter topic may be missing before there are no dead letters in it.
const missingPatience = 5 * time.Second

// find returns the dead letter at a place. The partition is that of the last call, or a later one.
func (p *Replays) find(ctx context.Context, at place, end *partitionEnd) (_ remembered, err error) {
	select {
	case p.busy <- struct{}{}:
		defer func() { <-p.busy }()
	case <-ctx.Done():
		return remembered{}, context.Cause(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	if !end.answers(at.Partition) {
		if *end, err = p.ask(ctx, at.Partition); err != nil {
			return remembered{}, err
		}
	}
	if end.err != nil || at.offset < end.Next || at.offset >= end.End {
		return remembered{}, end.err
	}
	at.topic = end.reader.TopicID(at.Partition)
	if dead, ok := p.known[at]; ok {
		return dead, nil
	}
	return p.read(ctx, end.reader, at, end.End)
}

// read reads some dead letters from a place on, and returns the one there. It remembers all of them.
func (p *Replays) read(ctx context.Context, reader *kafka.Reader, at place, end int64) (remembered, error) {
	span := kafka.Span{Partition: at.Partition, Next: at.offset, End: end}
	records, err := reader.Read(ctx, &span)
	if err != nil {
		return remembered{}, orNoReplay(err)
	}
	if len(p.known)+len(records) >= maxKnown {
		clear(p.known)
	}
	dead := remembered{}
	p.known[at] = dead // unless a record is there
	for _, r := range records[:min(len(records), maxKnown)] {
		l := rememberedOf(r)
		p.known[place{at.Partition, r.Offset, at.topic}] = l
		if r.Offset == at.offset {
			dead = l
		}
	}
	return dead, nil
}

// orNoReplay returns [ErrNoReplay] for errors that asking again would not change.
func orNoReplay(err error) error {
	if errors.Is(err, kerr.UnknownTopicOrPartition) || errors.Is(err, kerr.TopicAuthorizationFailed) || errors.Is(err, kerr.OffsetOutOfRange) ||
		errors.Is(err, kgo.ErrMaxDecompress) || errors.Is(err, kafka.ErrBatch) {
		return fmt.Errorf("%w that can be looked at: %w", ErrNoReplay, err)
	}
	return err
}

// rememberedOf returns what is remembered of a dead letter.
func rememberedOf(dead *kgo.Record) remembered {
	headers := lastOwn(dead)
	origin := headers[OriginalTopic] + "-" + headers[OriginalPartition] + "-" + headers[OriginalOffset]
	l := remembered{exists: true, edited: headers[EditedFrom] != "", about: aboutOf(headers[OriginalTopic], headers[Group], headers[Action], cmp.Or(headers[ReplayOf], origin))}
	switch digest, size := headers[OriginalDigest], headers[ValueOmitted]; {
	case digest != "":
		l.original = fmt.Sprintf("%.*s", 2*sha256.Size, digest)
	case size != "":
		l.sizeOnly, l.rest = fmt.Sprintf("%.20s", size), Digest(dead)
	default:
		l.original = Digest(dead)
	}
	return l
}

// aboutOf returns a digest of what a dead letter and its replay say of the original.
func aboutOf(topic, group, action, of string) [sha256.Size]byte {
	return sha256.Sum256(fmt.Appendf(nil, "%q %q %q %q", topic, group, action, of))
}

// isCopy compares a record with the dead letter that it says it is a copy of. It may have
// more than the dead letter, of which parts may be left out.
func isCopy(r *kgo.Record, said map[string]string, dead remembered) bool {
	if !dead.exists || dead.about != aboutOf(r.Topic, said[ReplayGroup], said[ReplayAction], said[ReplayOf]) {
		return false
	}
	if dead.sizeOnly != "" {
		without := *r
		without.Value = nil
		return strconv.Itoa(len(r.Value)) == dead.sizeOnly && Digest(&without) == dead.rest
	}
	return Digest(r) == dead.original
}

// lastOwn returns the headers of a dead letter or a replay, the last of each name.
func lastOwn(r *kgo.Record) map[string]string {
	own := map[string]string{}
	for _, h := range r.Headers {
		if IsOwn(h.Key) {
			own[h.Key] = string(h.Value)
		}
	}
	return own
}

// parseOrigin is the inverse of [Origin].
func parseOrigin(text string) (at kafka.Partition, offset int64, err error) {
	rest, last := cutLast(text)
	topic, number := cutLast(rest)
	n, err := strconv.ParseInt(number, 10, 32)
	if err == nil {
		offset, err = strconv.ParseInt(last, 10, 64)
	}
	if err == nil && (topic == "" || n < 0 || offset < 0) {
		err = strconv.ErrRange
	}
	if err != nil {
		return at, 0, fmt.Errorf("%.100q is no position in a topic", text)
	}
	return kafka.Partition{Topic: topic, Number: int32(n)}, offset, nil
}

// TopicOf returns the topic of a position in the form of [Origin].
func TopicOf(origin string) string {
	partition, _ := cutLast(origin)
	topic, _ := cutLast(partition)
	return topic
}

// cutLast cuts a text at its last dash.
func cutLast(text string) (before, after string) {
	n := max(strings.LastIndexByte(text, '-'), 0)
	return text[:n], strings.TrimPrefix(text[n:], "-")
}
