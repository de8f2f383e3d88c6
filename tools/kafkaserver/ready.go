package kafkaserver

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

const (
	// retryEvery is the pause between two tries.
	retryEvery = 50 * time.Millisecond
	// tryTimeout bounds one try. A broker that starts may accept a connection
	// and answer late.
	tryTimeout = 5 * time.Second
)

// newClusterID returns a random id in the form that Kafka wants.
func newClusterID() string {
	var id [16]byte
	rand.Read(id[:])
	id[0] &= 0x7f // no leading "-" after encoding: it would look like an option
	return base64.RawURLEncoding.EncodeToString(id[:])
}

// Ping returns nil if the cluster at brokers answers and has a controller.
func Ping(ctx context.Context, brokers []string) error {
	return visit(ctx, brokers, func(ctx context.Context, client *kgo.Client) error {
		_, err := askMetadata(ctx, client)
		return err
	})
}

// Ready returns nil if the cluster at brokers can be used: a topic can be created
// and deleted, and consumer groups and transactions have their coordinators.
func Ready(ctx context.Context, brokers []string) error {
	return visit(ctx, brokers, func(ctx context.Context, client *kgo.Client) error {
		if _, err := askMetadata(ctx, client); err != nil {
			return err
		}
		return tryAll(ctx, client)
	})
}

// ready is [Ready] for our own broker. A stranger may have taken the port: then
// ours is about to end. A node of a [Cluster] is ready when it knows that it is one of
// the brokers: what else it can do depends on the other nodes.
func (s *Server) ready(ctx context.Context) error {
	return visit(ctx, s.Brokers(), func(ctx context.Context, client *kgo.Client) error {
		metadata, err := askMetadata(ctx, client)
		if err != nil {
			return err
		}
		if metadata.ClusterID == nil || *metadata.ClusterID != s.cluster {
			return errors.New("the port belongs to another cluster")
		}
		if len(s.quorum) == 1 {
			return tryAll(ctx, client)
		}
		if !slices.ContainsFunc(metadata.Brokers, func(b kmsg.MetadataResponseBroker) bool { return b.NodeID == s.node }) {
			return fmt.Errorf("node %d is not one of the brokers yet", s.node)
		}
		return nil
	})
}

func visit(ctx context.Context, brokers []string, try func(context.Context, *kgo.Client) error) error {
	ctx, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel()
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...), kgo.RetryTimeout(0), kgo.RequestRetries(0))
	if err != nil {
		return fmt.Errorf("make client: %w", err)
	}
	defer client.Close()

	return try(ctx, client)
}

// askMetadata returns what a broker knows of the cluster, without topics.
func askMetadata(ctx context.Context, client *kgo.Client) (*kmsg.MetadataResponse, error) {
	request := kmsg.NewMetadataRequest()
	request.Topics = []kmsg.MetadataRequestTopic{} // none; nil would be all
	metadata, err := request.RequestWith(ctx, client)
	switch {
	case err != nil:
		return nil, fmt.Errorf("get metadata: %w", err)
	case metadata.ControllerID < 0 || len(metadata.Brokers) == 0:
		return nil, errors.New("get metadata: no controller yet")
	}
	return metadata, nil
}

func tryAll(ctx context.Context, client *kgo.Client) error {
	if err := tryCoordinators(ctx, client); err != nil {
		return err
	}
	return tryTopic(ctx, client)
}

// coordinatorPartitions is how many partitions [Defaults] gives to each of the topics
// of the coordinators.
const coordinatorPartitions = 5

// tryCoordinators asks for a group and for a transactional id in each partition of
// the topics of the coordinators. A broker makes these topics when the first client
// asks, refuses requests until it has read them, and reads them one by one.
func tryCoordinators(ctx context.Context, client *kgo.Client) error {
	prefix := "outbox-services-check-" + newClusterID()
	for i := range coordinatorPartitions {
		// The partition is a hash modulo their number, and names that differ by one
		// in the last character have hashes that differ by one.
		name := prefix + strconv.Itoa(i)
		if err := tryGroup(ctx, client, name); err != nil {
			return fmt.Errorf("use a consumer group: %w", err)
		}
		if err := tryTransactions(ctx, client, name); err != nil {
			return fmt.Errorf("use a transactional id: %w", err)
		}
	}
	return nil
}

func tryGroup(ctx context.Context, client *kgo.Client, name string) error {
	request := kmsg.NewOffsetFetchRequest()
	request.Group = name
	response, err := request.RequestWith(ctx, client)
	if err != nil {
		return err
	}
	if response.ErrorCode == kerr.GroupIDNotFound.Code {
		return nil // the coordinator knows all of its groups
	}
	return kerr.ErrorForCode(response.ErrorCode)
}

func tryTransactions(ctx context.Context, client *kgo.Client, name string) error {
	request := kmsg.NewInitProducerIDRequest()
	request.TransactionalID = &name
	request.TransactionTimeoutMillis = int32(tryTimeout.Milliseconds())
	response, err := request.RequestWith(ctx, client)
	if err != nil {
		return err
	}
	return kerr.ErrorForCode(response.ErrorCode)
}

// tryTopic creates a topic and deletes it.
func tryTopic(ctx context.Context, client *kgo.Client) error {
	topic := "outbox-services-check-" + newClusterID()
	if err := createTopic(ctx, client, topic); err != nil {
		return fmt.Errorf("create topic: %w", err)
	}
	if err := deleteTopic(ctx, client, topic); err != nil {
		return fmt.Errorf("delete topic: %w", err)
	}
	return nil
}

func createTopic(ctx context.Context, client *kgo.Client, name string) error {
	topic := kmsg.NewCreateTopicsRequestTopic()
	topic.Topic, topic.NumPartitions, topic.ReplicationFactor = name, 1, 1
	request := kmsg.NewCreateTopicsRequest()
	request.Topics = append(request.Topics, topic)
	response, err := request.RequestWith(ctx, client)
	if err != nil {
		return err
	}
	return kerr.ErrorForCode(response.Topics[0].ErrorCode)
}

func deleteTopic(ctx context.Context, client *kgo.Client, name string) error {
	topic := kmsg.NewDeleteTopicsRequestTopic()
	topic.Topic = &name
	request := kmsg.NewDeleteTopicsRequest()
	request.Topics = append(request.Topics, topic)
	request.TopicNames = []string{name} // for brokers before version 2.8
	response, err := request.RequestWith(ctx, client)
	if err != nil {
		return err
	}
	return kerr.ErrorForCode(response.Topics[0].ErrorCode)
}
