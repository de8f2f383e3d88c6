package faults

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/sasl/plain"
)

// permission is a line of the table in docs/roles.md: an operation of a user on something.
type permission struct {
	user, operation, on string
	without             string // what one reads where it is missing
}

// documentedRights reads the table, whose lines may have several operations and resources.
func documentedRights(t *testing.T) (all []permission) {
	t.Helper()
	text, err := os.ReadFile("../docs/roles.md")
	require.NoError(t, err)
	lines := regexp.MustCompile("(?m)^\\| ([a-z]+)[^|]* \\| ([A-Z_, ]+) \\| ([^|]+) \\| `([^`]+)`[^|]* \\|$").FindAllStringSubmatch(string(text), -1)
	for _, line := range lines {
		for operation := range strings.SplitSeq(line[2], ", ") {
			for on := range strings.SplitSeq(line[3], ", ") {
				all = append(all, permission{line[1], operation, on, line[4]})
			}
		}
	}
	require.Len(t, all, 20)
	return all
}

// rightsSite is a topic with its dead-letter topic and a group on a Kafka that refuses each request
// without a right to it.
type rightsSite struct {
	*guardedKafka
	topic, group string
	program      string
	database     string // its URL
}

// resource returns what a line of the table means.
func (s *rightsSite) resource(t *testing.T, on string) (kmsg.ACLResourceType, string) {
	t.Helper()
	switch on {
	case "its topics":
		return kmsg.ACLResourceTypeTopic, s.topic
	case "their dead-letter topics":
		return kmsg.ACLResourceTypeTopic, s.topic + ".dlq"
	case "the group":
		return kmsg.ACLResourceTypeGroup, s.group
	}
	require.Fail(t, "a resource that is not known", on)
	return 0, ""
}

// allow gives a user exactly these rights.
func (s *rightsSite) allow(t *testing.T, user string, rights []permission) {
	t.Helper()
	remove := kmsg.NewPtrDeleteACLsRequest()
	filter := kmsg.NewDeleteACLsRequestFilter()
	principal := "User:" + user
	filter.ResourceType, filter.ResourcePatternType, filter.Operation, filter.PermissionType = kmsg.ACLResourceTypeAny, kmsg.ACLResourcePatternTypeAny, kmsg.ACLOperationAny, kmsg.ACLPermissionTypeAny
	filter.Principal = &principal
	remove.Filters = append(remove.Filters, filter)
	removed, err := remove.RequestWith(t.Context(), s.admin)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(removed.Results[0].ErrorCode))
	if len(rights) == 0 {
		return
	}
	create := kmsg.NewPtrCreateACLsRequest()
	for _, r := range rights {
		c := kmsg.NewCreateACLsRequestCreation()
		c.ResourceType, c.ResourceName = s.resource(t, r.on)
		c.ResourcePatternType, c.PermissionType, c.Principal, c.Host = kmsg.ACLResourcePatternTypeLiteral, kmsg.ACLPermissionTypeAllow, principal, "*"
		operation, err := kmsg.ParseACLOperation(r.operation)
		require.NoError(t, err)
		c.Operation = operation
		create.Creations = append(create.Creations, c)
	}
	created, err := create.RequestWith(t.Context(), s.admin)
	require.NoError(t, err)
	for _, result := range created.Results {
		require.NoError(t, kerr.ErrorForCode(result.ErrorCode))
	}
}

// as returns the options of a client that logs in as a user.
func (s *rightsSite) as(user string) []kgo.Opt {
	return []kgo.Opt{kgo.SeedBrokers(s.Address(clearText)), kgo.SASL(plain.Auth{User: user, Pass: "pass-" + user}.AsMechanism())}
}

// call runs the command line as a user, and returns what it says.
func (s *rightsSite) call(t *testing.T, user string, args ...string) (text string, code int) {
	t.Helper()
	out, errs, code := call(t, s.program, []string{"KAFKA_BROKERS=" + s.Address(clearText), "KAFKA_MECHANISM=plain", "KAFKA_USER=" + user, "KAFKA_PASSWORD=pass-" + user,
		"DATABASE_URL=" + s.database}, append(args, "--timeout", "10s")...)
	return out + errs, code
}

