// Package kafka holds what relay, consumer and tools share about Kafka: options of
// the host, partitions and their leaders, limits of topics, and classes of errors.
package kafka

import (
	"errors"
	"fmt"
	"reflect"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// making is held while franz-go reads options: it sorts the codecs of
// ProducerBatchCompression in the host's own slice, and the two clients of a
// relay, or those of a relay and a consumer, may be made of the same options.
var making sync.Mutex

// NewClient is [kgo.NewClient] for options that several clients may share.
func NewClient(opts []kgo.Opt) (*kgo.Client, error) {
	making.Lock()
	defer making.Unlock()
	return kgo.NewClient(opts...)
}

// ValidateOpts is [kgo.ValidateOpts] for options that several clients may share.
func ValidateOpts(opts []kgo.Opt) error {
	making.Lock()
	defer making.Unlock()
	return kgo.ValidateOpts(opts...)
}

// HostOpts inspects the Kafka options of the host, to refuse those that the host
// must not choose.
type HostOpts struct {
	Client *kgo.Client // made of the options alone; never used
	errs   *[]error
}

// CheckOpts makes a client of options, passes them to look, and returns what look
// refused.
func CheckOpts(opts []kgo.Opt, look func(HostOpts)) error {
	client, err := NewClient(opts)
	if err != nil {
		return fmt.Errorf("kafka options: %w", err)
	}
	defer client.Close()
	var errs []error
	look(HostOpts{client, &errs})
	return errors.Join(errs...)
}

// LargestWrite returns the size of the largest request that a client writes, in
// bytes. A client that sends records of others on must not have a lower limit than
// they had.
func LargestWrite(opts []kgo.Opt) (bytes int32, err error) {
	err = CheckOpts(opts, func(o HostOpts) { bytes, _ = o.Client.OptValue(kgo.BrokerMaxWriteBytes).(int32) })
	return bytes, err
}

// Refuse adds an error for an option if it is set.
func (o HostOpts) Refuse(set bool, option, why string) {
	if set {
		*o.errs = append(*o.errs, fmt.Errorf("kafka option %s: %s", option, why))
	}
}

// Names reports whether an option holds a name.
func (o HostOpts) Names(option any) bool {
	name, _ := o.Client.OptValue(option).(string)
	return name != ""
}

// Sets reports whether a switch is on, or a function given.
func (o HostOpts) Sets(option any) bool {
	v := reflect.ValueOf(o.Client.OptValue(option))
	return v.IsValid() && !v.IsZero()
}

// CheckProducerOpts refuses options with which the promises of a relay cannot be
// kept.
func CheckProducerOpts(opts []kgo.Opt) error {
	return CheckOpts(opts, func(o HostOpts) {
		const notConsumer = "that is for a consumer"
		o.Refuse(o.Names(kgo.ConsumerGroup), "ConsumerGroup", notConsumer)
		o.Refuse(o.Names(kgo.ShareGroup), "ShareGroup", notConsumer)
		o.Refuse(o.Names(kgo.InstanceID), "InstanceID", notConsumer)
		o.Refuse(len(o.Client.GetConsumeTopics()) > 0, "ConsumeTopics or ConsumePartitions", notConsumer)
		o.Refuse(o.Names(kgo.TransactionalID), "TransactionalID", "it belongs to the relay")
		o.Refuse(o.Sets(kgo.DisableIdempotentWrite), "DisableIdempotentWrite", "retries would repeat and reorder records")
		o.Refuse(o.Sets(kgo.ManualFlushing), "ManualFlushing", "nobody would flush")
	})
}

// ProducerOpts returns the options of the host with those that the promises need.
func ProducerOpts(host []kgo.Opt, deliveryTimeout time.Duration) []kgo.Opt {
	return append(append([]kgo.Opt(nil), host...),
		kgo.RequiredAcks(kgo.AllISRAcks()),
		// With idempotence alone, a record whose request was sent and never
		// answered would neither fail nor time out.
		kgo.RecordDeliveryTimeout(deliveryTimeout),
		kgo.AllowIdempotentProduceCancellation(),
		// Batches come full: waiting for more records would only delay them.
		kgo.ProducerLinger(0),
	)
}
