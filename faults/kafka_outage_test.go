package faults

import (
	"bytes"
	"context"
	"maps"
	"net"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/outboxgo/outbox/faults/internal/proxy"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/tools/kafkaserver"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/sasl/plain"
)

// The relay's password is wrong when it starts, and revoked later. Events wait,
// uncounted, and arrive when it is right again.
func TestPasswordRevoked(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	topic := "faults-" + uuid.NewString()
	reader, writer := plain.Auth{User: "reader", Pass: "reader"}, plain.Auth{User: "relay", Pass: "relay"}
	kafka := fakeKafka(t, kfake.NumBrokers(1), kfake.SeedTopics(3, topic), kfake.EnableSASL(),
		kfake.Superuser("PLAIN", reader.User, reader.Pass), kfake.Superuser("PLAIN", writer.User, writer.Pass))
	var revoked atomic.Bool
	var rejected tries
	kafka.ControlKey(int16(kmsg.SASLAuthenticate), func(request kmsg.Request) (kmsg.Response, error, bool) {
		kafka.KeepControl()
		r := request.(*kmsg.SASLAuthenticateRequest)
		if !revoked.Load() || !bytes.Contains(r.SASLAuthBytes, []byte(writer.User)) {
			return nil, nil, false
		}
		rejected.n.Add(1)
		response := r.ResponseKind().(*kmsg.SASLAuthenticateResponse)
		response.ErrorCode = kerr.SaslAuthenticationFailed.Code
		return response, nil, true
	})
	s := guest(t, kafka.ListenAddrs(), topic, kgo.SASL(reader.AsMechanism()))
	way := through(t, kafka.ListenAddrs()[0])
	var dials tries
	log := new(warnings)

	revoked.Store(true)
	run(t, s.relayPool(t), fakeOpts(kafka, dials.to(way.Addr()), kgo.SASL(writer.AsMechanism())), shortly(t, log))
	stop := s.stream(t)
	s.awaitOutage(t, log, 1)
	revoked.Store(false)
	s.awaitFlow(t)

	revoked.Store(true)
	way.Reset() // Kafka asks only who connects
	s.awaitOutage(t, log, 2)
	tried := rejected.during(func() { time.Sleep(outage) })
	revoked.Store(false)
	s.awaitFlow(t)
	s.requireRecovery(t, stop())
	log.requireOutages(t, "Kafka", 2)
	requireSome(t, tried)
}

// Kafka gives the relay no producer id when it starts. Clients take some of the
// answers for final, and never ask again.
func TestNoProducerID(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	for name, answer := range map[string]*kerr.Error{
		"may not write anything": kerr.ClusterAuthorizationFailed,
		"trouble at the broker":  kerr.UnknownServerError,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			topic := "faults-" + uuid.NewString()
			kafka := fakeKafka(t, kfake.NumBrokers(1), kfake.SeedTopics(3, topic))
			fault := kafka.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.InitProducerID}, TopLevel: true, Err: answer, Count: -1})
			s := guest(t, kafka.ListenAddrs(), topic)
			log := new(warnings)
			run(t, s.relayPool(t), fakeOpts(kafka), shortly(t, log))
			stop := s.stream(t)
			s.awaitOutage(t, log, 1)
			fault.Remove()
			s.awaitFlow(t)
			s.requireRecovery(t, stop())
			log.requireOutages(t, "Kafka", 1)
		})
	}
}

