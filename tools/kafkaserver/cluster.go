package kafkaserver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/tools/internal/place"
)

// clusterSize is how many nodes a [Cluster] has: the fewest that go on when one of them is gone.
const clusterSize = 3

// Cluster is a cluster of three nodes that are brokers and controllers. Each of them is a
// [Server], which can be killed, shut down, frozen and restarted by itself. Its methods may be
// called from several goroutines.
type Cluster struct{ nodes []*Server }

// StartCluster starts a cluster and waits until it can be used, as [Ready] says. That and the
// restart of a node take at most 270 s. The defaults of settings are Kafka's, except for three
// replicas of everything, of which two must be in sync, and for less memory. If the start fails,
// nothing remains running.
func StartCluster(ctx context.Context, cfg Config) (*Cluster, error) {
	java, libraries, err := cfg.programs(ctx)
	if err != nil {
		return nil, err
	}
	c := &Cluster{}
	for id := range int32(clusterSize) {
		run, err := place.NewRun("kafka")
		if err != nil {
			return nil, errors.Join(fmt.Errorf("kafka: %w", err), c.Stop())
		}
		c.nodes = append(c.nodes, &Server{
			cfg: cfg, java: java, libraries: libraries, options: clusterOptions, limit: clusterSize * startTimeout,
			defaults: clusterDefaults(), node: id + 1, run: run,
		})
	}
	for _, node := range c.nodes {
		node.quorum = c.nodes
	}
	if err := start(ctx, c.nodes, c.launch); err != nil {
		return nil, errors.Join(fmt.Errorf("kafka: %w", err), c.Stop())
	}
	return c, nil
}

// clusterOptions let three nodes share a small machine.
var clusterOptions = []string{"-Xmx320m", briefly}

// clusterDefaults returns the settings for brokers of a cluster. What is not here is Kafka's
// default: a broker is fenced 9 s after its last heartbeat, for example.
func clusterDefaults() map[string]string {
	settings := Defaults()
	for _, name := range []string{
		"broker.session.timeout.ms", "broker.heartbeat.interval.ms", "group.initial.rebalance.delay.ms",
		"authorizer.class.name", "allow.everyone.if.no.acl.found",
	} {
		delete(settings, name)
	}
	maps.Copy(settings, map[string]string{
		"default.replication.factor": "3",
		"min.insync.replicas":        "2",

		"offsets.topic.replication.factor":                 "3",
		"transaction.state.log.replication.factor":         "3",
		"transaction.state.log.min.isr":                    "2",
		"share.coordinator.state.topic.replication.factor": "3",
		"share.coordinator.state.topic.min.isr":            "2",
	})
	return settings
}

// launch starts all nodes: none is ready before a second one runs.
func (c *Cluster) launch(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	errs := make([]error, len(c.nodes))
	var starting sync.WaitGroup
	for i, node := range c.nodes {
		starting.Go(func() {
			if errs[i] = node.launch(ctx); errs[i] != nil {
				cancel(errs[i]) // the others need not wait
			}
		})
	}
	starting.Wait()
	err := errors.Join(errs...)
	if err == nil {
		err = c.nodes[0].proc.Await(ctx, "the cluster", retryEvery, func(ctx context.Context) error { return Ready(ctx, c.Brokers()) })
	}
	if err != nil {
		return errors.Join(err, c.kill())
	}
	return nil
}

// kill ends all nodes that run.
func (c *Cluster) kill() error {
	var errs []error
	for _, node := range c.nodes {
		node.mu.Lock()
		if node.proc != nil {
			errs = append(errs, node.proc.Kill())
		}
		node.mu.Unlock()
	}
	return errors.Join(errs...)
}

// Stop kills all nodes and removes their directories. A second Stop does nothing. It is not a
// clean end: the last nodes could not reach a controller any more, and the data go in any case.
func (c *Cluster) Stop() error {
	errs := []error{c.kill()}
	for _, node := range c.nodes {
		node.mu.Lock()
		if node.run != nil {
			errs = append(errs, node.run.Remove())
			node.run = nil
		}
		node.mu.Unlock()
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("kafka: %w", err)
	}
	return nil
}

// Brokers returns the addresses of all nodes. They never change.
func (c *Cluster) Brokers() (addresses []string) {
	for _, node := range c.nodes {
		addresses = append(addresses, node.Brokers()...)
	}
	return addresses
}

// IDs returns the ids of all nodes.
func (c *Cluster) IDs() (ids []int32) {
	for _, node := range c.nodes {
		ids = append(ids, node.node)
	}
	return ids
}

// Node returns the node of one of the [Cluster.IDs]. Its Stop is not for it: see [Cluster.Stop].
func (c *Cluster) Node(id int32) *Server { return c.nodes[id-1] }

// Controller returns the id of the node that is the active controller. It returns an error while
// there is none, for example because two nodes are gone.
func (c *Cluster) Controller(ctx context.Context) (id int32, err error) {
	var errs []error
	for _, node := range c.nodes { // one that is gone does not answer, the next one may
		err := visit(ctx, node.Brokers(), func(ctx context.Context, client *kgo.Client) error {
			id, err = askQuorum(ctx, client.SeedBrokers()[0])
			return err
		})
		if err == nil {
			return id, nil
		}
		errs = append(errs, fmt.Errorf("node %d: %w", node.node, err))
	}
	return 0, fmt.Errorf("kafka: get the controller: %w", errors.Join(errs...))
}

// askQuorum returns the leader of the topic in which controllers store the cluster's metadata.
// What brokers call the controller in their metadata is any broker: it forwards requests.
func askQuorum(ctx context.Context, node kmsg.Requestor) (leader int32, err error) {
	topic := kmsg.NewDescribeQuorumRequestTopic()
	topic.Topic = "__cluster_metadata"
	topic.Partitions = []kmsg.DescribeQuorumRequestTopicPartition{{Partition: 0}}
	request := kmsg.NewDescribeQuorumRequest()
	request.Topics = append(request.Topics, topic)
	response, err := request.RequestWith(ctx, node)
	if err != nil {
		return 0, err
	}
	if err := kerr.ErrorForCode(response.ErrorCode); err != nil {
		return 0, err
	}
	if len(response.Topics) == 0 || len(response.Topics[0].Partitions) == 0 {
		return 0, errors.New("the answer has no partition")
	}
	partition := response.Topics[0].Partitions[0]
	if err := kerr.ErrorForCode(partition.ErrorCode); err != nil {
		return 0, err
	}
	if partition.LeaderID < 1 {
		return 0, errors.New("there is none")
	}
	return partition.LeaderID, nil
}
