package consumer

import (
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/kafka"
)

// CheckOpts refuses options that the consumer sets itself, and options that would break its promises.
// TestConsumerOptions lists all options of the client. CheckOpts returns the session timeout and the interval between
// two heartbeats, by the host's options or by default.
func CheckOpts(opts []kgo.Opt, maxPollInterval time.Duration) (session, heartbeat time.Duration, err error) {
	const itsOwn = "it belongs to the consumer"
	const topicsFollow = "topics follow from the handlers"
	given := false
	session = defaultSession
	err = kafka.CheckOpts(opts, func(o kafka.HostOpts) {
		o.RejectCommon()
		o.Reject(o.Names(kgo.ConsumerGroup), "ConsumerGroup", "it is the argument group of NewConsumer")
		o.Reject(o.Names(kgo.ShareGroup), "ShareGroup", itsOwn)
		o.Reject(o.Client.OptValue(kgo.GroupProtocol) != "consumer", "GroupProtocol", itsOwn)
		o.Reject(o.Lists(kgo.ConsumeTopics), "ConsumeTopics", topicsFollow)
		o.Reject(o.Lists(kgo.ConsumePartitions), "ConsumePartitions", topicsFollow)
		o.Reject(o.Lists(kgo.ConsumeExcludeTopics), "ConsumeExcludeTopics", topicsFollow)
		o.Reject(o.Sets(kgo.ConsumeRegex), "ConsumeRegex", topicsFollow+", and a topic's name is also in that of its dead letters")
		o.Reject(o.Sets(kgo.KeepControlRecords), "KeepControlRecords", "markers of transactions are no events")
		o.Reject(o.Differs(kgo.ConsumeStartOffset, unlikelyOffset), "ConsumeStartOffset", "HandlerConfig.From says where a new group begins")
		o.Reject(o.Differs(kgo.ConsumeResetOffset, unlikelyOffset), "ConsumeResetOffset", itsOwn)
		o.Reject(o.Differs(kgo.FetchIsolationLevel, int8(1)), "FetchIsolationLevel", "events of aborted transactions never happened")
		if given = o.Differs(kgo.SessionTimeout, unlikelySession); given {
			session, _ = o.Client.OptValue(kgo.SessionTimeout).(time.Duration)
		}
		o.Reject(given && session >= maxPollInterval, "SessionTimeout", fmt.Sprintf("%v must be shorter than MaxPollInterval, %v", session, maxPollInterval))
		heartbeat = min(defaultHeartbeat, session/3)
		if o.Differs(kgo.HeartbeatInterval, unlikelyHeartbeat) {
			heartbeat, _ = o.Client.OptValue(kgo.HeartbeatInterval).(time.Duration)
		}
		o.Reject(heartbeat <= 0 || heartbeat >= session, "HeartbeatInterval",
			fmt.Sprintf("%v must be above 0 and shorter than SessionTimeout, %v", heartbeat, session))
		o.Reject(o.Differs(kgo.RebalanceTimeout, unlikelyTimeout), "RebalanceTimeout", "ConsumerConfig.MaxPollInterval says it")
		o.Reject(o.Sets(kgo.OnPartitionsAssigned), "OnPartitionsAssigned", itsOwn)
		o.Reject(o.Sets(kgo.OnPartitionsRevoked), "OnPartitionsRevoked", itsOwn)
		o.Reject(o.Sets(kgo.OnPartitionsLost), "OnPartitionsLost", itsOwn)
		o.Reject(o.Sets(kgo.OnOffsetsFetched), "OnOffsetsFetched", "its error would keep the member from its partitions")
		o.Reject(o.Sets(kgo.AdjustFetchOffsetsFn), "AdjustFetchOffsetsFn", itsOwn)
		o.Reject(o.Sets(kgo.StopProducerOnDataLossDetected), "StopProducerOnDataLossDetected", "no dead letter could be sent any more")
	}, unlikelyOpts...)
	if !given {
		err = errors.Join(err, check.Shorter(check.Field[time.Duration]{Name: "SessionTimeout", Value: session},
			check.Field[time.Duration]{Name: "MaxPollInterval", Value: maxPollInterval}))
	}
	return session, heartbeat, err
}