// The right to write one topic is revoked for a while. Its events wait, uncounted;
// those of another topic flow.
func TestTopicRightRevoked(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	for name, ops := range map[string][]kmsg.ACLOperation{
		"still seen":    {kmsg.ACLOperationWrite},
		"not even seen": {kmsg.ACLOperationWrite, kmsg.ACLOperationDescribe},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			topic, open := "faults-"+uuid.NewString(), "faults-"+uuid.NewString()
			admin, writer := plain.Auth{User: "admin", Pass: "admin"}, plain.Auth{User: "relay", Pass: "relay"}
			kafka := fakeKafka(t, kfake.NumBrokers(1), kfake.SeedTopics(3, topic, open), kfake.EnableSASL(), kfake.EnableACLs(),
				kfake.Superuser("PLAIN", admin.User, admin.Pass), kfake.User("PLAIN", writer.User, writer.Pass,
					right(topic, kmsg.ACLOperationWrite), right(topic, kmsg.ACLOperationDescribe), right(open, kmsg.ACLOperationWrite)))
			s := guest(t, kafka.ListenAddrs(), topic, kgo.SASL(admin.AsMechanism()))
			other := s.sideBySide(t, open)
			var dials tries
			log := new(warnings)
			run(t, s.relayPool(t), fakeOpts(kafka, dials.to(kafka.ListenAddrs()[0]), kgo.SASL(writer.AsMechanism())), shortly(t, log))
			stop, stopOther := s.stream(t), other.stream(t)
			s.awaitArrivals(t, 100)

			s.revoke(t, writer.User, ops...)
			log.awaitFailure(t, "topic "+topic, 1)
			made := dials.during(func() { other.awaitArrivals(t, 1000) })
			require.Positive(t, s.countFailed(t, `status = 'waiting' AND error_class = 'not_authorized'`))
			require.Zero(t, s.countFailed(t, `retry_count > 0 OR status NOT IN ('waiting', 'parked')`))
			s.grant(t, writer.User, ops...)
			s.awaitFlow(t)

			s.requireRecovery(t, stop())
			other.requireRecovery(t, stopOther())
			log.requireOutages(t, "topic "+topic, 1)
			require.Len(t, log.changes(t), 1, "%s", log)
			require.Less(t, made, 10, "connections")
		})
	}
}

func right(topic string, op kmsg.ACLOperation) kfake.ACL {
	return kfake.ACL{
		Resource: kmsg.ACLResourceTypeTopic, Name: topic, Pattern: kmsg.ACLResourcePatternTypeLiteral, Operation: op, Allow: true,
	}
}

// grant gives a user rights on the topic.
func (s *site) grant(t *testing.T, user string, ops ...kmsg.ACLOperation) {
	t.Helper()
	request := kmsg.NewPtrCreateACLsRequest()
	for _, op := range ops {
		c := kmsg.NewCreateACLsRequestCreation()
		c.ResourceType, c.ResourceName, c.ResourcePatternType = kmsg.ACLResourceTypeTopic, s.topic, kmsg.ACLResourcePatternTypeLiteral
		c.Principal, c.Host, c.Operation, c.PermissionType = "User:"+user, "*", op, kmsg.ACLPermissionTypeAllow
		request.Creations = append(request.Creations, c)
	}
	response, err := request.RequestWith(t.Context(), s.admin(t))
	require.NoError(t, err)
	for _, result := range response.Results {
		require.NoError(t, kerr.ErrorForCode(result.ErrorCode))
	}
}

// revoke takes rights on the topic away that grant, or the cluster's start, gave.
func (s *site) revoke(t *testing.T, user string, ops ...kmsg.ACLOperation) {
	t.Helper()
	request := kmsg.NewPtrDeleteACLsRequest()
	for _, op := range ops {
		f := kmsg.NewDeleteACLsRequestFilter()
		f.ResourceType, f.ResourceName, f.ResourcePatternType = kmsg.ACLResourceTypeTopic, &s.topic, kmsg.ACLResourcePatternTypeLiteral
		f.Principal, f.Operation, f.PermissionType = kmsg.StringPtr("User:"+user), op, kmsg.ACLPermissionTypeAllow
		request.Filters = append(request.Filters, f)
	}
	response, err := request.RequestWith(t.Context(), s.admin(t))
	require.NoError(t, err)
	for _, result := range response.Results {
		require.NoError(t, kerr.ErrorForCode(result.ErrorCode))
		require.Len(t, result.MatchingACLs, 1)
	}
}

// admin returns a client that may do everything.
func (s *site) admin(t *testing.T) *kgo.Client {
	t.Helper()
	client, err := kgo.NewClient(append(s.as[:len(s.as):len(s.as)], kgo.SeedBrokers(s.brokers...))...)
	require.NoError(t, err)
	t.Cleanup(client.Close)
	return client
}