// Each part works with the rights that docs/roles.md names for it, and with no others. With
// one right fewer it says which, in the words of the table.
func TestRightsInKafka(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	k, program := startGuardedKafka(t), buildCommandLine(t)
	works := map[string]func(*testing.T, *rightsSite) string{"relay": relayWorks, "consumer": consumerWorks, "operator": operatorWorks,
		"rewinder": rewinderWorks, "creator": creatorWorks, "doctor": doctorWorks}
	rights := map[string][]permission{}
	for _, r := range documentedRights(t) {
		rights[r.user] = append(rights[r.user], r)
		require.Contains(t, works, r.user)
	}
	for user, work := range works {
		t.Run(user, func(t *testing.T) {
			try := func(rights []permission) string {
				s := &rightsSite{guardedKafka: k, topic: "rights-" + uuid.NewString(), program: program}
				s.group = "group-" + s.topic
				if user != "creator" {
					k.createTopic(t, s.topic)
					k.createTopic(t, s.topic+".dlq")
				}
				s.allow(t, user, rights)
				return work(t, s)
			}
			require.Empty(t, try(rights[user]), "it works")
			for i, missing := range rights[user] {
				text := try(slices.Delete(slices.Clone(rights[user]), i, i+1))
				require.Contains(t, text, missing.without, "%s without %s on %s", user, missing.operation, missing.on)
			}
		})
	}
}

// await waits until something is done and returns "", or until a log says that a right is
// missing and returns that.
func (s *rightsSite) await(t *testing.T, log *testenv.Buffer, done func() bool) string {
	t.Helper()
	for end := time.Now().Add(testenv.Patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if text := log.String(); strings.Contains(text, "AUTHORIZATION_FAILED") {
			return text
		}
		if done() {
			return ""
		}
	}
	return "neither works nor says why: " + log.String()
}

// relayWorks relays an event.
func relayWorks(t *testing.T, s *rightsSite) string {
	site := guest(t, s.Brokers(), s.topic)
	log := new(testenv.Buffer)
	cfg := shortly(t, new(warnings))
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	run(t, site.relayPool(t), s.as("relay"), cfg)
	site.commit(t, "on", 1)
	text := s.await(t, log, func() bool { return s.newest(t, s.topic) == 1 })
	if strings.Contains(text, "CLUSTER_AUTHORIZATION_FAILED") {
		require.Contains(t, text, "which needs WRITE on a topic")
	}
	return text
}

// newest returns the number of records of a topic.
func (s *rightsSite) newest(t *testing.T, topic string) int64 {
	t.Helper()
	request := kmsg.NewPtrListOffsetsRequest()
	partition := kmsg.NewListOffsetsRequestTopicPartition()
	partition.Timestamp = -1
	asked := kmsg.NewListOffsetsRequestTopic()
	asked.Topic, asked.Partitions = topic, append(asked.Partitions, partition)
	request.Topics = append(request.Topics, asked)
	response, err := request.RequestWith(t.Context(), s.admin)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.Topics[0].Partitions[0].ErrorCode))
	return response.Topics[0].Partitions[0].Offset
}

// happened is the event of a consumer's test.
type happened struct {
	Key string
	At  time.Time
}

func (h happened) id() string            { return h.Key }
func (h happened) OccurredAt() time.Time { return h.At }

