package deadletter

import (
	"cmp"
	"context"
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
type Replays struct {
	client *kgo.Client
	busy   chan struct{} // holds one while a goroutine asks Kafka or reads read

	// read has the records that were read last of each partition of a dead-letter topic, because
	// dead letters are mostly sent back in their order.
	read map[kafka.Partition][]*kgo.Record
}

// NewReplays returns the replays of dead-letter topics that a client may read.
func NewReplays(client *kgo.Client) *Replays {
	return &Replays{client: client, busy: make(chan struct{}, 1), read: map[kafka.Partition][]*kgo.Record{}}
}

// ErrNoReplay is the error of a record whose headers say that it was sent back, and that
// is no copy of a dead letter, or of none that can be looked at.
var ErrNoReplay = errors.New("not a copy of a dead letter")

// askTimeout bounds a question, so that a partition that is revoked does not wait for the question
// of another.
const askTimeout = 5 * time.Second

// Check returns nil if a record is a copy of a dead letter in one of the topics, for the group and
// action that its headers name. Otherwise the error is [ErrNoReplay], or the error of an outage:
// then the caller asks again.
func (p *Replays) Check(ctx context.Context, r *kgo.Record, topics ...string) error {
	headers := lastOwn(r)
	at, offset, err := parseOrigin(headers[ReplayFrom])
	if err != nil {
		return fmt.Errorf("%w: header %s %w", ErrNoReplay, ReplayFrom, err)
	}
	if !slices.Contains(topics, at.Topic) {
		return fmt.Errorf("%w: %s is not the dead-letter topic of %s", ErrNoReplay, short.Text(at.Topic, 300), r.Topic)
	}
	select {
	case p.busy <- struct{}{}:
		defer func() { <-p.busy }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	dead, err := p.find(ctx, at, offset)
	if err != nil {
		return err
	}
	if dead == nil || !isCopy(r, headers, dead) {
		return fmt.Errorf("%w: %s is another record, or there is none", ErrNoReplay, headers[ReplayFrom])
	}
	return nil
}

// find returns the record at an offset, or nil if there is none.
func (p *Replays) find(ctx context.Context, at kafka.Partition, offset int64) (*kgo.Record, error) {
	byOffset := func(r *kgo.Record, offset int64) int { return cmp.Compare(r.Offset, offset) }
	if n, ok := slices.BinarySearchFunc(p.read[at], offset, byOffset); ok {
		return p.read[at][n], nil
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	records, err := p.readFrom(ctx, at, offset)
	if err != nil {
		return nil, err
	}
	p.read[at] = records
	if n, ok := slices.BinarySearchFunc(records, offset, byOffset); ok {
		return records[n], nil
	}
	return nil, nil
}

// readFrom returns some records from an offset on.
func (p *Replays) readFrom(ctx context.Context, at kafka.Partition, offset int64) ([]*kgo.Record, error) {
	reader := kafka.NewReader(p.client)
	spans, err := reader.Spans(ctx, at.Topic, map[int32]int64{at.Number: offset})
	if err != nil {
		return nil, orNoReplay(err)
	}
	n := slices.IndexFunc(spans, func(s kafka.Span) bool { return s.Partition == at })
	if spans[n].Next != offset || offset >= spans[n].End {
		return nil, nil
	}
	records, err := reader.Read(ctx, &spans[n])
	return records, orNoReplay(err)
}

// orNoReplay returns [ErrNoReplay] for errors that asking again would not change.
func orNoReplay(err error) error {
	if errors.Is(err, kerr.UnknownTopicOrPartition) || errors.Is(err, kerr.TopicAuthorizationFailed) || errors.Is(err, kerr.OffsetOutOfRange) {
		return fmt.Errorf("%w that can be looked at: %w", ErrNoReplay, err)
	}
	return err
}

// isCopy compares a record with the dead letter that it says it is a copy of. It may have
// more than the dead letter, of which parts may be left out.
func isCopy(r *kgo.Record, said map[string]string, dead *kgo.Record) bool {
	headers := lastOwn(dead)
	origin := headers[OriginalTopic] + "-" + headers[OriginalPartition] + "-" + headers[OriginalOffset]
	if headers[OriginalTopic] != r.Topic || headers[Group] != said[ReplayGroup] || headers[Action] != said[ReplayAction] ||
		cmp.Or(headers[ReplayOf], origin) != said[ReplayOf] {
		return false
	}
	if digest := headers[OriginalDigest]; digest != "" {
		return Digest(r) == digest
	}
	if size := headers[ValueOmitted]; size != "" { // of an earlier release, without a digest
		without := *r
		without.Value = dead.Value
		return strconv.Itoa(len(r.Value)) == size && Digest(&without) == Digest(dead)
	}
	return Digest(r) == Digest(dead)
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

// cutLast cuts a text at its last dash.
func cutLast(text string) (before, after string) {
	n := max(strings.LastIndexByte(text, '-'), 0)
	return text[:n], strings.TrimPrefix(text[n:], "-")
}