// A topic is deleted while events flow, and created again. What commits once the
// relay has noticed is in the new one, each key in its order; what the old one
// held is gone with it.
func TestTopicDeletedAndCreatedAgain(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	for name, partitions := range map[string]int32{"as it was": 3, "with fewer partitions": 1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := guest(t, testenv.RealBrokers(t), "faults-"+uuid.NewString())
			testenv.CreateTopic(t, s.brokers, s.topic, 3)
			log := new(warnings)
			run(t, s.relayPool(t), noCreation(s.brokers), shortly(t, log))
			stop := s.stream(t)
			s.awaitFlow(t)

			s.deleteTopic(t)
			log.awaitFailure(t, "topic "+s.topic, 1)
			early := s.recorded(t)
			time.Sleep(outage)
			require.Positive(t, s.countFailed(t, `status = 'waiting' AND error_class = 'unknown_topic'`))
			require.Zero(t, s.countFailed(t, `retry_count > 0 OR status NOT IN ('waiting', 'parked')`))
			old, err := s.reader.Arrived()
			require.NoError(t, err)

			testenv.CreateTopic(t, s.brokers, s.topic, partitions)
			s.reader = s.follow(t)
			s.awaitFlow(t)
			stop()
			committed := s.recorded(t)
			late := maps.Clone(committed)
			maps.DeleteFunc(late, func(id string, _ struct{}) bool { _, is := early[id]; return is })
			s.compare(t, late)
			arrived, err := s.reader.Arrived()
			require.NoError(t, err)
			var v oracle.Result
			v.Compare(committed, slices.Concat(old, arrived))
			t.Logf("%s; arrived before %d, later %d", v, len(old), len(arrived))
			require.Zero(t, v.Phantom+v.Inversions, "%s", v)
			s.requireHeldUpOnly(t)
			changes := log.awaitEnd(t)
			require.Len(t, changes, 1, "%s", log)
			require.LessOrEqual(t, changes["topic "+s.topic].times, 2, "%s", log) // its partitions go one after the other
		})
	}
}

func (s *site) deleteTopic(t *testing.T) {
	t.Helper()
	topic := kmsg.NewDeleteTopicsRequestTopic()
	topic.Topic = &s.topic
	request := kmsg.NewPtrDeleteTopicsRequest()
	request.Topics, request.TopicNames = []kmsg.DeleteTopicsRequestTopic{topic}, []string{s.topic}
	response, err := request.RequestWith(t.Context(), s.admin(t))
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.Topics[0].ErrorCode))
}

// The broker is shut down and started again while events flow.
func TestKafkaRestarted(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("-short: needs a real Kafka")
	}
	kafka, err := kafkaserver.Start(t.Context(), brokerConfig(t))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, kafka.Stop(context.Background())) })
	s := guest(t, kafka.Brokers(), "faults-"+uuid.NewString())
	testenv.CreateTopic(t, s.brokers, s.topic, 3)
	var dials tries
	log := new(warnings)
	run(t, s.relayPool(t), append(testenv.KafkaOpts(s.brokers), dials.to(s.brokers[0])), shortly(t, log))
	stop := s.stream(t)
	s.awaitFlow(t)
	made := dials.during(func() { require.NoError(t, kafka.Restart(t.Context())) })
	s.awaitFlow(t)
	s.requireRecovery(t, stop())
	require.NotEmpty(t, log.awaitEnd(t)) // Kafka is slow at first, and may seem to fail again
	requireSome(t, made)
}

// Partitions move from broker to broker while events flow. That is no outage.
func TestLeadersMove(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	const brokers, partitions, moves = 3, 3, 30
	topic := "faults-" + uuid.NewString()
	kafka := fakeKafka(t, kfake.NumBrokers(brokers), kfake.SeedTopics(partitions, topic))
	s := guest(t, kafka.ListenAddrs(), topic)
	log := new(warnings)
	cfg := shortly(t, log)
	cfg.DeliveryTimeout, cfg.Lease = 0, 0 // nothing is to time out
	run(t, s.relayPool(t), fakeOpts(kafka), cfg)
	stop := s.stream(t)
	for n := range int32(moves) {
		partition := n % partitions
		require.NoError(t, kafka.MoveTopicPartition(topic, partition, (kafka.LeaderFor(topic, partition)+1)%brokers))
		s.requireArrival(t, s.commit(t, "on", 1))
	}
	confirmed := stop()
	s.reader = s.follow(t) // the other one has read again from the start whenever a leader moved
	s.requireRecovery(t, confirmed)
	require.Empty(t, log.String())
	require.Zero(t, s.countFailed(t, "true"))
}