// These values reveal which options the host has set, also to their defaults. CheckOpts puts them
// before the host's options: an option that still has its unlikely value was not set.
const (
	unlikelyTimeout   = 40*time.Second + 1
	unlikelySession   = 45*time.Second + 1 // no shorter than franz-go's own, which bounds a heartbeat, too
	unlikelyHeartbeat = time.Duration(1)   // below any SessionTimeout, as kgo wants it
)

var unlikelyOffset = kgo.NewOffset().At(1<<62 - 1)

var unlikelyOpts = []kgo.Opt{
	kgo.ConsumeStartOffset(unlikelyOffset), kgo.ConsumeResetOffset(unlikelyOffset), kgo.FetchIsolationLevel(kgo.ReadCommitted()),
	kgo.SessionTimeout(unlikelySession), kgo.HeartbeatInterval(unlikelyHeartbeat), kgo.RebalanceTimeout(unlikelyTimeout),
}

const (
	// defaultSession is how long Kafka waits for a heartbeat before it gives the partitions of a member to others.
	defaultSession = 30 * time.Second
	// defaultHeartbeat is how often a member sends a heartbeat: at least three times in a session timeout.
	defaultHeartbeat = 10 * time.Second
)

// fetchMaxWait is how long a broker may hold a fetch without records, unless the host sets it. A
// resumed partition is fetched only after the current fetch has returned, so half a queue must last
// that long.
const fetchMaxWait = 250 * time.Millisecond

// fetchMaxBytes is the most bytes of a fetch from one broker, compressed, unless the host sets it.
const fetchMaxBytes = 8 << 20

// consumerOpts returns the host's options with those of the consumer.
func consumerOpts(host []kgo.Opt, cfg *Rules, topics []string) ([]kgo.Opt, error) {
	maxWrite, err := kafka.LargestWrite(host) // a dead letter is as large as its original
	if err != nil {
		return nil, err
	}
	around := func(host []kgo.Opt) []kgo.Opt { return aroundHost(host, cfg, topics, maxWrite) }
	return around(host), kafka.ValidateOpts(host, around)
}

func aroundHost(host []kgo.Opt, cfg *Rules, topics []string, maxWrite int32) []kgo.Opt {
	return append(append([]kgo.Opt{kgo.FetchMaxWait(fetchMaxWait), kgo.FetchMaxBytes(fetchMaxBytes)}, kafka.Bounded(host)...),
		kgo.ConsumerGroup(cfg.Group),
		kgo.ConsumeTopics(topics...),
		kgo.ConsumeStartOffset(kgo.NewOffset().AtStart()), // starts decides
		// If the committed offset no longer exists, remaining records must not be skipped.
		kgo.ConsumeResetOffset(kgo.RewindOffset(time.Minute)),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		// Control records distinguish the end of a transaction from a removed record.
		kgo.KeepControlRecords(),
		kgo.SessionTimeout(cfg.SessionTimeout),
		kgo.HeartbeatInterval(cfg.HeartbeatInterval),
		kgo.RebalanceTimeout(cfg.MaxPollInterval),
		kgo.DisableAutoCommit(),
		// No partition is revoked while polled records are moved into the queues.
		kgo.BlockRebalanceOnPoll(),
		// For dead letters, see kafka.ProducerOpts.
		kgo.RequiredAcks(kgo.AllISRAcks()),
		kgo.RecordDeliveryTimeout(deadLetterDelivery),
		kgo.AllowIdempotentProduceCancellation(),
		kgo.ProducerBatchMaxBytes(maxWrite),
		kgo.ProducerLinger(0),
	)
}