// consumerWorks handles an event, makes a dead letter of another, and handles that once an
// operator has sent it back.
func consumerWorks(t *testing.T, s *rightsSite) string {
	site := guest(t, s.Brokers(), s.topic)
	s.database = site.url
	events, err := outbox.NewRegistry("rights", outbox.Event("test.thing.happened.v1", "Thing", happened.id).Topic(s.topic))
	require.NoError(t, err)
	log := new(testenv.Buffer)
	broken, handled := make(chan struct{}), make(chan string, 10)
	consumer, err := outbox.NewConsumer(site.db, s.as("consumer"), events, s.group, outbox.ConsumerConfig{
		HandlerConfig: outbox.HandlerConfig{Retry: outbox.RetryPolicy{MaxRetries: -1}, Logger: slog.New(slog.NewTextHandler(log, nil)), From: outbox.FromStart},
	}, outbox.Handle("HANDLE", func(_ context.Context, _ pgx.Tx, h happened, _ outbox.Metadata) error {
		select {
		case <-broken:
		default:
			if h.Key == "bad" {
				return errors.New("not yet")
			}
		}
		handled <- h.Key
		return nil
	}))
	require.NoError(t, err)
	for _, key := range []string{"good", "bad"} {
		record := &kgo.Record{Topic: s.topic, Key: []byte(key), Value: []byte(`{"Key": "` + key + `"}`)}
		for name, value := range map[string]string{"ce_specversion": "1.0", "ce_id": key, "ce_source": "rights", "ce_type": "test.thing.happened.v1", "content-type": "application/json"} {
			record.Headers = append(record.Headers, kgo.RecordHeader{Key: name, Value: []byte(value)})
		}
		require.NoError(t, s.admin.ProduceSync(t.Context(), record).FirstErr())
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- consumer.Run(ctx) }()
	defer func() { stop(); require.NoError(t, <-ended) }()
	got := map[string]bool{}
	replayed := false
	return s.await(t, log, func() bool {
		select {
		case key := <-handled:
			got[key] = true
		default:
		}
		if !replayed && s.newest(t, s.topic+".dlq") == 1 {
			close(broken)
			text, code := s.call(t, "kim", "dlq", "replay", s.topic+".dlq", "--yes", "--reason", "repaired")
			require.Zero(t, code, text)
			replayed = true
		}
		return got["good"] && got["bad"]
	})
}

// deadLetter puts a record into the topic, and a dead letter of it without its value.
func (s *rightsSite) deadLetter(t *testing.T) {
	t.Helper()
	original := &kgo.Record{Topic: s.topic, Value: []byte("value")}
	require.NoError(t, s.admin.ProduceSync(t.Context(), original).FirstErr())
	dead := &kgo.Record{Topic: s.topic + ".dlq"}
	for name, value := range map[string]string{outbox.DeadLetterOriginalTopic: s.topic, outbox.DeadLetterOriginalPartition: "0", outbox.DeadLetterOriginalOffset: "0",
		outbox.DeadLetterGroup: s.group, outbox.DeadLetterAction: "A", outbox.DeadLetterValueOmitted: "5"} {
		dead.Headers = append(dead.Headers, kgo.RecordHeader{Key: name, Value: []byte(value)})
	}
	require.NoError(t, s.admin.ProduceSync(t.Context(), dead).FirstErr())
}

// succeed calls the command line, and returns what it says if it fails.
func (s *rightsSite) succeed(t *testing.T, user string, args ...string) string {
	t.Helper()
	if text, code := s.call(t, user, args...); code != 0 || strings.Contains(text, "AUTHORIZATION_FAILED") {
		return fmt.Sprintf("%v: %s", args, text)
	}
	return ""
}

// operatorWorks sends a dead letter back whose value only the original has.
func operatorWorks(t *testing.T, s *rightsSite) string {
	s.deadLetter(t)
	s.database = guest(t, s.Brokers(), s.topic).url
	if text := s.succeed(t, "operator", "dlq", "replay", s.topic+".dlq", "--yes", "--reason", "repaired"); text != "" {
		return text
	}
	if n := s.newest(t, s.topic); n != 2 {
		return "nothing was sent"
	}
	return ""
}

// rewinderWorks sets a group back.
func rewinderWorks(t *testing.T, s *rightsSite) string {
	require.NoError(t, s.admin.ProduceSync(t.Context(), &kgo.Record{Topic: s.topic, Value: []byte("value")}).FirstErr())
	client, err := kgo.NewClient(kgo.SeedBrokers(s.Brokers()...), kgo.ConsumerGroup(s.group), kgo.ConsumeTopics(s.topic), kgo.DisableAutoCommit())
	require.NoError(t, err)
	require.NoError(t, client.CommitRecords(t.Context(), client.PollFetches(t.Context()).Records()...))
	client.Close()
	s.database = guest(t, s.Brokers(), s.topic).url
	return s.succeed(t, "rewinder", "consumer", "rewind", "--group", s.group, "--to", "1h", "--yes", "--reason", "restored")
}

// creatorWorks creates topics.
func creatorWorks(t *testing.T, s *rightsSite) string {
	return s.succeed(t, "creator", "topics", s.topic, "--create", "--partitions", "1")
}

// doctorWorks looks at the settings of topics, which it would find by their events.
func doctorWorks(t *testing.T, s *rightsSite) string {
	return s.succeed(t, "doctor", "topics", s.topic)
}
