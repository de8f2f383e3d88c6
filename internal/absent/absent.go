// Package absent gives topics of a single broker, or some of their partitions, a replica that is never there, for
// tests and measurements: with min.insync.replicas 2 they accept nothing. It registers a broker with the controller
// that never sends a heartbeat.
package absent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// ID is the id of the broker that is not there.
const ID = 9999

// CreateTopic creates a topic with so many partitions, each with one replica on the broker
// that creates topics and one on the broker that is not there. Settings are as in
// kmsg.CreateTopicsRequestTopic. The controller must be reachable from here.
func CreateTopic(ctx context.Context, brokers []string, topic string, partitions int32, settings map[string]string) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...))
	if err != nil {
		return fmt.Errorf("absent: %w", err)
	}
	defer client.Close()
	here, err := register(ctx, client)
	if err != nil {
		return fmt.Errorf("absent: register a broker: %w", err)
	}
	t := kmsg.NewCreateTopicsRequestTopic()
	t.Topic, t.NumPartitions, t.ReplicationFactor = topic, -1, -1 // the assignment says both
	for p := range partitions {
		a := kmsg.NewCreateTopicsRequestTopicReplicaAssignment()
		a.Partition, a.Replicas = p, []int32{here, ID}
		t.ReplicaAssignment = append(t.ReplicaAssignment, a)
	}
	for name, value := range settings {
		t.Configs = append(t.Configs, kmsg.CreateTopicsRequestTopicConfig{Name: name, Value: &value})
	}
	request := kmsg.NewPtrCreateTopicsRequest()
	request.Topics = append(request.Topics, t)
	response, err := request.RequestWith(ctx, client)
	if err == nil {
		err = kerr.ErrorForCode(response.Topics[0].ErrorCode)
	}
	if err != nil {
		return fmt.Errorf("absent: create topic %s: %w", topic, err)
	}
	return nil
}

// register registers the broker that is not there, unless that is done, and returns the id
// of one that is.
func register(ctx context.Context, client *kgo.Client) (here int32, err error) {
	meta, err := kmsg.NewPtrMetadataRequest().RequestWith(ctx, client)
	if err != nil {
		return 0, err
	}
	if len(meta.Brokers) == 0 || meta.ClusterID == nil {
		return 0, errors.New("there are no brokers")
	}
	here = meta.Brokers[0].NodeID
	request := kmsg.NewPtrBrokerRegistrationRequest()
	request.BrokerID, request.ClusterID, request.IncarnationID = ID, *meta.ClusterID, uuid.New()
	request.Listeners = []kmsg.BrokerRegistrationRequestListener{{Name: "PLAINTEXT", Host: "127.0.0.1", Port: 9}}
	request.LogDirs = [][16]byte{uuid.New()}
	if request.Features, err = features(ctx, client); err != nil {
		return 0, err
	}
	address, err := controller(ctx, client)
	if err != nil {
		return 0, err
	}
	return here, send(ctx, address, request)
}

// features returns those of the cluster, all of which a broker has to know.
func features(ctx context.Context, client *kgo.Client) (all []kmsg.BrokerRegistrationRequestFeature, err error) {
	request := kmsg.NewPtrApiVersionsRequest()
	request.ClientSoftwareName, request.ClientSoftwareVersion = "outbox-absent", "1"
	response, err := request.RequestWith(ctx, client)
	if err != nil {
		return nil, err
	}
	for _, f := range response.FinalizedFeatures {
		all = append(all, kmsg.BrokerRegistrationRequestFeature{Name: f.Name, MinSupportedVersion: 0, MaxSupportedVersion: f.MaxVersionLevel})
	}
	return all, nil
}

// controller returns the address of one.
func controller(ctx context.Context, client *kgo.Client) (string, error) {
	topic := kmsg.NewDescribeQuorumRequestTopic()
	topic.Topic, topic.Partitions = "__cluster_metadata", []kmsg.DescribeQuorumRequestTopicPartition{{}}
	request := kmsg.NewPtrDescribeQuorumRequest()
	request.Topics = append(request.Topics, topic)
	response, err := request.RequestWith(ctx, client)
	if err == nil {
		err = kerr.ErrorForCode(response.ErrorCode)
	}
	if err != nil {
		return "", fmt.Errorf("look for the controller: %w", err)
	}
	for _, node := range response.Nodes {
		for _, l := range node.Listeners {
			return net.JoinHostPort(l.Host, strconv.Itoa(int(l.Port))), nil
		}
	}
	return "", errors.New("the cluster does not tell where its controller is")
}

func send(ctx context.Context, address string, request *kmsg.BrokerRegistrationRequest) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(address))
	if err != nil {
		return err
	}
	defer client.Close()
	response, err := request.RequestWith(ctx, client.SeedBrokers()[0])
	if err != nil {
		return err
	}
	if err := kerr.ErrorForCode(response.ErrorCode); err != nil && !errors.Is(err, kerr.DuplicateBrokerRegistration) {
		return err
	}
	return nil
}
