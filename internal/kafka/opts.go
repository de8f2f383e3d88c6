// Package kafka holds what relay, consumer and tools share about Kafka: options of
// the host, partitions and their leaders, limits of topics, and classes of errors.
package kafka

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// making is held while franz-go reads options: it sorts the codecs of ProducerBatchCompression in
// the host's own slice. The two clients of a relay, or a relay and a consumer, may be made of the
// same options.
var making sync.Mutex

// NewClient is [kgo.NewClient] for options that several clients may share.
func NewClient(opts []kgo.Opt) (*kgo.Client, error) {
	making.Lock()
	defer making.Unlock()
	return kgo.NewClient(opts...)
}

// HostOpts inspects the Kafka options of the host, to reject those that the host must
// not set.
type HostOpts struct {
	Client *kgo.Client // made of the options alone; never used
	errs   *[]error
}

// CheckOpts makes a client of the options of the host, behind others, passes it to inspect,
// and returns the options that kgo or inspect rejected as an error.
func CheckOpts(host []kgo.Opt, inspect func(HostOpts), others ...kgo.Opt) error {
	all := func(host []kgo.Opt) []kgo.Opt { return slices.Concat(others, host) }
	valid, err := validOpts(host, all)
	client, cerr := NewClient(all(valid))
	if cerr != nil {
		return cmp.Or(err, fmt.Errorf("kafka options: %w", cerr))
	}
	defer client.Close()
	errs := []error{err}
	inspect(HostOpts{client, &errs})
	return errors.Join(errs...)
}

// LargestWrite returns the size of the largest request that a client writes, in bytes. A
// client that forwards records must not have a lower limit than their producers.
func LargestWrite(opts []kgo.Opt) (bytes int32, err error) {
	err = CheckOpts(opts, func(o HostOpts) { bytes, _ = o.Client.OptValue(kgo.BrokerMaxWriteBytes).(int32) })
	return bytes, err
}

// LargestBatch returns the size of the largest batch that a client writes, in bytes. If a function of the host decides
// that for each topic, it is the size of the largest request.
func LargestBatch(opts []kgo.Opt) (bytes int32, err error) {
	err = CheckOpts(opts, func(o HostOpts) {
		bytes, _ = o.Client.OptValue(kgo.ProducerBatchMaxBytes).(int32)
		of, _ := o.Client.OptValue(kgo.ProducerBatchMaxBytesFn).(func(string) int32)
		// The compiler may inline the function of franz-go, whose name is then a part of the caller's. A function of
		// the host may have such a name, too.
		name := runtime.FuncForPC(reflect.ValueOf(of).Pointer()).Name()
		isStatic := strings.HasPrefix(name, "github.com/twmb/franz-go/pkg/kgo.") || strings.Contains(name, ".ProducerBatchMaxBytes.")
		if !isStatic || of("a-topic") != bytes {
			bytes, _ = o.Client.OptValue(kgo.BrokerMaxWriteBytes).(int32)
		}
	})
	return bytes, err
}

// ContextOf returns the context of a client that is made from options.
func ContextOf(opts []kgo.Opt) (context.Context, error) {
	var set any
	err := CheckOpts(opts, func(o HostOpts) { set = o.Client.OptValue(kgo.WithContext) })
	if ctx, ok := set.(context.Context); ok {
		return ctx, err
	}
	return context.Background(), err
}

// Reject adds an error for an option if it is set.
func (o HostOpts) Reject(set bool, option, why string) {
	if set {
		*o.errs = append(*o.errs, fmt.Errorf("kafka option %s: %s", option, why))
	}
}

// Names reports whether an option that is a name is set.
func (o HostOpts) Names(option any) bool {
	name, _ := o.Client.OptValue(option).(string)
	return name != ""
}

// Sets reports whether an option that is a switch or a function is set.
func (o HostOpts) Sets(option any) bool {
	v := reflect.ValueOf(o.Client.OptValue(option))
	return v.IsValid() && !v.IsZero()
}

// Lists reports whether an option that is a list has anything in it.
func (o HostOpts) Lists(option any) bool {
	v := reflect.ValueOf(o.Client.OptValue(option))
	return v.IsValid() && v.Len() > 0
}

// Differs reports whether an option does not have a value.
func (o HostOpts) Differs(option, value any) bool { return o.Client.OptValue(option) != value }

