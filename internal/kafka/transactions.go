package kafka

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// Transaction is what Kafka says about the producer of a transactional id.
type Transaction struct {
	ID         string
	ProducerID int64
	State      string    // Ongoing or Empty, for example
	Since      time.Time // when it began; zero if none is open
}

// Transactions asks the coordinators about transactional ids. Those that they do not know are not in the answer. The
// error names the ids of which Kafka says nothing.
func Transactions(ctx context.Context, client *kgo.Client, ids ...string) (map[string]Transaction, error) {
	found := map[string]Transaction{}
	if len(ids) == 0 {
		return found, nil
	}
	request := kmsg.NewPtrDescribeTransactionsRequest()
	request.TransactionalIDs = ids
	answer, err := request.RequestWith(ctx, client) // with an error of one broker come the answers of the others
	var errs []error
	if err != nil {
		errs = append(errs, fmt.Errorf("describe transactions: %w", err))
	}
	if answer == nil {
		answer = new(kmsg.DescribeTransactionsResponse)
	}
	for _, s := range answer.TransactionStates {
		switch err := kerr.ErrorForCode(s.ErrorCode); {
		case errors.Is(err, kerr.TransactionalIDNotFound):
		case err != nil:
			errs = append(errs, fmt.Errorf("describe transactional id %s: %w", s.TransactionalID, err))
		default:
			t := Transaction{ID: s.TransactionalID, ProducerID: s.ProducerID, State: s.State}
			if s.State == "Ongoing" || strings.HasPrefix(s.State, "Prepare") {
				t.Since = time.UnixMilli(s.StartTimestamp)
			}
			found[t.ID] = t
		}
	}
	return found, errors.Join(errs...)
}

// Hold is an open transaction in a partition, in which clients that read committed records read up to its beginning.
type Hold struct {
	Transaction // ID and State are empty if Kafka does not tell them
	At          Partition
	Behind      int64     // how far the last stable offset of the partition is behind its end
	Wrote       time.Time // timestamp of the last record of the producer there
}

// Holds returns the open transactions in some partitions. The error names what Kafka does not tell.
func Holds(ctx context.Context, client *kgo.Client, partitions []Partition) ([]Hold, error) {
	behind, err := unstable(ctx, client, partitions)
	if len(behind) == 0 {
		return nil, err
	}
	holds, perr := openProducers(ctx, client, behind)
	known, terr := transactionsOf(ctx, client, holds)
	for i := range holds {
		if t, ok := known[holds[i].ProducerID]; ok {
			holds[i].Transaction = t
		}
	}
	slices.SortFunc(holds, func(a, b Hold) int {
		return cmp.Or(cmp.Compare(a.ProducerID, b.ProducerID), cmp.Compare(a.At.Topic, b.At.Topic), cmp.Compare(a.At.Number, b.At.Number))
	})
	return holds, errors.Join(err, perr, terr)
}

// unstable returns how far the last stable offsets of partitions are behind their ends, which are asked for first.
func unstable(ctx context.Context, client *kgo.Client, partitions []Partition) (map[Partition]int64, error) {
	behind := map[Partition]int64{}
	for _, p := range partitions {
		behind[p] = EndOffset
	}
	ends, err := ListOffsets(ctx, client, Uncommitted, behind)
	stable, serr := ListOffsets(ctx, client, Committed, behind)
	clear(behind)
	for p, end := range ends {
		if s, known := stable[p]; known && s < end {
			behind[p] = end - s
		}
	}
	return behind, errors.Join(err, serr)
}

// openProducers returns the producers that have a transaction open in partitions, by their producer ids.
func openProducers(ctx context.Context, client *kgo.Client, behind map[Partition]int64) (holds []Hold, err error) {
	request := kmsg.NewPtrDescribeProducersRequest()
	for p := range behind {
		topic := kmsg.NewDescribeProducersRequestTopic()
		topic.Topic, topic.Partitions = p.Topic, []int32{p.Number}
		request.Topics = append(request.Topics, topic)
	}
	var errs []error
	answer, err := request.RequestWith(ctx, client)
	if err != nil {
		errs = append(errs, fmt.Errorf("describe producers: %w", err))
	}
	if answer == nil {
		answer = new(kmsg.DescribeProducersResponse)
	}
	for _, t := range answer.Topics {
		for _, p := range t.Partitions {
			at := Partition{t.Topic, p.Partition}
			if err := kerr.ErrorForCode(p.ErrorCode); err != nil {
				errs = append(errs, fmt.Errorf("last stable offset of %s is %d behind its end, and Kafka does not say for whom: %w", at.Name(), behind[at], err))
			}
			for _, a := range p.ActiveProducers {
				if a.CurrentTxnStartOffset >= 0 {
					holds = append(holds, Hold{Transaction{ProducerID: a.ProducerID}, at, behind[at], time.UnixMilli(a.LastTimestamp)})
				}
			}
		}
	}
	return holds, errors.Join(errs...)
}

// transactionsOf returns what the coordinators say about producers, by their producer ids.
func transactionsOf(ctx context.Context, client *kgo.Client, holds []Hold) (map[int64]Transaction, error) {
	if len(holds) == 0 {
		return nil, nil
	}
	producers := map[int64]bool{}
	for _, h := range holds {
		producers[h.ProducerID] = true
	}
	request := kmsg.NewPtrListTransactionsRequest()
	request.ProducerIDFilters = slices.Sorted(maps.Keys(producers))
	answer, err := request.RequestWith(ctx, client)
	if err == nil {
		err = kerr.ErrorForCode(answer.ErrorCode)
	}
	if err != nil {
		return nil, fmt.Errorf("list transactions: %w", err)
	}
	var ids []string
	for _, t := range answer.TransactionStates {
		ids = append(ids, t.TransactionalID)
	}
	found, err := Transactions(ctx, client, ids...)
	known := map[int64]Transaction{}
	for _, t := range found {
		known[t.ProducerID] = t
	}
	return known, err
}