// The broker takes connections and requests, and answers nothing. Sends time out
// and are repeated; when it wakes up, what it held arrives as well.
func TestSilentKafka(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	topic := "faults-" + uuid.NewString()
	kafka := fakeKafka(t, kfake.NumBrokers(1), kfake.SeedTopics(3, topic))
	s := guest(t, kafka.ListenAddrs(), topic)
	way := through(t, kafka.ListenAddrs()[0])
	var dials tries
	log := new(warnings)
	run(t, s.relayPool(t), fakeOpts(kafka, dials.to(way.Addr())), shortly(t, log))
	stop := s.stream(t)
	s.awaitFlow(t)

	way.Set(proxy.Fault{HoldUp: true, HoldDown: true})
	s.awaitOutage(t, log, 1)
	made := dials.during(func() {
		enough := dials.n.Load() + 2
		require.Eventually(t, func() bool { return dials.n.Load() >= enough }, testenv.Patience, time.Millisecond, "no connection is given up")
	})
	way.Set(proxy.Fault{})
	s.awaitFlow(t)
	s.requireRecovery(t, stop())
	log.requireOutages(t, "Kafka", 1)
	requireSome(t, made)
}

// The relay's host is cut off from Kafka, and then from PostgreSQL too, until its
// lease is lost. The outage of Kafka is still the same one in the next session.
func TestHostCutOff(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	topic := "faults-" + uuid.NewString()
	kafka := fakeKafka(t, kfake.NumBrokers(1), kfake.SeedTopics(3, topic))
	s := guest(t, kafka.ListenAddrs(), topic)
	cfg := s.poolConfig(t)
	toKafka := through(t, kafka.ListenAddrs()[0])
	toPostgres := through(t, net.JoinHostPort(cfg.ConnConfig.Host, strconv.Itoa(int(cfg.ConnConfig.Port))))
	cfg.ConnConfig.DialFunc = dialTo(toPostgres.Addr())
	log := new(warnings)
	run(t, openPool(t, cfg), fakeOpts(kafka, kafkaVia(toKafka.Addr())), shortly(t, log))
	stop := s.stream(t)
	s.awaitFlow(t)

	toKafka.Set(proxy.Fault{Cut: true})
	s.awaitOutage(t, log, 1)
	toPostgres.Set(proxy.Fault{Cut: true})
	log.await(t, "outbox: lease lost, standing by", 1)
	log.awaitFailure(t, "PostgreSQL", 1)
	toPostgres.Set(proxy.Fault{})
	toKafka.Set(proxy.Fault{})
	s.awaitFlow(t)
	s.requireRecovery(t, stop())
	log.requireOutages(t, "Kafka", 1)
	log.requireOutages(t, "PostgreSQL", 1)
}

// A topic is deleted and created again while nothing is sent. The next event
// finds the new one, and the log has nothing to tell.
func TestTopicReplacedUnnoticed(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	s := guest(t, testenv.RealBrokers(t), "faults-"+uuid.NewString())
	testenv.CreateTopic(t, s.brokers, s.topic, 1)
	log := new(warnings)
	run(t, s.relayPool(t), noCreation(s.brokers), shortly(t, log))
	s.requireArrival(t, s.commit(t, "on", 1))
	s.deleteTopic(t)
	testenv.CreateTopic(t, s.brokers, s.topic, 1)
	s.reader = s.follow(t)
	s.requireArrival(t, s.commit(t, "on", 10))
	s.requireHeldUpOnly(t)
	require.Empty(t, log.String())
}

// awaitOutage waits until the log says for the n-th time that Kafka fails. If
// something of the first batch got through, the rest waits in outbox_failed, and
// perhaps all keys with it; then it takes another key to find out.
func (s *site) awaitOutage(t *testing.T, log *warnings, n int) {
	t.Helper()
	s.add(t, oracle.Event{ID: uuid.NewString(), Key: uuid.NewString()})
	log.awaitFailure(t, "Kafka", n)
}

func fakeKafka(t *testing.T, opts ...kfake.Opt) *kfake.Cluster {
	t.Helper()
	kafka, err := kfake.NewCluster(opts...)
	require.NoError(t, err)
	t.Cleanup(kafka.Close)
	return kafka
}

// fakeOpts are a relay's options for a broker of fakeKafka.
func fakeOpts(kafka *kfake.Cluster, opts ...kgo.Opt) []kgo.Opt {
	return append(noCreation(kafka.ListenAddrs()), opts...)
}

// noCreation are options of a relay that creates no topics.
func noCreation(brokers []string) []kgo.Opt {
	return []kgo.Opt{kgo.SeedBrokers(brokers...), kgo.MetadataMinAge(50 * time.Millisecond)}
}