// RejectCommon rejects the options that neither a relay nor a consumer can use.
func (o HostOpts) RejectCommon() {
	o.Reject(o.Names(kgo.TransactionalID), "TransactionalID", "nobody would begin and end its transactions")
	o.Reject(o.Sets(kgo.ManualFlushing), "ManualFlushing", "nobody would flush")
	o.Reject(o.Sets(kgo.DefaultProduceTopicAlways), "DefaultProduceTopicAlways", "each record has a topic of its own")
	ctx, _ := o.Client.OptValue(kgo.WithContext).(context.Context)
	o.Reject(ctx != nil && ctx.Done() != nil, "WithContext", "a client whose context has ended does nothing any more; end the context of the call")
}

// CheckProducerOpts rejects options that break the promises of a relay.
func CheckProducerOpts(opts []kgo.Opt) error {
	return CheckOpts(opts, func(o HostOpts) {
		const notConsumer = "that is for a consumer"
		o.RejectCommon()
		o.Reject(o.Names(kgo.ConsumerGroup), "ConsumerGroup", notConsumer)
		o.Reject(o.Names(kgo.ShareGroup), "ShareGroup", notConsumer)
		o.Reject(o.Names(kgo.InstanceID), "InstanceID", notConsumer)
		o.Reject(o.Lists(kgo.ConsumeTopics), "ConsumeTopics", notConsumer)
		o.Reject(o.Lists(kgo.ConsumePartitions), "ConsumePartitions", notConsumer)
		o.Reject(o.Sets(kgo.DisableIdempotentWrite), "DisableIdempotentWrite", "retries would repeat and reorder records")
		partitioner, _ := o.Client.OptValue(kgo.RecordPartitioner).(kgo.Partitioner)
		if err := checkPartitioner(partitioner); err != nil {
			o.Reject(true, "RecordPartitioner", err.Error())
		}
	})
}

// RequestTimeout is how long a broker may be silent before another one is asked, unless the host has set it: franz-go
// waits for 10 s.
const RequestTimeout = 2 * time.Second

// metadataMinAge is how soon a client asks again who leads a partition, unless the host has set it: franz-go waits for
// 5 s. While another broker is being elected, that is how long the relay does not know of it.
const metadataMinAge = time.Second

// ProducerOpts returns the options of the host, and those that the promises need.
func ProducerOpts(host []kgo.Opt, deliveryTimeout time.Duration) []kgo.Opt {
	return append(sendOpts(host),
		// With idempotence alone, a record whose request was sent and never
		// answered would neither fail nor time out.
		kgo.RecordDeliveryTimeout(deliveryTimeout),
		kgo.AllowIdempotentProduceCancellation(),
	)
}

// TransactionOpts returns the options of the host, and those of a producer whose transactions Kafka ends after a time.
// It has room for a cursor record besides what the host lets it buffer.
func TransactionOpts(host []kgo.Opt, timeout time.Duration) []kgo.Opt {
	return slices.Concat(sendOpts(host), cursorRoom(host), []kgo.Opt{kgo.TransactionTimeout(timeout)})
}

func sendOpts(host []kgo.Opt) []kgo.Opt {
	opts := append([]kgo.Opt{
		kgo.DialTimeout(RequestTimeout), kgo.RequestTimeoutOverhead(RequestTimeout), kgo.MetadataMinAge(metadataMinAge),
	}, host...)
	return append(opts, kgo.RequiredAcks(kgo.AllISRAcks()), kgo.ProducerLinger(0))
}

// FlushOpts returns options for a client that sends nothing before it is flushed, and whose log does not
// say at INFO that it is.
func FlushOpts(host []kgo.Opt) []kgo.Opt {
	opts := []kgo.Opt{kgo.ManualFlushing()}
	err := CheckOpts(host, func(o HostOpts) {
		if log, ok := o.Client.OptValue(kgo.WithLogger).(kgo.Logger); ok && log != nil {
			opts = append(opts, kgo.WithLogger(flushLogger{log}))
		}
	})
	if err != nil { // as others say, too
		return nil
	}
	return opts
}

// flushLogger is a log of the host.
type flushLogger struct{ kgo.Logger }

// Log implements [kgo.Logger].
func (l flushLogger) Log(level kgo.LogLevel, msg string, keyvals ...any) {
	if msg == "flushing" {
		if level = kgo.LogLevelDebug; l.Level() < level {
			return
		}
	}
	l.Logger.Log(level, msg, keyvals...)
}
